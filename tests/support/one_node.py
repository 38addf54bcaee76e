"""ONNX models of one native operator, and tensors for them. A model is well-formed unless a test changes it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from kvexport.backends.onnxruntime.operators import library
from kvexport.methods.base import Method
from kvexport.methods.grkv import GRKV
from kvexport.methods.h2o import H2O
from kvexport.methods.keepkv import KeepKV
from kvexport.methods.kvslimmer import KVSlimmer
from kvexport.schema import operators
from kvexport.schema.state import STATE_NAMES as STATE

DEFAULTS = {a.name: a.default for a in operators.VOTE_ATTENTION.attributes if a.default is not None}
VOTE_ATTENTION = operators.VOTE_ATTENTION.node_attributes(
    {**DEFAULTS, "scale": 0.3, "vote_exponent": 1.0, "statistics": "log_ema", "decay": [0.9]}
)


# Query heads, KV heads, tokens, slots of a head and of all, and the sizes of keys and values.
HQ, H, T, C, D, DV = 4, 2, 3, 16, 8, 12
S = H * C


def merge_of(method: Method, **more: Any) -> dict[str, Any]:
    policy = method.policy()
    kinds = [statistic.kind for statistic in method.statistics]
    values = {"budget": [8] * H, "sinks": 1, "recent": [2] * H, "sliding_window": 0, "statistics": kinds}
    values |= {"compresses": method.compresses, "recent_receives": method.recent_receives}
    return operators.MERGE_CACHE.node_attributes({**values, **policy.node_attributes(), **more})


MERGE_CACHE = merge_of(H2O())
KEEPKV = merge_of(KeepKV(pool=2))
KVSLIMMER = merge_of(KVSlimmer(), inverse_frequencies=[1.0, 0.5], rotary_interleaved=0)
GRKV_5 = merge_of(GRKV(queries=5))
RING, RING_PREFIX = ("query", "query_seen"), {"VoteAttention": "past_", "MergeCache": ""}
Shape = Sequence[int | str] | None  # None: unknown rank


def state_shapes(prefix: str = "", statistics: int = 1) -> dict[str, Shape]:
    shapes = (["B", "S", D], ["B", "S", DV], ["B", "S"], ["B", statistics, "S"], ["B", "S"])
    return {prefix + name: shape for name, shape in zip(STATE, shapes, strict=True)}


def ring_shapes(op: str, rows: int | str = "W") -> dict[str, Shape]:
    return dict(zip((RING_PREFIX[op] + name for name in RING), (["B", H, rows, D], ["B", H, rows]), strict=True))


def vote_attention_shapes(statistics: int = 1) -> dict[str, Shape]:
    return {
        "query": ["B", HQ, "T", D], "key": ["B", H, "T", D], "value": ["B", H, "T", DV], "position": ["B", "T"],
        "query_length": ["B", 1],
        **state_shapes("past_", statistics), "sink_logits": [HQ],
    }  # fmt: skip


def model(
    op: str,
    attributes: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    *,
    half: bool = False,
    absent: Sequence[str] = (),
) -> bytes:
    """Return the ONNX model of one node. Its cache is float32 by default. `absent` names inputs that it leaves out."""
    element = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    outputs = [f"present_{name}" for name in STATE]
    if op == "VoteAttention":
        outputs.insert(0, "output")
    outputs += [f"present_{name}" for name in RING if RING_PREFIX[op] + name in shapes]

    def info(name: str, shape: Shape) -> Any:
        return helper.make_tensor_value_info(name, type_of(op, name, element), shape)

    node = helper.make_node(
        op, ["" if name in absent else name for name in shapes], outputs, domain="kvexport", **attributes
    )
    graph = helper.make_graph(
        [node],
        "one_node",
        [info(n, s) for n, s in shapes.items() if n not in absent],
        [info(name, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return serialized


def type_of(op: str, name: str, element: int) -> int:
    if op == "VoteAttention" and name in ("position", "query_length"):
        return int(TensorProto.INT64)
    kind = name.removeprefix("past_").removeprefix("present_")
    if kind in ("position", "query_seen"):
        return int(TensorProto.INT32)
    if kind == "query" and (op == "MergeCache" or name != kind):
        return int(TensorProto.FLOAT)
    return int(element if kind in ("query", "output", "key", "value") else TensorProto.FLOAT)


def merge_shapes(statistics: int = 1) -> dict[str, Shape]:
    return state_shapes("", statistics)


def session(serialized: bytes, threads: int = 1) -> Any:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library()))
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def state(
    rng: np.random.Generator, batch: int, used: int, capacity: int = C, statistics: int = 1, *, half: bool = False
) -> dict[str, Any]:
    """Return a state with `capacity` slots of each KV head, of which the first `used` are occupied."""
    dtype, slots = np.float16 if half else np.float32, H * capacity
    votes = np.where(np.arange(slots) % max(capacity, 1) < used, rng.uniform(0.5, 3, (batch, slots)), 0.0)
    return {
        "key": rng.normal(size=(batch, slots, D)).astype(dtype),
        "value": rng.normal(size=(batch, slots, DV)).astype(dtype),
        "votes": votes.astype(np.float32),
        "score": rng.uniform(0.1, 3, (batch, statistics, slots)).astype(np.float32),
        "position": np.tile(np.arange(capacity, dtype=np.int32), (batch, H)),
    }


def ring(rng: np.random.Generator, op: str, batch: int, rows: int, now: int) -> dict[str, Any]:
    """Return reference queries that have seen up to `now` tokens. The first row is empty."""
    seen = np.sort(rng.integers(1, now + 1, (batch, H, rows)).astype(np.int32), axis=-1)
    seen[..., 0] = 0
    query = rng.normal(size=(batch, H, rows, D)).astype(np.float32)
    return {RING_PREFIX[op] + "query": query, RING_PREFIX[op] + "query_seen": seen}


def vote_attention_inputs(
    rng: np.random.Generator, batch: int, tokens: int, used: int, capacity: int = C, *, half: bool = False
) -> dict[str, Any]:
    dtype = np.float16 if half else np.float32
    return {
        "query": rng.normal(size=(batch, HQ, tokens, D)).astype(dtype),
        "key": rng.normal(size=(batch, H, tokens, D)).astype(dtype),
        "value": rng.normal(size=(batch, H, tokens, DV)).astype(dtype),
        "position": np.broadcast_to(used + np.arange(tokens), (batch, tokens)).astype(np.int64),
        "query_length": np.full((batch, 1), tokens, dtype=np.int64),
        **{f"past_{name}": array for name, array in state(rng, batch, used, capacity, half=half).items()},
        "sink_logits": rng.normal(size=HQ).astype(np.float32),
    }
