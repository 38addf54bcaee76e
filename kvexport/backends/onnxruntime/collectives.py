"""The sums over ranks on the CPU: the native operator AllReduce, over memory that the processes share.

See plugins/cpu/ranks/ranks.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvexport.backends.onnxruntime import operators

if TYPE_CHECKING:
    from mmap import mmap

    from kvexport.artifact.manifest import Manifest


class NativeCollectives:
    """The sums over ranks on the CPU, by the operator AllReduce of the native library.

    It implements `kvexport.backends.base.Collectives`.

    Raises:
        EnvironmentProblem: If the artifact would not run with the native operators, which include AllReduce.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._library = operators.library_of_ranks(manifest, "cpu")
        self._library.kvexport_ranks_bytes.restype = ctypes.c_size_t

    def bytes(self, ranks: int) -> int:
        """Return the bytes of shared memory for `ranks` ranks; 0 if there cannot be so many."""
        return int(self._library.kvexport_ranks_bytes(ranks))

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return no variables."""
        return {}

    def join(self, memory: mmap, rank: int, ranks: int) -> None:
        """Join the other ranks."""
        self._library.kvexport_ranks_join(_address(memory), rank, ranks)

    def fail(self, memory: mmap) -> None:
        """Make every sum an error from now on."""
        self._library.kvexport_ranks_fail(_address(memory))

    def problem(self, memory: mmap) -> str:
        """Return "", because a sum that fails is an error of the run."""
        return ""


def _address(memory: mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def threads_of_rank(ranks: int) -> int:
    """Return the default number of threads of each rank on this machine."""
    return max(1, (os.cpu_count() or 1) // ranks)
