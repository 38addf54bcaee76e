"""Time of the merge at the end of a prompt in one layer of SmolLM2, by the native operator and by the ONNX function.

    python benchmarks/once_merge.py [--rounds 7] [--threads 1]

2,000 entries become 200 by the method of smollm2-135m-once. Writes benchmarks/results/once-merge.json: medians in
milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from common import interleave, save
from onnx import helper

from kvexport.backends.onnxruntime.operators import library
from kvexport.ops.layer_state import merge_cache_functions
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.onnx_function import DOMAIN, merge_cache_node_attributes
from kvexport.recipe.load import load_recipe
from kvexport.schema.operators import MERGE_CACHE

HEADS, SIZE, ENTRIES, BUDGET = 3, 64, 2000, 200


def merging(threads: int, *, native: bool) -> Callable[[], float]:
    """Return a function that merges the same cache at every call and returns the seconds that it takes."""
    section = load_recipe("smollm2-135m-once", []).recipe.cache
    attributes = [MergeCacheAttributes(section.build_method(), BUDGET, section.sinks, BUDGET // 10)] * HEADS
    method, rng = attributes[0].method, np.random.default_rng(0)
    shape, rows = (1, HEADS * ENTRIES), (1, HEADS, method.reference_queries)
    arguments = [
        *(rng.normal(size=(*shape, SIZE)) for _ in range(2)),
        np.ones(shape),
        np.exp(rng.normal(size=(1, len(method.statistics), HEADS * ENTRIES))),
        np.tile(np.arange(ENTRIES, dtype=np.int32), (1, HEADS)),
        0.3 * rng.normal(size=(*rows, SIZE)),
        np.full(rows, ENTRIES, np.int32),
    ]
    arrays = [np.ascontiguousarray(x if x.dtype == np.int32 else x.astype(np.float32)) for x in arguments]
    own = merge_cache_functions(attributes, head_sizes=(SIZE, SIZE), cache_type="float32")
    operator = MERGE_CACHE.with_state(method.extra_state)
    node = helper.make_node(
        "MergeCache",
        operator.input_names,
        operator.output_names,
        domain=DOMAIN,
        overload="" if native else own[0].overload,
        **merge_cache_node_attributes(attributes),
    )
    inputs, outputs = (
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in zip(names, arrays, strict=True)
        ]
        for names in (operator.input_names, operator.output_names)
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    functions = [] if native else own
    graph = helper.make_graph([node], "merge", inputs, outputs)
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if native:
        options.register_custom_ops_library(str(library()))
    session = ort.InferenceSession(model.SerializeToString(), options)
    feed: dict[str, Any] = dict(zip(operator.input_names, arrays, strict=True))

    def merge() -> float:
        start = time.perf_counter()
        session.run(None, feed)
        return time.perf_counter() - start

    merge()
    return merge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    assert library() is not None, "the operators are not built: python plugins/build.py"
    sides = {"native": merging(options.threads, native=True), "function": merging(options.threads, native=False)}
    milliseconds = {name: 1e3 * statistics.median(times) for name, times in interleave(sides, options.rounds).items()}
    print(milliseconds, save("once-merge", {"milliseconds": milliseconds}))


if __name__ == "__main__":
    main()
