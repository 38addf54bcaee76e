"""The HTTP server as an ASGI application with all routes: `create_app(engine)`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvexport.engine.engine import Engine
from kvexport.serve.chat import chat_completions
from kvexport.serve.completions import completions
from kvexport.serve.errors import ApiError, api_error
from kvexport.serve.guard import Guard, origins
from kvexport.serve.messages import count_tokens, messages
from kvexport.serve.responses import create_response, delete_response, get_response
from kvexport.serve.service import IGNORED, Service
from kvexport.serve.session_routes import delete_session, get_session, put_session
from kvexport.serve.sessions import ENDS, RESTARTED
from kvexport.serve.settings import ServeSettings
from kvexport.serve.stats import measure
from kvexport.serve.streams import ClientGone
from kvexport.serve.tokens import detokenize, tokenize
from kvexport.version import __version__

Handler = Callable[[Service, Request], Awaitable[Response]]
log = logging.getLogger("kvexport.serve")
requests_log = logging.getLogger("kvexport.serve.requests")


def create_app(engine: Engine, settings: ServeSettings | None = None) -> Starlette:
    """Return the ASGI application that serves an engine over HTTP. Nothing else may use the engine."""
    engine.settings()
    service = Service(engine, settings or ServeSettings())
    measure(service)

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await service.worker.close()
            service.sessions.close()

    app = Starlette(
        routes=[
            Route(path, functools.partial(_answer, service, handler), methods=[method])
            for method, path, handler in ROUTES
        ],
        # CORS comes before the access control: a browser's preflight request has no API key, and web pages can read
        # only errors with CORS headers.
        middleware=[Middleware(_Requests), *_cors(service.settings), Middleware(Guard, settings=service.settings)],
        exception_handlers={HTTPException: _no_route, Exception: _failed},
        lifespan=life,
    )
    app.state.service = service
    return app


class _Requests:
    """ASGI middleware that logs every HTTP request, and closes the request's exit stack after the response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            async with AsyncExitStack() as ends:
                scope[ENDS] = ends
                await self.app(scope, receive, noted)
        finally:
            seconds = time.monotonic() - began
            path = scope["path"][:200].encode("unicode_escape").decode()  # a line break starts no line of the log
            requests_log.info("%s %s %d %.3f s", scope["method"], path, status, seconds)


def _cors(settings: ServeSettings) -> list[Middleware]:
    if not settings.origins:
        return []
    exposed = [RESTARTED, IGNORED, "Retry-After"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins(settings),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
    ]


async def _answer(service: Service, handler: Handler, request: Request) -> Response:
    try:
        response = await handler(service, request)
        if ignored := getattr(request.state, "ignored", ()):
            response.headers[IGNORED] = ", ".join(ignored)
        return response
    except ClientGone:
        return Response(status_code=499)  # the client has disconnected, so nobody reads this response
    except Exception as error:
        known = api_error(error)
        if known.code == "internal_error":
            log.error("%s failed", request.url.path, exc_info=error)
        return _error(request, known)


def _error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(request.url.path), error.status, headers=error.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is nothing at {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
    known = ApiError(error.status_code, messages.get(error.status_code, error.detail))
    known.headers.update(error.headers or {})
    return _error(request, known)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(request, api_error(error))


async def health(service: Service, _: Request) -> Response:
    failed = service.worker.failed
    return JSONResponse({"status": "failed" if failed else "ok"}, 500 if failed else 200)


async def ready(service: Service, _: Request) -> Response:
    alive = service.worker.alive
    return JSONResponse({"status": "ready" if alive else "not ready"}, 200 if alive else 503)


async def metrics(service: Service, _: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def version(_: Service, __: Request) -> Response:
    return JSONResponse({"version": __version__})


async def models(service: Service, _: Request) -> Response:
    names = [service.model, *(n for n in service.settings.names if n not in (service.model, "*"))]
    names += service.engine.adapters.by_name
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in names]})


async def model(service: Service, request: Request) -> Response:
    return JSONResponse(_model(service, service.check_model(request.path_params["name"])))


_STARTED = int(time.time())


def _model(service: Service, name: str) -> dict[str, object]:
    limit = service.engine.max_length
    about = {"id": name, "object": "model", "created": _STARTED, "owned_by": "kvexport", "max_model_len": limit}
    return {**about, "parent": service.model} if service.adapter(name) else about


ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/metrics", metrics),
    ("GET", "/version", version),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{name}", get_response),
    ("DELETE", "/v1/responses/{name}", delete_response),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("GET", "/v1/sessions/{name}", get_session),
    ("PUT", "/v1/sessions/{name}", put_session),
    ("DELETE", "/v1/sessions/{name}", delete_session),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
]
