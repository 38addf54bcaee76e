"""Tests of the server's figures about its lanes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvexport.engine.engine import Engine
from tests.support.http_server import Running
from tests.support.streams import RawClient

ASKED = {"prompt": "anna lamp. " * 8, "max_tokens": 300, "stream": True}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow down the engine's steps, so that requests run long enough to be observed."""
    step = Engine.step

    def wait(engine: Engine) -> Any:
        time.sleep(0.01)
        return step(engine)

    monkeypatch.setattr(Engine, "step", wait)


def test_the_usage_of_an_answer_tells_what_its_cache_holds(server: Running) -> None:
    answer = server.ask("/v1/completions", {**ASKED, "stream": False, "max_tokens": 4, "n": 2})[2]["usage"]
    slots = [server.service.lanes.occupied(lane) for lane in (0, 1)]
    merged = 2 * (88 + 3) - round(sum(slots))
    held = {"slots": sum(slots), "merged_tokens": merged, "pinned_tokens": 0}
    assert answer["kv_cache"] == {**held, "prompt_tokens_over_budget": 88 - 32}
    short = server.ask("/v1/completions", {"prompt": "anna", "max_tokens": 4})[2]["usage"]["kv_cache"]
    assert short == {"slots": 4 + 3, "merged_tokens": 0, "pinned_tokens": 0, "prompt_tokens_over_budget": 0}


def test_metrics_include_the_lanes(engine: Engine, server: Running, slow: None) -> None:
    client = RawClient(server.url, "/v1/completions", ASKED)
    client.read_until(b"data:")
    text = server.ask("/metrics")[2]
    client.close()
    server.wait_for_clients()
    for line in (
        'vllm:num_requests_running{model_name="tiny"} 1.0',
        'vllm:num_requests_waiting{model_name="tiny"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.25',
        'kvexport:lanes{model_name="tiny"} 4.0',
        f'kvexport:state_bytes{{model_name="tiny"}} {float(engine.plan.bytes(4))}',
    ):
        assert line in text
    assert float(text.split('kvexport:tokens_per_slot{model_name="tiny"} ')[1].split("\n")[0]) > 1.5
    assert float(text.split('kvexport:merges_total{model_name="tiny"} ')[1].split("\n")[0]) > 0
