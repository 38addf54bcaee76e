"""Time of the kernel of packed weights alone, on matrices of a 7B layer that fit into no processor cache.

    python benchmarks/speed/packed_kernel.py [--rounds 20] [--threads 2] [--rows 1,8,512] [--megabytes 640]
        [--sides SIDE ...]

Matrices are multiplied with one row and with a prompt's rows. The sides are Linear with int4, int8 (groups of 32,
scales in float16) and float16 weights, the first two also with inputs that are not rounded (`float_input`),
ONNX Runtime's MatMulNBits (int4, groups of 32, accuracy level 4), and by name the K types of GGUF files (`--sides Q2_K
Q4_K`). All run in turn in one process. `read_share` is
the bytes of weights and scales over the time of one row and the machine's read bandwidth, which is measured before and
after. `of_MatMulNBits` is the speed relative to that side's. Goals: one row at 0.85 of the bandwidth and 1.0 of
MatMulNBits, 512 rows at 300 GMAC/s on two Zen 4 cores and 2 times MatMulNBits. The result names the processor, the
instruction set that ran and the load of the machine. On a busy machine take many rounds and read the figures that begin
with `best`: they are those of the fastest round.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import options_of, read_bandwidth, save
from kvexport.backends.onnxruntime.operators import instruction_set, library
from kvexport.export.model.ggml_blocks import LAYOUTS
from kvexport.export.passes.packed import TYPES
from kvexport.ops.packed import PackedFormat
from tests.support.packed_weights import random_parts

OUTPUTS, INPUTS, GROUP = 11008, 4096, 32
SIDES = ("int4", "int8", "int4, float inputs", "int8, float inputs", "float16", "MatMulNBits")
PEER = "MatMulNBits"
READ_GOAL = 0.85  # the share of the read bandwidth for one row


def weight_parts(side: str, name: str, rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    """Return the initializers of one matrix, and the attributes of its node of Linear or MatMulNBits."""
    from onnx import TensorProto, helper

    from kvexport.ops.linear import Form

    if side == "float16":
        numbers = rng.integers(0, 256, OUTPUTS * INPUTS * 2, np.uint8)
        values = (numbers.view(np.uint16) & 0x83FF | 0x2000).tobytes()  # of magnitude 2^-7
        return [helper.make_tensor(name, TensorProto.FLOAT16, [OUTPUTS, INPUTS], values, raw=True)], Form().attributes
    if side == PEER:
        groups, numbers = INPUTS // GROUP, rng.integers(0, 256, OUTPUTS * INPUTS // 2, np.uint8)
        scale = np.full(OUTPUTS * groups, 0.01, np.float32)
        tensors = [
            helper.make_tensor(name, TensorProto.UINT8, [OUTPUTS, groups, GROUP // 2], numbers.tobytes(), raw=True),
            helper.make_tensor(f"{name}.scale", TensorProto.FLOAT, [OUTPUTS * groups], scale.tobytes(), raw=True),
        ]
        return tensors, {"K": INPUTS, "N": OUTPUTS, "bits": 4, "block_size": GROUP, "accuracy_level": 4}
    packing = LAYOUTS[side].packing if side in LAYOUTS else PackedFormat(8 if "int8" in side else 4, True, GROUP)
    stored = random_parts(rng, packing, OUTPUTS, INPUTS)
    tensors = [
        helper.make_tensor(f"{name}.{part}", int(TYPES[dtype]), shape, stored[part].tobytes(), raw=True)
        for part, (dtype, shape) in packing.tensors(OUTPUTS, INPUTS).items()
    ]
    form = Form(packed=(packing.kind,), group=(packing.group,), float_input=int(side.endswith("float inputs")))
    return tensors, form.attributes


def session(side: str, threads: int, megabytes: int) -> tuple[Any, int, int]:
    """Return a session of matrices times the same rows, their number, and their bytes.

    The matrices have at least `megabytes` megabytes together.
    """
    import onnxruntime as ort
    from onnx import TensorProto, helper

    peer = side == PEER
    kind = TensorProto.FLOAT16 if side == "float16" else TensorProto.FLOAT
    rng, nodes, weights, count = np.random.default_rng(0), [], [], 1
    while len(nodes) < count:
        name = f"w{len(nodes)}"
        parts, attributes = weight_parts(side, name, rng)
        count = -(-megabytes * 10**6 // sum(len(tensor.raw_data) for tensor in parts))
        weights += parts
        inputs = ["x", *(tensor.name for tensor in parts)]
        op, domain = ("MatMulNBits", "com.microsoft") if peer else ("Linear", "kvexport")
        nodes.append(helper.make_node(op, inputs, [f"{name}.y"], domain=domain, **attributes))
    value = helper.make_tensor_value_info
    outputs = [value(node.output[0], kind, ["rows", OUTPUTS]) for node in nodes]
    graph = helper.make_graph(nodes, "g", [value("x", kind, ["rows", INPUTS])], outputs, weights)
    opsets = [
        helper.make_opsetid(domain, version) for domain, version in (("", 23), ("kvexport", 1), ("com.microsoft", 1))
    ]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # after a run, as in the engine's sessions
    if not peer:
        options.register_custom_ops_library(str(library()))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session, len(nodes), sum(len(tensor.raw_data) for tensor in weights)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,512")
    parser.add_argument("--megabytes", type=int, default=640)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=[*SIDES, *LAYOUTS])
    options = parser.parse_args()
    runs = {side: session(side, options.threads, options.megabytes) for side in options.sides}
    bandwidth = [read_bandwidth(512, options.threads, 1.0)]
    results: dict[str, Any] = {}
    for rows in map(int, options.rows.split(",")):
        x = np.random.default_rng(1).standard_normal((rows, INPUTS)).astype(np.float32)
        seconds: dict[str, list[float]] = {side: [] for side in runs}
        for _ in range(max(3, options.rounds // (1 + rows // 64))):
            for side, (runner, count, _) in runs.items():
                feed = {"x": x.astype(np.float16) if side == "float16" else x}
                start = time.perf_counter()
                runner.run(None, feed)
                seconds[side].append((time.perf_counter() - start) / count)
        bandwidth.append(read_bandwidth(512, options.threads, 1.0))
        best = {side: min(times[1:]) for side, times in seconds.items()}
        for side, (_, count, size) in runs.items():
            one = statistics.median(seconds[side][1:])
            figures = {
                "ms_per_matrix": round(one * 1e3, 3),
                "best_ms": round(best[side] * 1e3, 3),
                "GMAC_per_s": round(rows * OUTPUTS * INPUTS / one / 1e9, 1),
                "best_GMAC_per_s": round(rows * OUTPUTS * INPUTS / best[side] / 1e9, 1),
            }
            if rows == 1:
                figures |= {"read_share": round(size / count / one / max(bandwidth), 3), "read_goal": READ_GOAL}
                figures["best_read_share"] = round(size / count / best[side] / max(bandwidth), 3)
            if PEER in best:
                figures["of_MatMulNBits"] = round(statistics.median(seconds[PEER][1:]) / one, 2)
                figures["best_of_MatMulNBits"] = round(best[PEER] / best[side], 2)
            results[f"{side}, {rows} rows"] = figures
            print(f"{side}, {rows} rows", json.dumps(figures), flush=True)
    bandwidths = [round(b / 1e9, 1) for b in bandwidth]
    isa = instruction_set(library() or Path())
    save("packed-kernel", {"instruction_set": isa, **results, "bandwidth_GBps": bandwidths, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
