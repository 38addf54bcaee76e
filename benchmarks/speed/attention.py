"""Share of the machine's read bandwidth that a decode step of the native VoteAttention reaches.

    python benchmarks/speed/attention.py [--rounds 20] [--threads 2]

Batch 4, 4096 slots, 32 query heads on 8 KV heads of size 128 (a layer of Llama-3-8B), votes and one score statistic,
state bound in place. The cache has the query's type, int8, int4 or k8v4. Bytes are keys, values, scales, votes, scores
read and scores written. The bandwidth is measured before and after every round with the same number of threads. Each
instruction set runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.common import options_of, read_bandwidth, save

BATCH, QUERY_HEADS, HEADS, SLOTS, SIZE = 4, 32, 8, 4096, 128
GOALS = {"avx512": 0.85, "avx2": 0.75}
SIDES = (
    *("float32-log_ema", "float32-probability", "float16-log_ema"),
    *("float32-log_ema-int8", "float16-log_ema-int8", "float32-log_ema-int4", "float32-log_ema-k8v4"),
)


def session(threads: int, dtype: str, statistic: str, cache_type: str) -> tuple[Any, Any, int]:
    """Return a session of one VoteAttention node, a binding with state in place, and the bytes of a step."""
    import onnxruntime as ort
    from onnx import helper

    from kvexport.backends.onnxruntime.operators import library
    from kvexport.methods.slots import Statistic
    from kvexport.ops.onnx_function import vote_attention_node_attributes
    from kvexport.ops.vote_attention import VoteAttentionAttributes
    from kvexport.schema.operators import VOTE_ATTENTION
    from kvexport.schema.state import STATE, StateTensor, scales_of

    rng = np.random.default_rng(0)
    capacity, real, scales = SLOTS + 1, np.dtype(dtype), scales_of(cache_type)
    operator, factor = VOTE_ATTENTION.with_state(scales), 40.0 if scales else 1.0
    slots_of_heads = (BATCH, HEADS * capacity)

    def rows(tensor: StateTensor) -> np.ndarray:
        sizes = {"B": BATCH, "H": HEADS, "S": HEADS * capacity, "D": SIZE, "Dv": SIZE}
        held, kind = tensor.stored_shape(cache_type, sizes), tensor.stored_dtype(cache_type)
        if kind == "uint8":
            return rng.integers(0, 256, held, np.uint8)
        return (rng.normal(size=held).clip(-3, 3) * factor).astype(kind)

    arrays = {
        "query": rng.normal(size=(BATCH, QUERY_HEADS, 1, SIZE)).astype(real),
        "key": rng.normal(size=(BATCH, HEADS, 1, SIZE)).astype(real),
        "value": rng.normal(size=(BATCH, HEADS, 1, SIZE)).astype(real),
        "position": np.full((BATCH, 1), SLOTS, np.int64),
        "query_length": np.ones((BATCH, 1), np.int64),
        "past_key": rows(STATE[0]),
        "past_value": rows(STATE[1]),
        "past_votes": (np.tile(np.arange(capacity) < SLOTS, (BATCH, HEADS))).astype(np.float32),
        "past_score": np.ones((BATCH, 1, HEADS * capacity), np.float32),
        "past_position": np.tile(np.arange(capacity, dtype=np.int32), (BATCH, HEADS)),
    }
    arrays |= {f"past_{scale.name}": np.full(slots_of_heads, 1 / factor, np.float32) for scale in scales}
    output = np.zeros((BATCH, QUERY_HEADS, 1, SIZE), real)
    kind = Statistic(statistic, 0.9) if statistic == "log_ema" else Statistic(statistic)
    attributes = vote_attention_node_attributes(VoteAttentionAttributes(SIZE**-0.5, 1.0, (kind,)))
    inputs = [name if name in arrays else "" for name in operator.input_names]
    while not inputs[-1]:
        inputs.pop()  # sink logits
    node = helper.make_node("VoteAttention", inputs, operator.output_names, domain="kvexport", **attributes)
    bound = {"output": output} | {
        name.replace("past", "present"): x for name, x in arrays.items() if name.startswith("past")
    }

    def info(name: str, x: np.ndarray) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)

    graph = helper.make_graph(
        [node], "attention", [info(*x) for x in arrays.items()], [info(*x) for x in bound.items()]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library()))
    ort_session = ort.InferenceSession(
        helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString(), options
    )
    binding = ort_session.io_binding()
    for name, x in arrays.items():
        binding.bind_input(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    for name, x in bound.items():
        binding.bind_output(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    slots = BATCH * HEADS * SLOTS
    row_bytes = sum(arrays[f"past_{name}"][0, 0].nbytes for name in ("key", "value"))
    # Both lists are returned with the session, so that the buffers live as long as it does.
    return (ort_session, (binding, arrays, bound), slots * (row_bytes + 4 * len(scales) + 4 + 2 * 4))


def measure(threads: int, rounds: int, dtype: str, statistic: str, cache_type: str) -> dict[str, Any]:
    """Return the median figures of all rounds.

    The share of a round is relative to the better of the two measurements of the bandwidth around it.
    """
    ort_session, bound, nbytes = session(threads, dtype, statistic, cache_type)
    votes = bound[1]["past_votes"].reshape(BATCH, HEADS, SLOTS + 1)  # a view
    shares, rates = [], []
    before = read_bandwidth(256, threads, 0.1)
    for _ in range(rounds):
        best = float("inf")
        for _ in range(8):
            votes[:, :, SLOTS:] = 0  # removes the token that the last step appended
            start = time.perf_counter()
            ort_session.run_with_iobinding(bound[0])
            best = min(best, time.perf_counter() - start)
        after = read_bandwidth(256, threads, 0.1)
        rates.append(nbytes / best)
        shares.append(rates[-1] / max(before, after))
        before = after
    return {
        "milliseconds": nbytes / statistics.median(rates) * 1e3,
        "share": statistics.median(shares),
        "GBps": statistics.median(rates) / 1e9,
        "bandwidth_GBps": before / 1e9,
        "bytes": nbytes,
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        dtype, statistic, *cache_type = options.side.split("-")
        print(json.dumps(measure(options.threads, options.rounds, dtype, statistic, *(cache_type or [dtype]))))
        return
    results: dict[str, Any] = {}
    for isa, goal in GOALS.items():
        for side in SIDES:
            command = [
                sys.executable,
                __file__,
                "--side",
                side,
                "--rounds",
                str(options.rounds),
                "--threads",
                str(options.threads),
            ]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "KVEXPORT_CPU_ISA": isa}
            )
            results[f"{isa}-{side}"] = {**json.loads(done.stdout.splitlines()[-1]), "goal": goal}
            print(isa, side, json.dumps(results[f"{isa}-{side}"]), flush=True)
    print(save("attention", results))


if __name__ == "__main__":
    main()
