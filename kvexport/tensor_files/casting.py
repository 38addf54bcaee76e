"""Reading of a checkpoint's tensors as blocks of bytes, checked and cast to an artifact's data type."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from kvexport.errors import UsageError
from kvexport.tensor_files.shards import TensorEntry

Dtype = Literal["float32", "float16"]

# Of smaller blocks a thread beside a busy one spends its time waiting for the interpreter, after each step of each.
BLOCK_BYTES = 4 << 20
STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The types that can be cast, as numpy reads them."""
WANTED: dict[Dtype, str] = {"float32": "<f4", "float16": "<f2"}
"""The types that they are cast to, as numpy writes them."""
SAME = {("F32", "float32"), ("F16", "float16")}
"""Pairs of a stored and a wanted type that are the same."""
# Of each stored type: the bits as integers, and the exponent's bits, all of which are 1 in infinities and NaN alone.
_EXPONENT = {
    "F64": ("<i8", 0x7FF << 52),
    "F32": ("<i4", 0xFF << 23),
    "F16": ("<i2", 0x1F << 10),
    "BF16": ("<i2", 0xFF << 7),
}


def require_float(entry: TensorEntry) -> None:
    if entry.dtype not in STORED:
        raise UsageError(
            f"tensor {entry.name!r} in {entry.file} is {entry.dtype}, expected one of {', '.join(STORED)}",
            "set model.path to a checkpoint in float32, float16 or bfloat16",
        )


def load_tensor(entry: TensorEntry, dtype: Dtype) -> np.ndarray[Any, Any]:
    require_float(entry)
    tensor = np.empty(entry.shape, WANTED[dtype])
    flat, begin = tensor.reshape(-1).view(np.uint8), 0
    for block in cast_blocks(entry, dtype):
        flat[begin : begin + len(block)] = np.frombuffer(block, np.uint8)
        begin += len(block)
    return tensor


def cast_blocks(entry: TensorEntry, dtype: Dtype) -> Iterator[bytes | memoryview]:
    lost = at = 0
    for block in read_blocks(entry):
        require_finite(entry, block, at)
        at += len(block)
        if (entry.dtype, dtype) in SAME:
            yield block
        else:
            values, overflowed = _cast(block, entry.dtype, dtype)
            lost += overflowed
            yield values.data.cast("B")
    if lost:
        largest = np.finfo(WANTED[dtype]).max
        raise UsageError(
            f"{lost} of {math.prod(entry.shape)} values of tensor {entry.name!r} in {entry.file} exceed {largest:g}, "
            f"the largest {dtype}, and would become infinite",
            "--set model.dtype=float32"
            if dtype == "float16"
            else "set model.path to a checkpoint that float32 can hold",
        )


def read_blocks(entry: TensorEntry) -> Iterator[bytes]:
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset)
        left = entry.nbytes
        while left:
            size = min(left, BLOCK_BYTES)
            block = stream.read(size)
            if len(block) < size:
                raise shrunk(entry, entry.file.stat().st_size)
            left -= size
            yield block


def require_finite(entry: TensorEntry, block: bytes | memoryview, at: int) -> None:
    """Raise UsageError if a value in a block of a tensor's bytes, which begins at byte `at`, is infinite or NaN."""
    signed, exponent = _EXPONENT[entry.dtype]
    bits = np.frombuffer(block, signed)
    # Without its sign such a value is at least `exponent` as an integer: of positive values the largest integer, and of
    # negative ones, which are larger than all positive ones as unsigned integers, the largest unsigned.
    negative = bits.view(signed.replace("i", "u"))
    sign = 1 << (8 * bits.itemsize - 1)
    if bits.max(initial=0) < exponent and negative.max(initial=0) < sign + exponent:
        return
    number = int(np.flatnonzero((bits & exponent) == exponent)[0]) + at // bits.itemsize
    raise UsageError(
        f"tensor {entry.name!r} in {entry.file} has values that are infinite or NaN, the first is number {number} of "
        f"{math.prod(entry.shape)}",
        f"download {entry.file.name} again, or set model.path to a checkpoint whose weights are finite",
    )


def _cast(block: bytes, stored: str, dtype: Dtype) -> tuple[np.ndarray[Any, Any], int]:
    """Return a block's values cast through float32, as in PyTorch, and the number of values that became infinite."""
    values = np.frombuffer(block, STORED[stored])
    # Looked up where it can be: four times as fast as NumPy's own rounding to float16.
    lookup = stored == "BF16" and dtype == "float16"
    result = _bfloat16_as_float16().take(values) if lookup else _round(_widen(values, stored), dtype)
    if stored in ("F16", "BF16") and dtype == "float32":
        return result, 0
    infinite = np.isinf(result) if dtype == "float32" else (result.view("<u2") & 0x7FFF) == 0x7C00
    return result, int(np.count_nonzero(infinite))


def read_rows(entry: TensorEntry, rows: range) -> np.ndarray[Any, Any]:
    block = read_at(entry, rows)
    require_finite(entry, block, rows.start * (entry.nbytes // entry.shape[0]))
    values, overflowed = _cast(block, entry.dtype, "float32")
    if overflowed:
        raise UsageError(
            f"{overflowed} values of tensor {entry.name!r} in {entry.file} exceed the largest float32",
            "set model.path to a checkpoint that float32 can hold",
        )
    return values.reshape(len(rows), *entry.shape[1:])


def read_at(entry: TensorEntry, rows: range) -> bytes:
    row = entry.nbytes // entry.shape[0]
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset + rows.start * row)
        block = stream.read(len(rows) * row)
    if len(block) < len(rows) * row:
        raise shrunk(entry, entry.file.stat().st_size)
    return block


def byte_rows(entry: TensorEntry, rows: range) -> np.ndarray[Any, Any]:
    return np.frombuffer(read_at(entry, rows), np.uint8).reshape(len(rows), -1)


def row_blocks(count: int, row_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[range]:
    """Yield ranges of rows that together cover a matrix, each of at most `block_bytes` bytes but at least one row."""
    step = max(1, block_bytes // max(1, row_bytes))
    yield from (range(begin, min(begin + step, count)) for begin in range(0, count, step))


def _widen(values: np.ndarray[Any, Any], stored: str) -> np.ndarray[Any, Any]:
    if stored != "BF16":
        return values
    # bfloat16 is the upper half of a float32.
    wide = values.astype("<u4")
    wide <<= 16
    return wide.view("<f4")


def _round(values: np.ndarray[Any, Any], dtype: Dtype) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype("<f4", copy=False).astype(WANTED[dtype], copy=False)


@functools.cache
def _bfloat16_as_float16() -> np.ndarray[Any, Any]:
    return _round(_widen(np.arange(1 << 16, dtype="<u2"), "BF16"), "float16")


def shrunk(entry: TensorEntry, size: int) -> UsageError:
    return UsageError(
        f"{entry.file} ends before tensor {entry.name!r}: expected at least {entry.offset + entry.nbytes} bytes, "
        f"found {size}",
        f"download {entry.file.name} again",
    )
