"""Speculative decoding does not change answers, whatever is drafted, and a rejected token leaves no trace."""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import MistralConfig

from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.engine.engine import Completion, Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.engine.speculation import LONGEST, SHORTEST, follow
from kvexport.errors import UsageError
from kvexport.export.build import build
from tests.support.models import SIZES, make_recipe, random_ids, save_checkpoint
from tests.support.on_device import onto_device
from tests.support.schedules import Alone, Schedule
from tests.support.speculation import SETTINGS, generated, prompts, recipe_of
from tests.support.tensorrt_artifacts import engines as tensorrt_engines

ROUNDING = 1e-4  # tolerance of logits: a call with more rows adds them in another order


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe_of(tiny_checkpoint), tmp_path_factory.mktemp("speculating") / "artifact")


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Engine:
    return load(artifact)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine whose layers see 24 tokens, and whose cache drops earlier ones in merges."""
    folder = tmp_path_factory.mktemp("windowed")
    save_checkpoint(folder / "checkpoint", MistralConfig(**SIZES, sliding_window=24))
    return load(build(recipe_of(folder / "checkpoint", merge_every=4), folder / "artifact"))


class Guessing:
    """A drafter that drafts a part of the answer, of random length, with random mistakes."""

    def __init__(self, answers: list[Completion], vocabulary: int, seed: int) -> None:
        self.answers, self.vocabulary = answers, vocabulary
        self.rng = np.random.default_rng(seed)

    def __call__(self, requests: Sequence[Request], lanes: Lanes) -> list[list[int]]:
        return [self.guess(request) for request in requests]

    def guess(self, request: Request) -> list[int]:
        start = len(request.tokens)
        guess = self.answers[request.sequence].token_ids[start : start + self.rng.integers(0, 7)][:-1]
        return [int(self.rng.integers(self.vocabulary)) if self.rng.random() < 0.3 else token for token in guess]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_answers_are_those_without_drafts(engine: Engine, settings: dict[str, Any]) -> None:
    for seed in range(6):
        batch, generation = prompts(seed, 64), {"seed": seed, "logprobs": 2, **settings}
        expected = generated(engine, batch, None, **generation)
        plain = [Completion(0, [token.id for token in answer]) for answer in expected]
        actual = generated(engine, batch, Guessing(plain, 64, seed), **generation)
        for one, other in zip(actual, expected, strict=True):
            assert [token[:4] for token in one] == [token[:4] for token in other]  # ids, text, reason to finish
            for here, there in zip(one, other, strict=True):
                assert here.logprob == pytest.approx(there.logprob, abs=ROUNDING)


def test_every_number_of_drafted_tokens_is_accepted_at_times(engine: Engine) -> None:
    batch = prompts(0, 64)
    plain = engine.generate(batch, max_new_tokens=200)
    guess, lengths = Guessing(plain, 64, 0), [list[int]() for _ in batch]

    def noted(requests: Sequence[Request], lanes: Lanes) -> list[list[int]]:
        for request in requests:
            lengths[request.sequence].append(len(request.tokens))
        return guess(requests, lanes)

    answers = generated(engine, batch, noted, max_new_tokens=200)
    assert [[token.id for token in answer] for answer in answers] == [answer.token_ids for answer in plain]
    timing = engine.timing
    assert timing.generated_tokens == 600 and timing.steps < 150
    assert timing.decoded_tokens == 600 - len(plain), "prompts give the first tokens"
    assert 0 < timing.accepted_tokens < timing.drafted_tokens
    assert {b - a for each in lengths for a, b in itertools.pairwise(each)} == {1, 2, 3, 4, 5, 6}


def test_a_sliding_window_drops_entries_only_after_verification(windowed: Engine) -> None:
    batch = prompts(1, windowed.vocabulary)
    expected = generated(windowed, batch, None, max_new_tokens=120)
    plain = [Completion(0, [token.id for token in answer]) for answer in expected]
    for seed in range(3):
        actual = generated(windowed, batch, Guessing(plain, windowed.vocabulary, seed), max_new_tokens=120)
        assert [[token.id for token in answer] for answer in actual] == [answer.token_ids for answer in plain]
    assert windowed._pool.lanes.merges > 30


def given(lanes: Lanes, ids: NDArray[np.int64], counts: list[int]) -> None:
    start = 0
    for count in counts:
        lanes.draft([ids[start : start + count]], first=0)
        lanes.settle(0, 0)
        start += count


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_rolled_back_tokens_leave_no_trace(
    engine: Engine, windowed: Engine, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for seed, each in enumerate([engine, windowed]):
        model: Any = each.model
        if device:
            monkeypatch.setattr(model, "zeros", partial(DeviceArray, "cpu"))
        ids, wrong = random_ids(seed, 150, 150, vocabulary=64)
        kept, straight = each.lanes(1), each.lanes(1)
        start, counts = 0, [int(n) for n in rng.integers(1, 8, 20)]
        for count in counts:
            rejected = int(rng.integers(0, 5))
            part = np.concatenate([ids[start : start + count], wrong[start : start + rejected]])
            kept.draft([part], first=0)
            kept.settle(0, rejected)
            start += count
        given(straight, ids, counts)
        one, other = kept.save(0), straight.save(0)
        assert one.counters == other.counters
        for name, array in one.state.items():
            # A call with other rows adds in another order. Votes and positions are bit-identical.
            exact = name.endswith(("votes", "position"))
            np.testing.assert_allclose(array, other.state[name], rtol=0, atol=0 if exact else ROUNDING)
        assert len(one.state["past_key_values.0.votes"]) // 2 == min(start, one.counters.held[0] + one.counters.added)


def test_a_rollback_restores_the_state_bit_by_bit(engine: Engine) -> None:
    ids, wrong = random_ids(5, 40, 6, vocabulary=64)
    lanes, straight = engine.lanes(2), engine.lanes(2)
    for each in (lanes, straight):
        each.prefill([ids, ids[:10]])
    lanes.draft([wrong, wrong[:3]], first=0)
    lanes.settle(0, 6)
    lanes.settle(1, 3)
    for lane in range(2):
        one, other = lanes.save(lane), straight.save(lane)
        assert one.counters == other.counters
        for name, array in one.state.items():
            np.testing.assert_array_equal(array, other.state[name])
    # The contents of empty slots do not change later results either.
    after = [each.append([ids[:1], ids[1:2]]).copy() for each in (lanes, straight)]
    np.testing.assert_array_equal(*after)


def test_rows_of_one_call_are_those_of_single_calls_but_for_rounding(engine: Engine) -> None:
    """Greedy answers differ only where two logits are nearly equal."""
    (ids,) = random_ids(8, 300, vocabulary=64)
    single, several = engine.lanes(1), engine.lanes(1)
    for each in (single, several):
        each.prefill([ids[:60]])
    start, largest = 60, 0.0
    while start + 8 < 300:
        count = start % 8 + 1
        rows = several.draft([ids[start : start + count]], first=0)[0].copy()
        several.settle(0, 0)
        ones = np.concatenate([single.append([ids[i : i + 1]])[0].copy() for i in range(start, start + count)])
        largest = max(largest, float(np.abs(rows - ones).max()))
        start += count
    assert 0 <= largest < ROUNDING


def test_speculating_schedules_answer_as_solo_runs_without_drafts(artifact: Path, tmp_path: Path) -> None:
    speculating, plain, other = (load(artifact) for _ in range(3))
    plain.drafter = other.drafter = None
    for seed in range(4):
        Schedule([speculating, plain], Alone(other), tmp_path / str(seed), 300 + seed).run(15)


def test_schedules_that_speculate_on_a_device(artifact: Path, tmp_path: Path) -> None:
    speculating, plain, other = (load(artifact) for _ in range(3))
    plain.drafter = other.drafter = None
    for engine in (speculating, plain):
        onto_device(engine, graphs=True)
    Schedule([speculating, plain], Alone(other), tmp_path / "sessions", 310).run(15)


def test_speculation_on_engines_of_tensorrt(artifact: Path, tmp_path: Path, plugins: Path) -> None:
    engine, plain = load(tensorrt_engines(artifact, tmp_path / "engines")), load(artifact)
    plain.drafter = None
    batch = [ids * 2 for ids in prompts(3, 64)]
    actual, expected = (each.generate(batch, max_new_tokens=40, do_sample=False) for each in (engine, plain))
    assert [answer.token_ids for answer in actual] == [answer.token_ids for answer in expected]
    assert 0 < engine.timing.accepted_tokens < engine.timing.drafted_tokens


def looked_up(ids: list[int], count: int) -> list[int]:
    for n in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[len(ids) - n :]:
                after = ids[end:]
                return (after * count)[:count]
    return []


def test_ngrams_are_followed_from_their_latest_earlier_place() -> None:
    assert follow(np.array([1, 2, 3, 9, 1, 2, 4, 1, 2]), 2) == [4, 1]
    assert follow(np.array([5, 1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]), 3) == [7, 9, 2]  # the longer n-gram
    assert follow(np.array([6, 6, 6, 6]), 3) == [6, 6, 6]
    assert follow(np.array([1, 2, 1, 2, 1, 2]), 5) == [1, 2, 1, 2, 1]
    assert follow(np.array([1, 2, 3]), 4) == follow(np.array([1]), 4) == []
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, 4, rng.integers(1, 30)).tolist()
        count = int(rng.integers(1, 6))
        assert follow(np.array(ids), count) == looked_up(ids, count)


def test_drafts_stay_within_the_answer_and_the_artifact(engine: Engine) -> None:
    drafter = load(engine.path).drafter
    assert drafter is not None
    seen: list[tuple[int, int]] = []

    def noted(requests: Sequence[Request], lanes: Lanes) -> list[list[int]]:
        drafts = drafter(requests, lanes)
        seen.append((len(requests[0].seen), len(drafts[0])))
        return drafts

    answer = generated(engine, [[5, 6] * 230], noted, max_new_tokens=500, do_sample=False)[0]
    assert len(answer) == 512 - 460 and answer[-1].finish_reason == "length"
    assert max(length + count for length, count in seen) < 512 and max(count for _, count in seen) == 5


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        ({"method": "keepkv", "budget": 64}, "keepkv may have merged them into layer 0, which has 64 slots"),
        ({"method": "h2o", "budget": 1.0, "allocation": {"kind": "pyramid"}}, "h2o may have merged them into layer 1"),
    ],
)
def test_a_cache_that_merges_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, cache: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        build(recipe_of(tiny_checkpoint, **cache), tmp_path / "artifact")
    assert "cache.method=full" in caught.value.fix
    assert not (tmp_path / "artifact").exists()


def test_a_draft_longer_than_a_call_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"speculate\.tokens 16 and one more are verified in one call"):
        make_recipe(tiny_checkpoint, export={"prefill_chunk": 16}, speculate={"draft": "ngram", "tokens": 16})
