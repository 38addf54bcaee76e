"""Nodes whose KV heads differ in capacity, budget and recent slots: malformed lists, and tensors that do not fit."""

from typing import Any

import numpy as np
import pytest

from kvexport.backends.onnxruntime.operators import VARIABLE, library
from kvexport.methods import all_methods
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.schema.state import STATE_NAMES as STATE
from plugins.building import make
from tests.conformance.cuda_library import CudaOnHost, bfloat16
from tests.conformance.layout import joined
from tests.support.one_node import (
    DV,
    HQ,
    KEEPKV,
    MERGE_CACHE,
    VOTE_ATTENTION,
    D,
    T,
    merge_shapes,
    model,
    session,
    vote_attention_inputs,
    vote_attention_shapes,
)

pytestmark = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)
CAPACITY = [16, 9]
SLOTS = sum(CAPACITY)
BUDGET, RECENT = [8, 6], [2, 1]
LISTS = {"capacity": CAPACITY, "budget": BUDGET, "recent": RECENT}


def attention(changes: dict[str, Any] | None = None, shapes: dict[str, Any] | None = None) -> Any:
    attributes = VOTE_ATTENTION | {"capacity": CAPACITY} | (changes or {})
    return session(model("VoteAttention", attributes, vote_attention_shapes() | (shapes or {})))


def merging(changes: dict[str, Any] | None = None, shapes: dict[str, Any] | None = None, **options: Any) -> Any:
    attributes = MERGE_CACHE | LISTS | (changes or {})
    return session(model("MergeCache", attributes, merge_shapes() | (shapes or {}), **options))


def head_state(rng: np.random.Generator, used: int, capacity: int) -> dict[str, np.ndarray]:
    """Return the state tensors [2, 1, capacity, ...] of one KV head whose first `used` slots are occupied."""
    votes = np.where(np.arange(capacity) < used, rng.uniform(0.5, 3, (2, 1, capacity)), 0.0)
    return {
        "key": rng.normal(size=(2, 1, capacity, D)).astype(np.float32),
        "value": rng.normal(size=(2, 1, capacity, DV)).astype(np.float32),
        "votes": votes.astype(np.float32),
        "score": rng.uniform(0.1, 3, (2, 1, 1, capacity)).astype(np.float32),
        "position": np.tile(np.arange(capacity, dtype=np.int32), (2, 1, 1)),
    }


def layer_state(used: tuple[int, int] = (5, 4), prefix: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads = [head_state(rng, n, capacity) for n, capacity in zip(used, CAPACITY, strict=True)]
    return {prefix + name: x for name, x in joined(heads)[0].items()}


def feed(tokens: int = T, **changes: np.ndarray) -> dict[str, np.ndarray]:
    inputs = vote_attention_inputs(np.random.default_rng(1), 2, tokens, 5)
    return inputs | layer_state(prefix="past_") | changes


def test_every_head_keeps_its_budget_in_its_own_slots() -> None:
    outputs = attention().run(None, feed())
    assert outputs[0].shape == (2, HQ, T, DV)
    votes = outputs[3]
    assert [(x > 0).sum() for x in np.split(votes[0], [CAPACITY[0]])] == [5 + T, 4 + T]
    merged = merging().run(["present_votes"], layer_state(used=(16, 9)))[0]
    assert [(x > 0).sum() for x in np.split(merged[1], [CAPACITY[0]])] == BUDGET


@pytest.mark.parametrize(
    ("changes", "shapes", "problem"),
    [
        ({"capacity": [16, 0]}, {}, "capacity is 0, and has to be at least 1"),
        ({"capacity": 16}, {}, "capacity holds no integers"),
        ({"capacity": [16, 9, 7]}, {"past_key": ["B", SLOTS, D]}, "capacity has 3 numbers, but there are 2 KV heads"),
        ({"capacity": [16, 8]}, {"past_key": ["B", SLOTS, D]}, "the sum of capacity is 24, but there are 25 slots"),
    ],
    ids=["no slots", "type", "heads", "sum"],
)
@pytest.mark.parametrize("op", [attention, merging])
def test_a_capacity_that_cannot_be(op: Any, changes: dict[str, Any], shapes: dict[str, Any], problem: str) -> None:
    if op is merging:
        shapes = {name.removeprefix("past_"): shape for name, shape in shapes.items()}
        problem = problem.replace("but there are 2 KV heads", "and budget 2")
    with pytest.raises(Exception, match=f"kvexport: (VoteAttention|MergeCache): {problem}"):
        op(changes, shapes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"budget": [8]}, "budget and recent have a number for each KV head, not 1 and 2"),
        ({"recent": [2, 1, 1]}, "budget and recent have a number for each KV head, not 2 and 3"),
        ({"budget": [8], "recent": [2]}, "capacity has 2 numbers, and budget 1"),
        ({"budget": [8, 0]}, "budget is 0, and has to be at least 1"),
        ({"recent": [2, -1]}, "recent is -1, and has to be at least 0"),
        ({"budget": 8}, "budget and recent have a number for each KV head, not 0 and 2"),
    ],
)
def test_lists_of_another_number_of_heads_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match=f"kvexport: MergeCache: {problem}"):
        merging(changes)


def test_a_capacity_that_is_omitted_is_the_same_for_every_head() -> None:
    inputs = {name: x[:, :, :24] if "score" in name else x[:, :24] for name, x in layer_state().items()}
    omitted = {name: x for name, x in (KEEPKV | LISTS).items() if name != "capacity"}
    one = session(model("MergeCache", omitted, merge_shapes()))
    listed = merging({**KEEPKV, "capacity": [12, 12]})
    for name, x, y in zip(STATE, one.run(None, inputs), listed.run(None, inputs), strict=True):
        assert x.tobytes() == y.tobytes(), name
    with pytest.raises(Exception, match="25 slots are not the same number for each of 2 KV heads"):
        one.run(None, layer_state())


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (feed(tokens=10), "the call brings more tokens than a KV head has slots"),
        (feed(past_votes=np.zeros((2, SLOTS - 1), np.float32)), r"votes is \[2, 24\], not \[2, 25\]"),
        (feed(past_key=np.zeros((2, SLOTS - 1, D), np.float32)), "the sum of capacity is 25, but there are 24 slots"),
        (feed(query=np.zeros((2, 3, T, D), np.float32)), "3 query heads are not a multiple of 2 KV heads"),
    ],
    ids=["tokens", "slots of votes", "slots of keys", "query heads"],
)
def test_tensors_that_do_not_fit_are_errors_of_the_run(inputs: dict[str, np.ndarray], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        attention(shapes={"query": ["B", None, "T", D]}).run(None, inputs)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"score": np.zeros((2, 1, SLOTS + 1), np.float32)}, r"score is \[2, 1, 26\], not \[2, 1, 25\]"),
        ({"position": np.zeros((2, SLOTS - 1), np.int32)}, r"position is \[2, 24\], not \[2, 25\]"),
        ({"value": np.zeros((1, SLOTS, DV), np.float32)}, r"value is \[1, 25, 12\], not \[2, 25, 12\]"),
    ],
    ids=["slots of scores", "slots of positions", "sequences"],
)
def test_states_that_do_not_fit_are_errors_of_a_merge(change: dict[str, np.ndarray], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        merging(shapes={name: [None] * x.ndim for name, x in change.items()}).run(None, layer_state() | change)


ON_HOST = make.host_output("onnxruntime-cuda-host")
needs_binding = pytest.mark.skipif(
    not make.is_current("onnxruntime-cuda-host"),
    reason="not reached: the binding is not compiled for the host (make cuda-host)",
)


@needs_binding
def test_a_merge_of_bfloat16_on_cuda_has_the_bits_of_the_kernels_called_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, str(ON_HOST))
    state = layer_state(used=(16, 9))
    # Rows of the values' size, 12, are not whole vectors of two-byte numbers.
    state |= {"key": bfloat16(state["key"]), "value": bfloat16(np.concatenate([state["value"]] * 2, -1))}
    attributes = [MergeCacheAttributes(all_methods()["h2o"](), b, 2, 1) for b in BUDGET]
    expected = CudaOnHost().caller.layer_merge_cache(state, attributes, CAPACITY)
    one = merging({"sinks": 1, "recent": [2, 2]}, {"value": ["B", "S", 2 * DV]}, bfloat=True)
    binding, actual = one.io_binding(), {f"present_{name}": np.zeros_like(x) for name, x in state.items()}
    for bind, arrays in ((binding.bind_input, state), (binding.bind_output, actual)):
        for name, x in arrays.items():
            kind = 16 if x.dtype == np.uint16 else x.dtype.type  # TensorProto.BFLOAT16
            bind(name, "cpu", 0, kind, x.shape, x.ctypes.data)
    one.run_with_iobinding(binding)
    assert all(x.tobytes() == expected[name].tobytes() for name, x in actual.items())
    assert (actual["present_votes"] > 0).sum() == 2 * sum(BUDGET)
