"""Packed weights: a projection's weight in 4 or 8 bits with a scale for each group of inputs, as quantized checkpoints
hold it and as artifacts keep it.

    value[n, k] = weight[n, k] * scale[n, k / group]                                 offset none
                = (weight[n, k] - zero[n, k / group]) * scale[n, k / group]          offset zero
                = weight[n, k] * scale[n, k / group] + minimum[n, k / group]         offset minimum

in float32, rounded once to the model's type. Four-bit numbers lie two in a byte, the first in the low half, as in ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
GROUPS = (16, 256)
"""Smallest and largest group; the whole row is one as well."""


class Part(NamedTuple):
    """One tensor of a packed weight. dtype: a name of numpy's, or int4 or uint4, which lie two in a byte."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        count = math.prod(self.shape)
        return -(-count // 2) if self.dtype in ("int4", "uint4") else count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class PackedFormat:
    """How a weight is packed. group: consecutive inputs that share a scale. offset: what stands beside the scale, in
    the weight's type (zero) or in the scale's (minimum). ordered: columns stand in another order than the input's
    features: column k is that of feature `order[k]`."""

    bits: Literal[4, 8]
    signed: bool
    group: int
    offset: Literal["none", "zero", "minimum"] = "none"
    scale_dtype: Literal["float16", "float32"] = "float16"
    ordered: bool = False

    @property
    def dtype(self) -> str:
        """Of the weight and the zeros: int4, uint4, int8 or uint8."""
        return f"{'' if self.signed else 'u'}int{self.bits}"

    @property
    def lowest(self) -> int:
        """The smallest number that `dtype` holds."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def label(self) -> str:
        """For a person: "int4, groups of 32, zero points"."""
        offset = {"none": "", "zero": ", zero points", "minimum": ", minima"}[self.offset]
        return f"{self.dtype}, groups of {self.group}{offset}{', columns in order of groups' * self.ordered}"

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """The tensors of a weight [outputs, inputs], by name, in the order in which they are stored."""
        groups = (outputs, inputs // self.group)
        parts = {"weight": Part(self.dtype, (outputs, inputs)), "scale": Part(self.scale_dtype, groups)}
        if self.offset != "none":
            parts[self.offset] = Part(self.dtype if self.offset == "zero" else self.scale_dtype, groups)
        if self.ordered:
            parts["order"] = Part("int64", (inputs,))
        return parts

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts(outputs, inputs).values())

    def fault(self, inputs: int) -> str:
        """Why no weight of so many inputs can be packed so; empty where one can."""
        least, most = GROUPS
        if self.group != inputs and not least <= self.group <= most:
            return f"groups of {self.group} inputs, expected {least} to {most}, or all {inputs}"
        if self.group % 2 or inputs % self.group:
            return f"groups of {self.group} inputs do not divide {inputs} inputs into groups of an even number"
        return ""


def pack(values: Array, bits: int) -> Array:
    """Whole numbers of any shape as they are stored: 8 bits as they are; 4 bits two in a byte, flat."""
    if bits == 8:
        return values.astype(np.int8 if values.min(initial=0) < 0 else np.uint8)
    flat = values.reshape(-1).astype(np.uint8) & 15
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: Array = flat[0::2] | (flat[1::2] << 4)
    return packed


def unpack(stored: Array, part: Part) -> Array:
    """The whole numbers of `part` from what `pack` stored: int8 or uint8, of its shape."""
    if part.dtype in ("int8", "uint8"):
        return stored.reshape(-1).view(part.dtype).reshape(part.shape)
    flat = np.empty(stored.size * 2, np.uint8)
    flat[0::2], flat[1::2] = stored.reshape(-1) & 15, stored.reshape(-1) >> 4
    if part.dtype == "int4":
        flat = ((flat ^ 8) - 8).view(np.int8)
    return flat[: math.prod(part.shape)].reshape(part.shape)


def dequantize(packing: PackedFormat, outputs: int, inputs: int, stored: Mapping[str, Array]) -> NDArray[np.float32]:
    """[outputs, inputs] float32 of the stored parts (arrays of `PackedFormat.parts`; 4-bit ones as bytes), columns in
    the order of the input's features."""
    parts = packing.parts(outputs, inputs)
    values = unpack(stored["weight"], parts["weight"]).reshape(outputs, -1, packing.group).astype(np.float32)
    if packing.offset == "zero":
        values -= unpack(stored["zero"], parts["zero"])[..., None].astype(np.float32)
    values *= stored["scale"].reshape(outputs, -1, 1).astype(np.float32)
    if packing.offset == "minimum":
        values += stored["minimum"].reshape(outputs, -1, 1).astype(np.float32)
    columns = values.reshape(outputs, inputs)
    if not packing.ordered:
        return columns
    result = np.empty_like(columns)
    result[:, stored["order"]] = columns
    return result
