"""Functions that the readers of all quantized layouts share: checks of tensors, and reading of tensors or columns."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.tensors import Source
from kvexport.ops.packed import pack
from kvexport.tensor_files.casting import read_blocks, shrunk
from kvexport.tensor_files.shards import TensorEntry

Array = NDArray[Any]
Tensors = Mapping[str, TensorEntry]
Read = tuple[dict[str, Source], set[str], list[str]]
"""(weights by the names that they would have in floats, names of the tensors that they consist of, notes)."""

ACTIVATIONS = "the checkpoint's scheme rounds activations too; the engine does so in its own way, or not at all"
AGAIN = "set model.path to the checkpoint it was quantized from"
_TYPES = {"I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1", "F16": "<f2", "F32": "<f4"}


def wrong(entry: TensorEntry, expected: str, fix: str = "") -> UsageError:
    return UsageError(
        f"tensor {entry.name!r} in {entry.file} is {entry.dtype} {list(entry.shape)}, expected {expected}",
        fix or f"download {entry.file.name} again",
    )


def require(tensors: Tensors, name: str, beside: str) -> TensorEntry:
    if name not in tensors:
        raise UsageError(f"the checkpoint has a tensor {beside!r} and no {name!r}", "download the checkpoint again")
    return tensors[name]


def require_shape(entry: TensorEntry, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if entry.dtype not in dtypes or entry.shape != shape:
        raise wrong(entry, f"{' or '.join(dtypes)} {list(shape)}")


def whole(entry: TensorEntry) -> Array:
    """Read a small tensor of the checkpoint as one array; bfloat16 becomes float32."""
    data = b"".join(read_blocks(entry))
    if entry.dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(entry.shape)
    if entry.dtype not in _TYPES:
        raise wrong(entry, f"one of {', '.join(_TYPES)}")
    return np.frombuffer(data, _TYPES[entry.dtype]).reshape(entry.shape)


@cache
def float8_values() -> NDArray[np.float32]:
    """Return the value of each of the 256 bytes as an 8-bit float of type E4M3 without infinities."""
    import ml_dtypes

    values: NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def column_bytes(entry: TensorEntry, columns: range) -> NDArray[np.uint8]:
    """Read neighbouring columns of a matrix in a checkpoint as bytes [rows, bytes of the columns in a row]."""
    rows, width = entry.shape
    item = entry.nbytes // (rows * width)
    selected = np.empty((rows, len(columns) * item), np.uint8)
    with entry.file.open("rb", buffering=0) as stream:
        for row, target in enumerate(selected):
            stream.seek(entry.offset + (row * width + columns.start) * item)
            if stream.readinto(target.data) != target.nbytes:
                raise shrunk(entry, entry.file.stat().st_size)
    return selected


def halves(stored: Array) -> NDArray[np.uint8]:
    """Return the 4-bit codes that bytes pack along the last axis, the low half of each byte first."""
    numbers = np.empty((*stored.shape[:-1], stored.shape[-1] * 2), np.uint8)
    numbers[..., 0::2], numbers[..., 1::2] = stored & 15, stored >> 4
    return numbers


def packed_block(
    stored: Array, bits: int, order: Array | None, parts: dict[str, Array], *, flipped: bool
) -> dict[str, Array]:
    """Return a block of packed rows with its scales; with `flipped`, the upper bit of each code is inverted."""
    if flipped:
        stored = stored ^ np.uint8(0x88 if bits == 4 else 0x80)
    if order is None:
        return {"weight": stored, **parts}
    numbers = halves(stored) if bits == 4 else stored
    return {"weight": pack(numbers[:, order], bits), **parts, "order": order}


def groups_in_order(entry: TensorEntry, group: int) -> NDArray[np.int64] | None:
    """Return the permutation of inputs that makes the groups of GPTQ's `g_idx` contiguous; None if they already are."""
    groups = whole(entry)
    if (groups == -1).all():  # compressed-tensors writes -1 if the inputs are not reordered
        return None
    expected = np.repeat(np.arange(len(groups) // group), group)
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable").astype(np.int64)
    if not np.array_equal(groups[order], expected):
        raise UsageError(
            f"tensor {entry.name!r} in {entry.file} puts inputs into groups that are not all of {group}", AGAIN
        )
    return order


def require_scales(name: str, scale: Array) -> Array:
    if not scale.all():
        raise UsageError(f"the scales of tensor {name!r} hold a 0", "download the checkpoint again")
    return scale


def refused(what: str) -> UsageError:
    return UsageError(f"the checkpoint's weights are quantized as {what}, which is not read here", AGAIN)
