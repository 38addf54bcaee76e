"""The HTTP server in this process: it serves an application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from kvexport.errors import EnvironmentProblem
from kvexport.serve.connections import OncePerSecond, backlog, connection_limit, connections
from kvexport.serve.service import Service

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def listen(host: str, port: int, stall: float) -> socket.socket:
    """Return a listening TCP socket. Linux closes a connection whose peer acknowledges nothing for `stall` seconds."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _not_listening(f"{host}:{port}", error) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall * 1000))
    return listener


def _not_listening(address: str, error: OSError) -> EnvironmentProblem:
    problem = f"{address} cannot be listened on: {error.strerror or error}"
    return EnvironmentProblem(problem, "another --port (0 = any free one), or another --host")


class Server(uvicorn.Server):
    """A uvicorn server that ends gracefully on the first signal, and at once on the second."""

    def __init__(self, app: Starlette, on_ready: Callable[[], None] = lambda: None) -> None:
        self._service: Service = app.state.service
        self._on_ready = on_ready
        self._logged = OncePerSecond()
        limit = connection_limit()
        super().__init__(
            uvicorn.Config(
                app,
                http=connections(limit),
                backlog=backlog(limit),
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(self._service.settings.drain) + 5,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._logged.attach()
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            self._logged.detach()
            name, port = sockets[0].getsockname()[:2] if sockets else ("the address", 0)
            raise _not_listening(f"{name}:{port}", error) from error
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections and requests, and wait up to `drain` seconds for the running requests."""
        draining = asyncio.ensure_future(self._service.worker.drain(self._service.settings.drain))
        await super().shutdown(sockets)
        draining.cancel()
        self._logged.detach()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP end the server while the context is open.

        Only the main thread installs signal handlers, because Python delivers signals to the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def run(app: Starlette, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    # The event loop sends every token at once, so it must soon get the GIL from the engine's thread.
    sys.setswitchinterval(0.001)
    with listener:
        asyncio.run(Server(app, on_ready).serve([listener]))
