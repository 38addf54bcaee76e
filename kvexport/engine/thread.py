"""A thread that runs the steps of an engine, and calls functions for other threads between two steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from kvexport.engine.core import EngineCore
from kvexport.engine.request import FINISHED, Request
from kvexport.errors import EngineEndedError

T = TypeVar("T")
log = logging.getLogger("kvexport.engine")


class EngineThread:
    def __init__(
        self,
        engine: EngineCore,
        advanced: Callable[[Sequence[Request]], None],
        failed: Callable[[], None],
    ) -> None:
        self.engine = engine
        self._advanced, self._failed = advanced, failed
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._ending = self._dead = False
        self._thread = threading.Thread(target=self._run, name="kvexport-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not (self._ending or self._dead)

    def call(self, function: Callable[[], T]) -> Future[T]:
        if self._dead:
            raise EngineEndedError("the engine's thread has ended, so the engine answers nothing any more")
        future: Future[T] = Future()
        self._calls.put((function, future))
        if self._dead:  # the thread may have refused all waiting calls and ended before this `put`
            self._refuse_calls()
        return future

    def end(self) -> None:
        self._ending = True
        self._calls.put((lambda: None, Future()))

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending:
                self._make_calls()
                if self.engine.busy and not self._ending:
                    self._step()
        except BaseException:
            log.critical("the engine's thread has failed: the engine answers nothing any more", exc_info=True)
            self._dead = True
            self._refuse_calls()
            self._failed()
            return
        self._dead = True
        self._refuse_calls()

    def _make_calls(self) -> None:
        with suppress(queue.Empty):
            while True:
                function, future = self._calls.get(block=not self.engine.busy and not self._ending)
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = function()
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

    def _step(self) -> None:
        running = self.engine.pending()
        try:
            advanced = self.engine.step()
        except Exception:
            # The requests of the failed step have finished with the error. All others go on.
            log.error("a step of the engine failed", exc_info=True)
            advanced = [request for request in running if request.state is FINISHED]
        self._advanced(advanced)

    def _refuse_calls(self) -> None:
        with suppress(queue.Empty):
            while True:
                _, future = self._calls.get(block=False)
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineEndedError("the engine's thread has ended"))
