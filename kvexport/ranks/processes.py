"""The processes of tensor-parallel ranks, as rank 0 manages them: their start, their calls and their end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from mmap import mmap
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.base import A_RANK_FAILED, Backend, Collectives, LoadOptions
from kvexport.errors import EnvironmentProblem, KvexportError, UsageError
from kvexport.ranks.channel import Channel, Message
from kvexport.units import format_bytes

T = TypeVar("T")
# The program gets this process's module search path, so that it imports the same modules from any directory.
PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from kvexport.ranks.worker import main; main()"
AGAIN = "load the artifact again"
SECONDS_TO_END = 10.0
SECONDS_TO_REPORT = 2.0


class SumError(Exception):
    """The error for a wrong all-reduce (sum over tensor-parallel ranks) in finished model calls, with the reason."""


def require_sums(collectives: Collectives, memory: mmap) -> None:
    """Check that the all-reduces (sums over tensor-parallel ranks) of finished model calls have right results.

    Raises:
        SumError: A rank failed, waited too long for another rank, or added up another tensor than the other ranks.
    """
    if problem := collectives.problem(memory):
        raise SumError(problem)


class Ranks:
    """The tensor-parallel ranks (processes) of one loaded model, as rank 0 manages them.

    Rank 0's calls run in a separate thread, which no interrupt reaches, so a call that has begun always ends and all
    ranks make the same calls. If a rank ends or fails, or rank 0 fails within a call, all later sums fail, and every
    later call raises a KvexportError that names the rank.
    """

    def __init__(self, backend: Backend, path: Path, manifest: Manifest, options: LoadOptions) -> None:
        """Start the processes of all ranks, and load the model on each.

        Args:
            backend: The backend.
            path: The directory of the artifact.
            manifest: Its manifest.
            options: Settings that replace those of the recipe.

        Raises:
            EnvironmentProblem: If there is no memory to share or a process cannot be started.
            KvexportError: The errors of `Backend.load` on any rank.
        """
        self.count = manifest.graphs.rank_count
        self.manifest = manifest.rank_manifest(0)
        self.collectives = backend.collectives(self.manifest, options)
        self._thread = ThreadPoolExecutor(1, "rank 0")
        self._failed: list[KvexportError] = []  # the first failure, if any
        self._has_failed = Event()  # set after the first failure
        self.memory, file = _shared_memory(self.collectives, self.count)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._close = weakref.finalize(self, _end, os.getpid(), self._channels, self._processes, self._thread)
        try:
            # An artifact of several ranks takes no adapters, whose arrays could not be sent.
            settings = asdict(replace(options, adapters=None))
            start = {"path": str(path.resolve()), "backend": backend.name, "options": settings}
            for rank in range(1, self.count):
                self._start(rank, file)
                self._channels[-1].send(Message("start", {**start, "rank": rank}))
            self.model: Any = self.call(partial(self._load, backend, path, options))
            for rank in range(1, self.count):
                self.answer(rank)
        except BaseException:
            self._close()
            raise
        finally:
            os.close(file)

    def _load(self, backend: Backend, path: Path, options: LoadOptions) -> Any:
        self.collectives.join(self.memory, 0, self.count)  # in the thread of all calls
        return backend.load(path, self.manifest, options)

    def _start(self, rank: int, file: int) -> None:
        near_end, far_end = socket.socketpair()
        files = (far_end.fileno(), file)
        command = [sys.executable, "-I", "-c", PROGRAM, *map(str, files), json.dumps(sys.path)]
        with far_end:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=files,
                    env={**os.environ, **self.collectives.environment(rank)},
                    start_new_session=True,  # an interrupt from the terminal reaches only rank 0
                )
            except OSError as error:
                near_end.close()
                raise EnvironmentProblem(f"rank {rank} cannot be started: {error}") from error
        self._processes.append(process)
        ended = partial(
            _ended, rank, process, self._failed, self._has_failed, partial(self.collectives.fail, self.memory)
        )
        self._channels.append(Channel(near_end, ended))

    def call(self, work: Callable[[], T], message: Message | None = None) -> T:
        """Run a function on rank 0 while the other ranks execute the call of a message.

        Args:
            work: The function.
            message: The message; None to run only the function.

        Returns:
            The result of the function.

        Raises:
            KvexportError: The failure of a rank, or the function's own KvexportError.
        """
        future = self._thread.submit(self._tell, work, message)
        try:
            return future.result()
        except KvexportError:
            raise
        except Exception as error:
            # The other ranks may now be out of step. If another rank failed first, its report arrives soon.
            echo = isinstance(error, OSError) or A_RANK_FAILED in str(error)
            if not (echo and self._has_failed.wait(SECONDS_TO_REPORT)):
                problem = error if isinstance(error, SumError) else f"rank 0 failed: {type(error).__name__}: {error}"
                _note(self._failed, self._has_failed, str(problem))
            self.collectives.fail(self.memory)
            raise self._failed[0] from error
        except BaseException:
            wait([future])
            raise

    def _tell(self, work: Callable[[], T], message: Message | None) -> T:
        if self._failed:
            raise self._failed[0]
        if message is not None:
            for channel in self._channels:
                channel.send(message)
        result = work()
        require_sums(self.collectives, self.memory)
        return result

    def ask(self, work: Callable[[], T], message: Message) -> list[Any]:
        """Run `work` on rank 0 while the other ranks execute a call; return all results, rank by rank."""
        return self.call(lambda: [work(), *map(self.answer, range(1, self.count))], message)

    def answer(self, rank: int) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of a rank's answer to a call.

        Raises:
            KvexportError: If the rank has failed.
        """
        message = self._channels[rank - 1].receive()
        if message is None or message.name == "failed":
            self._has_failed.wait()
            raise self._failed[0]
        return message.arrays


def _shared_memory(collectives: Collectives, ranks: int) -> tuple[mmap, int]:
    """Return anonymous shared memory for all-reduces and its file number; it disappears with the last process."""
    size = collectives.bytes(ranks)
    if not size:
        raise UsageError(f"there cannot be {ranks} ranks", "a smaller backend.tensor_parallel")
    try:
        file = os.memfd_create("kvexport") if hasattr(os, "memfd_create") else _unnamed_file()
        os.ftruncate(file, size)
        return mmap(file, size), file
    except OSError as error:
        raise EnvironmentProblem(
            f"the ranks cannot share {format_bytes(size)} of memory: {error.strerror}", "free some memory"
        ) from error


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _note(failed: list[KvexportError], has_failed: Event, problem: str, fix: str = "") -> None:
    """Record a rank's failure if it is the first one, which every later call raises."""
    if not failed:
        failed.append(KvexportError(problem, fix or AGAIN))
    has_failed.set()


def _ended(
    rank: int,
    process: subprocess.Popen[bytes],
    failed: list[KvexportError],
    has_failed: Event,
    fail: Callable[[], None],
    last: Message | None,
) -> None:
    """Record the failure of a rank whose connection has closed, and make all all-reduces fail."""
    if last is not None and last.name == "failed":
        _note(failed, has_failed, f"rank {rank} failed: {last.values['problem']}", last.values["fix"])
    else:
        _note(failed, has_failed, f"rank {rank}, the process {process.pid}, {_how(process)}")
    fail()


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(SECONDS_TO_REPORT)
    except subprocess.TimeoutExpired:
        return "does not answer"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _end(
    owner: int, channels: Sequence[Channel], processes: Sequence[subprocess.Popen[bytes]], thread: ThreadPoolExecutor
) -> None:
    """Close the connections to all ranks, which ends them, and wait for their processes."""
    if os.getpid() != owner:
        return  # this process is a fork of the one that started the ranks
    thread.shutdown(wait=False)
    for channel in channels:
        channel.close()
    for process in processes:
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
