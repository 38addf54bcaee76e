"""Packed weights: a weight in 2 to 6 or in 8 bits with a scale for each group of inputs.

Quantized checkpoints and artifacts store weights in this form:

    value[n, k] = weight[n, k] * scale[n, k / group]                                 offset none
                = (weight[n, k] - zero[n, k / group]) * scale[n, k / group]          offset zero
                = weight[n, k] * scale[n, k / group] + minimum[n, k / group]         offset minimum
                = table[weight[n, k]] * scale[n, k / group]                          with a table

A scale is stored as a float; as an exponent e in a byte, for the scale 2^(e - 128); or as an integer that is multiplied
with the float16 super-scale of 256 inputs (ggml's K types). A minimum is stored as a float or as such an integer. The
value is computed in float32 and rounded once to the model's type. A byte stores two 4-bit codes (integers), the first
in its low half, as in ONNX. Codes of 3, 5 and 6 bits are stored in two tensors: `weight` has the lower 2 or 4 bits, and
`high` the upper 1 or 2. Fields of 1 or 2 bits are packed as `unpack_fields` says. Signed codes of 3, 5 and 6 bits are
stored as code + 2^(bits - 1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of the 4-bit floats E2M1, by their bits."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of ggml's type IQ4_NL."""
_TABLES: dict[tuple[int, ...], str] = {E2M1: "float4 e2m1", IQ4: "iq4"}
GROUPS = (16, 256)
"""Smallest and largest group; the whole row is one as well."""
SUPER = 256
"""The number of inputs that share a super-scale."""
SUB_SCALES = ("int8", "uint4", "int6")
"""The types of scales that are multiplied with super-scales. `pack_sixes` stores int6."""


class PackedTensor(NamedTuple):
    """The type and shape of one tensor of a packed weight.

    Attributes:
        dtype: A numpy name, or int4 or uint4, which are stored two in a byte.
        shape: The shape in elements.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes of the stored tensor."""
        count = math.prod(self.shape)
        return -(-count // 2) if self.dtype in ("int4", "uint4") else count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class PackedFormat:
    """The format of a packed weight: integer codes of 2 to 6 or of 8 bits with a scale for each group of inputs.

    Attributes:
        bits: The bits of an integer code.
        signed: Whether the codes are signed.
        group: The number of consecutive inputs that share a scale.
        offset: The tensor that accompanies the scale: none, a zero point in the weight's type, or a minimum in the
            scale's type.
        scale_dtype: The type of the scales. Scales of uint8 are exponents, which only a weight with a table has. The
            scale types in `SUB_SCALES` are integers, which a super-scale for every 256 inputs multiplies; minima
            have super-scales of their own.
        ordered: Whether the columns are in another order than the input's features: column k belongs to feature
            `order[k]`.
        table: The sixteen int8 values that the indices of a uint4 weight stand for; empty for a weight without a
            table.
    """

    bits: Literal[2, 3, 4, 5, 6, 8]
    signed: bool
    group: int
    offset: Literal["none", "zero", "minimum"] = "none"
    scale_dtype: Literal["float16", "float32", "uint8", "int8", "uint4", "int6"] = "float16"
    ordered: bool = False
    table: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        """The data type of a weight's integer codes and zero points, such as int4 or uint8."""
        return f"{'' if self.signed else 'u'}int{self.bits}"

    @property
    def lowest(self) -> int:
        """The smallest integer that the weight's data type can hold."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def label(self) -> str:
        """The weight's format in words for people, such as "int4, groups of 32, zero points"."""
        offset = {"none": "", "zero": ", zero points", "minimum": ", minima"}[self.offset]
        kind = f"{_TABLES[self.table]} (4 bits)" if self.table else self.dtype
        return f"{kind}, groups of {self.group}{offset}{', columns in order of groups' * self.ordered}"

    @property
    def scale(self) -> str:
        """The name of the tensor that holds the scales: `exponent` if scales are powers of two, otherwise `scale`."""
        return "exponent" if self.scale_dtype == "uint8" else "scale"

    @property
    def low_bits(self) -> int:
        """How many lower bits of each integer code are stored in the tensor `weight`."""
        return 2 if self.bits < 4 else 4 if self.bits < 8 else 8

    @property
    def high_bits(self) -> int:
        """How many upper bits of each integer code are stored apart, in the tensor `high`; 0 if the weight has none."""
        return self.bits - self.low_bits

    @property
    def has_supers(self) -> bool:
        """Whether scales and minima are integers that super-scales (one for 256 inputs) multiply, as in ggml."""
        return self.scale_dtype in SUB_SCALES

    @property
    def kind(self) -> int:
        """The number that stands for this format in the attribute `packed` of the operators Linear and Experts."""
        offset = {"none": 1, "zero": 2, "minimum": 3}[self.offset]
        base = offset if not self.table else 5 if self.scale_dtype == "uint8" else 4
        return base + 8 * self.has_supers + 16 * self.high_bits + 64 * (self.low_bits == 2)

    def tensors(self, outputs: int, inputs: int) -> dict[str, PackedTensor]:
        """Return the tensors that together store a weight [outputs, inputs], by name."""
        groups = (outputs, inputs // self.group)
        scale = PackedTensor(self.scale_dtype, groups)
        if self.scale_dtype == "int6":
            scale = PackedTensor("uint8", (outputs, groups[1] * 6 // 8))
        weight = PackedTensor("uint4" if self.high_bits else self.dtype, (outputs, inputs))
        if self.low_bits == 2:
            weight = PackedTensor("uint8", (outputs, inputs * 2 // 8))
        tensors = {"weight": weight, self.scale: scale}
        if self.table:
            tensors["table"] = PackedTensor("int8", (len(self.table),))
        if self.offset != "none":
            tensors[self.offset] = PackedTensor(self.dtype if self.offset == "zero" else self.scale_dtype, groups)
        if self.has_supers:
            for name in ("scale", "minimum"):
                if name in tensors:
                    tensors[f"super_{name}"] = PackedTensor("float16", (outputs, inputs // SUPER))
        if self.high_bits:
            tensors["high"] = PackedTensor("uint8", (outputs, inputs * self.high_bits // 8))
        if self.ordered:
            tensors["order"] = PackedTensor("int64", (inputs,))
        return tensors

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Return the size in bytes of a weight [outputs, inputs], with scales and all other parts."""
        return sum(tensor.nbytes for tensor in self.tensors(outputs, inputs).values())

    def fault(self, inputs: int) -> str:
        """Return why a weight with this many inputs cannot have this format; an empty string if it can."""
        least, most = GROUPS
        if self.group != inputs and not least <= self.group <= most:
            return f"groups of {self.group} inputs, expected {least} to {most}, or all {inputs}"
        if self.group % 2 or inputs % self.group:
            return f"groups of {self.group} inputs do not divide {inputs} inputs into groups of an even number"
        return ""


def pack(values: Array, bits: int) -> Array:
    """Return integers as the bytes to store: 8-bit integers in their shape, 4-bit integers two in a byte, flat."""
    if bits == 8:
        return values.astype(np.int8 if values.min(initial=0) < 0 else np.uint8)
    flat = values.reshape(-1).astype(np.uint8) & 15
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: Array = flat[0::2] | (flat[1::2] << 4)
    return packed


def unpack(stored: Array, tensor: PackedTensor) -> Array:
    """Reverse `pack`: return the integers, int8 or uint8 in the tensor's shape, from stored bytes."""
    if tensor.dtype in ("int8", "uint8"):
        return stored.reshape(-1).view(tensor.dtype).reshape(tensor.shape)
    flat = np.empty(stored.size * 2, np.uint8)
    flat[0::2], flat[1::2] = stored.reshape(-1) & 15, stored.reshape(-1) >> 4
    if tensor.dtype == "int4":
        flat = ((flat ^ 8) - 8).view(np.int8)
    return flat[: math.prod(tensor.shape)].reshape(tensor.shape)


def unpack_fields(stored: Array, bits: int) -> Array:
    """Return integers [..., inputs] uint8 of 1 or 2 bits, which are packed into [..., inputs * bits / 8] bytes.

    Byte i of every four bytes has the bits of the inputs i, i + 4, i + 8 and so on, the first in its lowest bits.
    """
    fields = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    apart = stored.reshape(*stored.shape[:-1], -1, 1, 4) >> fields & np.uint8((1 << bits) - 1)
    numbers: Array = apart.reshape(*stored.shape[:-1], -1)
    return numbers


def pack_sixes(numbers: Array) -> Array:
    """Pack integers [..., n] uint8 of 6 bits into [..., n * 6 / 8] bytes.

    Every four integers become three bytes. The six low bits of each byte are one of the first three integers; the two
    high bits are bits 0 and 1, 2 and 3, or 4 and 5 of the fourth integer.
    """
    fours = numbers.reshape(*numbers.shape[:-1], -1, 4)
    last = fours[..., 3:] >> np.array([0, 2, 4], np.uint8) << 6
    packed: Array = (fours[..., :3] | last).reshape(*numbers.shape[:-1], -1)
    return packed


def unpack_sixes(stored: Array) -> Array:
    """Reverse `pack_sixes`: return integers of 6 bits from the packed bytes."""
    threes = stored.reshape(*stored.shape[:-1], -1, 3)
    last = np.bitwise_or.reduce(threes >> 6 << np.array([0, 2, 4], np.uint8), axis=-1, keepdims=True)
    numbers: Array = np.concatenate([threes & 63, last], axis=-1).reshape(*stored.shape[:-1], -1)
    return numbers


def integers(packing: PackedFormat, outputs: int, inputs: int, stored: Mapping[str, Array]) -> Array:
    """Return the integer codes [outputs, inputs] of a packed weight, as int8 or uint8."""
    numbers = unpack(stored["weight"], packing.tensors(outputs, inputs)["weight"])
    if packing.low_bits == 2:
        numbers = unpack_fields(numbers, 2)
    if not packing.high_bits:
        return numbers
    upper = unpack_fields(stored["high"].reshape(outputs, -1), packing.high_bits)
    joined: Array = numbers | upper << packing.low_bits
    return joined.view(np.int8) - np.int8(1 << (packing.bits - 1)) if packing.signed else joined


def scales(packing: PackedFormat, stored: Mapping[str, Array], name: str = "scale") -> NDArray[np.float32]:
    """Return the scales or minima in float32, one for each group of inputs.

    A stored exponent e becomes the scale 2^(e - 128). A scale stored as an integer is multiplied with the super-scale
    of its 256 inputs.
    """
    if name == "scale" and packing.scale == "exponent":
        powers: NDArray[np.float32] = np.ldexp(np.float32(1), stored["exponent"].astype(np.int32) - 128)
        return powers
    factors = stored[name]
    if packing.scale_dtype == "int6":
        factors = unpack_sixes(factors).view(np.int8) - np.int8(32)
    if packing.scale_dtype == "uint4":
        factors = unpack(factors, PackedTensor("uint4", (factors.size * 2,)))
    if not packing.has_supers:
        return factors.astype(np.float32)
    supers = np.repeat(stored[f"super_{name}"].astype(np.float32), SUPER // packing.group, axis=-1)
    return factors.reshape(supers.shape) * supers


def dequantize(packing: PackedFormat, outputs: int, inputs: int, stored: Mapping[str, Array]) -> NDArray[np.float32]:
    """Return the float32 values [outputs, inputs] of a packed weight; column k belongs to input feature k."""
    tensors = packing.tensors(outputs, inputs)
    numbers = integers(packing, outputs, inputs, stored).reshape(outputs, -1, packing.group)
    values = (np.array(packing.table, np.float32)[numbers] if packing.table else numbers).astype(np.float32)
    if packing.offset == "zero":
        values -= unpack(stored["zero"], tensors["zero"])[..., None].astype(np.float32)
    values *= scales(packing, stored).reshape(outputs, -1, 1)
    if packing.offset == "minimum":
        values += scales(packing, stored, "minimum").reshape(outputs, -1, 1)
    columns = values.reshape(outputs, inputs)
    if not packing.ordered:
        return columns
    result = np.empty_like(columns)
    result[:, stored["order"]] = columns
    return result
