"""A router and its replicas, without Ray: a handle of their own calls the replica in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.deploy.replicas import Replica, Router, route_key
from kvexport.serve.settings import ServeSettings

Ask = Callable[..., tuple[int, bytes, str]]
SETTINGS = ServeSettings(names=("tiny",), body=100_000)


class Full(Exception):
    """As Ray's BackPressureError."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def replica(tiny_artifact: Path, loop: asyncio.AbstractEventLoop) -> Iterator[Replica]:
    made = Replica(tiny_artifact, SETTINGS, 1, 2)
    yield made
    if made._life is not None:
        loop.run_until_complete(made._life.__aexit__(None, None, None))


@pytest.fixture
def ask(replica: Replica, loop: asyncio.AbstractEventLoop) -> Ask:
    return partial(asked, replica, loop)


class Answers:
    """A call of a replica. fails: raised behind so many lots of messages."""

    def __init__(self, messages: AsyncGenerator[list[Any]], fails: Exception | None, after: int) -> None:
        self._messages, self._fails, self._after, self.cancelled = messages, fails, after, False

    async def __aiter__(self) -> AsyncIterator[list[Any]]:
        count = 0
        if self._fails is not None and not self._after:
            raise self._fails
        async with aclosing(self._messages) as messages:
            async for lot in messages:
                yield lot
                count += 1
                if self._fails is not None and count == self._after:
                    raise self._fails

    def cancel(self) -> None:
        self.cancelled = True


def scope_of(path: str, method: str = "POST", **headers: str) -> dict[str, Any]:
    given = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    base = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http", "query_string": b""}
    return {**base, "path": path, "raw_path": path.encode(), "headers": [(b"host", b"localhost"), *raw]}


def asked(
    replica: Replica,
    loop: asyncio.AbstractEventLoop,
    scope: dict[str, Any],
    body: bytes,
    fails: Exception | None = None,
    after: int = 0,
) -> tuple[int, bytes, str]:
    """Status and body of an answer by way of a router, and the key that it was routed by."""
    sent: list[Any] = []
    keys: list[str] = []
    calls: list[Answers] = []

    def call(key: str, head: Any, data: bytes) -> Answers:
        keys.append(key)
        calls.append(Answers(replica.answer(head, data), fails, after))
        return calls[0]

    async def main() -> None:
        parts = [body[i : i + 50_000] for i in range(0, len(body), 50_000)] or [b""]
        heard = [{"type": "http.request", "body": p, "more_body": i < len(parts) - 1} for i, p in enumerate(parts)]

        async def receive() -> Any:
            return heard.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        await Router(call, SETTINGS, 1 << 20, Full)(scope, receive, send)

    loop.run_until_complete(main())
    assert all(call.cancelled for call in calls)
    status = next(m["status"] for m in sent if m["type"] == "http.response.start")
    return status, b"".join(m.get("body", b"") for m in sent[1:]), (keys or ["none"])[0]


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 20, **fields}).encode()


def test_an_answer_by_a_replica_is_the_engines(ask: Ask, tiny_artifact: Path) -> None:
    wanted = kvexport.load(tiny_artifact).generate("hello", max_new_tokens=20)[0].text
    status, body, _ = ask(scope_of("/v1/completions"), completion())
    assert status == 200 and json.loads(body)["choices"][0]["text"] == wanted
    status, body, _ = ask(scope_of("/v1/completions"), completion(stream=True))
    events = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line.startswith("data: {")]
    assert status == 200 and body.endswith(b"data: [DONE]\n\n")
    assert "".join(event["choices"][0]["text"] for event in events) == wanted
    assert ask(scope_of("/health", "GET"), b"")[0] == 200
    assert ask(scope_of("/v1/completions"), b"{")[0] == 400


@pytest.mark.parametrize(
    ("fails", "code"), [(RuntimeError("the actor died"), "replica_lost"), (Full("no room"), "overloaded")]
)
def test_a_replica_that_is_lost_or_full_is_an_error_503(ask: Ask, fails: Exception, code: str) -> None:
    status, body, _ = ask(scope_of("/v1/completions"), completion(), fails)
    assert status == 503 and json.loads(body)["error"]["code"] == code
    status, body, _ = ask(scope_of("/v1/messages"), completion(), fails)
    assert status == 503 and json.loads(body)["error"]["type"] == "overloaded_error"


def test_a_replica_that_is_lost_in_the_middle_ends_the_stream_by_an_error(ask: Ask) -> None:
    lost = RuntimeError("the actor died")
    status, body, _ = ask(scope_of("/v1/completions"), completion(stream=True, max_tokens=400), lost, after=1)
    *_, error, done, _ = body.decode().split("\n\n")
    assert status == 200 and done == "data: [DONE]"
    assert json.loads(error[6:])["error"]["code"] == "replica_lost"


def test_bodies_are_bounded_before_a_replica_is_asked(ask: Ask) -> None:
    status, body, key = ask(scope_of("/v1/completions"), b" " * 100_001)
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_long" and key == "none"
    status, body, key = ask(scope_of("/v1/sessions/alice", "PUT"), b" " * 100_001)
    assert (status, key) == (400, "alice"), "a session may be longer; this is none"


def test_a_client_that_goes_away_frees_its_lane(replica: Replica, loop: asyncio.AbstractEventLoop) -> None:
    async def main() -> None:
        answer = replica.answer(scope_of("/v1/completions"), completion(max_tokens=400, stream=True, ignore_eos=True))
        await anext(answer)
        worker = replica._app.state.service.worker
        assert worker.pending == 1
        await answer.aclose()
        for _ in range(1000):
            if not worker.pending:
                break
            await asyncio.sleep(0.002)
        assert not worker.pending
        await replica.check_health()
        worker.draining = True
        with pytest.raises(RuntimeError, match="thread has ended"):
            await replica.check_health()
        worker.draining = False

    loop.run_until_complete(main())


def test_requests_of_one_session_or_beginning_go_to_one_replica() -> None:
    def key(path: str = "/v1/chat/completions", *, header: str = "", **body: Any) -> str:
        scope = scope_of(path, **({"x_session_id": header} if header else {}))
        return route_key(scope, json.dumps(body).encode())

    say: Callable[..., dict[str, Any]] = lambda role, text: {"role": role, "content": text}  # noqa: E731
    first = [say("system", "be brief"), say("user", "hello")]
    later = [*first, say("assistant", "hi"), say("user", "and now?")]
    assert key(header="alice") == key(header="alice", messages=first) == "alice"
    assert key(session_id="bob", prompt="x") == key("/v1/sessions/bob") == "bob"
    assert key(messages=first) == key(messages=later) != key(messages=[say("user", "hello")])
    assert key(messages=first, system="a") != key(messages=first, system="b")
    assert key(prompt="a" * 9000) == key(prompt="a" * 9000 + "b") != key(prompt="b" + "a" * 9000)
    assert key(prompt=[1] * 3000) == key(prompt=[1] * 4000) != key(prompt=[2] * 3000)
    assert key(input="hello") != key(input="hello", instructions="shout")
    assert key() == route_key(scope_of("/v1/completions"), b"{") == route_key(scope_of("/x"), b"[" * 5000) == ""
    for nonsense in (5, {"a": 1}, ["x"], [None]):
        assert key(messages=nonsense)
