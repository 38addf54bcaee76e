"""Effect of the begin of launches on a step: the part `launches` of `gpu_check`.

The attention of all layers of a step runs as one CUDA graph in two ways: launches one after another, and launches that
begin while the one before ends. Both must give equal bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tests.conformance.cuda_library import EARLY, IN_ORDER
from tools.gpu_check.parts import Step, attributes_of, bandwidth, layer
from tools.gpu_check.target import Figures, Row, Target

BEGIN = {"in order": IN_ORDER, "early": EARLY}
REPLAYS = 32  # replays of a step in one span: fewer than the slots that a cache has beyond those in use


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    heads: int
    group: int  # query heads of a KV head
    size: int
    slots: int


SHAPES = (
    Shape("SmolLM2-135M", 30, 3, 3, 64, 512),
    Shape("Llama-2-7B", 32, 32, 1, 128, 1024),
)
SMALL = {"layers": 2, "heads": 1, "group": 2, "size": 32, "slots": 40}


class Layers:
    """The launches of all layers. The queries of a layer are the output of the one before."""

    def __init__(self, target: Target, shape: Shape) -> None:
        self.target, self.shape = target, shape
        arrays = layer(1, shape.heads * shape.group, shape.heads, shape.slots, 1, 1, "float16", shape.size)
        self.attention = [Step(target, arrays, attributes_of("log_ema")) for _ in range(shape.layers)]
        for before, after in pairwise(self.attention):
            after.call.query = before.call.output
        for step in self.attention:  # the workspace grows now, since a CUDA graph keeps using its own
            target.caller.prepared("vote_attention", step.call)

    def bytes(self) -> int:
        """Return the bytes that a step reads: keys, values and numbers of the used slots."""
        shape = self.shape
        return shape.layers * shape.heads * shape.slots * (4 * shape.size + 12)

    def enqueue(self) -> None:
        for step in self.attention:
            step()

    def reset(self) -> None:
        """Remove the tokens that steps appended."""
        for step in self.attention:
            step.reset()

    def replayed(self, begin: int) -> Callable[[], Any]:
        """Return a step as a CUDA graph whose launches begin as given."""
        caller = self.target.caller
        caller.begin = begin
        try:
            self.reset()
            return self.target.captured(self.enqueue)
        finally:
            caller.begin = IN_ORDER

    def outcome(self, step: Callable[[], Any]) -> bytes:
        """Return the bits of the last layer's output in the first step."""
        self.reset()
        step()
        output = self.target.caller.memory.get(self.attention[-1].output)
        if not np.isfinite(output).all():
            raise RuntimeError(f"{self.shape.name}: a layer's numbers are not finite")
        return bytes(output.tobytes())


def launches(target: Target) -> Figures:
    """Measure the microseconds of a step's layers for each begin of launches, next to the time of their bytes."""
    figures: Figures = {"bytes per second": bandwidth(target)["bytes per second"]}
    shapes = [replace(shape, **SMALL) for shape in SHAPES] if target.small else SHAPES
    return target.rows(shapes, figures, lambda shape: rows_of(target, shape, figures))


def rows_of(target: Target, shape: Shape, figures: Figures) -> list[Row]:
    layers, rows, expected = Layers(target, shape), list[Row](), b""
    floor, replays = layers.bytes() / figures["bytes per second"], target.scaled(REPLAYS, 2)
    for name, begin in BEGIN.items():
        step = layers.replayed(begin)
        outcomes = [layers.outcome(step) for _ in range(target.scaled(20, 1))]
        expected = expected or outcomes[0]
        if set(outcomes) != {expected}:
            raise RuntimeError(f"{shape.name}: launches that begin {name} make other bits than those in order")

        def run(step: Callable[[], Any] = step) -> None:
            for _ in range(replays):
                step()

        seconds = statistics.median(target.spans(run, layers.reset, rounds=9)) / replays
        row: Row = {"model": shape.name, "begin": name, "us": seconds * 1e6}
        row |= {"launches": shape.layers, "floor us": floor * 1e6, "over the floor": seconds / floor}
        rows.append(row)
    for row in rows:
        row["over in order"] = row["us"] / rows[0]["us"]
        row["us saved a launch"] = (rows[0]["us"] - row["us"]) / row["launches"]
    return rows


PARTS = {"launches": launches}
