"""The API key: every route but /health asks for it."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.api.errors import ApiError

OPEN_PATHS = frozenset({"/health"})  # liveness only; compared exactly, so that no other spelling of a path is open


class ApiKeyMiddleware:
    """Answers 401 unless the request brings `Authorization: Bearer KEY`; unknown routes too, so that nothing can be probed."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            message = "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'"
            await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        normal = b"Bearer " + key.strip() if scheme.lower() == b"bearer" else b""
        return secrets.compare_digest(normal, self._expected)
