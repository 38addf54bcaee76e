"""TCP connections of HTTP clients: deadlines for each request's headers and body, and a limit on open connections.

uvicorn closes a connection that is idle after an answer, but waits forever for a client that sends half a request. A
client needs no API key for half a request, which takes one of the process's file descriptors. This module gives every
connection a deadline. If the limit of connections is reached, a new connection replaces the one that has waited longest
without a complete request. A connection whose request is being answered is never replaced.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvexport.errors import EnvironmentProblem

HEAD_SECONDS = 10.0  # from the first byte of a request, or from the start of a connection, to the headers' end
BODY_SECONDS = 65.0  # from the end of the headers to the end of the body; `bodies.read_bytes` answers 408 before
_MOST = 1024
_RESERVE = 16  # file descriptors that are left for session files, the artifact and libraries
_LEAST = 4


def connection_limit() -> int:
    """Return how many client connections the process can hold without running out of file descriptors.

    16 of the free descriptors are reserved for files. For every 2 connections one more descriptor stays free, for
    connections that are accepted but not counted yet, and for those that are closed but not freed yet. Together these
    states last four turns of asyncio's event loop, and each turn accepts up to `backlog` connections.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return _MOST
    open_files = Path("/proc/self/fd")
    free = allowed - len(list(open_files.iterdir())) if open_files.is_dir() else allowed // 2
    limit = (free - _RESERVE) * 2 // 3
    if limit < _LEAST:
        problem = f"this process may open {allowed} files, and {free} of them are free: too few for connections"
        raise EnvironmentProblem(problem, f"ulimit -n {max(1024, 2 * allowed)}")
    return min(_MOST, limit)


def backlog(limit: int) -> int:
    """Return how many connections may wait in the system for `accept`, for at most `limit` open connections."""
    return min(128, max(1, limit // 8))


class Connection(H11Protocol):
    """A client's HTTP connection (uvicorn's protocol class) with deadlines and a limit on the number of connections."""

    limit = _MOST
    _deadline: asyncio.TimerHandle | None = None
    _receives = ""  # the piece of a request that the deadline is for: "head", "body", or "" for none
    _since = 0.0  # time of the event loop at which the connection began to wait for a complete request

    def connection_made(self, transport: Any) -> None:
        """Admit a new client connection within the limit of open connections.

        At the limit, an open connection without a complete request is closed to make room (`_free_a_place`). If every
        open connection has a complete request, the new connection is closed.
        """
        if len(self.connections) >= self.limit and not self._free_a_place():
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()
            self.transport, self.flow = transport, None  # type: ignore[assignment]
            return
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline("")
        if self.flow is not None:  # a refused connection has no flow: uvicorn never got it
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.flow is None:
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Set a deadline for the rest of a request body, if the request was answered before the body arrived."""
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with status 400, or close the connection if an answer has begun already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection at once if its request is incomplete; otherwise let the request's answer end first."""
        if self._receives:
            self.transport.abort()
        else:
            super().shutdown()

    @property
    def waits(self) -> bool:
        """Whether the connection has no complete request, so that it may be closed for a new connection."""
        return self.conn.their_state is h11.IDLE or self._receives != ""

    def _free_a_place(self) -> bool:
        """Close the connection that has waited longest without a complete request; return False without such a one.

        Connections that never sent a complete request, and those that sent a part of their next one, are closed first.
        Otherwise a flood of new connections within one turn of the event loop would close the connection of a client
        that is between two requests.
        """
        waiting = [c for c in self.connections if isinstance(c, Connection) and c.waits]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda c: (c.cycle is not None and not c._receives, c._since))
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _watch(self) -> None:
        if self.transport.is_closing():
            return self._set_deadline("")
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return self._set_deadline("body", BODY_SECONDS)
        # After an answer uvicorn itself closes a connection that stays idle. The first bytes of a request end that.
        begun = state is h11.IDLE and (self.cycle is None or self.timeout_keep_alive_task is None)
        return self._set_deadline("head" if begun else "", HEAD_SECONDS)

    def _set_deadline(self, piece: str, seconds: float = 0.0) -> None:
        """Set a deadline for the head or body of a request, which later bytes do not extend."""
        if piece == self._receives:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._receives = piece
        self._since = self.loop.time()
        if piece:
            self._deadline = self.loop.call_later(seconds, self.transport.abort)


def connections(limit: int) -> type[Connection]:
    return type("LimitedConnection", (Connection,), {"limit": limit})


class OncePerSecond(logging.Filter):
    """A logging filter that lets equal messages through only once a second.

    Clients without an API key can cause many messages, for example asyncio's message that no file descriptor is left.
    The filter keeps these messages from filling a disk.
    """

    LOGGERS = ("asyncio", "uvicorn.error")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = str(record.msg).partition("\n")[0][:200], self._clock()
        if now - self._last.get(text, float("-inf")) < 1:
            return False
        if len(self._last) > 100:
            self._last.clear()
        self._last[text] = now
        return True

    def attach(self) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).addFilter(self)

    def detach(self) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeFilter(self)
