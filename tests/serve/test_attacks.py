"""Clients that attack the server. benchmarks/correctness/attacks.py defines the attacks, and can repeat them."""

import http.client
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.correctness.attacks import ATTACKS, MIB, Target, drains, run_attack, target
from kvexport.bounded_json import MOST_VALUES, count_values
from kvexport.engine.engine import Engine
from kvexport.errors import EnvironmentProblem
from kvexport.serve import connections
from kvexport.serve.connections import OncePerSecond, backlog, connection_limit
from tests.support.http_server import running, wait_until


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    log = tmp_path_factory.mktemp("attacks") / "log"
    with target(tiny_artifact, log) as server:
        yield server
        assert not drains(server), "with a half-sent body"
    text = log.read_text()
    assert "Traceback" not in text and len(text) < 10_000


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_stops_no_stream(server: Target, name: str) -> None:
    """An attack gets an error and harms nothing: a stream beside it continues, /health answers, and memory is freed."""
    problem, _ = run_attack(server, name, max(server.memory(), 300 * MIB))
    assert not problem


def test_a_request_that_does_not_arrive_loses_its_connection(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single bytes do not extend the deadline. A later request on the connection has its own deadline."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.2)
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = f'{head}Content-Length: 14\r\n\r\n{{"prompt":"a"}}'
    with running(engine) as server:
        alive = server.connections
        for count, half in enumerate(("", "GET / HT", f"{head}Content-Length: 99\r\n\r\n", f"{whole}GET /heal"), 1):
            client = Target(server.url, None).connect()  # type: ignore[arg-type]
            client.sendall(half.encode())
            wait_until(lambda count=count: alive.accepted == count)
            for _ in range(5):
                try:
                    client.sendall(b"x")
                except OSError:
                    break
            wait_until(lambda: not alive)
            client.close()
        assert server.ask("/health")[0] == 200


def test_a_flood_of_half_requests_closes_no_answered_client(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was answered and waits for its client's next request outlives newer ones with half a head."""
    monkeypatch.setattr("kvexport.serve.run.connection_limit", lambda: 3)
    with running(engine) as server:
        target = Target(server.url, None)  # type: ignore[arg-type]
        client = http.client.HTTPConnection(*target.address(), timeout=30)
        client.connect()
        socket = client.sock
        flood = []
        for turn in range(2):
            client.request("GET", "/health")
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
            assert client.sock is socket
            for _ in range(8 if turn == 0 else 0):
                flood.append(target.connect())
                flood[-1].sendall(b"GET / HT")
                wait_until(lambda: server.connections.accepted == 1 + len(flood))
        client.close()
        for one in flood:
            one.close()


def test_a_full_server_gives_places_to_complete_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full server the connection that waits longest loses its place, but never one that is being answered."""
    monkeypatch.setattr("kvexport.serve.run.connection_limit", lambda: 2)
    body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with running(engine) as server:
        target = Target(server.url, None)  # type: ignore[arg-type]
        stream = target.connect()
        stream.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
        idle = [target.connect() for _ in range(3)]
        assert server.ask("/health")[0] == 200
        seen = b""
        while b"[DONE]" not in seen:
            seen += stream.recv(1 << 16)
        assert b'"finish_reason":"length"' in seen
        assert [one.recv(1) for one in idle[:2]] == [b"", b""] or idle[0].recv(1) == b""
        for one in (stream, *idle):
            one.close()


def test_the_number_of_connections_leaves_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert connection_limit() == 1024 and backlog(1024) == 128
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (16, 16))
    with pytest.raises(EnvironmentProblem, match="may open 16 files"):
        connection_limit()


def test_equal_messages_are_logged_once_a_second() -> None:
    now = [0.0]
    filtered = OncePerSecond(lambda: now[0])

    def passes(text: str) -> bool:
        return filtered.filter(logging.LogRecord("asyncio", 40, "", 0, f"{text}\nmore {now}", (), None))

    assert [passes("full") for _ in range(1000)].count(True) == 1
    assert passes("another")
    now[0] = 1.5
    assert passes("full") and not passes("full")


@pytest.mark.parametrize("size", [10, MOST_VALUES])
def test_values_are_counted_outside_of_strings(size: int) -> None:
    texts = ["a,b[{:", "\\", '"', '\\"', '\\\\",[', ""] * (size // 4)
    inner = json.dumps(texts).encode()
    count = count_values(inner)
    assert len(texts) <= count <= (1 + len(texts) if size > 10 else 10 * len(texts))
    assert count_values(json.dumps({"a": "," * 2 * size}).encode()) <= (3 if size > 10 else 30)
