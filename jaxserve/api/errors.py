"""Errors of the HTTP API: one exception, one JSON envelope as OpenAI's, and the handlers that make it from any failure."""

from __future__ import annotations

import functools
import http
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

log = logging.getLogger(__name__)


class ApiError(Exception):
    """A failure that the client is told of: status, message, the field at fault and a code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after_s = status, message, param, code, retry_after_s

    @property
    def type(self) -> str:
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 408:
            headers["Connection"] = "close"  # the rest of the body is not waited for
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 for a request that is wrong whenever it is sent."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """A 503 for a request that may be sent again."""
    return ApiError(503, message, code=code, retry_after_s=1)


def from_value_error(error: ValueError, fields: set[str], default: str | None = None) -> ApiError:
    """A 400 from the engine's ValueError; the field is the first word of the message that is one of `fields`, else `default`."""
    message = str(error)
    param = next((word for word in re.findall(r"[a-z_]+", message) if word in fields), default)
    code = "context_length_exceeded" if re.search(r"max_model_len|context|pool", message) else "invalid_value"
    return bad_request(message, param, code)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the envelope."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    messages = {
        404: f"there is no route {path}",
        405: f"{path} does not take {method}; it takes {(error.headers or {}).get('Allow', 'another')}",
    }
    message = messages.get(error.status_code, error.detail)
    response = ApiError(error.status_code, message, code=http.HTTPStatus(error.status_code).name.lower()).response()
    response.headers.update(error.headers or {})
    return response


HANDLERS: dict[Any, Any] = {ApiError: on_api_error, HTTPException: on_http_exception}


def internal_error() -> ApiError:
    """The 500 for a fault of ours: the log has its traceback, the client gets no internals."""
    return ApiError(500, "internal server error; the server's log has the details", code="internal_error")


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint with its faults logged and answered here; further out they would cost the client its connection and the CORS headers."""

    @functools.wraps(endpoint)
    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ApiError, HTTPException):
            raise
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            return internal_error().response()

    return call
