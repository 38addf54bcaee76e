"""A real server on a port of its own, in a thread of this process, and the tiny model behind it."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import kvexport
from kvexport.engine.engine import Engine
from kvexport.language.chat import ChatTemplate

T = TypeVar("T")
# In the words of its alphabet: letters, digits, space and full stop. An answer is written as it was begun.
TEMPLATE = (
    "{% for m in messages %}{{ 'say' if m.role == 'assistant' else m.role }} {{ m.content }}. {% endfor %}"
    "{% if add_generation_prompt %}say {% endif %}"
)


def engine_of(artifact: Path) -> Engine:
    """The tiny model, with a chat template."""
    engine = kvexport.load(artifact, threads=1)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, "the test")
    return engine


def prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation in the words of TEMPLATE."""
    role = {"assistant": "say"}
    return "".join(f"{role.get(m['role'], m['role'])} {m['content']}. " for m in messages) + "say "


class Running:
    """A server that runs. service: its own, to be looked at."""

    def __init__(self, url: str, service: Any, server: Any) -> None:
        self.url, self.service, self.server = url, service, server

    def on_engine(self, function: Callable[[], T]) -> T:
        """What `function` returns in the thread that owns the engine."""
        worker, done = self.service.worker, queue.SimpleQueue[Any]()
        worker._calls.put((lambda: done.put(function()), None))
        return cast("T", done.get(timeout=60))

    def ask(
        self, path: str, body: Any = None, method: str = "", headers: Mapping[str, str] = {}
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of an answer; JSON bodies are read. body: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(
            self.url + path, data, given, method=method or ("GET" if data is None else "POST")
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
    """A server over the engine, until the end of the block. send_buffer: bytes that the system takes for a client that
    does not read, 0 = as it likes."""
    from kvexport.serve.app import create_app
    from kvexport.serve.run import Server, listen
    from kvexport.serve.settings import ServeSettings

    allowed = ServeSettings(**{"names": ("tiny",), "drain": 5.0, **settings})
    app = create_app(engine, allowed)
    ready = threading.Event()
    server = Server(app, ready.set)
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
    """Fails after a minute."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)
