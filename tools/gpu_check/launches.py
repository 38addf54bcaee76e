"""Effect of the begin of launches on a step: the part `launches` of `gpu_check`.

The layers of a step, only the kernels, run as one CUDA graph in three ways: launches one after another, launches that
begin while the one before ends, and in addition weights that are read before that end. All three must give equal bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvexport.ops.packed import PackedFormat
from tests.conformance.cuda_library import EARLY, EARLY_WEIGHTS, IN_ORDER
from tools.gpu_check.linear import call_of
from tools.gpu_check.parts import Step, attributes_of, bandwidth, layer
from tools.gpu_check.target import Figures, Row, Target

BEGIN = {"in order": IN_ORDER, "early": EARLY, "early, weights first": EARLY_WEIGHTS}
REPLAYS = 32  # replays of a step in one span: fewer than the slots that a cache has beyond those in use
LAUNCHES = 5  # launches of a layer


@dataclass(frozen=True)
class Shape:
    """The layers of a Llama.

    Attributes:
        group: Query heads of a KV head.
        distinct: Layers with weights of their own, used in turn; together they are larger than a device's cache.
    """

    name: str
    weights: str
    packing: PackedFormat | None
    layers: int
    distinct: int
    hidden: int
    inner: int
    heads: int
    group: int
    size: int
    slots: int


SHAPES = (
    Shape("SmolLM2-135M", "float16", None, 30, 30, 576, 1536, 3, 3, 64, 512),
    Shape("Llama-2-7B", "int4", PackedFormat(4, True, 32), 32, 4, 4096, 11008, 32, 1, 128, 1024),
)
SMALL = {"layers": 2, "distinct": 1, "hidden": 64, "inner": 96, "heads": 1, "group": 2, "size": 32, "slots": 40}


class Layers:
    """The launches of all layers, each on the output of the one before."""

    def __init__(self, target: Target, shape: Shape) -> None:
        self.target, self.shape, self.kept, self.weight_bytes = target, shape, list[Any](), 0
        memory, width = target.caller.memory, shape.heads * shape.group * shape.size
        start = np.random.default_rng(1).normal(size=(1, 1, shape.hidden)).astype(np.float16)
        self.hidden = memory.put(start)
        arrays = layer(1, shape.heads * shape.group, shape.heads, shape.slots, 1, 1, "float16", shape.size)
        turned = tuple(shape.heads * x for x in (shape.group, 1, 1))
        normed = {"norm": 1, "epsilon": 1e-5}
        forms: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
            "qkv": (
                tuple(heads * shape.size for heads in turned),
                shape.hidden,
                {**normed, "output_heads": turned, "bias": (0, 0, 0), "rotated": (1, 1, 0)},
            ),
            "out": ((shape.hidden,), width, {"residual": 1}),
            "gate": ((shape.inner,), shape.hidden, {**normed, "gate": 1}),
            "down": ((shape.hidden,), shape.inner, {"residual": 1}),
        }
        products = [{name: self.linear(*form) for name, form in forms.items()} for _ in range(shape.distinct)]
        self.attention = [Step(target, arrays, attributes_of("log_ema")) for _ in range(shape.layers)]
        self.calls: list[tuple[str, Any]] = []
        hidden = memory.address(self.hidden)
        for i, attend in enumerate(self.attention):
            qkv, out, gate, down = (type(call).from_buffer_copy(call) for call in products[i % shape.distinct].values())
            qkv.input = out.residual = hidden
            for j, name in enumerate(("query", "key", "value")):
                setattr(attend.call, name, qkv.products[j].output)
            out.input = attend.call.output
            gate.input = down.residual = out.products[0].output
            down.input, hidden = gate.products[0].output, self.room(shape.hidden)
            down.products[0].output = hidden
            chain = (("linear", qkv), ("vote_attention", attend.call), ("linear", out), ("linear", gate))
            self.calls += [*chain, ("linear", down)]
        self.last = self.kept[-1]
        for operator, call in self.calls:  # the workspace grows now, since a CUDA graph keeps using its own
            target.caller.prepared(operator, call)

    def room(self, count: int) -> int:
        """Return the address of memory for `count` elements."""
        memory = self.target.caller.memory
        self.kept.append(memory.put(np.zeros(count, np.float16)))
        return int(memory.address(self.kept[-1]))

    def linear(self, sizes: tuple[int, ...], inputs: int, steps: dict[str, Any]) -> Any:
        """Return a call with weights of its own, scaled so that numbers keep their magnitude from layer to layer."""
        one = call_of(1, sizes, inputs, steps, self.shape.packing)
        for weight in one.weights.values():
            part, scale = ("scale", inputs**-0.5 / 8) if self.shape.packing else ("weight", inputs**-0.5)
            weight.parts[part] = (weight.parts[part] * scale).astype(np.float16)
        call, outputs = one.call(self.target.caller)
        self.kept += [one, outputs]
        self.weight_bytes += sum(x.nbytes for weight in one.weights.values() for x in weight.parts.values())
        return call

    def bytes(self) -> int:
        """Return the bytes that a step reads: weights, and keys, values and numbers of the used slots."""
        shape = self.shape
        slots = shape.layers * shape.heads * shape.slots * (4 * shape.size + 12)
        return self.weight_bytes * shape.layers // shape.distinct + slots

    def enqueue(self) -> None:
        """Enqueue a step."""
        for operator, call in self.calls:
            self.target.caller.prepared(operator, call)()

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
        output = self.target.caller.memory.get(self.last)
        if not np.isfinite(output).all():
            raise RuntimeError(f"{self.shape.name}: a layer's numbers are not finite")
        return bytes(output.tobytes())


def launches(target: Target) -> Figures:
    """Measure the microseconds of a step's layers for each begin of launches, next to the time of their bytes."""
    figures: Figures = {"bytes per second": bandwidth(target)["bytes per second"]}
    shapes = [replace(shape, **SMALL) for shape in SHAPES] if target.small else SHAPES
    return target.rows(shapes, figures, lambda shape: rows_of(target, shape, figures))


def rows_of(target: Target, shape: Shape, figures: Figures) -> list[Row]:
    """Return a row for each value of BEGIN."""
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
        row: Row = {"model": shape.name, "weights": shape.weights, "begin": name, "us": seconds * 1e6}
        row |= {"launches": LAUNCHES * shape.layers, "floor us": floor * 1e6, "over the floor": seconds / floor}
        rows.append(row)
    for row in rows:
        row["over in order"] = row["us"] / rows[0]["us"]
        row["us saved a launch"] = (rows[0]["us"] - row["us"]) / row["launches"]
    return rows


PARTS = {"launches": launches}
