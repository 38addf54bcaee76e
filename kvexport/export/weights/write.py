"""Writes a checkpoint's tensors into an artifact as ONNX external data, block by block.

Memory does not grow with the model. Not covered: the manifest, syncing, and cleaning up a stage whose build failed.
These belong to the artifact.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np

from kvexport.artifact.digests import file_digests
from kvexport.errors import UsageError
from kvexport.export.model.tensors import Source, TensorEntry
from kvexport.export.weights.casting import (
    BLOCK_BYTES,
    SAME,
    WANTED,
    Dtype,
    cast_blocks,
    require_finite,
    require_float,
    shrunk,
)
from kvexport.export.weights.computed import ComputedSpec, part_name, parts_of

DATA_FILE = "decoder.weights"
LINK_FOLDER = "weights"
LARGE_TENSOR_BYTES = 64 << 10
PAGE_BYTES = 4096
SMALL_ALIGNMENT_BYTES = 64

# What a file system answers that cannot hard-link this file, or not from here.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class TensorSpec:
    """One initializer that is a tensor of the checkpoint.

    Attributes:
        name: The name in the graph.
        entry: The tensor.
        dtype: The dtype that the graph declares.
        shape: The shape that the graph declares.
    """

    name: str
    entry: TensorEntry
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes in the artifact, after the cast."""
        return math.prod(self.shape) * np.dtype(WANTED[self.dtype]).itemsize


@dataclass(frozen=True)
class Location:
    """ONNX external data. file: relative to the stage, with forward slashes. offset, nbytes: bytes in that file."""

    file: str
    offset: int
    nbytes: int


Spec: TypeAlias = "TensorSpec | ComputedSpec"
Key: TypeAlias = "tuple[TensorEntry | Source, Dtype]"


class WrittenWeights(NamedTuple):
    """The result of writing weights.

    Attributes:
        locations: The place of each initializer; for packed weights of each of their tensors.
        digests: sha256 (hex) of every written file, by its path in the stage. Hard-linked files have none, because they
            were not read.
    """

    locations: dict[str, Location]
    digests: dict[str, str]


@dataclass(frozen=True)
class SharedWeights:
    """Weights in `folder`, to which every artifact whose initializers are `specs` can link."""

    folder: Path
    specs: tuple[Spec, ...]
    written: WrittenWeights


def total_bytes(specs: Sequence[Spec]) -> int:
    """Return the sum of all arguments of `progress` in one `write_weights` of these specs; tied tensors count once."""
    return sum(spec.nbytes for spec in _distinct(specs))


def check_specs(specs: Sequence[Spec]) -> None:
    """Raise UsageError for a tensor whose shape is not the graph's, or whose dtype is no float."""
    for spec in specs:
        if isinstance(spec, ComputedSpec):
            _check_computed(spec)
            continue
        entry = spec.entry
        require_float(entry)
        if entry.shape != spec.shape:
            raise UsageError(
                f"tensor {entry.name!r} in {entry.file} has shape {list(entry.shape)}, the model of config.json "
                f"expects {list(spec.shape)}",
                "use the config.json that belongs to these weights",
            )


def _check_computed(spec: ComputedSpec) -> None:
    source = spec.source
    shape = getattr(source, "full_shape", source.shape)
    if shape != spec.shape:
        raise UsageError(
            f"tensor {source.name!r} has shape {list(shape)}, the model of config.json expects {list(spec.shape)}",
            "use the config.json that belongs to these weights",
        )


def write_weights(
    specs: Sequence[Spec], stage: Path, mode: Literal["copy", "link"], progress: Callable[[int], None]
) -> WrittenWeights:
    """Bring every tensor of `specs` into the directory `stage`, cast to the dtype its spec asks for, or computed.

    copy: all in one file, `decoder.weights`, in the order of the specs; tensors of 64 KiB and more begin at a multiple
    of 4096 bytes (ONNX Runtime maps them), smaller ones at a multiple of 64. link: a source file whose tensors need no
    cast is hard-linked to `weights/<file name>` (copied whole where the file system cannot link) and pointed into; the
    rest goes to `decoder.weights`, and so does everything where some weights are computed.
    A hard link shares its bytes with the checkpoint: rewriting that file in place changes the artifact, as its
    digest will tell.

    Two specs of one entry and one dtype, or of one source, share their bytes, and so do equal orders of columns.
    `progress` receives the bytes of initializers put in place
    since its last call. Peak memory is some tens of MiB, whatever the size of a tensor. Raises UsageError for a shape
    other than the graph's, a dtype that is no float, values that are infinite or NaN, or that the wanted dtype cannot
    hold, and a source shorter than its header said; ValueError for a name given twice; OSError of reading and writing
    passes through. Files that are hard-linked are not read here: `linked_digests` reads them.
    """
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two specs have the same initializer name")
    check_specs(specs)
    distinct = _distinct(specs)
    plain = [spec for spec in distinct if isinstance(spec, TensorSpec)]
    # Of a file whose other tensors are packed here a link would bring all of them into the artifact a second time.
    linked = [spec for spec in plain if mode == "link" and len(plain) == len(distinct) and _can_link(spec)]
    placed, digests = _link_files(linked, stage, progress)
    rest = [spec for spec in distinct if _key(spec) not in placed]
    if rest:
        with (stage / DATA_FILE).open("xb") as stream, ThreadPoolExecutor(1) as hasher:
            data = _DataFile(stream, hasher)
            for spec in rest:
                placed[_key(spec)] = data.append_all(spec, progress)
            # The artifact is synced when it is published; then there is nothing left to wait for.
            stream.flush()
            os.fsync(stream.fileno())
        digests[DATA_FILE] = data.hexdigest()
    parts = {part_name(spec.name, part): at for spec in specs for part, at in placed[_key(spec)].items()}
    return WrittenWeights(parts, digests)


def linked_digests(specs: Sequence[Spec], stage: Path, written: WrittenWeights) -> Iterator[tuple[str, str]]:
    """Yield (file, sha256) of hard-linked files, and check their values.

    Raises:
        UsageError: A value is infinite or NaN.
    """
    linked: dict[str, list[TensorEntry]] = {}
    for spec in _distinct(specs):
        file = written.locations[spec.name].file
        if file not in written.digests and isinstance(spec, TensorSpec):
            linked.setdefault(file, []).append(spec.entry)
    names = sorted(linked)
    yield from zip(names, file_digests(stage, names, [_finite(linked[name]) for name in names]), strict=True)


def link_shared(shared: SharedWeights, stage: Path, progress: Callable[[int], None]) -> WrittenWeights:
    """Hard-link the files of `shared` into the directory `stage`, or copy them if the file system cannot link.

    `progress` is called as in `write_weights`. An OSError passes through.
    """
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


class _DataFile:
    """The file `decoder.weights` while it grows, and the digest of its bytes so far, which another thread computes."""

    def __init__(self, stream: BinaryIO, hasher: ThreadPoolExecutor) -> None:
        self._stream, self._hasher = stream, hasher
        self._digest = hashlib.sha256()
        self._hashed: Future[None] = hasher.submit(self._digest.update, b"")
        self._size = 0
        self._orders: dict[bytes, Location] = {}

    def append_all(self, spec: Spec, progress: Callable[[int], None]) -> dict[str, Location]:
        """Append the parts of an initializer, one after another, and return their places."""
        if isinstance(spec, TensorSpec):
            return {"weight": self._append(spec.nbytes, cast_blocks(spec.entry, spec.dtype), progress)}
        placed = {}
        for part, blocks in parts_of(spec):
            nbytes = spec.parts[part].nbytes
            if part != "order":
                placed[part] = self._append(nbytes, map(_bytes, blocks), progress)
                continue
            order = b"".join(map(_bytes, blocks))
            if order not in self._orders:
                self._orders[order] = self._append(nbytes, [order], progress)
            placed[part] = self._orders[order]
        return placed

    def _append(self, nbytes: int, blocks: Iterable[bytes | memoryview], progress: Callable[[int], None]) -> Location:
        alignment = PAGE_BYTES if nbytes >= LARGE_TENSOR_BYTES else SMALL_ALIGNMENT_BYTES
        self._write(b"\0" * (-self._size % alignment))
        offset = self._size
        for block in blocks:
            self._write(block)
            progress(len(block))
        assert self._size - offset == nbytes
        return Location(DATA_FILE, offset, nbytes)

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


def _bytes(block: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def _key(spec: Spec) -> Key:
    """Return the key that two specs have in common if they share their bytes."""
    return (spec.entry if isinstance(spec, TensorSpec) else spec.source, spec.dtype)


def _distinct(specs: Sequence[Spec]) -> list[Spec]:
    first: dict[Key, Spec] = {}
    for spec in specs:
        first.setdefault(_key(spec), spec)
    return list(first.values())


def _can_link(spec: TensorSpec) -> bool:
    # A header of odd length puts floats at odd addresses once the file is mapped: such a tensor is copied.
    return (spec.entry.dtype, spec.dtype) in SAME and spec.entry.offset % np.dtype(WANTED[spec.dtype]).itemsize == 0


def _link_files(
    specs: Sequence[TensorSpec], stage: Path, progress: Callable[[int], None]
) -> tuple[dict[Key, dict[str, Location]], dict[str, str]]:
    placed: dict[Key, dict[str, Location]] = {}
    digests: dict[str, str] = {}
    taken: set[str] = set()
    for n, source in enumerate(dict.fromkeys(spec.entry.file for spec in specs)):
        inside = [spec for spec in specs if spec.entry.file == source]
        last = max(inside, key=lambda spec: spec.entry.offset + spec.entry.nbytes).entry
        size = source.stat().st_size
        if size < last.offset + last.nbytes:
            raise shrunk(last, size)
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
                raise shrunk(last, size) from None
        placed.update({_key(spec): {"weight": Location(relative, spec.entry.offset, spec.nbytes)} for spec in inside})
    return placed, digests


def _copy_file(
    source: Path, target: Path, counted: int, progress: Callable[[int], None], seen: Callable[[int, memoryview], None]
) -> tuple[str, int]:
    """Copy a whole shard, and return its sha256 and size.

    Args:
        source: The shard.
        target: The copy.
        counted: The number of its bytes that belong to initializers, for `progress`.
        progress: Called with copied bytes.
        seen: Called as by `file_digests`.
    """
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


def _finite(entries: Sequence[TensorEntry]) -> Callable[[int, memoryview], None]:
    """Return a function that takes the blocks of a file and raises UsageError if one of these tensors is not finite.

    No block begins or ends within a value, because both lie at multiples of its size.
    """

    def look(offset: int, block: memoryview) -> None:
        for entry in entries:
            begin, end = max(entry.offset, offset), min(entry.offset + entry.nbytes, offset + len(block))
            if begin < end:
                require_finite(entry, block[begin - offset : end - offset], begin - entry.offset)

    return look
