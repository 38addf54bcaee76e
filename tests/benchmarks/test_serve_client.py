"""Tests of the load generator for a server: the requests, their times, the figures, and the errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from benchmarks.speed.serve_client import Answer, Objective, Result, Server, Workload, conversations, drive
from tests.support.http_server import Running, engine_of, running


@pytest.fixture(scope="module")
def server(tiny_artifact: Path) -> Iterator[Running]:
    with running(engine_of(tiny_artifact)) as server:
        yield server


def test_arrivals_are_poisson_and_the_same_for_a_seed() -> None:
    workload = Workload(conversations=4000, rate=5.0, words=1, seed=3)
    drawn = conversations(workload)
    gaps = np.diff([0.0, *(one.start for one in drawn)])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.08)  # as of an exponential distribution
    assert drawn == conversations(workload)
    assert drawn != conversations(Workload(conversations=4000, rate=5.0, words=1, seed=4))
    assert {one.start for one in conversations(Workload(rate=0))} == {0.0}


def test_messages_have_their_words() -> None:
    drawn = conversations(Workload(conversations=3, turns=3, words=7, first_words=50))
    assert [[len(message.split()) for message in one.messages] for one in drawn] == [[50, 7, 7]] * 3
    assert len({message for one in drawn for message in one.messages}) == 9


def test_a_real_server_is_measured(server: Running) -> None:
    workload = Workload(conversations=3, turns=2, rate=0, words=4, answer=5, ignore_eos=True)
    model, answers, seconds = drive(Server(server.url), workload)
    result = Result(server.url, model, workload, Objective(60, 60), seconds, answers)
    data = result.to_json()
    assert data["requests"] == 6
    assert data["failed"] == data["not_sent"] == 0
    assert [(a.conversation, a.turn, a.tokens) for a in answers] == [(i, j, 5) for i in range(3) for j in range(2)]
    assert all(0 < a.ttft <= a.pieces[-1] and a.end - a.sent >= a.pieces[-1] for a in answers)
    first, second = answers[:2]
    assert second.sent >= first.end
    assert second.prompt_tokens > first.prompt_tokens + first.tokens
    assert data["good_share"] == 1.0
    assert data["output_tokens_per_second"] == pytest.approx(30 / seconds, rel=0.01)
    json.dumps(data)


def fake(stream: str, status: int = 200) -> Starlette:
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m"}]})

    async def chat(request: Request) -> Any:
        return StreamingResponse(iter([stream]), status_code=status, media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])


def delta(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"


@pytest.mark.parametrize(
    ("stream", "status", "error"),
    [
        ("overloaded", 503, "status 503: overloaded"),
        (delta("a") + 'data: {"error": {"message": "lost"}}\n\n', 200, "lost"),
        ("data: [DONE]\n\n", 200, "no token came"),
        ("data: {broken\n\n", 200, "JSONDecodeError"),
    ],
)
def test_a_failed_request_is_counted_and_ends_its_conversation(
    monkeypatch: pytest.MonkeyPatch, stream: str, status: int, error: str
) -> None:
    answers = drive_fake(monkeypatch, fake(stream, status), Workload(conversations=2, turns=3, rate=0))
    assert len(answers) == 2
    assert all(error in answer.error for answer in answers)
    data = Result("u", "m", Workload(conversations=2, turns=3), Objective(), 1.0, answers).to_json()
    assert (data["failed"], data["not_sent"], data["requests_per_second"]) == (2, 4, 0.0)
    assert data["ttft"]["p50"] is None


def test_pieces_are_counted_where_the_server_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = delta("") + delta("a") + delta("b") + delta("c") + "data: [DONE]\n\n"
    answer = drive_fake(monkeypatch, fake(stream), Workload(conversations=1, rate=0))[0]
    assert (answer.text, answer.tokens, len(answer.gaps), answer.error) == ("abc", 3, 2, "")


def drive_fake(monkeypatch: pytest.MonkeyPatch, app: Starlette, workload: Workload) -> list[Answer]:
    import httpx2

    whole = httpx2.AsyncClient

    def client(**options: Any) -> Any:
        return whole(transport=httpx2.ASGITransport(app), headers=options["headers"])

    monkeypatch.setattr(httpx2, "AsyncClient", client)
    return drive(Server("http://fake/v1/"), workload)[1]


def answer_of(pieces: list[float], error: str = "", turn: int = 0) -> Answer:
    return Answer(0, turn, 0.5, pieces, 0.5 + pieces[-1], "x", len(pieces), 10, 4, error)


def test_the_figures_are_right() -> None:
    answers = [answer_of([0.1, 0.2, 0.4]), answer_of([2.0, 2.1], turn=1), answer_of([0.1, 0.9]), answer_of([0.1], "x")]
    result = Result("u", "m", Workload(conversations=4, turns=2), Objective(1.0, 0.2), 2.0, answers)
    data = result.to_json()
    assert data["ttft"] == {"p50": 100.0, "p90": 1620.0, "p99": 1962.0, "mean": 733.333, "max": 2000.0}
    assert data["inter_token_latency"]["max"] == 800.0
    assert data["per_token"]["p50"] == 150.0
    assert (data["good_share"], data["good_requests_per_second"]) == (0.25, 0.5)
    assert (data["output_tokens_per_second"], data["requests_per_second"], data["failed"]) == (3.5, 1.5, 1)


def test_addresses_are_checked() -> None:
    assert Server("http://a:1/").base == Server("http://a:1/v1/").base == "http://a:1/v1"
    with pytest.raises(ValueError, match="address is 'a:1'"):
        drive(Server("a:1"), Workload())
    with pytest.raises(ConnectionError, match="does not answer with models"):
        drive(Server("http://127.0.0.1:9"), Workload())
