"""Rank 0's side of the processes: started, told what to do, and ended."""

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
from dataclasses import asdict
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
# It finds what this process finds, whatever lies in the current directory.
PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from kvexport.ranks.worker import main; main()"
AGAIN = "load the artifact again"
SECONDS_TO_END = 10.0
SECONDS_TO_SAY = 2.0


class NoSum(Exception):
    """Ranks have not added up; the message says why."""


def require_sums(collectives: Collectives, memory: mmap) -> None:
    """Raises NoSum where sums of calls that have ended are none."""
    if said := collectives.problem(memory):
        raise NoSum(said)


class Ranks:
    """The ranks of one loaded artifact. Of rank 0 the calls run in a thread of their own, which no interrupt reaches:
    one that was begun is ended, so that the ranks stay in step.

    When a rank ends, or fails, or rank 0 fails within a call, all sums fail from then on, and every call raises a
    KvexportError that names the rank.
    """

    def __init__(self, backend: Backend, path: Path, manifest: Manifest, options: LoadOptions) -> None:
        """Raises what `Backend.load` raises, of whatever rank, and EnvironmentProblem where there is no memory to
        share or no process."""
        self.count = manifest.graphs.rank_count
        self.manifest = manifest.rank_plan(0)
        self.collectives = backend.collectives(self.manifest, options)
        self._thread = ThreadPoolExecutor(1, "rank 0")
        self._failed: list[KvexportError] = []  # the first failure, where there is one
        self._known = Event()  # that there is
        self.memory, file = _shared_memory(self.collectives, self.count)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._close = weakref.finalize(self, _end, os.getpid(), self._channels, self._processes, self._thread)
        try:
            start = {"path": str(path.resolve()), "backend": backend.name, "options": asdict(options)}
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
        self.collectives.join(self.memory, 0, self.count)  # the thread of all calls
        return backend.load(path, self.manifest, options)

    def _start(self, rank: int, file: int) -> None:
        ours, theirs = socket.socketpair()
        files = (theirs.fileno(), file)
        command = [sys.executable, "-I", "-c", PROGRAM, *map(str, files), json.dumps(sys.path)]
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=files,
                    env={**os.environ, **self.collectives.environment(rank)},
                    start_new_session=True,  # an interrupt of the terminal is for rank 0
                )
            except OSError as error:
                ours.close()
                raise EnvironmentProblem(f"rank {rank} cannot be started: {error}") from error
        self._processes.append(process)
        ended = partial(_ended, rank, process, self._failed, self._known, partial(self.collectives.fail, self.memory))
        self._channels.append(Channel(ours, ended))

    def call(self, work: Callable[[], T], message: Message | None = None) -> T:
        """`work` of rank 0, and what the other ranks do beside it. Raises the failure of a rank, and KvexportErrors of
        `work` as they are."""
        future = self._thread.submit(self._tell, work, message)
        try:
            return future.result()
        except KvexportError:
            raise
        except Exception as error:
            # Nobody knows where the others are now. Where another rank failed first, it says so soon.
            echo = isinstance(error, OSError) or A_RANK_FAILED in str(error)
            if not (echo and self._known.wait(SECONDS_TO_SAY)):
                said = error if isinstance(error, NoSum) else f"rank 0 failed: {type(error).__name__}: {error}"
                _note(self._failed, self._known, str(said))
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
        """What `work` gives, and the answers of the other ranks, rank by rank."""
        return self.call(lambda: [work(), *map(self.answer, range(1, self.count))], message)

    def answer(self, rank: int) -> Mapping[str, NDArray[Any]]:
        """What a rank answers to a call that asks for something. Raises its failure."""
        message = self._channels[rank - 1].receive()
        if message is None or message.name == "failed":
            self._known.wait()
            raise self._failed[0]
        return message.arrays


def _shared_memory(collectives: Collectives, ranks: int) -> tuple[mmap, int]:
    """Memory without a name, and the file that it is: nothing of it is left when no process holds it."""
    size = collectives.bytes(ranks)
    if not size:
        raise UsageError(f"there cannot be {ranks} ranks")
    try:
        file = os.memfd_create("kvexport") if hasattr(os, "memfd_create") else _unnamed_file()
        os.ftruncate(file, size)
        return mmap(file, size), file
    except OSError as error:
        raise EnvironmentProblem(
            f"the ranks get no memory to share, {format_bytes(size)}: {error.strerror}", "free some memory"
        ) from error


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _note(failed: list[KvexportError], known: Event, problem: str, fix: str = "") -> None:
    """The first failure is what every later call raises."""
    if not failed:
        failed.append(KvexportError(problem, fix or AGAIN))
    known.set()


def _ended(
    rank: int,
    process: subprocess.Popen[bytes],
    failed: list[KvexportError],
    known: Event,
    fail: Callable[[], None],
    last: Message | None,
) -> None:
    """A rank closed its end of the channel."""
    if last is not None and last.name == "failed":
        _note(failed, known, f"rank {rank} failed: {last.values['problem']}", last.values["fix"])
    else:
        _note(failed, known, f"rank {rank}, the process {process.pid}, {_how(process)}")
    fail()


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(SECONDS_TO_SAY)
    except subprocess.TimeoutExpired:
        return "does not answer"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _end(
    owner: int, channels: Sequence[Channel], processes: Sequence[subprocess.Popen[bytes]], thread: ThreadPoolExecutor
) -> None:
    """The ranks end when their channel is closed."""
    if os.getpid() != owner:
        return  # a fork of the process that has started them
    thread.shutdown(wait=False)
    for channel in channels:
        channel.close()
    for process in processes:
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
