"""Random nodes, mostly malformed, in a separate process. Each must give a session, outputs, or an error.

python -m tests.support.node_fuzz SEED CASES prints how many sessions were made and how many of them ran.
"""

import random
import sys
from typing import Any

import numpy as np

from kvexport.methods.ballot import Ballot
from kvexport.methods.snapkv import SnapKV
from kvexport.methods.zeromerge import ZeroMerge
from tests.support.one_node import (
    KEEPKV,
    KVSLIMMER,
    MERGE_CACHE,
    VOTE_ATTENTION,
    D,
    merge_of,
    merge_shapes,
    model,
    session,
    vote_attention_shapes,
)

ODD: list[Any] = [
    *(0, 1, -1, 3, 2**31 - 1, 2**31, 2**40, -(2**63), 0.0, 1.0, 0.5, -1.0, 1e38, float("nan"), float("inf")),
    *(
        "",
        "log_ema",
        "probability",
        "none,log_ema",
        ",",
        "nope",
        "score",
        "mean",
        "pair",
        "zip",
        "least_error",
        "distance",
    ),
    *([1.0], [0.5, 0.9], [0], [1, 2], [-1], ["a"], [float("nan")], [0.9] * 9, [8, 12], [9, 23], [2**31, 1], [4] * 8),
]
SIZES: list[Any] = ["B", "T", "S", 0, 1, 2, 3, 4, 7, 8, 12, 16, 64]
OTHER, POOLED, BALLOT = merge_of(ZeroMerge(residual=0.3)), merge_of(SnapKV()), merge_of(Ballot(zip="vote"))
# With this statistic only some of the queries count. Which queries see a slot depends on its position.
WINDOWED = VOTE_ATTENTION | {"scores": "log_ema", "decay": [0.9], "window": [3], "recency_weight": [2.0]}


def mutated(rng: random.Random, attributes: dict[str, Any]) -> dict[str, Any]:
    changed = dict(attributes)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        name = rng.choice(list(attributes))
        if rng.random() < 0.1:
            changed.pop(name, None)
        else:
            changed[name] = rng.choice([x for x in ODD if rng.random() < 0.02 or isinstance(x, type(attributes[name]))])
    return changed


def reshaped(rng: random.Random, shapes: dict[str, Any]) -> dict[str, Any]:
    changed = dict(shapes)
    for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
        name = rng.choice(list(shapes))
        shape = list(shapes[name])
        if rng.random() < 0.3:
            shape = [rng.choice(SIZES) for _ in range(rng.randint(0, 5))]
        else:
            shape[rng.randrange(len(shape))] = rng.choice(SIZES)
        changed[name] = None if rng.random() < 0.1 else shape
    return changed


def tensors(rng: random.Random, session: Any) -> dict[str, np.ndarray]:
    """Return random inputs of the declared shapes. The same symbol has mostly the same size."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    sizes = {"B": rng.choice([0, 1, 3]), "T": rng.choice([0, 1, 5]), "S": rng.choice([0, 1, 2, 32, 32, 32, 80])}
    dtypes: dict[str, Any] = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
    feed = {}
    for tensor in session.get_inputs():
        known = tensor.shape or [sizes["B"], sizes["S"], D]
        shape = [size if isinstance(size, int) else sizes.get(size, 2) for size in known]
        if rng.random() < 0.03 and shape:
            shape[rng.randrange(len(shape))] = rng.choice([0, 1, 5])
        dtype = dtypes[tensor.type]
        if dtype is np.float32:
            array = numbers.normal(size=shape) * rng.choice([1.0, 1.0, 1e30])
            array[numbers.random(shape) < 0.1] = rng.choice([0.0, np.nan, np.inf, -1.0])
        else:
            array = numbers.integers(*rng.choice([(0, 6), (0, 1000), (-5, 5), (-(2**31), 2**31 - 1)]), size=shape)
        feed[tensor.name] = np.asarray(array, dtype=dtype)
    return feed


def main(seed: int, cases: int) -> None:
    opened = ran = 0
    for case in range(seed, seed + cases):
        rng = random.Random(case)
        print(case, file=sys.stderr)  # a process that dies has printed the number of its case last
        attention = rng.random() < 0.5
        node = (
            rng.choice([VOTE_ATTENTION, WINDOWED])
            if attention
            else rng.choice([MERGE_CACHE, KEEPKV, KVSLIMMER, OTHER, POOLED, BALLOT])
        )
        kept = 2 if (node is BALLOT) != (rng.random() < 0.1) else 1
        if rng.random() < 0.5:
            capacity = rng.randint(1, 31)
            node = node | {"capacity": [capacity, 32 - capacity]}
        shapes = reshaped(rng, vote_attention_shapes() if attention else merge_shapes(kept))
        attributes = mutated(rng, node)
        absent = [name for name in shapes if rng.random() < (0.5 if name == "sink_logits" else 0.01)]
        try:
            one = session(model("VoteAttention" if attention else "MergeCache", attributes, shapes, absent=absent))
            opened += 1
            one.run(None, tensors(rng, one))
            ran += 1
        except Exception as error:
            if not type(error).__module__.startswith("onnxruntime") and not isinstance(
                error, (ValueError, TypeError, OverflowError)
            ):
                raise
    print(f"{opened} made, {ran} ran")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
