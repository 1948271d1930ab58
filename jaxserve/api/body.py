"""Request bodies: read up to a limit, parsed as strict JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from jaxserve.api.errors import ApiError, bad_request


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body's JSON object; 400 if it is none, 413 if it is longer than `max_bytes`, 415 if it is compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding!r}; send the body uncompressed", code="unsupported_encoding")
    return parse_object(await _read(request, max_bytes))


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            message = f"the body is longer than {max_bytes} bytes; send less or raise --max-request-bytes"
            raise ApiError(413, message, code="request_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object from UTF-8 bytes, without NaN, Infinity, half surrogate pairs or very deep nesting."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise bad_request(f"the body is not UTF-8: {e.reason} at byte {e.start}", code="invalid_json") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request("the body holds half of a surrogate pair; send whole characters", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    except ValueError as e:
        # of Python's own errors only this one is no JSONDecodeError; its words are about the interpreter
        problem = "a number has too many digits" if "int_max_str_digits" in str(e) else e
        raise bad_request(f"the body is not valid JSON: {problem}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is a JSON {type(value).__name__}; send an object", code="invalid_json")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
