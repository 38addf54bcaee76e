"""Predicted time of a decode step on a GPU, from bytes, instructions, round trips to memory, and launches.

The script prints a table of docs/measurements/cuda.md and writes results/step_on_paper.json.

No kernel has run on a GPU. The time of a kernel has three parts, one after the other: the round trips before its first
product, its loop, and the round trips after its last product. The loop takes the longest of four times: its memory, its
instructions, its products, and the round trips of one block. Instructions are counts of PTX, from
plugins/cuda/instructions.json or, if they are not recorded there, from docs/measurements/cuda.md. Round trips are those
of the PTX that nothing hides (plugins/building/ptx/trips.py). Launches are the nodes of a built decoder.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from common import save

RECORDED = json.loads((Path(__file__).parent.parent / "plugins/cuda/instructions.json").read_text())
COUNTS = RECORDED["instructions of a warp"]
RATIOS = RECORDED["per-head budgets over equal ones"]

LANES, WARPS = 128, 4  # those of a multiprocessor that issue an instruction in a cycle
LAUNCH = 1e-6  # seconds from one kernel of a CUDA graph to the next
# The seconds of it that are saved if a launch begins before the one before ends, which needs capability 9.0: the
# smallest and the largest that were published for an H100 (docs/measurements/cuda.md). The time to read weights
# meanwhile is not included.
SAVED = (0.2e-6, 0.96e-6)
TRIP = 0.3e-6  # seconds of a round trip to the L2 cache


@dataclass(frozen=True)
class Version:
    """The counts of one version of the kernels.

    Attributes:
        int4: Instructions of a lane per weight of 4 bits, by rows.
        pairs: The pairs of sums that a thread of Linear's epilogue loads at a time.
        joint: Whether it loads the sums of splits together with bias, residual, cosine and sine.
        norm: Round trips of the launch of a norm; and those of Linear for its result.
        before: Round trips of decode before its first keys.
        outputs: Splits whose outputs decode loads at a time.
        token: Round trips of decode for the new token's key, value and position.
        softmax: Cycles in which decode adds up the softmax of its splits: for each split, and for four query heads.
        chosen: Launches that find the token of the largest logit.
    """

    int4: dict[int, float]
    pairs: int
    joint: bool
    norm: tuple[int, int]
    before: int
    outputs: int
    token: int
    softmax: tuple[int, int]
    chosen: int


# Before: position, five reads of votes, length, queries, the first keys.
BEFORE = Version({1: 4.17, 8: 4.7, 32: 6.5}, 1, False, (1, 1), before=9, outputs=8, token=3, softmax=(70, 0), chosen=0)
# Now: two reads of votes, with which position, length and queries arrive, and the first keys.
NOW = Version(
    {rows: COUNTS[f"linear, int4, rows {rows}, per weight"] for rows in (1, 8, 32)},
    4,
    True,
    (1, 0),  # the launch of a norm keeps its rows in registers
    before=3,
    outputs=16,
    token=0,
    softmax=(0, 300),  # the lanes of a warp add up the splits
    chosen=5,  # Equal, Where, and ReduceMin between two casts
)
FLOAT16 = 4.5  # instructions of a lane per weight of 16 bits, counted for 8 rows
BYTES = {"float16": 2.0, "int4": 0.5 + 2 / 32}  # bytes of a weight; groups of 32 with a float16 scale each
# Launches of a step outside of its layers, by the nodes of a decoder (docs/measurements/cuda.md): positions and rotary
# factors 8, the embedding 1, the last row 6, the cast of the logits 1, the length 2, and 6 that find the largest
# logits. A packed embedding takes five more.
BESIDE, PACKED_EMBEDDING = 8 + 1 + 6 + 1 + 2 + 6, 5
# KV heads of a launch in per-head budgets (core/table.h); and, for a call of each head, the launches of the ONNX
# function that splits query, key and value and joins the outputs.
TABLE, SPLIT_AND_JOIN = 32, 4
OWN_BYTES = 16384  # the most bytes of several rows for which each block computes the norm itself (linear/linear.cu)


@dataclass(frozen=True)
class Device:
    """A GPU, by published figures.

    Attributes:
        name: Its name.
        copy: Bytes that a copy moves per second.
        multiprocessors: Their number.
        cycles: Cycles of a multiprocessor per second.
        products: Products per second that mma.sync reaches, six tenths of the published rate.
        held: Blocks of Linear for 8 rows, and of decode, that the shared memory of a multiprocessor holds.
        early: Whether launches begin early.
    """

    name: str
    copy: float
    multiprocessors: int
    cycles: float
    products: float
    held: tuple[int, int]
    early: bool = False


DEVICES = (
    Device("H200", 4.3e12, 132, 1.75e9, 0.6 * 989e12, (4, 3), early=True),
    Device("L40S", 0.9 * 864e9, 142, 2.52e9, 0.6 * 362e12, (2, 2)),
    Device("AGX Orin", 0.9 * 204.8e9, 16, 1.3e9, 0.6 * 42.5e12, (3, 3)),
)


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama and of its cache. `group` is the number of query heads of a KV head."""

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
    def products(self) -> list[tuple[int, int, bool, bool]]:
        """The products of a layer: inputs, outputs, whether a norm is before it, whether its epilogue reads numbers."""
        query, cache = self.heads * self.group * self.size, self.heads * self.size
        return [
            (self.hidden, query + 2 * cache, True, True),
            (query, self.hidden, False, True),
            (self.hidden, 2 * self.inner, True, False),
            (self.inner, self.hidden, False, True),
        ]

    @property
    def head(self) -> tuple[int, int, bool, bool]:
        """The product of the logits."""
        return self.hidden, self.vocabulary, True, False

    @property
    def weights(self) -> int:
        """The number of weights that a step reads: all but the embedding."""
        layer = sum(inputs * outputs for inputs, outputs, *_ in self.products)
        return self.layers * layer + self.head[0] * self.head[1]


SHAPES = (
    Shape("Llama-3.1-8B", 32, 4096, 14336, 8, 4, 128, 128256, 1024),
    Shape("Llama-2-7B", 32, 4096, 11008, 32, 1, 128, 32000, 1024),
    Shape("SmolLM2-135M", 30, 576, 1536, 3, 3, 64, 49152, 512),
)


def norm_is_launched(inputs: int, rows: int) -> bool:
    """Return whether the norm is a launch of its own."""
    return rows > 8 or (rows > 1 and rows * inputs * 2 > OWN_BYTES)


def linear_seconds(
    device: Device, product: tuple[int, int, bool, bool], weights: str, rows: int, version: Version
) -> tuple[float, float]:
    """Return the seconds of a product without its launch, and the part of them that round trips take."""
    inputs, outputs, norm, epilogue = product
    many, count = rows > 8, inputs * outputs
    columns, held = (128, 2) if many else (64, device.held[0])
    if weights == "int4" and not many:
        held = min(held, 3)  # rows loaded ahead need registers
    chunk = 256 if weights == "int4" else 64
    strips, chunks, places = ceil(outputs / columns), ceil(inputs / chunk), held * device.multiprocessors
    splits = max(1, min(chunks, places // strips))
    waves = ceil(strips * splits / places)
    launched = norm and norm_is_launched(inputs, rows)
    vectors = ceil(inputs / 8)
    # A row's vectors are read at once, four rows at a time if they are short.
    factors = ceil(rows / (4 if vectors <= 128 else 1)) * ceil(vectors / (128 if vectors <= 128 else 512))
    # The rows of a chunk are loaded a chunk ahead, or four at a time.
    in_chunk = ceil(ceil(rows / (16 if chunk == 64 else 4)) / 4) if many else 1
    before = (version.norm[1] if launched else norm * factors) + 1
    sums = ceil(rows * columns / 2 / 128)  # pairs of sums of a thread
    if version.joint:
        after = ceil(sums / version.pairs) * max(epilogue, ceil(splits / 8) if splits > 1 else 0)
    else:
        summed = ceil(rows * columns / 128) * ceil(splits / 8) if splits > 1 else 0
        after = summed + epilogue * ceil(sums / version.pairs)
    after += 3 if splits > 1 else 0  # fence, ticket, fence
    stream = max(
        count * BYTES[weights] / device.copy,
        count
        * (version.int4[rows] if weights == "int4" else FLOAT16)
        / (device.multiprocessors * device.cycles * LANES),
        2 * count * (32 if many else 8) / device.products,
    )
    looped = waves * ceil(chunks / splits) * in_chunk * TRIP
    trips = (before + after + (version.norm[0] if launched else 0)) * TRIP
    return max(stream, looped) + trips, trips + max(0.0, looped - stream)


def attention_seconds(device: Device, shape: Shape, batch: int, version: Version) -> tuple[float, float]:
    """Return the seconds of a layer's attention over a float16 cache with one average of logits, and of its trips."""
    heads = shape.heads * batch
    slots = heads * shape.budget
    counted = {1: 1, 3: 4, 4: 4}[shape.group]
    instructions = COUNTS[f"decode, float16, group {counted}, per slot"] * shape.size / 128
    stream = max(
        slots * slot_bytes(shape) / device.copy,
        slots * instructions / (device.multiprocessors * device.cycles * WARPS),
    )
    splits = max(1, min(shape.budget // 32, device.held[1] * device.multiprocessors // heads))
    # Fence, ticket, fence, the splits' softmax, their outputs; the new token.
    after = (4 + ceil(splits / version.outputs) if splits > 1 else 0) + version.token
    cycles = splits * version.softmax[0] + ceil(shape.group / 4) * version.softmax[1]
    trips = (version.before + after) * TRIP + (cycles / device.cycles if splits > 1 else 0.0)
    return stream + trips, trips


def slot_bytes(shape: Shape) -> int:
    """Return the bytes of a slot: key, value, votes, score and position."""
    return 4 * shape.size + 12


def own_launches(shape: Shape, batch: int) -> int:
    """Return the number of kvexport's launches in a step, which can begin early.

    They are four products and attention in each layer, the head, and norms.
    """
    norms = 2 * shape.layers + 1 if norm_is_launched(shape.hidden, batch) else 0
    return 5 * shape.layers + 1 + norms


def budgets_of_heads(shape: Shape) -> dict[str, Any]:
    """Return the launches of a step at batch 1 in per-head budgets.

    In a call for each head, the ONNX function also splits query, key and value, and joins the outputs.
    """
    equal = own_launches(shape, 1) + BESIDE + NOW.chosen
    each = equal + shape.layers * (shape.heads - 1 + SPLIT_AND_JOIN)
    table = equal + shape.layers * (ceil(shape.heads / TABLE) - 1)
    return {"model": shape.name, "equal budgets": equal, "a call for each head": each, "now": table}


def step(device: Device, shape: Shape, weights: str, batch: int, version: Version) -> dict[str, float]:
    """Return the microseconds of one step."""
    parts = [linear_seconds(device, product, weights, batch, version) for product in shape.products]
    parts.append(attention_seconds(device, shape, batch, version))
    head = linear_seconds(device, shape.head, weights, batch, version)
    seconds, trips = (shape.layers * sum(part[i] for part in parts) + head[i] for i in range(2))
    own = own_launches(shape, batch)
    launches = own + BESIDE + version.chosen + (PACKED_EMBEDDING if weights == "int4" else 0)
    whole = seconds + launches * LAUNCH
    early = [whole - own * saved if device.early else whole for saved in SAVED]
    return {
        "round trips us": trips * 1e6,
        "kernels us": seconds * 1e6,
        "launches": launches,
        "step us": whole * 1e6,
        "early least us": early[1] * 1e6,
        "early most us": early[0] * 1e6,
    }


def row(device: Device, shape: Shape, weights: str, batch: int) -> dict[str, Any]:
    """Return the figures of a step with the kernels before this version and now, and its floor: its bytes' time."""
    cache = shape.layers * shape.heads * batch * shape.budget * slot_bytes(shape)
    floor = (shape.weights * BYTES[weights] + cache) / device.copy * 1e6
    figures: dict[str, Any] = {"device": device.name, "model": shape.name, "weights": weights, "batch": batch}
    figures |= {"floor us": floor}
    for name, version in (("before", BEFORE), ("now", NOW)):
        times = step(device, shape, weights, batch, version)
        figures[name] = times | {"over the floor": [times["early least us"] / floor, times["early most us"] / floor]}
    return figures


def main() -> None:
    """Print the table and save the figures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cases = [(device, shape, "int4") for device in DEVICES for shape in (SHAPES[0], SHAPES[2])]
    cases += [(DEVICES[0], SHAPES[1], weights) for weights in BYTES] + [(DEVICES[0], SHAPES[2], "float16")]
    rows = [row(*case, batch) for case in cases for batch in (1, 8, 32)]
    print(
        "| GPU | model | weights | batch | floor, us | round trips, us, before | now | step, us, before | now "
        "| over the floor, before | now |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for one in rows:
        before, now = one["before"], one["now"]
        cells = [one["device"], one["model"], one["weights"], one["batch"], f"{one['floor us']:.0f}"]
        cells += [f"{x['round trips us']:.0f}" for x in (before, now)]
        cells += [_range(x["early least us"], x["early most us"], 0) for x in (before, now)]
        cells += [_range(*x["over the floor"], 2) for x in (before, now)]
        print(f"| {' | '.join(map(str, cells))} |")
    print("\n| launches of a step | equal budgets | budgets of heads, a call for each head | now |\n|---|---|---|---|")
    heads = [budgets_of_heads(shape) for shape in SHAPES]
    for one in heads:
        print(f"| {' | '.join(map(str, one.values()))} |")
    assumed = {"seconds a launch": LAUNCH, "seconds a round trip": TRIP, "of launches saved by early ones": SAVED}
    shapes = [asdict(shape) | {"weights": shape.weights} for shape in SHAPES]
    devices = [asdict(device) for device in DEVICES]
    figures = {"assumed": assumed, "devices": devices, "instructions": COUNTS, "shapes": shapes, "rows": rows}
    save("step_on_paper", figures | {"launches in budgets of heads": heads, "instructions in budgets of heads": RATIOS})


def _range(least: float, most: float, digits: int) -> str:
    low, high = f"{least:.{digits}f}", f"{most:.{digits}f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
