"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import jaxserve
from jaxserve.api.auth import ApiKeyMiddleware
from jaxserve.api.errors import HANDLERS
from jaxserve.api.routes import add_routes
from jaxserve.api.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """The application over `state`; CORS stands before the key check, so that a 401 carries its headers and a preflight needs no key."""
    middleware = []
    if state.config.allowed_origins:
        origins = list(state.config.allowed_origins)
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]))
    if state.config.api_key is not None:
        middleware.append(Middleware(ApiKeyMiddleware, api_key=state.config.api_key))
    app = FastAPI(
        title="jaxserve",
        version=jaxserve.__version__,
        middleware=middleware,
        exception_handlers=HANDLERS,
        redirect_slashes=False,
        redoc_url=None,
    )
    add_routes(app)
    app.state.server = state
    return app
