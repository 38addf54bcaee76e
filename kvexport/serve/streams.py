"""HTTP responses as streams of server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvexport.serve.errors import ApiError

T = TypeVar("T")
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The exception for an HTTP client that closed the connection before its answer."""


def event(data: Any, name: str = "") -> bytes:
    """Return one server-sent event with JSON data, as bytes; `name` is the event's name, "" for none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def error_event(error: ApiError, path: str) -> bytes:
    if path.startswith("/v1/messages"):
        return event(error.body(path), "error")
    return event(error.body(path)) + DONE


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. Raise ClientGone if the HTTP client disconnects first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(task, gone)


class EventStream(Response):
    """An HTTP response that sends server-sent events; a client that receives nothing for `stall` seconds is gone."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], stall: float, on_end: Callable[[], None], headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._stall, self._on_end = events, stall, on_end
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._send(send), _gone(receive), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._on_end()
            await _end(*tasks)

    async def _send(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for chunk in events:
                self._sending_since = loop.time()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sending_since = None
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self) -> None:
        """Return once the sending of an event has taken `stall` seconds, because the client reads nothing."""
        loop = asyncio.get_running_loop()
        while self._sending_since is None or loop.time() - self._sending_since < self._stall:
            await asyncio.sleep(self._stall / 4)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
