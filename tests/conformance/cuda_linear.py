"""Linear's kernels through their C ABI: calls of any form from arrays, and weights in any storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvexport.ops.linear import Form
from kvexport.ops.packed import PackedFormat, dequantize, pack
from tests.conformance.cuda_library import TYPES, Caller, Linear, LinearProduct, LinearWeight, bfloat16, float32_of

Arrays = dict[str, np.ndarray]


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return numbers in the dtype of a call, bfloat16 as its bits."""
    return bfloat16(x) if dtype == "bfloat16" else x.astype(dtype)


def exact(x: np.ndarray) -> np.ndarray:
    """Return stored numbers in double precision."""
    return (float32_of(x) if x.dtype == np.uint16 else x).astype(np.float64)


@dataclass
class Weight:
    """A weight [outputs, inputs], with its stored tensors and its values."""

    parts: Arrays
    values: np.ndarray
    packing: PackedFormat | None = None

    @classmethod
    def plain(cls, rng: np.random.Generator, outputs: int, inputs: int, dtype: str) -> Weight:
        held = stored(rng.standard_normal((outputs, inputs)) / np.sqrt(inputs), dtype)
        return cls({"weight": held}, exact(held))

    @classmethod
    def packed(cls, rng: np.random.Generator, outputs: int, inputs: int, packing: PackedFormat) -> Weight:
        held: Arrays = {}
        for part, (dtype, shape) in packing.tensors(outputs, inputs).items():
            if part in ("weight", "zero"):
                held[part] = pack(
                    rng.integers(packing.lowest, packing.lowest + (1 << packing.bits), shape), packing.bits
                )
            else:
                size = 1 / np.sqrt(inputs) / ((1 << (packing.bits - 1)) if part == "scale" else 1)
                held[part] = (rng.standard_normal(shape) * size).astype(dtype)
        return cls(held, dequantize(packing, outputs, inputs, held).astype(np.float64), packing)

    def view(self, held: dict[str, Any], address: Any) -> Any:
        """Return the weight's C structure. `held` are its parts in the kernels' memory."""
        if self.packing is None:
            return LinearWeight(data=address(held["weight"]))
        kind = TYPES[self.packing.scale_dtype]
        view = LinearWeight(data=address(held["weight"]), bits=self.packing.bits, is_signed=self.packing.signed)
        view.group, view.scale_type, view.scale, view.minimum_type = (
            self.packing.group,
            kind,
            address(held["scale"]),
            kind,
        )
        for part in ("zero", "minimum"):
            if part in held:
                setattr(view, part, address(held[part]))
        return view


@dataclass
class Case:
    """A call of Linear: its form, its dtype, and its stored arrays by the form's names."""

    form: Form
    dtype: str
    feeds: Arrays
    weights: dict[str, Weight]
    offset: int = 0  # bytes between an aligned address and a tensor
    _kept: list[Any] = field(default_factory=list)

    @property
    def rows(self) -> tuple[int, int]:
        """Return the batch and the tokens."""
        shape = self.feeds["input"].shape
        return shape[0], shape[2] if self.form.input_heads else shape[1]

    def call(self, caller: Caller) -> tuple[Any, list[Any]]:
        """Return the call, with its tensors in the library's memory, and the outputs."""
        form, memory = self.form, caller.memory

        def put(x: np.ndarray) -> Any:
            if not self.offset:
                held = memory.put(x)
            else:
                held = memory.bytes(x.nbytes + self.offset, 0)[self.offset :].view(x.dtype).reshape(x.shape)
                held[...] = x
            self._kept.append(held)
            return held

        def place(name: str) -> int | None:
            return memory.address(put(self.feeds[name])) if name in self.feeds else None

        def weight(name: str) -> Any:
            one = self.weights[name]
            return one.view({part: put(x) for part, x in one.parts.items()}, memory.address)

        batch, tokens = self.rows
        inputs = self.weights["weight0"].values.shape[1]
        call = Linear(type=2 if self.dtype == "bfloat16" else TYPES[self.dtype], batch=batch, tokens=tokens)
        call.inputs, call.input_heads, call.float_input = inputs, form.input_heads or 1, form.float_input
        call.count, call.epsilon = form.count, form.epsilon
        for name in ("input", "norm", "residual", "cosine", "sine"):
            setattr(call, name, place(name))
        if form.gate:
            call.gate = weight("gate")
        if any(form.rotated):
            call.planes = self.feeds["cosine"].shape[-1]
        outputs = []
        for i in range(form.count):
            columns, heads = self.weights[f"weight{i}"].values.shape[0], form.output_heads[i]
            shape = (batch, heads, tokens, columns // heads) if heads else (batch, tokens, columns)
            outputs.append(put(stored(np.full(shape, 77.0), self.dtype)))
            call.products[i] = LinearProduct(
                outputs=columns, heads=heads or 1, rotated=form.rotated[i], weight=weight(f"weight{i}"),
                bias=place(f"bias{i}"), output=memory.address(outputs[-1]),
            )  # fmt: skip
        return call, outputs

    def run(self, caller: Caller) -> list[np.ndarray]:
        call, outputs = self.call(caller)
        caller._run("linear", call)
        return [caller.memory.get(x) for x in outputs]

    def terms(self) -> Arrays:
        """Return all tensors in double precision."""
        return {name: exact(x) for name, x in self.feeds.items()} | {n: w.values for n, w in self.weights.items()}


def case(
    form: Form,
    dtype: str,
    rows: tuple[int, int],
    inputs: int,
    outputs: int,
    packings: tuple[PackedFormat, ...] = (),
    *,
    seed: int = 0,
) -> Case:
    """Return a call with random tensors.

    Args:
        form: The form of Linear.
        dtype: The dtype of the call.
        rows: Batch and tokens.
        inputs: The number of inputs.
        outputs: The number of outputs of a product. A rotated product has as many as fit its heads.
        packings: The formats of the weights, the gate's last. Without formats the weights are plain.
        seed: The seed of the numbers.
    """
    rng, (batch, tokens) = np.random.default_rng(seed), rows
    planes = max(1, outputs // 4)
    sizes = [2 * planes * h if any(form.rotated) and h else outputs + 6 * i for i, h in enumerate(form.output_heads)]
    names = [f"weight{i}" for i in range(form.count)] + ["gate"] * form.gate
    weights = {}
    for i, name in enumerate(names):
        n = sizes[i] if i < form.count else sizes[0]
        plain = not packings or not form.packed[i]
        weights[name] = Weight.plain(rng, n, inputs, dtype) if plain else Weight.packed(rng, n, inputs, packings[i])
    heads = form.input_heads
    shapes: dict[str, tuple[int, ...]] = {
        "input": (batch, heads, tokens, inputs // heads) if heads else (*rows, inputs)
    }
    if form.norm:
        shapes["norm"] = (inputs,)
    shapes |= {f"bias{i}": (size,) for i, size in enumerate(sizes) if form.bias[i]}
    if form.residual:
        shapes["residual"] = (*rows, sizes[0])
    if any(form.rotated):
        shapes |= {"cosine": (*rows, planes), "sine": (*rows, planes)}
    return Case(form, dtype, {n: stored(rng.standard_normal(s), dtype) for n, s in shapes.items()}, weights)
