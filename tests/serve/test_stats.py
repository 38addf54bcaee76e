"""Tests of the server's figures about its lanes."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvexport.engine.engine import Engine
from tests.support.http_server import Running, wait_until
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


def test_lanes_memory_and_slots_while_a_request_runs(engine: Engine, server: Running, slow: None) -> None:
    client = RawClient(server.url, "/v1/completions", ASKED)
    client.read_until(b"data:")
    seen = server.ask("/stats")[2]
    client.close()
    server.wait_for_clients()  # the next test looks at lane 0
    assert seen["state_bytes"] == engine.plan.bytes(4) and len(seen["lanes"]) == 4
    assert seen["full_cache_bytes_per_token"] == 2 * 2 * (8 + 8) * 4  # layers, KV heads, a key and a value, float32
    lane = seen["lanes"][0]
    assert lane["state"] == "decoding" and lane["prompt"] == lane["read"] == 88 <= lane["tokens"]
    assert 32 <= lane["slots"] <= engine.plan.caches[0].capacity[0]
    assert [entry["state"] for entry in seen["lanes"][1:]] == ["idle"] * 3
    assert seen["merges"] > 0 and seen["generated_tokens"] > 0


def test_an_answer_has_the_number_that_its_lane_shows(server: Running, slow: None) -> None:
    """The header X-Request-Number and the field `request` of a lane in /stats name the same request."""
    url, body = urlsplit(server.url).netloc, {"max_tokens": 200, "stream": True}
    clients = [HTTPConnection(url, timeout=60) for _ in range(3)]
    for i, client in enumerate(clients):
        prompt = {**body, "prompt": "a" * (300 + i)}
        client.request("POST", "/v1/completions", json.dumps(prompt), {"Content-Type": "application/json"})
    numbers = [int(client.getresponse().headers["X-Request-Number"]) for client in clients]
    seen: dict[int, int] = {}

    def all_have_a_lane() -> bool:
        lanes = server.ask("/stats")[2]["lanes"]
        seen.update({lane["request"]: lane["prompt"] for lane in lanes if lane["state"] != "idle"})
        return seen.keys() >= {*numbers}

    wait_until(all_have_a_lane)
    assert [seen[number] for number in numbers] == [300, 301, 302]
    for client in clients:
        client.close()
    server.wait_for_clients()
    whole = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[1]
    assert int(whole["x-request-number"]) > max(numbers)


def test_the_usage_of_an_answer_tells_what_its_cache_holds(server: Running) -> None:
    answer = server.ask("/v1/completions", {**ASKED, "stream": False, "max_tokens": 4, "n": 2})[2]["usage"]
    slots = [lane["slots"] for lane in server.ask("/stats")[2]["lanes"][:2]]
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
