"""How ranks of one model add up what they made: the operator AllReduce of the native library for the CPU, over memory
that their processes share (plugins/cpu/ranks/ranks.h)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvexport.backends.onnxruntime import operators
from kvexport.errors import EnvironmentProblem

if TYPE_CHECKING:
    from mmap import mmap

    from kvexport.artifact.manifest import Manifest


class NativeCollectives:
    """See `kvexport.backends.base.Collectives`. Raises EnvironmentProblem where the artifact would not run by the
    native operators, of which AllReduce is one."""

    def __init__(self, manifest: Manifest) -> None:
        path = operators.library("cpu")
        attention = operators.implementations(manifest, "cpu")["VoteAttention"]
        if path is None or not attention.native:
            why = operators.why_no_library() if path is None else (attention.detail, "")
            raise EnvironmentProblem(f"ranks add up by the native operators, and {why[0]}", why[1])
        if not operators.has_ranks(path):
            raise EnvironmentProblem(f"{path} is of a kvexport without ranks", operators.how_to_build("cpu"))
        self._library = operators.loaded(path)
        self._library.kvexport_ranks_bytes.restype = ctypes.c_size_t

    def bytes(self, ranks: int) -> int:
        """See `Collectives`."""
        return int(self._library.kvexport_ranks_bytes(ranks))

    @contextmanager
    def joined(self, memory: mmap, rank: int, ranks: int) -> Iterator[None]:
        """See `Collectives`."""
        self._library.kvexport_ranks_join(_address(memory), rank, ranks)
        try:
            yield
        finally:
            self._library.kvexport_ranks_join(None, 0, 0)

    def fail(self, memory: mmap) -> None:
        """See `Collectives`."""
        self._library.kvexport_ranks_fail(_address(memory))


def _address(memory: mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def threads_of_rank(ranks: int) -> int:
    """How many threads each of the ranks of one machine has where nobody says so."""
    return max(1, (os.cpu_count() or 1) // ranks)
