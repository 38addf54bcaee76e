"""Setup of the program's process: closed standard streams, and signals that ask the process to end."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(KeyboardInterrupt):
    """The exception for a signal that asks the process to end.

    As with an interrupt, no `except Exception` catches this exception, so every `finally` and context manager cleans
    up: the staging folder of a build, the folder of an evaluation, child processes.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def end_cleanly() -> None:
    """Make SIGTERM and SIGHUP raise `Terminated`; a signal that the caller ignores (as nohup does) stays ignored."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise Terminated(number)


def open_standard_streams() -> None:
    """Open descriptors 0 to 2 on the null device if the caller closed them.

    Otherwise the next opened files would get these numbers, and output of a library would be written into them. A
    closed stdin stays None in `sys`, so that a prompt from it can be refused.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `number`
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - of a descriptor, for as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character is no reason to stop.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
