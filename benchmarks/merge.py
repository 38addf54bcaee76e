"""Time of the native MergeCache alone, which brings a layer's cache back to its budget.

    python benchmarks/merge.py [--rounds 40] [--threads 2] [--before LIBRARY]

Batch 4, 8 KV heads of size 128 (a layer of Llama-3-8B), budgets of 512 and 2,048 slots, state bound in place. 32 tokens
are appended, and a merge evicts as many, again and again, so that slots have the order that merges leave. `--before`
names the library of operators of another checkout, which runs in turn with this one's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import interleave, ratio, save

BATCH, HEADS, SIZE, EVICTED = 4, 8, 128, 32
SIDES = [(method, budget, "float32") for method in ("h2o", "keepkv", "ballot") for budget in (512, 2048)]
SIDES += [("h2o", 2048, "float16")]


def merging(library: Path, threads: int, method: str, budget: int, dtype: str) -> Callable[[], float]:
    """Return a function that appends, merges, and returns the milliseconds of the merge."""
    import onnxruntime as ort
    from onnx import helper

    from kvexport.methods import all_methods
    from kvexport.ops.merge_cache import MergeCacheAttributes
    from kvexport.ops.onnx_function import merge_cache_node_attributes
    from kvexport.schema.operators import MERGE_CACHE
    from kvexport.schema.state import STATE_NAMES

    rule, rng, capacity = all_methods()[method](), np.random.default_rng(0), budget + EVICTED
    shape = (BATCH, HEADS, capacity)
    state: dict[str, np.ndarray] = {name: rng.normal(size=(*shape, SIZE)).astype(dtype) for name in ("key", "value")}
    state |= {
        "votes": np.ones(shape, np.float32),
        "score": rng.normal(size=(*shape[:2], len(rule.statistics), capacity)),
    }
    state["score"] = state["score"].astype(np.float32)
    state["position"] = np.broadcast_to(np.arange(capacity, dtype=np.int32), shape).copy()
    node = helper.make_node(
        "MergeCache",
        MERGE_CACHE.input_names,
        MERGE_CACHE.output_names,
        domain="kvexport",
        **merge_cache_node_attributes(MergeCacheAttributes(rule, budget, 4, budget // 4)),
    )
    names = dict(zip(STATE_NAMES, MERGE_CACHE.input_names, strict=True))
    bound = dict(zip(STATE_NAMES, MERGE_CACHE.output_names, strict=True))

    def info(name: str, x: np.ndarray) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)

    graph = helper.make_graph(
        [node],
        "merge",
        [info(names[name], x) for name, x in state.items()],
        [info(bound[name], x) for name, x in state.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    session = ort.InferenceSession(model, options)
    binding = session.io_binding()
    for name, x in state.items():
        binding.bind_input(names[name], "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
        binding.bind_output(bound[name], "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    new = {name: rng.normal(size=(*shape[:2], EVICTED, SIZE)).astype(dtype) for name in ("key", "value")}

    def merge() -> float:
        first = int(state["position"].max()) + 1
        state["position"][..., budget:] = first + np.arange(EVICTED)
        state["votes"][..., budget:] = 1
        state["score"][..., budget:] = rng.normal(size=(*state["score"].shape[:3], EVICTED))
        for name, x in new.items():
            state[name][:, :, budget:] = x
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        return 1e3 * (time.perf_counter() - start)

    for _ in range(2 * budget // EVICTED):  # until twice the budget has been evicted
        merge()
    return merge


def main() -> None:
    from kvexport.backends.onnxruntime.operators import library

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    own = library()
    assert own is not None, "the operators are not built: python plugins/build.py"
    libraries = {"now": own} | ({"before": options.before} if options.before else {})
    results: dict[str, Any] = {}
    for method, budget, dtype in SIDES:
        sides = {name: merging(path, options.threads, method, budget, dtype) for name, path in libraries.items()}
        figures = interleave(sides, options.rounds)
        row = {f"{name}_milliseconds": statistics.median(times) for name, times in figures.items()}
        if "before" in figures:
            row["ratio"] = ratio(figures["now"], figures["before"])
        results[f"{method}-{budget}-{dtype}"] = row
        print(method, budget, dtype, row, flush=True)
    print(save("merge", results))


if __name__ == "__main__":
    main()
