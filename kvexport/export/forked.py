"""Work in a forked process on another CPU core, which returns its result as bytes."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

PATIENCE_SECONDS = 300.0
WATCH_SECONDS = 0.1


@contextmanager
def forked(work: Callable[[], bytes], watch: Callable[[], None] | None = None) -> Iterator[Callable[[], bytes]]:
    """Start `work` in a forked process, and yield a function that waits for the result of `work`.

    The forked process ends with the context at the latest. If no process can or should be forked (`can_fork`), or if it
    fails or does not answer within `PATIENCE_SECONDS`, the calling process itself runs `work` when the result is
    needed, and exceptions of `work` are raised there. With `watch`, the wait has no limit, and calls `watch` again and
    again.
    """
    if not can_fork():
        yield work
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, sender), daemon=True)

    def result() -> bytes:
        with suppress(EOFError, OSError):
            while watch and not receiver.poll(WATCH_SECONDS):
                watch()
            if receiver.poll(PATIENCE_SECONDS):
                return receiver.recv_bytes()
        return work()

    try:
        # The interpreter ignores exceptions of signal handlers while it forks, so a signal would be lost. Signals are
        # therefore blocked for the moment of the fork; one that came meanwhile raises as soon as they are not.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sender.close()
        yield result
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()


def can_fork() -> bool:
    """Return whether this process can fork a copy of itself that works on another CPU core.

    Forking needs Linux, more than one core, no other Python thread (the copy could wait forever for a lock of such a
    thread), and a process that multiprocessing allows to have children.
    """
    several = (os.cpu_count() or 1) > 1 and threading.active_count() == 1
    return sys.platform == "linux" and several and not multiprocessing.current_process().daemon


def _send(work: Callable[[], bytes], sender: Connection) -> None:
    with suppress(BaseException):  # the parent then runs `work` itself, and raises the exception
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with its parent
        # Files that the parent has open are closed here, such as the lock of the artifact, which must be free if the
        # parent is killed.
        for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if number > 2 and number != sender.fileno():
                with suppress(OSError):  # the file that listed /proc/self/fd is closed already
                    os.close(number)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # a fork does not copy torch's other threads
        sender.send_bytes(work())
