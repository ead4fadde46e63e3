"""create_app: the application behind the guard."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from edge_llm import __version__
from edge_llm_server import routes_batches, routes_ollama, routes_openai, routes_plain
from edge_llm_server.api_error import ApiError
from edge_llm_server.exchange import STATE
from edge_llm_server.service import Service


def create_app(service: Service) -> FastAPI:
    """All routes. It checks no host, origin or key: whoever serves it puts a `Guard` around it."""
    app = FastAPI(
        title="edge_llm",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,  # its page would fetch scripts from the network
        redoc_url=None,
    )

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Any:
        return JSONResponse(error.body_for(request.scope["path"]), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> Any:
        message = {404: "there is nothing under this path", 405: "this path does not take that method"}
        own = ApiError(error.status_code, message.get(error.status_code, str(error.detail)))
        return JSONResponse(own.body_for(request.scope["path"]), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, _error: Exception) -> Any:
        own = ApiError(500, f"something went wrong; the log knows it as {request.scope[STATE].id}")
        return JSONResponse(own.body_for(request.scope["path"]), 500, own.headers)

    for routes in (routes_openai, routes_batches, routes_ollama, routes_plain):
        app.include_router(routes.router(service))
    return app
