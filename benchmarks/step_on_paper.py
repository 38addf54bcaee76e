"""What a decode step should take on an H200, on paper: bytes over bandwidth, instructions over cores, launches.

    python benchmarks/step_on_paper.py   prints a table of docs/measurements/cuda.md, writes results/step_on_paper.json

No kernel has run on a GPU. Instructions are counts of PTX (plugins/cuda/instructions.json, and the table of Linear in
docs/measurements/cuda.md for what is not recorded there), launches are the nodes of a built decoder, and a kernel takes
the longest of its memory, its instructions and its products.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import save

RECORDED = json.loads((Path(__file__).parent.parent / "plugins/cuda/instructions.json").read_text())
COUNTS = RECORDED["instructions of a warp"]

# An H200: bytes of a copy a second; multiprocessors, their cycles a second, lanes and warps' instructions a cycle; what
# mma.sync reaches of the products a second.
COPY, CYCLES, LANES, WARPS, PRODUCTS = 4.3e12, 132 * 1.75e9, 128, 4, 0.6 * 989e12
LAUNCH = 1e-6  # seconds from one kernel of a CUDA graph to the next
# What of that is saved where a launch begins while the one before ends: the least and the most that was published for
# an H100 (docs/measurements/cuda.md). Weights that are read meanwhile are not in it.
SAVED = (0.2e-6, 0.96e-6)
GOAL = 1.2  # of a step over its bytes' time
# Instructions of a lane for a weight, by rows (docs/measurements/cuda.md). One row of float16 was counted; at 32 its
# products take 22 us of the 94 that its memory does.
LINEAR = {
    "float16": {1: 3.7, 8: 3.7, 32: 3.7},
    "int4": {1: COUNTS["linear, int4, rows 1, per weight"], 8: 4.7, 32: 6.5},
}
BYTES = {"float16": 2.0, "int4": 0.5 + 2 / 32}  # of a weight; groups of 32, a float16 scale each
NORM_ROWS = 8  # above, a norm is a launch of its own
# Launches of a step beside its layers, by the nodes of a decoder (docs/measurements/cuda.md): positions and
# rotary factors 8, the embedding, the last row 6, the cast of the logits, the length 2; and the six
# nodes that find the largest logits. A packed embedding takes five more.
BESIDE, PACKED_EMBEDDING = 8 + 1 + 6 + 1 + 2 + 6, 5


@dataclass(frozen=True)
class Shape:
    """A Llama's, and its cache. group: query heads of a KV head."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    group: int
    size: int
    vocabulary: int
    budget: int

    @property
    def layer_weights(self) -> int:
        """The weights of a layer's four products."""
        query, cache = self.heads * self.group * self.size, self.heads * self.size
        return self.hidden * (2 * query + 2 * cache + 3 * self.inner)

    @property
    def weights(self) -> int:
        """The weights that a step reads: all but the embedding."""
        return self.layers * self.layer_weights + self.vocabulary * self.hidden


SHAPES = (
    Shape("Llama-2-7B", 32, 4096, 11008, 32, 1, 128, 32000, 1024),
    Shape("SmolLM2-135M", 30, 576, 1536, 3, 3, 64, 49152, 512),
)


def linear_seconds(shape: Shape, weights: str, rows: int) -> float:
    """The seconds of all products of a step."""
    panel = 8 if rows <= 8 else 32
    count = shape.weights
    return max(
        count * BYTES[weights] / COPY,
        count * LINEAR[weights][rows] / (CYCLES * LANES),
        2 * count * panel / PRODUCTS,
    )


def attention_seconds(shape: Shape, batch: int) -> float:
    """The seconds of attention in all layers, over a cache in float16."""
    slots = shape.layers * shape.heads * batch * shape.budget
    counted = {1: 1, 3: 4}[shape.group]
    instructions = COUNTS[f"decode, float16, group {counted}, per slot"] * shape.size / 128
    return max(slots * slot_bytes(shape) / COPY, slots * instructions / (CYCLES * WARPS))


def slot_bytes(shape: Shape) -> int:
    """Key, value, votes, score, position."""
    return 4 * shape.size + 12


def own_launches(shape: Shape, batch: int) -> int:
    """Four products and attention a layer, the head, and norms: the kernels here, which begin early."""
    return 5 * shape.layers + 1 + (2 * shape.layers + 1 if batch > NORM_ROWS else 0)


def launches(shape: Shape, weights: str, batch: int) -> int:
    """Those, and what is beside, which are ONNX Runtime's."""
    return own_launches(shape, batch) + BESIDE + (PACKED_EMBEDDING if weights == "int4" else 0)


def row(shape: Shape, weights: str, batch: int) -> dict[str, Any]:
    """Microseconds of one step."""
    cache = shape.layers * shape.heads * batch * shape.budget * slot_bytes(shape)
    floor = (shape.weights * BYTES[weights] + cache) / COPY
    count = launches(shape, weights, batch)
    kernels = linear_seconds(shape, weights, batch) + attention_seconds(shape, batch)
    step = kernels + count * LAUNCH
    figures = {"model": shape.name, "weights": weights, "budget": shape.budget, "batch": batch}
    figures |= {"floor us": floor * 1e6, "kernels us": kernels * 1e6, "launches": count, "step us": step * 1e6}
    figures["early us"] = [(step - own_launches(shape, batch) * saved) * 1e6 for saved in SAVED]
    figures["early over the floor"] = [us / floor / 1e6 for us in figures["early us"]]
    left = GOAL * floor - count * LAUNCH
    return figures | {"over the floor": step / floor, "share of copy for the goal": floor / left if left > 0 else None}


def main() -> None:
    """Print the table, keep the figures."""
    rows = [row(shape, weights, batch) for shape in SHAPES for weights in BYTES for batch in (1, 8, 32)]
    print(
        "| model | weights | batch | floor, us | kernels, us | launches | step, us | over the floor | of a copy "
        "| early, us | over the floor |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for one in rows:
        share = one["share of copy for the goal"]
        print(
            f"| {one['model']}, {one['budget']} slots | {one['weights']} | {one['batch']} | {one['floor us']:.0f} "
            f"| {one['kernels us']:.0f} | {one['launches']} | {one['step us']:.0f} | {one['over the floor']:.2f} "
            f"| {f'{share:.2f}' if share and share < 1 else 'out of reach'} "
            f"| {' to '.join(f'{us:.0f}' for us in reversed(one['early us']))} "
            f"| {' to '.join(f'{over:.2f}' for over in reversed(one['early over the floor']))} |"
        )
    assumed = {"copy bytes a second": COPY, "multiprocessor cycles a second": CYCLES, "seconds a launch": LAUNCH}
    assumed["of these saved by launches that begin early"] = SAVED
    shapes = [asdict(shape) | {"weights": shape.weights} for shape in SHAPES]
    save("step_on_paper", {"assumed": assumed, "instructions": COUNTS, "shapes": shapes, "rows": rows})


if __name__ == "__main__":
    main()
