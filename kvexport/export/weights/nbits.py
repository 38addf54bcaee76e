"""Packed weights in the layout of ONNX Runtime's MatMulNBits, GatherBlockQuantized and QMoE, which run on GPUs.

Integer codes in this layout are unsigned, and without a zero point 2^(bits - 1) stands for 0. Groups (inputs that share
a scale) are powers of two, and the zero points of every output begin at a byte. All conversions are exact: 2^(bits - 1)
is added to a signed code, a larger group is divided into smaller ones with the same scale, codes of 2 and 3 bits become
codes of 4 bits, codes of 5 or 6 bits and the values of a table become codes of 8 bits, and products of scales and
super-scales become float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.export.model.tensors import Dense, Source
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.write import Spec
from kvexport.ops.packed import PackedFormat, integers, pack, scales

Array = NDArray[Any]
GROUPS = (128, 64, 32, 16)
# Products that read each packed weight once for many rows (`ep.cuda.fpa_intb_gemm`) are in ONNX Runtime's wheels for
# groups of 32 without zero points alone. They are worth the scales of smaller groups.
FUSED = 32


def nbits_format(packing: PackedFormat, inputs: int) -> PackedFormat:
    """Return the format in which MatMulNBits' layout stores a packed weight with `inputs` inputs.

    Groups of the given format must have a multiple of 16 inputs. If the returned format is signed, the artifact stores
    each integer code with 2^(bits - 1) added, because MatMulNBits takes unsigned codes.
    """
    bits = 8 if packing.table or packing.bits > 4 else 4
    signed = packing.signed or bool(packing.table)
    largest = FUSED if packing.offset == "none" else GROUPS[0]
    groups = [group for group in GROUPS if group <= largest and packing.group % group == 0]
    if packing.offset == "zero" and bits == 4:
        even = [group for group in groups if inputs // group % 2 == 0]
        bits, groups = (4, even) if even else (8, groups)
    scale = packing.scale_dtype if packing.scale_dtype.startswith("float") else "float32"
    return replace(packing, bits=bits, signed=signed, group=groups[0], scale_dtype=scale, table=())  # type: ignore[arg-type]


@dataclass(frozen=True)
class NBits:
    """A packed weight, from a checkpoint or rounded by the build, in the layout of ONNX Runtime's MatMulNBits."""

    source: Source

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    @property
    def packing(self) -> PackedFormat:
        packing = self.source.packing
        assert packing is not None
        return nbits_format(packing, self.shape[1])

    def blocks(self) -> Iterator[dict[str, Array]]:
        old, new, inputs = self.source.packing, self.packing, self.shape[1]
        assert old is not None
        offset = 1 << (new.bits - 1) if new.signed else 0
        for block in self.source.blocks():
            rows, times = len(block[old.scale]), old.group // new.group
            converted = {"weight": _numbers(block, old, new, (rows, inputs))}
            converted["scale"] = np.repeat(scales(old, block).astype(new.scale_dtype), times, axis=1)
            if "zero" in block:
                zero = np.repeat(block["zero"].astype(np.int32), times, axis=1)
                converted["zero"] = (zero + offset).astype(np.uint8)
            if "minimum" in block:
                converted["minimum"] = np.repeat(scales(old, block, "minimum").astype(new.scale_dtype), times, axis=1)
            yield converted if "order" not in block else {**converted, "order": block["order"]}


def _numbers(block: Mapping[str, Array], old: PackedFormat, new: PackedFormat, shape: tuple[int, int]) -> Array:
    """Repack a block of rows of a packed weight [rows, inputs]: return the bytes of its codes in the format `new`."""
    if not old.table and old.bits == new.bits:
        flipped = (0x88 if new.bits == 4 else 0x80) if new.signed else 0
        result: Array = block["weight"].reshape(-1).view(np.uint8) ^ np.uint8(flipped)
        return result
    numbers = integers(old, *shape, block).astype(np.int32)
    if old.table:
        numbers = np.array(old.table, np.int32)[numbers]
    return pack(numbers + ((1 << (new.bits - 1)) if new.signed else 0), new.bits)


def nbits_specs(specs: list[Spec]) -> list[Spec]:
    return [replace(spec, source=_stored(spec.source)) if isinstance(spec, ComputedSpec) else spec for spec in specs]


def _stored(source: Source) -> Source:
    if source.packing is None:
        return source
    return Dense(source) if source.packing.group % GROUPS[-1] else NBits(source)
