"""Progress output for command line users: bars on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """A task in progress, such as a download, whose progress is shown to the user."""

    def advance(self, amount: int) -> None: ...


Progress = AbstractContextManager[Task]


class _Quiet:
    def advance(self, amount: int) -> None:
        """Ignore the progress of a task, because nothing shows it."""


@contextmanager
def silent(label: str, total: int | None = None) -> Iterator[Task]:
    yield _Quiet()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(label: str, total: int | None = None) -> Progress:
    return _bar(label, total) if sys.stderr.isatty() else _line(label, total)


@contextmanager
def _line(label: str, total: int | None) -> Iterator[Task]:
    start = time.monotonic()
    print(f"{label} ...", file=sys.stderr, flush=True)
    yield _Quiet()
    print(f"{label}: done in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def _bar(label: str, total: int | None) -> Iterator[Task]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    # rich honours NO_COLOR itself.
    shown = RichProgress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with shown:
        task = shown.add_task(label, total=total)

        class Bar:
            def advance(self, amount: int) -> None:
                shown.advance(task, amount)

        yield Bar()
        shown.update(task, total=total or 1, completed=total or 1)
