"""Calls of some lanes of a state, on every backend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvexport
from tests.conformance.layout import of_heads
from tests.support.on_device import onto_device
from tests.support.tensorrt_artifacts import engines

LANES = 4


@pytest.fixture(params=["host", "device", "device with graphs", "plugins", "functions"])
def engine(request: pytest.FixtureRequest, tiny_artifact: Path, tmp_path: Path) -> Any:
    """An engine of the tiny model on one of several backends."""
    if request.param in ("plugins", "functions"):
        request.getfixturevalue("gpu" if request.param == "functions" else "plugins")
        return kvexport.load(engines(tiny_artifact, tmp_path / "engines"))
    engine = kvexport.load(tiny_artifact)
    if request.param != "host":
        model: Any = engine.model
        model.device = "a device"  # a device on which the state is, too
        onto_device(engine, graphs="graphs" in request.param)
    return engine


def lane_bytes(state: Any, lane: int) -> dict[str, bytes]:
    return {name: array[lane].tobytes() for name, array in state.get_state().items()}


def by_head(name: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor of one lane as [KV heads, slots, ...]; a score as [KV heads, K, slots]."""
    return of_heads(name.rpartition(".")[2], array[None], 2)[0]


def used_values(state: Any, lane: int) -> dict[str, Any]:
    """Return every state tensor of a lane, with zeros in slots without votes, which a device need not clear."""
    tensors = {name: by_head(name, array[lane]) for name, array in state.get_state().items()}
    for name, array in tensors.items():
        used = tensors[name.rpartition(".")[0] + ".votes"] > 0  # [KV heads, slots]
        kind = name.rpartition(".")[2]
        used = used[..., None] if kind in ("key", "value") else used[:, None] if kind == "score" else used
        tensors[name] = np.where(used, array, 0)
    return tensors


def test_calls_of_some_lanes_are_those_of_each_alone(engine: Any) -> None:
    rng = np.random.default_rng(0)
    state = engine.new_state(LANES)
    alone = [engine.new_state(1) for _ in range(LANES)]
    for call in range(40):
        first = int(rng.integers(LANES))
        count = int(rng.integers(1, LANES - first + 1))
        width = (1, 1, 5, 16)[rng.integers(4)]
        lengths = rng.integers(0, width + 1, (count, 1))
        ids = rng.integers(0, engine.vocabulary, (count, width))
        others = {lane: lane_bytes(state, lane) for lane in range(LANES) if not first <= lane < first + count}
        logits = np.array(state.decode(ids, lengths, first))
        for i, lane in enumerate(range(first, first + count)):
            if lengths[i, 0]:
                expected = alone[lane].decode(ids[i : i + 1], lengths[i : i + 1])
                np.testing.assert_allclose(logits[i], expected[0], rtol=0, atol=2e-5, err_msg=f"call {call}")
        for lane in range(first, first + count):
            alone[lane].merge(0, 1)
        state.merge(first, first + count)
        assert {lane: lane_bytes(state, lane) for lane in others} == others
        if call % 7 == 6:
            state.clear(first, first + count, poisoned=call % 2 == 0)
            for lane in range(first, first + count):
                alone[lane].clear(0, 1)
            assert {lane: lane_bytes(state, lane) for lane in others} == others
    for lane in range(LANES):
        actual, reference = used_values(state, lane), used_values(alone[lane], 0)
        for name, array in reference.items():
            np.testing.assert_allclose(actual[name], array, rtol=0, atol=2e-5, err_msg=name)


def test_a_poisoned_lane_is_cleared_of_every_value(engine: Any) -> None:
    state = engine.new_state(3)
    poison = {
        name: np.full_like(array, np.nan if array.dtype.kind == "f" else 7) for name, array in state.get_state().items()
    }
    state.set_state(poison, np.full((3, 1), 5))
    others = lane_bytes(state, 2)
    state.clear(0, 2, poisoned=True)
    assert not any(any(data) for lane in range(2) for data in lane_bytes(state, lane).values())
    assert lane_bytes(state, 2) == others
    ids, lengths = np.full((1, 3), 9), np.array([[3]])
    expected = engine.new_state(1).decode(ids, lengths)
    np.testing.assert_allclose(state.decode(ids, lengths, 1), expected, rtol=0, atol=2e-5)


def test_the_state_of_fewer_lanes_becomes_that_of_the_first(engine: Any) -> None:
    small, large = engine.new_state(2), engine.new_state(3)
    ids, lengths = np.arange(2 * 9).reshape(2, 9), np.array([[9], [4]])
    small.decode(ids, lengths)
    large.set_state(small.get_state(), lengths)
    assert [lane_bytes(large, lane) for lane in range(2)] == [lane_bytes(small, lane) for lane in range(2)]
    assert not any(any(data) for data in lane_bytes(large, 2).values())
    step, one = np.array([[3], [4]]), np.ones((2, 1), np.int64)
    np.testing.assert_allclose(np.array(large.decode(step, one)), np.array(small.decode(step, one)), rtol=0, atol=2e-5)


@pytest.mark.parametrize("engine", ["device", "device with graphs", "plugins", "functions"], indirect=True)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_largest_logits_belong_to_the_requested_lanes(engine: Any, first: int) -> None:
    state, other = engine.new_state(3), engine.new_state(3)
    ids, one = np.array([[7], [8], [9]])[first:], np.ones((3 - first, 1), np.int64)
    rows, expected = state.step(ids, one, first), np.array(other.decode(ids, one, first))
    for i in range(3 - first):
        np.testing.assert_allclose(rows.row(i), expected[i, 0], rtol=0, atol=1e-6)
        top = rows.top_logits(i)
        np.testing.assert_allclose(top.values, -np.sort(-expected[i, 0])[: top.ids.size], rtol=0, atol=1e-6)


def test_a_lane_continues_unchanged_after_it_is_read_written_and_copied(engine: Any) -> None:
    rng = np.random.default_rng(3)
    state, other = engine.new_state(LANES), engine.new_state(2)
    ids, lengths = rng.integers(0, engine.vocabulary, (LANES, 16)), np.array([[16], [3], [0], [11]])
    for _ in range(3):  # beyond the budget
        state.decode(ids, lengths)
        state.merge(0, LANES)
    before = [lane_bytes(state, lane) for lane in range(LANES)]
    taken = state.read(0)
    for name, array in used_values(state, 0).items():
        held = by_head(name, taken[name])
        slots = [slice(n) for n in held.shape]
        assert np.array_equal(held, array[tuple(slots)]) and not np.delete(array, slots[1], 1).any()
    assert [lane_bytes(state, lane) for lane in range(LANES)] == before, "reading changes nothing"
    other.write(1, taken, 48)
    other.write(0, state.read(1), 9)
    state.copy(0, 2)
    assert lane_bytes(state, 2) == before[0]
    assert [lane_bytes(state, lane) for lane in (0, 1, 3)] == [before[0], before[1], before[3]]
    one, step = np.ones((1, 1), np.int64), np.array([[5]])
    expected = np.array(state.decode(step, one, 0))
    np.testing.assert_allclose(np.array(state.decode(step, one, 2)), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.array(other.decode(step, one, 1)), expected, rtol=0, atol=1e-6)
    expected = np.array(state.decode(step, one, 1))
    np.testing.assert_allclose(np.array(other.decode(step, one, 0)), expected, rtol=0, atol=1e-6)


def test_single_tensors_of_a_lane_are_read_and_written(engine: Any) -> None:
    state = engine.new_state(3)
    state.decode(np.full((3, 9), 7), np.array([[9], [4], [9]]))
    before = [lane_bytes(state, lane) for lane in range(3)]
    name = "past_key_values.1.score"
    taken = state.read(1, [name])
    assert set(taken) == {name} and taken[name].shape[-1] == 2 * 4, "the used slots of both KV heads"
    state.write(1, {name: taken[name] + 1})
    assert [lane_bytes(state, lane) for lane in (0, 2)] == [before[0], before[2]]
    after = lane_bytes(state, 1)
    assert {key for key, data in after.items() if data != before[1][key]} == {name}
    assert np.array_equal(state.read(1, [name])[name], taken[name] + 1)


def test_writing_a_lane_replaces_all_of_its_state(engine: Any) -> None:
    state = engine.new_state(2)
    state.decode(np.full((2, 9), 7), np.array([[9], [0]]))
    state.write(0, state.read(1), 0)
    assert not any(any(data) for data in lane_bytes(state, 0).values())
    assert all(0 in array.shape for array in state.read(0).values())
