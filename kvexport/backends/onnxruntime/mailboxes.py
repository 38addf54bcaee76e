"""How ranks of one model add up on GPUs: the operator AllReduce of the native library for CUDA, over mailboxes in the
memory of their devices, which their processes open to one another by CUDA's driver (plugins/cuda/ranks/ranks.h).

The memory of the host that ranks share, laid out here alone, begins with the kernels' word; from HANDLES on it holds of
every rank the handle of its mailbox, and the digest of that, by which others see that it is there.
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

MOST = 16  # ranks: KV_CUDA_MOST_RANKS
FAILED, LATE, OUT_OF_STEP = 1, 2, 3  # KV_RANKS_...
SECONDS_TO_WAIT = 30.0  # of a kernel, for the part of another rank
SECONDS_TO_JOIN = 120.0
HANDLES, HANDLE, DIGEST = 4096, 64, 32
PORTABLE_AND_MAPPED, LAZY_PEER_ACCESS = 3, 1
UNIT = 2 << 20  # a handle may open all of the driver's block that the memory lies in: mailboxes are whole ones


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE),)


class Mailboxes:
    """See `kvexport.backends.base.Collectives`. Raises EnvironmentProblem where this machine has too few GPUs, where
    one does not reach the memory of another, and where the artifact would not run by the native operators."""

    def __init__(self, manifest: Manifest) -> None:
        devices.require_device("cuda")
        if found := devices.rank_problems(manifest.graphs.rank_count):
            raise EnvironmentProblem(*found[0])
        self._library = operators.library_of_ranks(manifest, "cuda")
        self._library.kvexport_mailbox_bytes.restype = ctypes.c_size_t
        self._joined: tuple[int, list[int]] | None = None  # addresses on this device: of the word, of the mailboxes

    def bytes(self, ranks: int) -> int:
        """See `Collectives`."""
        return shared_bytes(ranks) if 1 <= ranks <= MOST else 0

    def environment(self, rank: int) -> Mapping[str, str]:
        """See `Collectives`: the process of a rank has that GPU as its first."""
        return {devices.VISIBLE: devices.visible_from(rank)}

    def join(self, memory: mmap, rank: int, ranks: int) -> None:
        """See `Collectives`. Waits for the other ranks."""
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
        """See `Collectives`."""
        if not _word(memory):
            memory[:4] = FAILED.to_bytes(4, "little")

    def problem(self, memory: mmap) -> str:
        """See `Collectives`."""
        word = _word(memory)
        kind, rank, other = word & 255, word >> 8 & 255, word >> 16 & 255
        if kind == LATE:
            return f"rank {rank} waited {SECONDS_TO_WAIT:g} s for the part of rank {other}"
        if kind == OUT_OF_STEP:
            return f"the ranks are out of step: rank {rank} and rank {other} add up different tensors"
        return A_RANK_FAILED if word else ""


def shared_bytes(ranks: int) -> int:
    """Of the memory of the host that so many ranks share."""
    return HANDLES + ranks * (HANDLE + DIGEST)


def exchanged(memory: mmap, rank: int, ranks: int, size: int, undo: list[tuple[str, Any]]) -> tuple[int, list[int]]:
    """Where this rank's device reaches the word, and the mailbox of every rank, of `size` bytes each; this one's is
    made. Waits for the others. undo: gets the driver's calls that give back what was taken, to be made last first."""
    shared, length = ctypes.addressof(ctypes.c_char.from_buffer(memory)), ctypes.c_size_t(len(memory))
    whole = ctypes.c_size_t(-(-size // UNIT) * UNIT)
    problem, own, handle = ctypes.c_uint64(), ctypes.c_uint64(), _Handle()
    devices.use_first_gpu()
    devices.drive("cuMemHostRegister_v2", ctypes.c_void_p(shared), length, PORTABLE_AND_MAPPED)
    undo.append(("cuMemHostUnregister", ctypes.c_void_p(shared)))
    devices.drive("cuMemHostGetDevicePointer_v2", ctypes.byref(problem), ctypes.c_void_p(shared), 0)
    devices.drive("cuMemAlloc_v2", ctypes.byref(own), whole)
    undo.append(("cuMemFree_v2", own))
    devices.drive("cuMemsetD8_v2", own, ctypes.c_ubyte(0), whole)
    devices.drive("cuCtxSynchronize")
    devices.drive("cuIpcGetMemHandle", ctypes.byref(handle), own)
    _leave(memory, rank, bytes(handle))
    mailboxes = []
    for other in range(ranks):
        there = own
        if other != rank:
            handle, there = _Handle.from_buffer_copy(_awaited(memory, other)), ctypes.c_uint64()
            devices.drive("cuIpcOpenMemHandle_v2", ctypes.byref(there), handle, LAZY_PEER_ACCESS)
            undo.append(("cuIpcCloseMemHandle", there))
        mailboxes.append(there.value)
    return problem.value, mailboxes


def _awaited(memory: mmap, rank: int) -> bytes:
    """The handle that another rank leaves, as soon as it has."""
    until = time.monotonic() + SECONDS_TO_JOIN
    while (handle := _left(memory, rank)) is None:
        if _word(memory):
            raise RuntimeError(A_RANK_FAILED)
        if time.monotonic() > until:
            raise KvexportError(f"rank {rank} has made no mailbox in {SECONDS_TO_JOIN:g} s", "load it again")
        time.sleep(0.001)
    return handle


def _word(memory: mmap) -> int:
    return int.from_bytes(memory[:4], "little")


def _leave(memory: mmap, rank: int, handle: bytes) -> None:
    at = HANDLES + rank * (HANDLE + DIGEST)
    memory[at : at + HANDLE + DIGEST] = handle + sha256(handle).digest()


def _left(memory: mmap, rank: int) -> bytes | None:
    at = HANDLES + rank * (HANDLE + DIGEST)
    handle = memory[at : at + HANDLE]
    return handle if sha256(handle).digest() == memory[at + HANDLE : at + HANDLE + DIGEST] else None


def _give_back(undo: list[tuple[str, Any]], _: mmap) -> None:
    """What a rank took of the driver; the memory of the host stays until then. A device that no longer works has
    nothing to give back."""
    with suppress(EnvironmentProblem):
        devices.use_first_gpu()
        for name, what in reversed(undo):
            devices.drive(name, what)
