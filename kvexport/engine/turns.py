"""A fair lock: threads get it in the order in which they ask for it."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A fair, reentrant lock: threads get it in the order in which they ask.

    A plain lock is not fair. A thread that steps an engine in a loop would take a plain lock again before a waiting
    thread wakes up. The waiting thread's request would then not start until the loop ends.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._mutex:
            if self._owner is None or self._owner == thread:
                self._owner = thread
                self._depth += 1
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((thread, gate))
        try:
            gate.acquire()
        except BaseException:  # an interrupt: this thread leaves the queue, or hands on the turn that it just got
            with self._mutex:
                if (thread, gate) in self._waiting:
                    self._waiting.remove((thread, gate))
                else:
                    self._hand_on()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._hand_on()

    def _hand_on(self) -> None:
        self._owner, self._depth = None, 0
        if self._waiting:
            self._owner, gate = self._waiting.popleft()
            self._depth = 1
            gate.release()
