"""Ranks that only call the all-reduce of plugins/cuda/ranks/ranks.h, with kernels compiled for the host.

The ranks are threads of one process, or separate processes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.conformance.cuda_library import HOST, TYPES, bfloat16, float32_of, load

MOST = 16
FAILED, LATE, OUT_OF_STEP = 1, 2, 3
LONG = 1 << 62  # nanoseconds


class View(ctypes.Structure):
    """The C structure KvCudaRanks."""

    _fields_ = (
        ("rank", ctypes.c_int),
        ("count", ctypes.c_int),
        ("patience", ctypes.c_uint64),
        ("problem", ctypes.c_void_p),
        ("mailbox", ctypes.c_void_p * MOST),
    )


@contextlib.contextmanager
def multiprocessors(count: int = 16) -> Iterator[None]:
    """Set the number of multiprocessors of the kernels on the host within the `with` block.

    The default is enough for all blocks of the largest sum to run at once.
    """
    library, limit = load(HOST), ctypes.c_size_t(101376)
    library.kv_host_set(0, 0, count, limit)
    try:
        yield
    finally:
        library.kv_host_set(0, 0, 4, limit)


def sum_of(library: Any) -> Callable[[View, str, int, int, int, int], str]:
    """Return a function that calls kv_cuda_all_reduce with addresses.

    Its arguments are the view, the dtype, the addresses of the rank's part and of the sum, the number of elements, and
    the stream. It returns the error message, or "" on success.
    """
    function = library.kv_cuda_all_reduce
    function.restype = ctypes.c_char_p
    pointer, number = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [ctypes.POINTER(View), ctypes.c_int, pointer, pointer, number, pointer]

    def call(view: View, dtype: str, part: int, to: int, count: int, stream: int = 0) -> str:
        problem = function(view, TYPES[dtype], part, to, count, stream)
        return problem.decode() if problem else ""

    return call


def mailbox_bytes(library: Any) -> int:
    library.kv_cuda_mailbox_bytes.restype = ctypes.c_size_t
    return int(library.kv_cuda_mailbox_bytes())


def in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the float32 sum of the parts in their order, rounded once to their dtype. uint16 means bfloat16."""
    brain = parts[0].dtype == np.uint16
    total = None
    for part in parts:
        wide = float32_of(part) if brain else part.astype(np.float32)
        total = wide if total is None else total + wide
    assert total is not None
    return bfloat16(total) if brain else total.astype(parts[0].dtype)


def random_part(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    x = rng.standard_normal(count, np.float32)
    return bfloat16(x) if dtype == "uint16" else x.astype(dtype)


class Ranks:
    """Ranks as threads of this process.

    Attributes:
        word: The flag in memory that tells why the ranks stopped making sums, 0 while they work.
        pause: A function that each rank calls before each sum.
    """

    def __init__(self, library: Any, count: int, patience: int = LONG) -> None:
        self.sum, size = sum_of(library), mailbox_bytes(library)
        self.pause: Callable[[int], None] = lambda rank: None
        self.word = np.zeros(1, np.uint32)
        self.boxes = [_aligned(size) for _ in range(count)]
        self.pool = ThreadPoolExecutor(count)
        self.views = [View(rank, count, patience, self.word.ctypes.data) for rank in range(count)]
        for view in self.views:
            view.mailbox[:count] = [box.ctypes.data for box in self.boxes]

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Sum the parts of every rank in turn, and return the sums that every rank gets.

        If `parts` has fewer entries than there are ranks, the remaining ranks do not take part.
        """
        return list(self.pool.map(self._one, range(len(parts)), parts))

    def _one(self, rank: int, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        sums = [np.full_like(part, 77) for part in parts]
        for part, to in zip(parts, sums, strict=True):
            self.pause(rank)
            problem = self.sum(self.views[rank], part.dtype.name, part.ctypes.data, to.ctypes.data, part.size, 0)
            assert not problem, problem
        return sums


def _aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size]
