"""The length of validation sequences, their calls, and caches cut to the slots that they use."""

from dataclasses import replace

import numpy as np
import pytest

from kvexport.artifact.manifest import Limits
from kvexport.plan.cache import CachePlan, LayerCache
from kvexport.validate.slots import has_beyond, used_plan, with_slots
from kvexport.validate.tokens import default_batch, default_length, later_calls, schedule

LAYER = LayerCache(4, 4, 1, (100, 100), (132, 132), 4, (50, 50), 0, True, "float32")


def limits(merge_every: int) -> Limits:
    return Limits(max_length=8192, max_batch=1, prefill_chunk=100, merge_every=merge_every)


def plan_of(*capacities: int) -> CachePlan:
    return CachePlan(tuple(replace(LAYER, capacity=(c, c)) for c in capacities))


@pytest.mark.parametrize(
    ("capacities", "longest"), [((132, 132), 132), ((100, 130, 180), 180), ((50, 50, 50, 50, 500), 280)]
)
def test_the_longest_sequence_is_past_the_caches_of_up_to_twice_the_mean(
    capacities: tuple[int, ...], longest: int
) -> None:
    assert default_length(plan_of(*capacities), limits(8), 20) == longest + 200 + 20


@pytest.mark.parametrize(
    ("parameters", "slots", "count"), [(10**8, 132, 3), (1_540_000_000, 132, 1), (10**8, 2_000_000, 1)]
)
def test_large_models_and_large_caches_are_compared_on_fewer_sequences(parameters: int, slots: int, count: int) -> None:
    assert default_batch(plan_of(slots), replace(limits(8), max_batch=8), parameters) == count


def test_tokens_between_two_merges_of_a_compressed_prompt_come_in_few_calls() -> None:
    assert later_calls(limits(32), "end", 10**8) == [1] * 68
    assert later_calls(limits(32), "end", 1_540_000_000) == [1] * 36
    assert later_calls(limits(256), "chunks", 10**8) == [1] * 160
    calls = later_calls(limits(256), "end", 10**8)
    assert sum(calls) == 2 * 256 + 4 and len(calls) < 30 and max(calls) <= 100
    tokens = [np.arange(600), np.arange(580)]
    parts = [(call, prefill) for call, prefill in schedule(tokens, 100, calls)]
    assert [t.tolist() for t in map(np.concatenate, zip(*(call for call, _ in parts), strict=True))] == [
        t.tolist() for t in tokens
    ]
    # The call before a later prompt decodes, so the first prompt is known to have ended.
    first = next(i for i, (_, prefill) in enumerate(parts) if not prefill)
    assert all(prefill for _, prefill in parts[:first]) and any(prefill for _, prefill in parts[first:])


def test_slots_are_cut_and_added_and_numbers_in_cut_slots_are_noticed() -> None:
    plan = plan_of(132)
    used = used_plan(plan, 40)
    assert used.caches[0].capacity == (64, 64) and used_plan(plan, 1000) == plan
    rng = np.random.default_rng(0)
    state = {
        f"present.0.{name}": rng.random(shape).astype(np.float32) for name, shape in used.caches[0].shapes(3).items()
    }
    wide = with_slots(used, plan, state | {"logits": np.ones(5)})
    assert {name: x.shape for name, x in wide.items() if name != "logits"} == {
        f"present.0.{name}": shape for name, shape in plan.caches[0].shapes(3).items()
    }
    assert not has_beyond(plan, used, wide)
    for name, x in with_slots(plan, used, wide).items():
        np.testing.assert_array_equal(x, state.get(name, np.ones(5)))
    wide["present.0.score"][2, 0, 132 + 64] = 1e-9
    assert has_beyond(plan, used, wide)
    apart = CachePlan((replace(LAYER, capacity=(132, 164)),))
    assert used_plan(apart, 40) == apart, "the graphs contain capacities that differ"
