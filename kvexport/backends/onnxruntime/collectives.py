"""How ranks of one model add up what they made: the operator AllReduce of the native library for the CPU, over memory
that their processes share (plugins/cpu/ranks/ranks.h)."""

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
    """See `kvexport.backends.base.Collectives`. Raises EnvironmentProblem where the artifact would not run by the
    native operators, of which AllReduce is one."""

    def __init__(self, manifest: Manifest) -> None:
        self._library = operators.library_of_ranks(manifest, "cpu")
        self._library.kvexport_ranks_bytes.restype = ctypes.c_size_t

    def bytes(self, ranks: int) -> int:
        """See `Collectives`."""
        return int(self._library.kvexport_ranks_bytes(ranks))

    def environment(self, rank: int) -> Mapping[str, str]:
        """See `Collectives`."""
        return {}

    def join(self, memory: mmap, rank: int, ranks: int) -> None:
        """See `Collectives`."""
        self._library.kvexport_ranks_join(_address(memory), rank, ranks)

    def fail(self, memory: mmap) -> None:
        """See `Collectives`."""
        self._library.kvexport_ranks_fail(_address(memory))

    def problem(self, memory: mmap) -> str:
        """See `Collectives`: a sum that cannot be made is an error of the run."""
        return ""


def _address(memory: mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def threads_of_rank(ranks: int) -> int:
    """How many threads each of the ranks of one machine has where nobody says so."""
    return max(1, (os.cpu_count() or 1) // ranks)
