"""The writer of a checkpoint's tensors into an artifact as ONNX external data, block by block.

The memory that it needs does not grow with the model. `kvexport.artifact` writes the manifest, syncs the files, and
removes the staging folder of a build that failed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from kvexport.errors import UsageError
from kvexport.export.model.tensors import Source
from kvexport.export.weights.computed import ComputedSpec, component_blocks, component_name
from kvexport.files import sync
from kvexport.tensor_files.casting import WANTED, Dtype, cast_blocks, require_float
from kvexport.tensor_files.shards import TensorEntry

DATA_FILE = "decoder.weights"
LARGE_TENSOR_BYTES = 64 << 10
PAGE_BYTES = 4096
SMALL_ALIGNMENT_BYTES = 64

# Errors of file systems that cannot hard-link a file, or cannot link it into the target folder
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class TensorSpec:
    name: str  # name in the ONNX graph
    entry: TensorEntry
    dtype: Dtype  # dtype that the ONNX graph declares
    shape: tuple[int, ...]  # shape that the ONNX graph declares

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(WANTED[self.dtype]).itemsize


@dataclass(frozen=True)
class Location:
    file: str  # file, relative to the staging folder, with forward slashes
    offset: int  # where the initializer begins in the file, in bytes
    nbytes: int  # initializer's size in bytes


Spec: TypeAlias = "TensorSpec | ComputedSpec"
Key: TypeAlias = "tuple[TensorEntry | Source, Dtype]"


class WrittenWeights(NamedTuple):
    locations: dict[str, Location]  # place of each initializer, or of each tensor of a packed one
    digests: dict[str, str]  # SHA-256 (hex) of every written file, by its path in the staging folder

    def to_json(self) -> bytes:
        return json.dumps([{name: astuple(x) for name, x in self.locations.items()}, self.digests]).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WrittenWeights:
        locations, digests = json.loads(data)
        return cls({name: Location(*x) for name, x in locations.items()}, digests)


@dataclass(frozen=True)
class SharedWeights:
    """Weight files in `folder`, to which every artifact with the same weights can link."""

    folder: Path
    specs: tuple[Spec, ...]
    written: WrittenWeights


def total_bytes(specs: Sequence[Spec]) -> int:
    return sum(spec.nbytes for spec in _distinct(specs))


def check_specs(specs: Sequence[Spec]) -> None:
    """Raise UsageError if a checkpoint tensor has another shape than its initializer, or holds no floats."""
    for spec in specs:
        if isinstance(spec, TensorSpec):
            require_float(spec.entry)
            name, shape = f"{spec.entry.name!r} in {spec.entry.file}", spec.entry.shape
        else:
            name, shape = repr(spec.source.name), getattr(spec.source, "full_shape", spec.source.shape)
        if shape != spec.shape:
            raise UsageError(
                f"tensor {name} has shape {list(shape)}, the model of config.json expects {list(spec.shape)}",
                "use the config.json that belongs to these weights",
            )


def write_weights(specs: Sequence[Spec], staging: Path, progress: Callable[[int], None]) -> WrittenWeights:
    """Write every weight of `specs` into the file `decoder.weights`: copied, cast to its spec's type, or computed.

    Two specs with the same checkpoint entry and dtype, or with the same source, share their bytes. Equal permutations
    of columns are written once. Tensors of 64 KiB and more begin at a multiple of 4096 bytes, because ONNX Runtime maps
    them; smaller ones begin at a multiple of 64. Peak memory is some tens of MiB, however large the tensors are.
    `progress` receives the number of bytes that were written since its last call.
    """
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two specs have the same initializer name")
    check_specs(specs)
    placed: dict[Key, dict[str, Location]] = {}
    with (staging / DATA_FILE).open("xb") as stream, ThreadPoolExecutor(1) as hasher:
        data = _DataFile(stream, hasher)
        for spec in _distinct(specs):
            placed[_key(spec)] = data.append_all(spec, progress)
        # The artifact is synced when it is published, which is faster if the weights are on the disk by then.
        sync(stream)
    digests = {DATA_FILE: data.hexdigest()}
    components = {
        component_name(spec.name, component): at for spec in specs for component, at in placed[_key(spec)].items()
    }
    return WrittenWeights(components, digests)


def link_shared(shared: SharedWeights, staging: Path, progress: Callable[[int], None]) -> WrittenWeights:
    for name in shared.written.digests:
        try:
            os.link(shared.folder / name, staging / name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copyfile(shared.folder / name, staging / name)
    progress(total_bytes(shared.specs))
    return shared.written


class _DataFile:
    """The file `decoder.weights` while it grows, and the digest of its bytes so far, which another thread computes."""

    def __init__(self, stream: BinaryIO, hasher: ThreadPoolExecutor) -> None:
        self._stream, self._hasher = stream, hasher
        self._digest = hashlib.sha256()
        self._hashed: Future[None] = hasher.submit(self._digest.update, b"")
        self._size = 0
        self._shared: dict[tuple[str, bytes], Location] = {}

    def append_all(self, spec: Spec, progress: Callable[[int], None]) -> dict[str, Location]:
        if isinstance(spec, TensorSpec):
            return {"weight": self._append(spec.nbytes, cast_blocks(spec.entry, spec.dtype), progress)}
        placed = {}
        for component, blocks in component_blocks(spec):
            nbytes = spec.components[component].nbytes
            if component not in ("order", "table"):
                placed[component] = self._append(nbytes, map(_bytes, blocks), progress)
                continue
            key = (component, b"".join(map(_bytes, blocks)))
            if key not in self._shared:
                self._shared[key] = self._append(nbytes, [key[1]], progress)
            placed[component] = self._shared[key]
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
        self._hashed.result()  # at most one block waits to be hashed
        self._hashed = self._hasher.submit(self._digest.update, block)
        self._stream.write(block)
        if hasattr(os, "posix_fadvise"):
            # Linux starts to write these pages to the disk, so that the sync at the end has less to wait for.
            os.posix_fadvise(self._stream.fileno(), self._size, len(block), os.POSIX_FADV_DONTNEED)
        self._size += len(block)


def _bytes(block: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def _key(spec: Spec) -> Key:
    return (spec.entry if isinstance(spec, TensorSpec) else spec.source, spec.dtype)


def _distinct(specs: Sequence[Spec]) -> list[Spec]:
    first: dict[Key, Spec] = {}
    for spec in specs:
        first.setdefault(_key(spec), spec)
    return list(first.values())
