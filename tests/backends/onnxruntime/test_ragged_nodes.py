"""Malformed nodes of RaggedVoteAttention and RaggedMergeCache, and tensors that do not fit a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from kvexport.ops.ragged import ragged_node_attributes
from onnx import TensorProto, helper

from kvexport.backends.onnxruntime.operators import VARIABLE, library
from kvexport.methods import all_methods
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.schema.operators import MERGE_CACHE, RAGGED, ragged
from kvexport.schema.operators import VOTE_ATTENTION as OPERATOR
from kvexport.schema.state import STATE_NAMES
from plugins.building import make
from tests.conformance import ragged as caches_of_heads
from tests.conformance.cuda_library import CudaOnHost, bfloat16
from tests.conformance.quantized import small
from tests.support.one_node import DV, HQ, VOTE_ATTENTION, D, session, state, type_of
from tests.support.one_node import MERGE_CACHE as MERGE

pytestmark = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)
OPERATORS = {"VoteAttention": OPERATOR, "MergeCache": MERGE_CACHE}
H, T, CAPACITIES = 2, 3, (16, 9)
SHAPES: dict[str, list[int | str | None]] = {
    "query": ["B", HQ, "T", D], "key": ["B", H, "T", D], "value": ["B", H, "T", DV], "position": ["B", "T"],
    "query_length": ["B", 1], "sink_logits": [HQ],
}  # fmt: skip
STATE_SHAPES: dict[str, list[int | str | None]] = {
    "key": ["B", 1, None, D], "value": ["B", 1, None, None], "votes": ["B", 1, None], "score": ["B", 1, 1, None],
    "position": ["B", 1, None],
}  # fmt: skip
RAGGED_MERGE = {**MERGE, "budget": [8, 6], "recent": [2, 1]}


def node(
    op: str,
    attributes: Mapping[str, Any],
    *,
    shapes: Mapping[str, Any] | None = None,
    types: Mapping[str, int] | None = None,
    left_out: int = 0,
) -> Any:
    """Return a session of a ragged node over two caches, without its last `left_out` state tensors."""
    operator = ragged(OPERATORS[op], H)
    inputs, outputs = (names[: len(names) - left_out] for names in (operator.input_names, operator.output_names))

    def info(name: str) -> Any:
        base, _, number = name.partition(".")
        tensor = base.removeprefix("past_").removeprefix("present_")
        shape = STATE_SHAPES[tensor] if number else SHAPES.get(name, [None] * 4)
        kind = type_of(op, name if not number else tensor, TensorProto.FLOAT)
        if number and tensor == "position":
            kind = TensorProto.INT32
        return helper.make_tensor_value_info(name, (types or {}).get(name, kind), (shapes or {}).get(name, shape))

    graph = helper.make_graph(
        [helper.make_node(RAGGED + op, inputs, outputs, domain="kvexport", **attributes)],
        "one_node",
        [info(name) for name in inputs],
        [info(name) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    return session(helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString())


def states(prefix: str, capacities: tuple[int, ...] = CAPACITIES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    caches = [{name: x[:, :1] for name, x in state(rng, 2, 4, capacity).items()} for capacity in capacities]
    return {f"{prefix}{name}.{h}": np.ascontiguousarray(x) for h, own in enumerate(caches) for name, x in own.items()}


def feed(tokens: int = T, **changes: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    sizes = {"query": (HQ, D), "key": (H, D), "value": (H, DV)}
    rows = {name: rng.normal(size=(2, heads, tokens, size)) for name, (heads, size) in sizes.items()}
    return {
        **{name: x.astype(np.float32) for name, x in rows.items()},
        "position": np.broadcast_to(4 + np.arange(tokens), (2, tokens)).astype(np.int64),
        "query_length": np.full((2, 1), tokens, np.int64),
        "sink_logits": np.zeros(HQ, np.float32),
        **states("past_"),
        **changes,
    }


def test_well_formed_nodes_run() -> None:
    outputs = node("VoteAttention", VOTE_ATTENTION).run(None, feed())
    assert outputs[0].shape == (2, HQ, T, DV)
    assert [x.shape[2] for x in outputs[1::5]] == list(CAPACITIES)
    merged = node("MergeCache", RAGGED_MERGE).run(None, states(""))
    assert [x.shape[2] for x in merged[::5]] == list(CAPACITIES)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"left_out": 1}, "a cache has 5 state tensors, and the node takes 9 and returns 9"),
        ({"types": {"past_votes.1": TensorProto.INT32}}, "state tensor 2 of cache 1 has another type"),
        ({"shapes": {"past_key.1": ["B", 2, None, D]}}, r"state tensor 0 of cache 1 is \[\?, 2, \?, 8\]"),
        ({"shapes": {"past_votes.0": ["B", 1]}}, r"state tensor 2 of cache 0 is \[\?, 1\]"),
    ],
    ids=["count", "type", "heads", "rank"],
)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_malformed_state_is_refused(op: str, change: dict[str, Any], problem: str) -> None:
    if op == "MergeCache":
        change = {
            key: {name.removeprefix("past_"): x for name, x in value.items()} if isinstance(value, dict) else value
            for key, value in change.items()
        }
    with pytest.raises(Exception, match=problem):
        node(op, VOTE_ATTENTION if op == "VoteAttention" else RAGGED_MERGE, **change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"budget": [8]}, "budget and recent have a number for each cache, not 1 and 2"),
        ({"recent": [2, 1, 1]}, "budget and recent have a number for each cache, not 2 and 3"),
        ({"budget": [8], "recent": [2]}, "budget has 1 numbers, but the node has 2 caches"),
        ({"budget": [8, 0]}, "budget is 0, and has to be at least 1"),
        ({"recent": [2, -1]}, "recent is -1, and has to be at least 0"),
        ({"budget": 8}, "budget and recent have a number for each cache, not 0 and 2"),
    ],
)
def test_budgets_of_another_number_of_caches_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        node("MergeCache", {**RAGGED_MERGE, **change})


def test_a_merge_without_a_policy_has_no_kernel() -> None:
    attributes = {name: x for name, x in RAGGED_MERGE.items() if name not in merge_of_policy()}
    with pytest.raises(Exception, match="the node carries no merge policy"):
        node("MergeCache", attributes)


def merge_of_policy() -> set[str]:
    """Return the names of the policy's attributes in a MergeCache node."""
    from kvexport.schema.policy import POLICY

    return {a.name for a in POLICY}


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (feed(tokens=10), "the call brings more tokens than the cache has slots"),
        (feed(**{"past_value.1": np.zeros((2, 1, 9, DV + 1), np.float32)}), r"of cache 1 do not fit"),
        (feed(**{"past_votes.1": np.zeros((2, 1, 8), np.float32)}), r"votes is \[2, 1, 8\], not \[2, 1, 9\]"),
    ],
    ids=["tokens", "sizes", "slots"],
)
def test_tensors_that_do_not_fit_are_errors_of_the_run(inputs: dict[str, np.ndarray], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        node("VoteAttention", VOTE_ATTENTION).run(None, inputs)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"value.1": np.zeros((2, 1, 9, DV + 1), np.float32)}, r"of cache 1 do not fit the node or its other caches"),
        ({"score.1": np.zeros((2, 1, 1, 8), np.float32)}, r"score is \[2, 1, 1, 8\], not \[2, 1, 1, 9\]"),
        ({"position.0": np.zeros((2, 1, 15), np.int32)}, r"position is \[2, 1, 15\], not \[2, 1, 16\]"),
        ({f"{name}.1": x[:1] for name, x in state(np.random.default_rng(0), 1, 4, 9).items()}, r"of cache 1"),
    ],
    ids=["sizes", "slots of scores", "slots of positions", "heads"],
)
def test_caches_that_do_not_fit_are_errors_of_a_merge(change: dict[str, np.ndarray], problem: str) -> None:
    feed = {name: np.ascontiguousarray(x) for name, x in (states("") | change).items()}
    with pytest.raises(Exception, match=problem):
        node("MergeCache", RAGGED_MERGE, shapes={name: [None] * x.ndim for name, x in change.items()}).run(None, feed)


BFLOAT16 = int(TensorProto.BFLOAT16)
ON_HOST = make.host_output("onnxruntime-cuda-host")
needs_binding = pytest.mark.skipif(
    not make.is_current("onnxruntime-cuda-host"),
    reason="not reached: the binding is not compiled for the host (make cuda-host)",
)


def bfloat_merge() -> tuple[Any, list[MergeCacheAttributes]]:
    """Return a session of a merge of two caches of bfloat16, and the attributes of each."""
    attributes = [MergeCacheAttributes(all_methods()["h2o"](), budget, 2, 1) for budget in (8, 6)]
    names = [f"{prefix}{x}.{h}" for prefix in ("", "present_") for x in ("key", "value") for h in range(H)]
    return node("MergeCache", ragged_node_attributes(attributes), types=dict.fromkeys(names, BFLOAT16)), attributes


@needs_binding
def test_a_merge_of_bfloat16_on_cuda_has_the_bits_of_the_kernels_called_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(Exception, match="state tensor 0 of cache 0 has another type"):
        bfloat_merge()  # on the CPU
    monkeypatch.setenv(VARIABLE, str(ON_HOST))
    one, attributes = bfloat_merge()
    heads: list[dict[str, np.ndarray]] = []
    for capacity in CAPACITIES:
        own = {name: x[:, :1] for name, x in state(np.random.default_rng(capacity), 2, capacity, capacity).items()}
        # Rows of the values' size, 12, are not whole vectors of two-byte numbers.
        own |= {"key": bfloat16(own["key"]), "value": bfloat16(np.concatenate([own["value"]] * 2, -1))}
        heads.append({name: np.ascontiguousarray(x) for name, x in own.items()})
    expected = CudaOnHost().caller.ragged_merge_cache(heads, attributes)
    binding, actual = one.io_binding(), [{name: np.zeros_like(x) for name, x in own.items()} for own in heads]
    for bind, arrays, prefix in ((binding.bind_input, heads, ""), (binding.bind_output, actual, "present_")):
        for h, own in enumerate(arrays):
            for name, x in own.items():
                kind = BFLOAT16 if x.dtype == np.uint16 else x.dtype.type
                bind(f"{prefix}{name}.{h}", "cpu", 0, kind, x.shape, x.ctypes.data)
    one.run_with_iobinding(binding)
    for own, right in zip(actual, expected, strict=True):
        assert all(own[name].tobytes() == right[f"present_{name}"].tobytes() for name in STATE_NAMES)
        assert (own["votes"] > 0).sum() in (2 * 8, 2 * 6)


@needs_binding
def test_a_merge_of_quantized_caches_has_no_kernel_on_cuda() -> None:
    attributes = [MergeCacheAttributes(all_methods()["h2o"](), budget, 2, 1) for budget in (8, 6)]
    heads = [
        {name: np.ascontiguousarray(x[:, :1]) for name, x in state(np.random.default_rng(0), 2, 4, capacity).items()}
        for capacity in CAPACITIES
    ]
    with pytest.raises(Exception, match="RaggedMergeCache: there is no kernel that merges a quantized cache"):
        caches_of_heads.merge_cache("onnxruntime-cuda-on-host", [small(x, "int8") for x in heads], attributes)


def test_query_heads_are_a_multiple_of_the_caches() -> None:
    query = np.zeros((2, 3, T, D), np.float32)
    one = node("VoteAttention", VOTE_ATTENTION, shapes={"query": ["B", None, "T", D], "output": [None] * 4})
    with pytest.raises(Exception, match="its heads are not a multiple of 2 caches"):
        one.run(None, feed(query=query))
