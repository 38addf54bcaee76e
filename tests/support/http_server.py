"""A real HTTP server on a free port, in a thread of this process, with the tiny model behind it."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import kvexport
from kvexport.engine.engine import Engine
from kvexport.language.chat import ChatTemplate

T = TypeVar("T")
# A chat template with only the characters of the model's alphabet: letters, digits, space and full stop. A message of
# the assistant is written as the generation prompt begins it.
TEMPLATE = (
    "{% for m in messages %}{{ 'say' if m.role == 'assistant' else m.role }} {{ m.content }}. {% endfor %}"
    "{% if add_generation_prompt %}say {% endif %}"
)


def engine_of(artifact: Path) -> Engine:
    engine = kvexport.load(artifact, threads=1)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, "the test")
    return engine


def prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    role = {"assistant": "say"}
    return "".join(f"{role.get(m['role'], m['role'])} {m['content']}. " for m in messages) + "say "


class Connections(set[Any]):
    accepted = 0

    def add(self, connection: Any) -> None:
        super().add(connection)
        self.accepted += 1


class Running:
    def __init__(self, url: str, service: Any = None, server: Any = None) -> None:
        """Describe a server. A server in another process has only its address."""
        self.url, self.service, self.server = url, service, server
        self.connections: Connections = server.server_state.connections if server is not None else Connections()

    def on_engine(self, function: Callable[[], T]) -> T:
        """Return the result of a call in the thread that steps the engine."""
        return self.service.worker._thread.call(function).result(timeout=60)

    def wait_for_clients(self, accepted: int = 0) -> None:
        """Wait until every client has gone and no part of its request is left.

        A client that closed its connection may not have been accepted yet, and the request of an accepted client may
        reach the engine after all others have finished. So the conditions are awaited in the order in which a request
        passes through the server: none of them can become false again.
        """
        worker = self.service.worker
        wait_until(lambda: self.connections.accepted >= accepted)
        wait_until(lambda: not self.connections)
        wait_until(lambda: not self.server.server_state.tasks)
        wait_until(lambda: not (worker.pending or worker._entries or worker._jobs))

    def ask(
        self, path: str, body: Any = None, method: str = "", headers: Mapping[str, str] = {}
    ) -> tuple[int, dict[str, str], Any]:
        """Send a request, and return the status, the headers and the body of the answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(
            self.url + path, data, all_headers, method=method or ("GET" if data is None else "POST")
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return _read(answer)
        except urllib.error.HTTPError as error:
            with error:
                return _read(error)


def _read(answer: Any) -> tuple[int, dict[str, str], Any]:
    data, headers = answer.read(), {key.lower(): value for key, value in answer.headers.items()}
    if headers.get("content-type", "").startswith("application/json"):
        return answer.status, headers, json.loads(data)
    return answer.status, headers, data.decode()


@contextmanager
def running(engine: Engine, send_buffer: int = 0, **settings: Any) -> Iterator[Running]:
    """Run a server over the engine until the end of the `with` block."""
    from kvexport.serve.app import create_app
    from kvexport.serve.run import Server, listen
    from kvexport.serve.settings import ServeSettings

    allowed = ServeSettings(**{"names": ("tiny",), "drain": 5.0, **settings})
    app = create_app(engine, allowed)
    ready = threading.Event()
    server = Server(app, ready.set)
    server.server_state.connections = Connections()
    with listen("127.0.0.1", 0, allowed.stall) as listener:
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        assert ready.wait(60)
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service, server)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)
