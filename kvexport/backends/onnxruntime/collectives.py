"""The all-reduce over tensor-parallel ranks on the CPU: the native operator AllReduce, in memory that processes share.

The C++ side is plugins/cpu/ranks/ranks.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvexport.backends.onnxruntime import operators
from kvexport.processors import suitable_threads

if TYPE_CHECKING:
    from mmap import mmap

    from kvexport.artifact.manifest import Manifest


class NativeCollectives:
    """All-reduce over tensor-parallel ranks on the CPU, by the operator AllReduce of the native library.

    It implements `kvexport.backends.base.Collectives`.

    Raises:
        EnvironmentProblem: If the artifact would not run with the native operators, which include AllReduce.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._library = operators.library_of_ranks(manifest, "cpu")
        self._library.kvexport_ranks_bytes.restype = ctypes.c_size_t

    def bytes(self, ranks: int) -> int:
        """Return the bytes of shared host memory that `ranks` CPU ranks need; 0 if `ranks` is too large."""
        return int(self._library.kvexport_ranks_bytes(ranks))

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return an empty mapping, because CPU ranks need no additional environment variables."""
        return {}

    def join(self, memory: mmap, rank: int, ranks: int) -> None:
        """Connect this CPU rank with the other ranks over the shared memory, and wait until all have joined."""
        self._library.kvexport_ranks_join(_address(memory), rank, ranks)

    def fail(self, memory: mmap) -> None:
        """Make every all-reduce over the CPU ranks raise an error from now on."""
        self._library.kvexport_ranks_fail(_address(memory))

    def problem(self, memory: mmap) -> str:
        """Return "": a failed all-reduce on the CPU already fails the session run that contains it."""
        return ""


def _address(memory: mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def threads_of_rank(ranks: int) -> int:
    """Return the default number of CPU threads of each of `ranks` tensor-parallel ranks on this machine."""
    return max(1, suitable_threads().number // ranks)
