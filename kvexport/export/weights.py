"""Put a checkpoint's tensors into an artifact as ONNX external data, block by block: memory does not grow with the
model.

Not covered: the manifest, syncing, and cleaning up a stage whose build failed; all three belong to the artifact.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from kvexport.artifact.digests import file_digests
from kvexport.errors import UsageError
from kvexport.export.model.checkpoint import TensorEntry

Dtype = Literal["float32", "float16"]

DATA_FILE = "decoder.weights"
LINK_FOLDER = "weights"
# Of smaller blocks a thread beside a busy one spends its time waiting for the interpreter, after each step of each.
BLOCK_BYTES = 4 << 20
LARGE_TENSOR_BYTES = 64 << 10
PAGE_BYTES = 4096
SMALL_ALIGNMENT_BYTES = 64

_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_WANTED: dict[Dtype, str] = {"float32": "<f4", "float16": "<f2"}
_SAME = {("F32", "float32"), ("F16", "float16")}
# Of each stored type: the bits as integers, and the exponent's bits, all of which are 1 in infinities and NaN alone.
_EXPONENT = {
    "F64": ("<i8", 0x7FF << 52),
    "F32": ("<i4", 0xFF << 23),
    "F16": ("<i2", 0x1F << 10),
    "BF16": ("<i2", 0xFF << 7),
}
# What a file system answers that cannot hard-link this file, or not from here.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class TensorSpec:
    """One initializer: its name in the graph, the checkpoint's tensor behind it, and the dtype and shape the graph
    declares."""

    name: str
    entry: TensorEntry
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the artifact, after the cast."""
        return math.prod(self.shape) * np.dtype(_WANTED[self.dtype]).itemsize


@dataclass(frozen=True)
class Location:
    """ONNX external data. file: relative to the stage, with forward slashes. offset, nbytes: bytes in that file."""

    file: str
    offset: int
    nbytes: int


class WrittenWeights(NamedTuple):
    """locations: by initializer. digests: sha256 (hex) by file relative to the stage, of every file whose bytes passed
    through here; a hard-linked file has none, since it was not read."""

    locations: dict[str, Location]
    digests: dict[str, str]


@dataclass(frozen=True)
class SharedWeights:
    """Weights that stand in `folder` for every artifact whose initializers are `specs` to link to."""

    folder: Path
    specs: tuple[TensorSpec, ...]
    written: WrittenWeights


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """The sum of the arguments of `progress` over one `write_weights` of the same specs; tied tensors count once."""
    return sum(spec.nbytes for spec in _distinct(specs))


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raise UsageError for a tensor whose shape is not the graph's, or whose dtype is no float."""
    for spec in specs:
        entry = spec.entry
        if entry.dtype not in _STORED:
            raise UsageError(
                f"tensor {entry.name!r} in {entry.file} is {entry.dtype}, expected one of {', '.join(_STORED)}",
                "set model.path to a checkpoint in float32, float16 or bfloat16",
            )
        if entry.shape != spec.shape:
            raise UsageError(
                f"tensor {entry.name!r} in {entry.file} has shape {list(entry.shape)}, the model of config.json "
                f"expects {list(spec.shape)}",
                "use the config.json that belongs to these weights",
            )


def write_weights(
    specs: Sequence[TensorSpec], stage: Path, mode: Literal["copy", "link"], progress: Callable[[int], None]
) -> WrittenWeights:
    """Bring every tensor of `specs` into the directory `stage`, cast to the dtype its spec asks for.

    copy: all in one file, `decoder.weights`, in the order of the specs; tensors of 64 KiB and more begin at a multiple
    of 4096 bytes (ONNX Runtime maps them), smaller ones at a multiple of 64. link: a source file whose tensors need no
    cast is hard-linked to `weights/<file name>` (copied whole where the file system cannot link) and pointed into; the
    rest goes to `decoder.weights`.
    A hard link shares its bytes with the checkpoint: rewriting that file in place changes the artifact, as its
    digest will tell.

    Two specs of one entry and one dtype share their bytes. `progress` receives the bytes of initializers put in place
    since its last call. Peak memory is some tens of MiB, whatever the size of a tensor. Raises UsageError for a shape
    other than the graph's, a dtype that is no float, values that are infinite or NaN, or that the wanted dtype cannot
    hold, and a source shorter than its header said; ValueError for a name given twice; OSError of reading and writing
    passes through. Files that are hard-linked are not read here: `linked_digests` reads them.
    """
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two specs have the same initializer name")
    check_specs(specs)
    distinct = _distinct(specs)
    linked = [spec for spec in distinct if mode == "link" and _can_link(spec)]
    placed, digests = _link_files(linked, stage, progress)
    rest = [spec for spec in distinct if (spec.entry, spec.dtype) not in placed]
    if rest:
        with (stage / DATA_FILE).open("xb") as stream, ThreadPoolExecutor(1) as hasher:
            data = _DataFile(stream, hasher)
            for spec in rest:
                placed[spec.entry, spec.dtype] = data.append(spec, progress)
            # The artifact is synced when it is published; then there is nothing left to wait for.
            stream.flush()
            os.fsync(stream.fileno())
        digests[DATA_FILE] = data.hexdigest()
    return WrittenWeights({spec.name: placed[spec.entry, spec.dtype] for spec in specs}, digests)


def linked_digests(specs: Sequence[TensorSpec], stage: Path, written: WrittenWeights) -> Iterator[tuple[str, str]]:
    """(file, sha256) of what was hard-linked, whose values are looked at as they are read. Raises UsageError for values
    that are infinite or NaN."""
    linked: dict[str, list[TensorEntry]] = {}
    for spec in _distinct(specs):
        file = written.locations[spec.name].file
        if file not in written.digests:
            linked.setdefault(file, []).append(spec.entry)
    names = sorted(linked)
    yield from zip(names, file_digests(stage, names, [_finite(linked[name]) for name in names]), strict=True)


def link_shared(shared: SharedWeights, stage: Path, progress: Callable[[int], None]) -> WrittenWeights:
    """Hard links to the files of `shared` in the directory `stage`, copies where the file system cannot link.
    `progress` as in `write_weights`; OSError passes through."""
    for name in shared.written.digests:
        target = stage / name
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(shared.folder / name, target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copyfile(shared.folder / name, target)
    progress(total_bytes(shared.specs))
    return shared.written


def load_tensor(entry: TensorEntry, dtype: Dtype) -> np.ndarray[Any, Any]:
    """One tensor in memory, of `entry.shape`, cast as `write_weights` casts; meant for small ones. Raises the same
    UsageErrors."""
    spec = TensorSpec(entry.name, entry, dtype, entry.shape)
    check_specs([spec])
    tensor = np.empty(entry.shape, _WANTED[dtype])
    flat, begin = tensor.reshape(-1).view(np.uint8), 0
    for block in _cast_blocks(spec):
        flat[begin : begin + len(block)] = np.frombuffer(block, np.uint8)
        begin += len(block)
    return tensor


class _DataFile:
    """`decoder.weights` while it grows, and the digest of what it holds so far, which another thread computes."""

    def __init__(self, stream: BinaryIO, hasher: ThreadPoolExecutor) -> None:
        self._stream, self._hasher = stream, hasher
        self._digest = hashlib.sha256()
        self._hashed: Future[None] = hasher.submit(self._digest.update, b"")
        self._size = 0

    def append(self, spec: TensorSpec, progress: Callable[[int], None]) -> Location:
        alignment = PAGE_BYTES if spec.nbytes >= LARGE_TENSOR_BYTES else SMALL_ALIGNMENT_BYTES
        self._write(b"\0" * (-self._size % alignment))
        offset = self._size
        for block in _cast_blocks(spec):
            self._write(block)
            progress(len(block))
        return Location(DATA_FILE, offset, spec.nbytes)

    def hexdigest(self) -> str:
        self._hashed.result()
        return self._digest.hexdigest()

    def _write(self, block: bytes | memoryview) -> None:
        self._hashed.result()  # no more than one block waits
        self._hashed = self._hasher.submit(self._digest.update, block)
        self._stream.write(block)
        if hasattr(os, "posix_fadvise"):
            # Linux starts to write these pages to the disk, and the sync at the end has less to wait for.
            os.posix_fadvise(self._stream.fileno(), self._size, len(block), os.POSIX_FADV_DONTNEED)
        self._size += len(block)


def _distinct(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    first: dict[tuple[TensorEntry, Dtype], TensorSpec] = {}
    for spec in specs:
        first.setdefault((spec.entry, spec.dtype), spec)
    return list(first.values())


def _can_link(spec: TensorSpec) -> bool:
    # A header of odd length puts floats at odd addresses once the file is mapped: such a tensor is copied.
    return (spec.entry.dtype, spec.dtype) in _SAME and spec.entry.offset % np.dtype(_WANTED[spec.dtype]).itemsize == 0


def _link_files(
    specs: Sequence[TensorSpec], stage: Path, progress: Callable[[int], None]
) -> tuple[dict[tuple[TensorEntry, Dtype], Location], dict[str, str]]:
    placed: dict[tuple[TensorEntry, Dtype], Location] = {}
    digests: dict[str, str] = {}
    taken: set[str] = set()
    for n, source in enumerate(dict.fromkeys(spec.entry.file for spec in specs)):
        inside = [spec for spec in specs if spec.entry.file == source]
        last = max(inside, key=lambda spec: spec.entry.offset + spec.entry.nbytes).entry
        size = source.stat().st_size
        if size < last.offset + last.nbytes:
            raise _shrunk(last, size)
        name = source.name if source.name not in taken else f"{n}-{source.name}"
        taken.add(name)
        relative = f"{LINK_FOLDER}/{name}"
        target = stage / relative
        target.parent.mkdir(exist_ok=True)
        try:
            # Of the resolved file: a link to a symlink would leave the artifact pointing into the hub's cache.
            os.link(source.resolve(), target)
            progress(sum(spec.nbytes for spec in inside))
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            seen = _finite([spec.entry for spec in inside])
            digests[relative], size = _copy_file(source, target, sum(spec.nbytes for spec in inside), progress, seen)
            if size < last.offset + last.nbytes:
                raise _shrunk(last, size) from None
        placed.update(((spec.entry, spec.dtype), Location(relative, spec.entry.offset, spec.nbytes)) for spec in inside)
    return placed, digests


def _copy_file(
    source: Path, target: Path, counted: int, progress: Callable[[int], None], seen: Callable[[int, memoryview], None]
) -> tuple[str, int]:
    """Copy a whole shard; of its bytes `counted` belong to initializers and are reported. seen: as `file_digests` calls
    it. Returns its sha256 and size."""
    digest, left, size = hashlib.sha256(), counted, 0
    with source.open("rb") as reader, target.open("xb") as writer:
        while block := reader.read(BLOCK_BYTES):
            writer.write(block)
            digest.update(block)
            seen(size, memoryview(block))
            progress(min(left, len(block)))
            left -= min(left, len(block))
            size += len(block)
    return digest.hexdigest(), size


def _cast_blocks(spec: TensorSpec) -> Iterator[bytes | memoryview]:
    """The tensor's bytes in the wanted dtype, a few MiB at a time. Raises UsageError after the last block where values
    overflowed."""
    entry, lost, at = spec.entry, 0, 0
    for block in _read_blocks(entry):
        _require_finite(entry, block, at)
        at += len(block)
        if (entry.dtype, spec.dtype) in _SAME:
            yield block
        else:
            values, overflowed = _cast(block, entry.dtype, spec.dtype)
            lost += overflowed
            yield values.data.cast("B")
    if lost:
        largest = np.finfo(_WANTED[spec.dtype]).max
        raise UsageError(
            f"{lost} of {math.prod(entry.shape)} values of tensor {entry.name!r} in {entry.file} exceed {largest:g}, "
            f"the largest {spec.dtype}, and would become infinite",
            "--set model.dtype=float32"
            if spec.dtype == "float16"
            else "set model.path to a checkpoint that float32 can hold",
        )


def _read_blocks(entry: TensorEntry) -> Iterator[bytes]:
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset)
        left = entry.nbytes
        while left:
            wanted = min(left, BLOCK_BYTES)
            block = stream.read(wanted)
            if len(block) < wanted:
                raise _shrunk(entry, entry.file.stat().st_size)
            left -= wanted
            yield block


def _finite(entries: Sequence[TensorEntry]) -> Callable[[int, memoryview], None]:
    """Takes the blocks of a file, and raises UsageError where one of these tensors is not finite. No block begins or
    ends within a value: both lie at multiples of its size."""

    def look(offset: int, block: memoryview) -> None:
        for entry in entries:
            begin, end = max(entry.offset, offset), min(entry.offset + entry.nbytes, offset + len(block))
            if begin < end:
                _require_finite(entry, block[begin - offset : end - offset], begin - entry.offset)

    return look


def _require_finite(entry: TensorEntry, block: bytes | memoryview, at: int) -> None:
    """Raises UsageError where a value of the block is infinite or NaN. at: the bytes of the tensor before it."""
    signed, exponent = _EXPONENT[entry.dtype]
    bits = np.frombuffer(block, signed)
    # Without its sign such a value is at least `exponent` as an integer: of positive values the largest integer, and of
    # negative ones, which are larger than all positive ones as unsigned integers, the largest unsigned.
    negative = bits.view(signed.replace("i", "u"))
    sign = 1 << (8 * bits.itemsize - 1)
    if bits.max(initial=0) < exponent and negative.max(initial=0) < sign + exponent:
        return
    found = int(np.flatnonzero((bits & exponent) == exponent)[0]) + at // bits.itemsize
    raise UsageError(
        f"tensor {entry.name!r} in {entry.file} has values that are infinite or NaN, the first is number {found} of "
        f"{math.prod(entry.shape)}",
        f"download {entry.file.name} again, or set model.path to a checkpoint whose weights are finite",
    )


def _cast(block: bytes, stored: str, wanted: Dtype) -> tuple[np.ndarray[Any, Any], int]:
    """The values of a block, all finite, in the wanted dtype, and how many became infinite. Everything goes through
    float32, as in PyTorch."""
    values = np.frombuffer(block, _STORED[stored])
    # Looked up where it can be: four times as fast as NumPy's own rounding to float16.
    lookup = stored == "BF16" and wanted == "float16"
    result = _bfloat16_as_float16().take(values) if lookup else _round(_widen(values, stored), wanted)
    if stored in ("F16", "BF16") and wanted == "float32":
        return result, 0
    infinite = np.isinf(result) if wanted == "float32" else (result.view("<u2") & 0x7FFF) == 0x7C00
    return result, int(np.count_nonzero(infinite))


def _widen(values: np.ndarray[Any, Any], stored: str) -> np.ndarray[Any, Any]:
    if stored != "BF16":
        return values
    # bfloat16 is the upper half of a float32.
    wide = values.astype("<u4")
    wide <<= 16
    return wide.view("<f4")


def _round(values: np.ndarray[Any, Any], wanted: Dtype) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype("<f4", copy=False).astype(_WANTED[wanted], copy=False)


@functools.cache
def _bfloat16_as_float16() -> np.ndarray[Any, Any]:
    return _round(_widen(np.arange(1 << 16, dtype="<u2"), "BF16"), "float16")


def _shrunk(entry: TensorEntry, size: int) -> UsageError:
    return UsageError(
        f"{entry.file} ends before tensor {entry.name!r}: expected at least {entry.offset + entry.nbytes} bytes, "
        f"found {size}",
        f"download {entry.file.name} again",
    )
