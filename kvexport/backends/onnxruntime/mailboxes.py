"""The all-reduce over tensor-parallel ranks on GPUs: the operator AllReduce of the native library for CUDA.

Each rank has a mailbox in the memory of its GPU, and gives the other processes access to it by CUDA's driver
(plugins/cuda/ranks/ranks.h). This module defines the layout of the host memory that ranks share. It begins with a
status word, which the kernels write. From HANDLES on it has, for every rank, the handle of its mailbox and the handle's
digest, which shows the other ranks that the handle is complete.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from mmap import mmap
from typing import TYPE_CHECKING, Any

from kvexport.backends.base import A_RANK_FAILED
from kvexport.backends.onnxruntime import devices, operators
from kvexport.errors import EnvironmentProblem, KvexportError

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest

MOST = 16  # the most ranks: KV_CUDA_MOST_RANKS
FAILED, LATE, OUT_OF_STEP = 1, 2, 3  # KV_RANKS_...
SECONDS_TO_WAIT = 30.0  # the time that a kernel waits for another rank's summand
SECONDS_TO_JOIN = 120.0
HANDLES, HANDLE, DIGEST = 4096, 64, 32
PORTABLE_AND_MAPPED, LAZY_PEER_ACCESS = 3, 1
# A handle may open the whole block of the driver that contains the memory, so mailboxes are whole blocks.
UNIT = 2 << 20


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE),)


class Mailboxes:
    """All-reduce over GPU ranks through mailboxes, buffers in GPU memory that the other ranks' GPUs can reach.

    Raises:
        EnvironmentProblem: If this machine has too few GPUs, one GPU does not reach the memory of another, or the
            artifact would not run with the native operators.
    """

    def __init__(self, manifest: Manifest) -> None:
        devices.require_device("cuda")
        if problems := devices.rank_problems(manifest.graphs.rank_count):
            raise EnvironmentProblem(*problems[0])
        self._library = operators.library_of_ranks(manifest, "cuda")
        self._library.kvexport_mailbox_bytes.restype = ctypes.c_size_t
        self._joined: tuple[int, list[int]] | None = None  # device addresses: the status word, the mailboxes

    def bytes(self, ranks: int) -> int:
        """Return the bytes of shared host memory that `ranks` GPU ranks need; 0 if `ranks` is too large."""
        return shared_bytes(ranks) if 1 <= ranks <= MOST else 0

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return CUDA_VISIBLE_DEVICES for the process of tensor-parallel rank `rank`: GPU number `rank` comes first."""
        return {devices.VISIBLE: devices.visible_from(rank)}

    def join(self, memory: mmap, rank: int, ranks: int) -> None:
        """Connect this rank's mailbox (a buffer in GPU memory) with the other ranks' mailboxes, and wait for them."""
        if self._joined is None:
            undo: list[tuple[str, Any]] = []
            weakref.finalize(self, _give_back, undo, memory).atexit = False
            self._joined = exchanged(memory, rank, ranks, self._library.kvexport_mailbox_bytes(), undo)
        problem, mailboxes = self._joined
        self._library.kvexport_mailboxes_join(
            rank,
            ranks,
            ctypes.c_uint64(int(SECONDS_TO_WAIT * 1e9)),
            ctypes.c_void_p(problem),
            (ctypes.c_void_p * ranks)(*mailboxes),
        )

    def fail(self, memory: mmap) -> None:
        """Make every all-reduce over the GPU ranks fail from now on."""
        if not _word(memory):
            memory[:4] = FAILED.to_bytes(4, "little")

    def problem(self, memory: mmap) -> str:
        """Return why sums over GPU ranks are wrong (a late rank, ranks out of step, or a failed rank); "" if right."""
        word = _word(memory)
        kind, rank, other = word & 255, word >> 8 & 255, word >> 16 & 255
        if kind == LATE:
            return f"rank {rank} waited {SECONDS_TO_WAIT:g} s for the summand of rank {other}"
        if kind == OUT_OF_STEP:
            return f"the ranks are out of step: rank {rank} and rank {other} add up different tensors"
        return A_RANK_FAILED if word else ""


def shared_bytes(ranks: int) -> int:
    """Return the bytes of shared host memory through which `ranks` GPU ranks exchange their mailbox handles."""
    return HANDLES + ranks * (HANDLE + DIGEST)


def exchanged(memory: mmap, rank: int, ranks: int, size: int, undo: list[tuple[str, Any]]) -> tuple[int, list[int]]:
    """Create this rank's mailbox (a buffer in GPU memory) and exchange its IPC handle with the other ranks.

    Args:
        memory: The shared host memory.
        rank: The number of this rank.
        ranks: The number of ranks.
        size: The bytes of a mailbox.
        undo: A list to which the driver calls that release everything are added; make them in reverse order.

    Returns:
        The device addresses of the status word and of every rank's mailbox.
    """
    shared, length = ctypes.addressof(ctypes.c_char.from_buffer(memory)), ctypes.c_size_t(len(memory))
    whole = ctypes.c_size_t(-(-size // UNIT) * UNIT)
    problem, mailbox, handle = ctypes.c_uint64(), ctypes.c_uint64(), _Handle()
    devices.use_first_gpu()
    devices.drive("cuMemHostRegister_v2", ctypes.c_void_p(shared), length, PORTABLE_AND_MAPPED)
    undo.append(("cuMemHostUnregister", ctypes.c_void_p(shared)))
    devices.drive("cuMemHostGetDevicePointer_v2", ctypes.byref(problem), ctypes.c_void_p(shared), 0)
    devices.drive("cuMemAlloc_v2", ctypes.byref(mailbox), whole)
    undo.append(("cuMemFree_v2", mailbox))
    devices.drive("cuMemsetD8_v2", mailbox, ctypes.c_ubyte(0), whole)
    devices.drive("cuCtxSynchronize")
    devices.drive("cuIpcGetMemHandle", ctypes.byref(handle), mailbox)
    _leave(memory, rank, bytes(handle))
    mailboxes = []
    for other in range(ranks):
        address = mailbox
        if other != rank:
            handle, address = _Handle.from_buffer_copy(_awaited(memory, other)), ctypes.c_uint64()
            devices.drive("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, LAZY_PEER_ACCESS)
            undo.append(("cuIpcCloseMemHandle", address))
        mailboxes.append(address.value)
    return problem.value, mailboxes


def _awaited(memory: mmap, rank: int) -> bytes:
    """Wait until another rank has published the IPC handle of its mailbox in shared memory, and return the handle."""
    until = time.monotonic() + SECONDS_TO_JOIN
    while (handle := _left(memory, rank)) is None:
        if _word(memory):
            raise RuntimeError(A_RANK_FAILED)
        if time.monotonic() > until:
            raise KvexportError(
                f"rank {rank} has created no mailbox in {SECONDS_TO_JOIN:g} s", "load the artifact again"
            )
        time.sleep(0.001)
    return handle


def _word(memory: mmap) -> int:
    return int.from_bytes(memory[:4], "little")


def _leave(memory: mmap, rank: int, handle: bytes) -> None:
    offset = HANDLES + rank * (HANDLE + DIGEST)
    memory[offset : offset + HANDLE + DIGEST] = handle + sha256(handle).digest()


def _left(memory: mmap, rank: int) -> bytes | None:
    offset = HANDLES + rank * (HANDLE + DIGEST)
    handle = memory[offset : offset + HANDLE]
    return handle if sha256(handle).digest() == memory[offset + HANDLE : offset + HANDLE + DIGEST] else None


def _give_back(undo: list[tuple[str, Any]], _: mmap) -> None:
    """Release the GPU memory and mailbox handles of a rank; the second argument keeps the host memory alive.

    A device that no longer works has nothing to release.
    """
    with suppress(EnvironmentProblem):
        devices.use_first_gpu()
        for name, argument in reversed(undo):
            devices.drive(name, argument)
