"""Tests of prompt snapshots: a hit gives the tokens of a cold run, and a shared beginning is read once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.load import load
from kvexport.engine.options import EngineOptions
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import Request

CHUNK = 16
SHARED = [7 * i % 61 for i in range(100)]


@pytest.fixture(scope="module")
def cold(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact)


@pytest.fixture
def engine(tiny_artifact: Path) -> Engine:
    engine = load(tiny_artifact)
    engine.prefixes = Prefixes(CHUNK, 1 << 30)
    return engine


def answered(engine: Engine, *prompts: list[int], **settings: Any) -> list[Request]:
    requests = [Request(ids, engine.settings(max_new_tokens=12, **settings)) for ids in prompts]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return requests


def tokens(engine: Engine, *prompts: list[int], **settings: Any) -> list[list[int]]:
    return [[token.id for token in request.tokens] for request in answered(engine, *prompts, **settings)]


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 32, 33, 48, 97, 100])
def test_a_hit_gives_the_tokens_of_a_cold_run(engine: Engine, cold: Engine, shared: int) -> None:
    ids = SHARED[:shared]
    for number in range(3):
        prompt = [*ids, *range(number, number + 4)]
        request = answered(engine, prompt, do_sample=True, seed=1)[0]
        assert [token.id for token in request.tokens] == tokens(cold, prompt, do_sample=True, seed=1)[0]
        border = shared // CHUNK * CHUNK
        assert request.cached_tokens == (border if number else 0)
        assert request.timing.prompt_tokens == len(prompt) - request.cached_tokens


def test_the_last_token_of_a_prompt_is_always_read(engine: Engine) -> None:
    prompt = SHARED[: 2 * CHUNK]
    assert [answered(engine, prompt)[0].cached_tokens for _ in range(2)] == [0, CHUNK]
    assert tokens(engine, prompt) == tokens(engine, prompt)


def test_prompts_that_arrive_together_read_a_shared_prefix_once(engine: Engine, cold: Engine) -> None:
    prompts = [[*SHARED[:70], *range(n, n + 20)] for n in range(6)]
    requests = answered(engine, *prompts)
    assert [[token.id for token in request.tokens] for request in requests] == tokens(cold, *prompts)
    assert [request.cached_tokens for request in requests] == [0] + [64] * 5


def test_a_prefix_shared_by_two_prompts_is_kept_for_a_third(engine: Engine) -> None:
    prompts = [[*SHARED[:48], *[n] * 300] for n in range(4)]
    cached = [answered(engine, prompt)[0].cached_tokens for prompt in prompts]
    assert cached[0] == 0 and cached[2:] == [48, 48]


def test_the_memory_is_bounded_and_the_least_recently_used_go(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    prompts = [[n] * 17 for n in range(5)]
    engine.prefixes = Prefixes(CHUNK, 1 << 30)
    answered(engine, prompts[0])
    size = engine.prefixes.nbytes
    engine.prefixes = Prefixes(CHUNK, 3 * size)
    for n in (0, 1, 2, 0, 3, 4):
        answered(engine, prompts[n])
        assert engine.prefixes.nbytes <= 3 * size
    assert len(engine.prefixes._saved) == 3
    assert [answered(engine, prompts[n])[0].cached_tokens for n in (0, 3, 4, 1)] == [16, 16, 16, 0]
    assert (engine.prefixes.queries, engine.prefixes.hits) == (10 * 17, 4 * 16)
    engine.prefixes = Prefixes(CHUNK, size - 1)
    assert [answered(engine, prompts[0])[0].cached_tokens for _ in range(2)] == [0, 0]


def test_a_lane_that_is_too_large_is_not_copied(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, save = SHARED[:40], Lanes.save
    sizes: list[tuple[int, int]] = []

    def measured(lanes: Lanes, lane: int) -> Any:
        saved = save(lanes, lane)
        sizes.append((sum(x.nbytes for x in saved.state.values()), lanes.saved_bytes(lane)))
        return saved

    monkeypatch.setattr(Lanes, "save", measured)
    answered(engine, [1, *prompt], [2] * 90)
    assert len(sizes) > 2 and all(real <= bound < 1.1 * real for real, bound in sizes)
    engine.prefixes.limit = min(real for real, _ in sizes) - 1
    count = len(sizes)
    answered(engine, [3, *prompt])
    assert len(sizes) == count


def test_on_a_gpu_no_prefixes_are_saved(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.with_options(EngineOptions(prefix_memory=1)).prefixes is not None
    monkeypatch.setattr(engine.model, "in_host_memory", False)
    assert engine.with_options(EngineOptions(prefix_memory=1)).prefixes is None


def test_a_lane_that_may_hold_nan_is_not_kept(engine: Engine, cold: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = SHARED[:40]
    engine.generate([1], max_new_tokens=1)
    lanes: Any = engine._pool.lanes
    decode = lanes.state.decode
    with monkeypatch.context() as patch:
        patch.setattr(lanes.state, "decode", lambda *call: np.full_like(decode(*call), np.nan))
        assert answered(engine, prompt)[0].finish_reason == "error"
    assert engine.prefixes is not None and not engine.prefixes._saved
    assert tokens(engine, prompt) == tokens(cold, prompt)


@pytest.mark.parametrize("seed", range(4))
def test_answers_with_shared_prefixes_equal_those_of_a_cold_engine(
    tiny_artifact: Path, cold: Engine, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    engine = load(tiny_artifact)
    engine.prefixes = Prefixes(CHUNK, int(rng.integers(1, 40)) * 20_000)
    requests = []
    for _ in range(40):
        prompt = [*SHARED[: int(rng.integers(100))], *rng.integers(0, 3, int(rng.integers(1, 40))).tolist()]
        requests.append((prompt, Request(prompt, engine.settings(max_new_tokens=int(rng.integers(1, 12))))))
        engine.add(requests[-1][1])
        if rng.random() < 0.1:
            engine.cancel(requests[int(rng.integers(len(requests)))][1].id)
        for _ in range(int(rng.integers(4))):
            engine.step()
    while engine.busy:
        engine.step()
    expected = {
        tuple(prompt): answer
        for prompt, answer in zip([p for p, _ in requests], tokens(cold, *(p for p, _ in requests)), strict=True)
    }
    for prompt, request in requests:
        assert [token.id for token in request.tokens] == expected[tuple(prompt)][: len(request.tokens)]
        assert request.finish_reason in ("length", "cancelled")
    assert engine.prefixes.hits > 0
