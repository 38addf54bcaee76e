"""Nodes that keep reference queries, or that fit slots to them."""

from typing import Any

import numpy as np
import pytest

from kvexport.backends.onnxruntime.operators import library
from kvexport.methods.attention_matching import AttentionMatching
from tests.support.one_node import (
    GRKV_5,
    KVSLIMMER,
    RING,
    RING_PREFIX,
    VOTE_ATTENTION,
    C,
    D,
    H,
    T,
    merge_of,
    merge_shapes,
    model,
    ring,
    ring_shapes,
    session,
    state,
    vote_attention_inputs,
    vote_attention_shapes,
)

pytestmark = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)
ROWS = 5
KEEPING = {**VOTE_ATTENTION, "reference_queries": ROWS}
MATCHING = merge_of(AttentionMatching(queries=ROWS))
SHAPES = {"VoteAttention": vote_attention_shapes(), "MergeCache": merge_shapes()}


def one_node(op: str, attributes: dict[str, Any], rows: Any = "W", half: bool = False, **more: Any) -> Any:
    return session(model(op, attributes, {**SHAPES[op], **ring_shapes(op, rows), **more}, half=half))


def feed_of(op: str, rng: np.random.Generator, half: bool = False) -> dict[str, Any]:
    inputs = vote_attention_inputs(rng, 2, T, 6, half=half) if op == "VoteAttention" else state(rng, 2, C, half=half)
    return inputs | ring(rng, op, 2, ROWS, C)


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("VoteAttention", {"reference_queries": 0}, "reference_queries is 0, and has to be at least 1"),
        ("VoteAttention", {"reference_queries": 1.5}, "the attribute reference_queries should be an integer"),
        (
            "VoteAttention",
            {"reference_queries": None},
            "only a quantized cache has scales, and only a fit a ring of queries",
        ),
        ("MergeCache", {"fit": None}, "select is attended, which needs the reference queries of a fit"),
        ("MergeCache", {"fit": "keys"}, "fit is 'keys'; known: values, votes_and_values"),
        ("MergeCache", {"ridge": 0.0}, r"ridge is 0\.0+, and has to be above 0"),
        ("MergeCache", {"change_max": -1.0}, r"change_max is -1\.0+, and has to be above 0"),
        ("MergeCache", {"vote_steps": -1}, "vote_steps is -1, and has to be at least 0"),
        ("MergeCache", {"bias_max": float("nan")}, "bias_max is -?nan, and has to be above 0"),
        ("MergeCache", {"ridge": None}, "the attribute ridge should be a float"),
        ("MergeCache", {**KVSLIMMER, "fit": "values"}, "a fit needs merge to be drop or zip"),
    ],
)
def test_a_node_that_cannot_be(op: str, changes: dict[str, Any], message: str) -> None:
    attributes = {**(KEEPING if op == "VoteAttention" else MATCHING), **changes}
    with pytest.raises(Exception, match=f"kvexport: {op}: {message}"):
        one_node(op, {name: value for name, value in attributes.items() if value is not None})


@pytest.mark.parametrize(("op", "attributes"), [("VoteAttention", KEEPING), ("MergeCache", GRKV_5)])
def test_a_node_without_its_ring(op: str, attributes: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=f"kvexport: {op}: a method that fits has query and query_seen"):
        session(model(op, attributes, SHAPES[op]))


@pytest.mark.parametrize(
    ("op", "attributes", "tensor", "message"),
    [
        ("VoteAttention", KEEPING, "query", r"query is \[2, 2, 4, 8\], not \[2, 2, 5, 8\]"),
        ("VoteAttention", KEEPING, "query_seen", r"query_seen is \[2, 2, 4\], not \[2, 2, 5\]"),
        ("MergeCache", GRKV_5, "query_seen", r"query_seen is \[2, 2, 4\], not \[2, 2, 5\]"),
    ],
)
def test_a_ring_that_does_not_fit_is_an_error_of_the_run(
    op: str, attributes: dict[str, Any], tensor: str, message: str
) -> None:
    feed = feed_of(op, np.random.default_rng(0))
    name = RING_PREFIX[op] + tensor
    feed[name] = feed[name][:, :, 1:]
    shapes = {x: [*shape[:2], None if x == name else "W", *shape[3:]] for x, shape in ring_shapes(op).items()}
    with pytest.raises(Exception, match=message):
        one_node(op, attributes, **shapes).run(None, feed)


def test_a_ring_without_rows_is_an_error_of_the_run() -> None:
    feed = feed_of("MergeCache", np.random.default_rng(0))
    feed |= {"query": np.zeros((2, H, 0, D), np.float32), "query_seen": np.zeros((2, H, 0), np.int32)}
    with pytest.raises(Exception, match="the ring of reference queries has no rows"):
        one_node("MergeCache", GRKV_5).run(None, feed)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize(
    ("op", "attributes"), [("VoteAttention", KEEPING), ("MergeCache", GRKV_5), ("MergeCache", MATCHING)]
)
def test_in_place_has_the_bits_of_separate_buffers(op: str, attributes: dict[str, Any], half: bool) -> None:
    feed, one, prefix = (
        feed_of(op, np.random.default_rng(2), half),
        one_node(op, attributes, half=half),
        RING_PREFIX[op],
    )
    separate = dict(zip([output.name for output in one.get_outputs()], one.run(None, feed), strict=True))
    arrays = {name: array.copy() for name, array in feed.items()}
    outputs = {name: arrays.get(prefix + name.removeprefix("present_"), separate[name].copy()) for name in separate}
    binding = one.io_binding()
    for bind, named in ((binding.bind_input, arrays), (binding.bind_output, outputs)):
        for name, array in named.items():
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    one.run_with_iobinding(binding)
    assert {name: x.tobytes() for name, x in outputs.items()} == {name: x.tobytes() for name, x in separate.items()}
    assert all(f"present_{name}" in outputs for name in RING)
