"""Merges that differ from PyTorch's are right if rounding decides a tie, and wrong otherwise."""

import numpy as np
import pytest
import torch

from kvexport.export.graph.graphs import merge_attributes
from kvexport.methods import all_methods
from kvexport.ops.merge_cache import merge_cache
from kvexport.plan.cache import CachePlan, LayerCache
from kvexport.schema.state import STATE
from kvexport.validate.compare import MERGES
from kvexport.validate.float64 import in_float64
from kvexport.validate.merges import _among, compare_merge
from tests.conformance.layout import flattened

SLOTS, BUDGET, SIZE = 24, 20, 16
KEEPKV = all_methods()["keepkv"]()
LAYER = LayerCache(SIZE, SIZE, 1, (BUDGET,), (SLOTS,), 2, (4,), 0, True, "float32")
PLAN = CachePlan((LAYER,))


def cache(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(1, 1, SLOTS, SIZE)).astype(np.float32),
        rng.normal(size=(1, 1, SLOTS, SIZE)).astype(np.float32),
        np.ones((1, 1, SLOTS), np.float32),
        rng.normal(size=(1, 1, 1, SLOTS)).astype(np.float32),
        np.arange(SLOTS, dtype=np.int32).reshape(1, 1, SLOTS),
    ]


def tied(seed: int, apart: float) -> list[np.ndarray]:
    """Return a cache whose slot of the lowest score has two targets with cosines that differ by about `apart`."""
    state = cache(seed)
    key, score = state[0][0, 0], state[3][0, 0, 0]
    score[:] = np.linspace(1.0, 2.0, SLOTS)
    score[5] = -9.0
    other = key[9] - key[9] @ key[5] / (key[5] @ key[5]) * key[5]
    other *= np.linalg.norm(key[5]) / np.linalg.norm(other)
    key[9] = key[5] + 0.4 * other
    key[12] = key[5] - (0.4 + apart) * other
    return state


def merged(state: list[np.ndarray]) -> list[np.ndarray]:
    out = merge_cache(*map(torch.from_numpy, state), attributes=merge_attributes(LAYER, KEEPKV)[0])
    return [x.numpy() for x in out]


def merged_where_it_is(state: list[np.ndarray], farther: float) -> list[np.ndarray]:
    """Return the merge of a cache in which slot 9 is `farther` times as far from slot 5."""
    other = [x.copy() for x in state]
    key = other[0][0, 0]
    key[9] = key[5] + (key[9] - key[5]) * np.float32(farther)
    return merged(other)


def flips(state: list[np.ndarray], engine: list[np.ndarray], reference: list[np.ndarray]) -> list:
    past, engine_state, reference_state = (
        {name(tensor, 0): flattened(tensor.name, x) for tensor, x in zip(STATE, arrays, strict=True)}
        for name, arrays in (
            (type(STATE[0]).past, state),
            (type(STATE[0]).present, engine),
            (type(STATE[0]).present, reference),
        )
    )
    return list(compare_merge(PLAN, KEEPKV, past, engine_state, reference_state, MERGES["float32"], 0))


def test_pytorchs_own_merges_have_no_difference() -> None:
    state = cache(0)
    assert flips(state, merged(state), merged(state)) == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_choices_of_a_tie_are_right(seed: int) -> None:
    state = tied(seed, 0.0)
    into_9, into_12 = (merged_where_it_is(state, farther) for farther in (1 - 5e-6, 1 + 5e-6))
    assert not np.allclose(into_9[1], into_12[1])  # the values show that there is a choice
    differing = [flips(state, engine, merged(state)) for engine in (into_9, into_12)]
    assert sorted(map(len, differing)) == [0, 1]
    (flip,) = differing[0] or differing[1]
    assert flip.right
    assert flip.roundings in (0, 1, 4, 16)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_farther_target_is_wrong_and_is_named(seed: int) -> None:
    state = tied(seed, 0.001)  # slot 9 is nearer by far more than rounding
    wrong = merged_where_it_is(state, 1.01)
    differing = flips(state, wrong, merged(state))
    assert len(differing) == 1
    assert not differing[0].right
    assert (differing[0].layer, differing[0].lane, differing[0].head) == (0, 0, 0)
    assert differing[0].difference > differing[0].allowed


def test_a_wrong_vote_is_no_tie() -> None:
    state = cache(4)
    wrong = merged(state)
    wrong[2] = wrong[2] * np.float32(1.001)
    (flip,) = flips(state, wrong, merged(state))
    assert flip.tensor == "votes"
    assert not flip.right


def test_float64_computes_in_float64_and_roundings_are_of_float32() -> None:
    x, y = torch.full((1, 3), 1.0), torch.tensor([[1e8], [1.0], [-1e8]])
    assert (x @ y).dtype == torch.float32
    with in_float64():
        exact = (x.float() @ y.float()).float()
        assert exact.dtype == torch.float64
        assert float(exact) == 1.0
    with in_float64(1.0, seed=1):
        assert 1e-3 < abs(float(x @ y) - 1.0) < 30.0
        assert float(torch.where(x > 0, x, 0.0).max()) == 1.0
    assert torch.get_default_dtype() == torch.float32


def drop(state: list[np.ndarray], slots: list[int]) -> dict[str, np.ndarray]:
    """Return a head without these slots, with all others moved up and their contents unchanged."""
    kept = [i for i in range(SLOTS) if i not in slots]
    key, value, votes, _, position = (x[0, 0] for x in state)
    return {
        "key": key[kept][None, None],
        "value": value[kept][None, None],
        "votes": votes[kept][None, None],
        "position": position[kept][None, None],
    }


def test_where_many_slots_cost_the_same_a_choice_may_be_any_of_them() -> None:
    state = cache(0)
    draws = [drop(state, slots) for slots in ([3, 5], [5, 7], [7, 9], [3, 9])]
    single = drop(state, [3, 11])
    assert _among(drop(state, [3, 7]), draws, single)
    assert _among(drop(state, [5, 11]), draws, single)  # one of the two, as between draws
    assert not _among(drop(state, [11, 12, 13, 14, 15]), draws, single)
    assert not _among(drop(state, [3, 7]), draws[:1] * 4, single)  # draws that all agree
    assert not _among(drop(state, [3, 7]), [*draws, draws[0]], single)  # two draws are equal


def test_a_choice_may_be_as_near_to_pytorchs_in_float32_as_draws_are_to_one_another() -> None:
    """PyTorch's merge in float32 drops slots that no draw drops, and the engine drops almost the same slots."""
    state = cache(0)
    draws = [drop(state, slots) for slots in ([3, 5], [5, 7], [7, 9], [3, 9])]
    single, engine = drop(state, [11, 12, 13, 14, 15]), drop(state, [11, 12, 13, 14, 16])
    assert _among(engine, draws, single)
    assert not _among(engine, draws, draws[0])
    assert not _among(drop(state, [16, 17, 18, 19, 20]), draws, single)


@pytest.mark.parametrize("name", ["key", "value", "votes"])
def test_a_choice_among_others_has_their_rows(name: str) -> None:
    state = cache(0)
    draws = [drop(state, slots) for slots in ([3, 5], [5, 7], [7, 9], [3, 9])]
    engine = drop(state, [3, 7])
    engine[name] = engine[name].copy()
    engine[name][0, 0, 10:14] *= 1.001
    assert _among(engine, draws, draws[0])  # as many rows as another choice may change
    engine[name][0, 0, 10:18] *= 1.001
    assert not _among(engine, draws, draws[0])
