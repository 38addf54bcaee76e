"""The server of `kvexport serve` by several replicas: `Router` hears clients and hands each request, whole, to one
`Replica`, which hands back what it would have sent. A handle of Ray Serve is between them; nothing here needs Ray.

Requests of one session go to one replica, and so do those whose prompts begin alike: what is kept there of them (the
state, prefixes) is used. Any replica can answer any request, since sessions are in a folder that all of them use.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from kvexport.serve.bodies import read_bytes
from kvexport.serve.errors import ApiError, overloaded
from kvexport.serve.sessions import HEADER
from kvexport.serve.settings import ServeSettings
from kvexport.serve.streams import ClientGone, error_event

log = logging.getLogger("kvexport.serve")
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
_PROMPT = 2048  # characters of its beginning, or token ids


class Replica:
    """One server, whose engine is loaded when it is made. settings: its own. threads, lanes: of the engine."""

    def __init__(self, artifact: Path, settings: ServeSettings, threads: int, lanes: int) -> None:
        from kvexport.engine.load import load
        from kvexport.serve.app import create_app

        self._app = create_app(load(artifact, threads=threads, lanes=lanes), settings)
        self._life: AbstractAsyncContextManager[Any] | None = None

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message]]:
        """What a request is answered with, as ASGI's messages, all that are there at once. Closing it is what a client
        that goes away does."""
        if self._life is None:
            self._life = self._app.router.lifespan_context(self._app)
            await self._life.__aenter__()
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        heard: list[Message] = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if not heard:
                await asyncio.Event().wait()  # until it is cancelled
            return heard.pop()

        task = asyncio.ensure_future(self._app(dict(scope), receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            ended = False
            while not ended:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                ended = messages[-1] is None
                if given := [message for message in messages if message is not None]:
                    yield given
            task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def check_health(self) -> None:
        """Raises where the engine's thread has ended: Ray then makes another replica."""
        worker = self._app.state.service.worker
        if self._life is not None and not worker.alive:
            raise RuntimeError("the engine's thread has ended")


class Answers(Protocol):
    """What a call of a replica gives: a `DeploymentResponseGenerator` of Ray."""

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        """The messages."""
        ...

    def cancel(self) -> None:
        """Nobody wants the rest."""
        ...


class Router:
    """An ASGI application. ask(key, scope, body): have a replica answer, the same one for the same key as long as there
    is room, any one for "". limit: bytes of a session that is brought. full: what `ask` raises where too many wait."""

    def __init__(
        self,
        ask: Callable[[str, Scope, bytes], Answers],
        settings: ServeSettings,
        limit: int,
        full: type[Exception],
    ) -> None:
        self._ask, self._body, self._limit, self._full = ask, settings.body, limit, full

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: by a replica, or by an error."""
        path = scope["path"]
        limit = max(self._limit, self._body) if path.startswith("/v1/sessions/") else self._body
        try:
            body = await read_bytes(Request(scope, receive), limit)
        except ClientGone:
            return
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        head = {name: scope[name] for name in _SCOPE if name in scope}
        answers = self._ask(route_key(head, body), head, body)
        streams: bool | None = None  # of the answer, once it has begun
        try:
            async for messages in answers:
                for message in messages:
                    if message["type"] == "http.response.start":
                        streams = any(v.startswith(b"text/event-stream") for k, v in message["headers"])
                    await send(message)
        except self._full:
            await _refuse(overloaded("the queue is full"), scope, receive, send)
        except Exception as error:
            log.error("a replica did not answer %s to its end: %s", path, error)
            lost = ApiError(503, "the replica that answered has ended", code="replica_lost", retry_after=1)
            if streams is None:
                await _refuse(lost, scope, receive, send)
            elif streams:
                await send({"type": "http.response.body", "body": error_event(lost, path)})
            else:
                raise  # the connection is closed in the middle of the answer
        finally:
            answers.cancel()


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.body(scope["path"]), error.status, headers=error.headers)(scope, receive, send)


def route_key(scope: Scope, body: bytes) -> str:
    """What requests have in common that had better go to one replica: their session, else the beginning of their
    prompt, up to the first message of the user. "" where there is neither."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if name := headers.get(HEADER.encode(), b"").decode("latin-1"):
        return name
    if scope["path"].startswith("/v1/sessions/"):
        return str(scope["path"]).removeprefix("/v1/sessions/")
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    if session := asked.get("session_id"):
        return str(session)
    prompt = next((asked[field] for field in ("messages", "input", "prompt") if asked.get(field)), None)
    if prompt is None:
        return ""
    beginning = [asked.get("system"), asked.get("instructions"), _beginning(prompt)]
    return hashlib.sha256(json.dumps(beginning).encode()).hexdigest()


def _beginning(prompt: Any) -> Any:
    if not isinstance(prompt, list):
        return str(prompt)[:_PROMPT]
    for count, entry in enumerate(prompt, 1):
        if isinstance(entry, dict) and entry.get("role") == "user":
            return prompt[:count]
    return prompt[:_PROMPT]
