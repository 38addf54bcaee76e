"""An inference engine for asyncio programs: a thread runs the engine's steps, and coroutines await the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from types import TracebackType
from typing import Any

from kvexport.engine.completion import Completion
from kvexport.engine.engine import Engine
from kvexport.engine.request import FINISHED, Pin, Processors, Prompt, Request, as_processors, ranges_of
from kvexport.engine.thread import EngineThread
from kvexport.errors import KvexportError
from kvexport.images.decode import ImageInput
from kvexport.language.chat import Message
from kvexport.language.settings import GenerationSettings
from kvexport.language.token import Token


class AsyncEngine:
    """An inference engine whose answers are awaited. Requests of all asyncio tasks run together in one batch.

        async with AsyncEngine(kvexport.load(path)) as engine:
            async for token in engine.astream("Once upon a time"):
                print(token.text, end="")

    A thread runs the engine's steps from the first request until the engine is closed. If an asyncio task is cancelled,
    or stops reading its stream of tokens, the task's request ends.

    Attributes:
        engine: The engine. Other threads may call it too, even while it answers asyncio tasks.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread: EngineThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[int, tuple[Request, asyncio.Queue[None]]] = {}
        self._failure: BaseException | None = None

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel all requests, end the thread that runs the steps, and close the engine."""
        if self._thread is not None:
            self._thread.end()
            await asyncio.to_thread(self._thread.join)
            self._failed(KvexportError("the engine was closed before the answer ended"))
        self.engine.close()

    async def agenerate(self, prompt: Prompt, settings: GenerationSettings | None = None, **options: Any) -> Completion:
        """Answer one prompt, and return the whole answer. `Engine.generate` explains arguments and errors."""
        return await self._completion(await self._request(prompt, settings, **options))

    async def astream(
        self, prompt: Prompt, settings: GenerationSettings | None = None, **options: Any
    ) -> AsyncGenerator[Token, None]:
        """Answer one prompt, and yield each token when it is chosen. `Engine.stream` explains arguments and errors."""
        async with aclosing(self._tokens(await self._request(prompt, settings, **options))) as tokens:
            async for token in tokens:
                yield token

    async def achat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        *,
        adapter: str | None = None,
        logits_processor: Processors = None,
        **options: Any,
    ) -> Completion:
        """Answer a conversation of chat messages.

        `Engine.chat` explains the arguments (all but `stream`) and errors.
        """
        prepare = partial(self.engine._prepare_chat, messages, settings, **options)
        ids, images, generation, plan, pins = await asyncio.to_thread(prepare)
        processors = as_processors(logits_processor)
        encoded = self.engine.encode(ids)
        request = Request(encoded, generation, processors=processors, adapter=adapter, images=images, pin=pins)
        return (await self._completion(request)).split(plan)

    async def _request(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None,
        *,
        images: Sequence[ImageInput] = (),
        pin: Pin = 0,
        adapter: str | None = None,
        logits_processor: Processors = None,
        **overrides: Any,
    ) -> Request:
        generation = settings or self.engine.settings(**overrides)
        ids, encoded = await asyncio.to_thread(self.engine.encode_with_images, prompt, images)
        processors, pins = as_processors(logits_processor), ranges_of(pin)
        return Request(ids, generation, processors=processors, adapter=adapter, images=encoded, pin=pins)

    async def _completion(self, request: Request) -> Completion:
        completion = Completion(len(request.prompt))
        async with aclosing(self._tokens(request)) as tokens:
            async for token in tokens:
                completion.append(token)
        return completion

    async def _tokens(self, request: Request) -> AsyncGenerator[Token, None]:
        """Add a request to the engine and yield its tokens. Closing the iterator early cancels the request."""
        added: asyncio.Queue[None] = asyncio.Queue()
        taken = 0
        try:
            await asyncio.wrap_future(self._started().call(lambda: self._add(request, added)))
            while True:
                await added.get()
                if self._failure is not None:
                    raise KvexportError(f"the engine's thread has ended: {self._failure}") from self._failure
                finished = request.state is FINISHED  # read before the tokens: a finished request gets no more
                for token in request.tokens[taken:]:
                    taken += 1
                    yield token
                if finished:
                    break
        finally:
            with suppress(KvexportError):
                self._started().call(lambda: self._drop(request))
        if request.error is not None:
            raise request.error

    def _started(self) -> EngineThread:
        """Return the thread that runs the engine's steps. The first call starts the thread."""
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise KvexportError("the engine belongs to another event loop", "make an AsyncEngine in this event loop")
        self._loop = loop
        if self._thread is None:
            self._thread = EngineThread(self.engine, self._advanced, self._failed)
            self._thread.start()
        return self._thread

    # ---- methods that run in the engine's thread ----

    def _add(self, request: Request, queue: asyncio.Queue[None]) -> None:
        self._queues[self.engine.add(request)] = request, queue

    def _drop(self, request: Request) -> None:
        self._queues.pop(request.id, None)
        self.engine.cancel(request.id)

    def _advanced(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (entry := self._queues.get(request.id)) is not None:
                self._notify(entry[1])

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        for _, queue in self._queues.values():
            self._notify(queue)

    def _notify(self, queue: asyncio.Queue[None]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop is closed, so no task waits for tokens
            self._loop.call_soon_threadsafe(queue.put_nowait, None)
