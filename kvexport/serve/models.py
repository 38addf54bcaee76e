"""Several models behind one address: each runs in a server process of its own while requests use it.

When a process ends, all memory of its model is free again. The load of one model delays no answer of another model.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from subprocess import PIPE

import anyio
import anyio.to_thread
import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.errors import lacks_files
from kvexport.serve.app import ROUTES, Bound, application, openapi, version
from kvexport.serve.bodies import read_bytes
from kvexport.serve.errors import ApiError, engine_failed, no_files
from kvexport.serve.fields import Body, parse
from kvexport.serve.page import page
from kvexport.serve.prompts import LONG_TEXT
from kvexport.serve.sessions import ENDS, HEADER
from kvexport.serve.settings import KEY_VARIABLE, SUPERVISED, ServeSettings
from kvexport.serve.streams import EventStream, error_event, unless_gone

_TO_PROCESS = ("accept", "content-type", "traceparent", "tracestate", "anthropic-version", "anthropic-beta", HEADER)
_OWN = ("content-length", "transfer-encoding", "connection", "date", "server", "content-encoding")
_STARTED = int(time.time())
_LOOK_SECONDS = 10.0  # for which a process may take to tell how many sessions it has


class Model:
    """One of the server's models, and the process that serves this model while requests use it."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.command = name, command
        self.users = 0  # requests that are being answered
        self.used = 0.0  # time.monotonic() at the end of the last answer
        self.kept = 0.0  # `used` at the time at which the process was found to have sessions that end with it
        self._key = secrets.token_hex(32)
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[str] | None = None

    @property
    def loaded(self) -> bool:
        """Whether the model's process runs, and has loaded the model."""
        started = self._starting is not None and self._starting.done()
        return started and self._process is not None and self._process.returncode is None

    @property
    def key(self) -> dict[str, str]:
        """The HTTP header with the API key of the model's process."""
        return {"authorization": f"Bearer {self._key}"}

    async def url(self) -> str:
        """Return the HTTP address of the model's process. The process is started if it does not run."""
        if self._starting is None or (self._starting.done() and not self.loaded):
            self._starting = asyncio.create_task(self._start())
            # Without a client that waits for the start, asyncio would report its error as an unexpected one.
            self._starting.add_done_callback(lambda start: start.cancelled() or start.exception())
        return await asyncio.shield(self._starting)  # the start goes on if this client goes away

    async def _start(self) -> str:
        if self._process is not None:
            await self._process.wait()  # the model's last process may hold the session folder until it has ended
        environment = {**os.environ, KEY_VARIABLE: self._key, SUPERVISED: "1"}
        process = await asyncio.create_subprocess_exec(*self.command, stdin=PIPE, stdout=PIPE, env=environment)
        assert process.stdout is not None
        self._process = process
        line = await process.stdout.readline()
        if not line:
            await process.wait()
            message = f"the model {self.name} could not be loaded; the server's log says why"
            raise ApiError(503, message, code="model_not_loaded")
        self.used = time.monotonic()
        return line.decode().strip()

    async def stop(self, seconds: float) -> None:
        """End the model's process, loaded or not. Requests that it still answers may take up to `seconds` seconds."""
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None  # the next request starts another process
        if (process := self._process) is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), seconds + 10)
            except TimeoutError:
                process.kill()
                await process.wait()


class Models:
    """The models of a server by name, and the requests that are forwarded to the models' processes."""

    def __init__(self, commands: Mapping[str, Sequence[str]], settings: ServeSettings, idle: float | None) -> None:
        self.by_name = {name: Model(name, command) for name, command in commands.items()}
        self.settings, self.idle = settings, idle
        self._client = httpx2.AsyncClient(
            timeout=None,
            trust_env=False,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._long = anyio.CapacityLimiter(1)
        self._upload = asyncio.Lock()  # one session at a time is in this process's memory

    async def forward(self, request: Request) -> Response:
        """Forward an HTTP request to the process of its model, and return the response of this process."""
        posted, put, data = request.method == "POST", request.method == "PUT", b""
        if put:
            await request.scope[ENDS].enter_async_context(self._upload)
        if posted or put:
            data = await read_bytes(request, self.settings.body if posted else self.settings.session_memory)
        body = await self._parsed(data) if posted else Body(model=request.query_params.get("model"))
        model = self._model(body.model, posted)
        if posted or "/sessions/" in request.url.path:
            model.users += 1
            request.scope[ENDS].callback(self._release, model)
        elif not model.loaded:
            raise ApiError(503, f"{model.name} is not loaded: a request to it loads it", code="model_not_loaded")
        url = await unless_gone(request.receive, model.url())
        headers = {name: request.headers[name] for name in _TO_PROCESS if name in request.headers}
        target = f"{url}{request.scope['raw_path'].decode('latin-1')}?{request.url.query}"
        try:
            sent = self._client.build_request(request.method, target, headers=headers | model.key, content=data)
            answer = await unless_gone(request.receive, self._client.send(sent, stream=True))
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN}
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return EventStream(
                    _events(answer, request.url.path), self.settings.stall, on_end=lambda: None, headers=kept
                )
            try:
                content = await unless_gone(request.receive, answer.aread())
            finally:
                await answer.aclose()
            return Response(content, answer.status_code, kept)
        except httpx2.TransportError as error:
            if lacks_files(error):
                raise no_files() from error
            raise ApiError(503, f"{model.name} has ended or cannot be reached; send the request again") from error

    async def names(self, _: Request) -> Response:
        """Answer /v1/models: the names of all models, and whether they are loaded."""
        return JSONResponse({"object": "list", "data": [_about(model) for model in self.by_name.values()]})

    async def describe(self, request: Request) -> Response:
        """Answer /v1/models/NAME: a description of one model."""
        return JSONResponse(_about(self._named(request.path_params["name"])))

    @asynccontextmanager
    async def life(self, _: Starlette) -> AsyncIterator[None]:
        """End the processes of unused models while the server runs, and all processes when the server ends."""
        unloading = asyncio.create_task(self._unload_idle())
        try:
            yield
        finally:
            unloading.cancel()
            await asyncio.gather(*(model.stop(self.settings.drain) for model in self.by_name.values()))
            await self._client.aclose()

    async def _parsed(self, data: bytes) -> Body:
        if len(data) <= LONG_TEXT:
            return parse(Body, data)
        return await anyio.to_thread.run_sync(parse, Body, data, limiter=self._long)

    def _model(self, name: str | None, posted: bool) -> Model:
        if name is not None:
            return self._named(name)
        used = [model for model in self.by_name.values() if model.loaded] if not posted else []
        return max(used, key=lambda model: model.used, default=next(iter(self.by_name.values())))

    def _named(self, name: str) -> Model:
        if name not in self.by_name:
            message = f"there is no model {name[:200]!r} here, but {', '.join(self.by_name)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self.by_name[name]

    def _release(self, model: Model) -> None:
        model.users -= 1
        model.used = time.monotonic()

    async def _unload_idle(self) -> None:
        while self.idle is not None:
            await asyncio.sleep(min(1.0, self.idle / 4))
            for model in self.by_name.values():
                if self._idle(model) and not await self._has_sessions(model) and self._idle(model):
                    await model.stop(0)

    def _idle(self, model: Model) -> bool:
        unused = self.idle is not None and time.monotonic() - model.used >= self.idle
        return unused and model.loaded and not model.users and model.kept != model.used

    async def _has_sessions(self, model: Model) -> bool:
        """Return whether the model's process has sessions that would be lost when it ends."""
        if self.settings.session_folder is not None:
            return False
        used, url = model.used, await model.url()
        try:
            answer = await self._client.get(f"{url}/stats", headers=model.key, timeout=_LOOK_SECONDS)
        except httpx2.HTTPError:
            return True  # it is asked again, unless it has ended
        if answer.is_success and answer.json()["sessions"]:
            model.kept = used  # only a request changes that
            return True
        return False


def create_models_app(
    commands: Mapping[str, Sequence[str]], settings: ServeSettings, idle: float | None = None
) -> Starlette:
    """Return the ASGI application of a server with several models.

    Args:
        commands: For each model's name, the command line of a process that serves the model and prints its address.
        settings: The limits of the server.
        idle: Seconds without a request after which a model's process ends; None never ends a process.
    """
    models = Models(commands, settings, idle)
    own: dict[str, Bound] = {
        "/": partial(page, None),
        "/health": _works,
        "/ready": _works,
        "/version": partial(version, None),
        "/openapi.json": partial(openapi, None),
        "/v1/models": models.names,
        "/v1/models/{name:path}": models.describe,
    }
    routes = [(method, path, own.get(path, models.forward)) for method, path, _ in ROUTES]
    app = application(routes, settings, models.life)
    app.state.drain = asyncio.sleep  # this process has nothing to drain: uvicorn waits for the answers
    app.state.descriptors = 2  # a client's connection, and the one that forwards its request
    return app


async def _works(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _events(answer: httpx2.Response, path: str) -> AsyncGenerator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    except httpx2.TransportError:
        yield error_event(engine_failed(), path)
    finally:
        await answer.aclose()


def _about(model: Model) -> dict[str, object]:
    about = {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "kvexport"}
    return {**about, "loaded": model.loaded}
