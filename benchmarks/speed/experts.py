"""Time of the kernel of Experts alone: a decode step and a prompt through layers of experts larger than any cache.

    python benchmarks/speed/experts.py [--shapes qwen3-30b-a3b,gpt-oss-20b] [--layers 2] [--rows 1,512] [--rounds 30]
                                 [--threads 2] [--sides SIDE ...]

Weights and inputs are random. Weights have groups of 32 with scales in float16; MXFP4 has exponents instead. Every
token chooses its experts at random, anew in every run. The sides are Experts with int4, int8 and MXFP4 weights, and
ONNX Runtime's QMoE (int4, groups of 32, accuracy level 4). They run in turn in one process. `read_share` is the bytes
of weights and scales of the chosen experts, over the time of one row and the machine's read bandwidth. The bandwidth is
measured before and after.

Goals: one row at 0.7 of the bandwidth, 1.0 times QMoE's speed with one row and 1.5 times with 512. On a busy machine
take many rounds and read the figures that begin with `best`: they are those of the fastest round.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import options_of, read_bandwidth, save
from kvexport.backends.onnxruntime.operators import instruction_set, library
from kvexport.ops.experts import ExpertsForm
from kvexport.ops.packed import E2M1

GROUP = 32
PEER = "QMoE"
SIDES = ("int4", "int8", "mxfp4", PEER)
GOALS = {"read_share": 0.7, "of_QMoE, 1 row": 1.0, "of_QMoE, 512 rows": 1.5}


class Shape(NamedTuple):
    """The shape of a layer of experts. `form` describes its activation; no side has biases."""

    hidden: int
    inner: int
    experts: int
    chosen: int
    form: ExpertsForm


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, ExpertsForm()),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, ExpertsForm(slope=1.702, limit=7.0, up_offset=1.0)),
}


def weight(name: str, dims: tuple[int, int, int], side: str, rng: np.random.Generator) -> list[Any]:
    """Return the initializers of random weights [experts, outputs, inputs]."""
    from onnx import TensorProto, helper

    experts, outputs, inputs = dims
    bits = 8 if side == "int8" else 4
    numbers = rng.integers(0, 256, experts * outputs * inputs * bits // 8, np.uint8).tobytes()
    groups = [experts, outputs, inputs // GROUP]
    if side == "mxfp4":
        return [
            helper.make_tensor(name, TensorProto.UINT4, dims, numbers, raw=True),
            helper.make_tensor(
                f"{name}.exponent", TensorProto.UINT8, groups, bytes([120]) * math.prod(groups), raw=True
            ),
            helper.make_tensor(f"{name}.table", TensorProto.INT8, [16], np.array(E2M1, np.int8).tobytes(), raw=True),
        ]
    peer = side == PEER
    kind = TensorProto.UINT8 if peer else TensorProto.INT8 if bits == 8 else TensorProto.INT4
    shape = [experts, outputs, inputs // 2] if peer else list(dims)
    scale = np.full(groups, 0.01, np.float32 if peer else np.float16)
    scale_kind = TensorProto.FLOAT if peer else TensorProto.FLOAT16
    return [
        helper.make_tensor(name, kind, shape, numbers, raw=True),
        helper.make_tensor(f"{name}.scale", scale_kind, groups, scale.tobytes(), raw=True),
    ]


def layer(i: int, shape: Shape, side: str, rng: np.random.Generator) -> tuple[Any, list[Any]]:
    from onnx import helper

    first = weight(f"{i}.first", (shape.experts, 2 * shape.inner, shape.hidden), side, rng)
    down = weight(f"{i}.down", (shape.experts, shape.hidden, shape.inner), side, rng)
    names = [*(x.name for x in first), *(x.name for x in down)]
    if side != PEER:
        kind = 5 if side == "mxfp4" else 1  # `PackedFormat.kind`
        form = ExpertsForm(**{**vars(shape.form), "packed": (kind, kind), "group": (GROUP, GROUP)})
        inputs = ["x", f"{i}.indices", f"{i}.weights", *names]
        return helper.make_node("Experts", inputs, [f"{i}.y"], domain="kvexport", **form.attributes), [*first, *down]
    # Inputs 2 to 4 belong to the first product, 5 to 7 to the second. The router's logits choose the experts.
    inputs = ["x", f"{i}.router", names[0], names[1], "", names[2], names[3], ""]
    attributes = {
        "k": shape.chosen, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": shape.form.slope,
        "activation_beta": shape.form.up_offset, "expert_weight_bits": 4, "block_size": GROUP, "accuracy_level": 4,
        "normalize_routing_weights": 1, **({"swiglu_limit": shape.form.limit} if shape.form.limit else {}),
    }  # fmt: skip
    return helper.make_node("QMoE", inputs, [f"{i}.y"], domain="com.microsoft", **attributes), [*first, *down]


def session(shape: Shape, side: str, layers: int, threads: int) -> tuple[Any, int]:
    """Return a session of ONNX Runtime whose layers read the same rows, and the bytes of one expert."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    rng, nodes, weights = np.random.default_rng(0), [], []
    for i in range(layers):
        node, own = layer(i, shape, side, rng)
        nodes.append(node)
        weights += own
    value: Any = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["rows", shape.hidden])]
    for i in range(layers):
        if side == PEER:
            inputs.append(value(f"{i}.router", TensorProto.FLOAT, ["rows", shape.experts]))
        else:
            inputs.append(value(f"{i}.indices", TensorProto.INT64, ["rows", shape.chosen]))
            inputs.append(value(f"{i}.weights", TensorProto.FLOAT, ["rows", shape.chosen]))
    outputs = [value(f"{i}.y", TensorProto.FLOAT, ["rows", shape.hidden]) for i in range(layers)]
    domains = (("", 23), ("kvexport", 1), ("com.microsoft", 1))
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if side != PEER:
        options.register_custom_ops_library(str(library()))
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    size = sum(len(tensor.raw_data) for tensor in weights) // layers // shape.experts
    weights.clear()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]), size


def feeds(shape: Shape, side: str, layers: int, rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the inputs of one run; every row chooses its experts at random."""
    result: dict[str, Any] = {"x": rng.standard_normal((rows, shape.hidden)).astype(np.float32)}
    for i in range(layers):
        order = rng.random((rows, shape.experts)).argsort(1)[:, : shape.chosen].astype(np.int64)
        if side == PEER:
            router = np.zeros((rows, shape.experts), np.float32)
            np.put_along_axis(router, order, np.float32(5.0), 1)
            result[f"{i}.router"] = router
        else:
            result[f"{i}.indices"] = order
            result[f"{i}.weights"] = np.full(order.shape, 1 / shape.chosen, np.float32)
    return result


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", default="1,512")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    options = parser.parse_args()
    bandwidth = [read_bandwidth(512, options.threads, 1.0)]
    results: dict[str, Any] = {}
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        runs = {side: session(shape, side, options.layers, options.threads) for side in options.sides}
        for rows in map(int, options.rows.split(",")):
            seconds: dict[str, list[float]] = {side: [] for side in runs}
            for turn in range(max(4, options.rounds // (1 + rows // 64))):
                for side, (run, _) in runs.items():
                    feed = feeds(shape, side, options.layers, rows, np.random.default_rng(turn))
                    start = time.perf_counter()
                    run.run(None, feed)
                    seconds[side].append((time.perf_counter() - start) / options.layers)
            bandwidth.append(read_bandwidth(512, options.threads, 1.0))
            best = {side: min(times[1:]) for side, times in seconds.items()}
            for side, (_, size) in runs.items():
                one = statistics.median(seconds[side][1:])
                products = rows * shape.chosen * 3 * shape.hidden * shape.inner
                figures = {
                    "ms_per_layer": round(one * 1e3, 3),
                    "best_ms": round(best[side] * 1e3, 3),
                    "best_GMAC_per_s": round(products / best[side] / 1e9, 1),
                }
                if rows == 1:
                    read = size * shape.chosen
                    figures["read_share"] = round(read / one / max(bandwidth), 3)
                    figures["best_read_share"] = round(read / best[side] / max(bandwidth), 3)
                if PEER in best:
                    figures["of_QMoE"] = round(statistics.median(seconds[PEER][1:]) / one, 2)
                    figures["best_of_QMoE"] = round(best[PEER] / best[side], 2)
                results[f"{name}, {side}, {rows} rows"] = figures
                print(f"{name}, {side}, {rows} rows", json.dumps(figures), flush=True)
        del runs
    bandwidths = [round(b / 1e9, 1) for b in bandwidth]
    isa = instruction_set(library() or Path())
    head = {"instruction_set": isa, "goals": GOALS, "bandwidth_GBps": bandwidths, "load": os.getloadavg()[0]}
    save("experts", {**head, **results})


if __name__ == "__main__":
    main()
