"""What every route needs of the engine: bodies read, prompts encoded, requests answered whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvexport.runtime.engine import Engine
from kvexport.runtime.request import Request as EngineRequest
from kvexport.serve.conversation import Conversation, Prepared
from kvexport.serve.errors import ApiError, api_error, overloaded
from kvexport.serve.fields import B, Sampling, parse
from kvexport.serve.metrics import Metrics
from kvexport.serve.response_store import ResponseStore
from kvexport.serve.settings import ServeSettings
from kvexport.serve.streams import KEEP_ALIVE, ClientGone, EventStream, unless_gone
from kvexport.serve.worker import Job, Update, Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport import GenerationSettings

T = TypeVar("T")
log = logging.getLogger("kvexport.serve")
_BODY_SECONDS = 60  # for a client to send its body


class Rendering(Protocol):
    """An API's words for an answer that streams. Each gives events, or b""."""

    def begin(self) -> bytes:
        """What comes first."""
        ...

    def add(self, update: Update) -> bytes:
        """What a step made."""
        ...

    def end(self) -> bytes:
        """When all requests have finished."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """In place of the end."""
        ...


class Service:
    """One server's: the engine behind its worker, what is allowed, and the metrics."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.model = next((name for name in settings.names if name != "*"), "kvexport")
        self.metrics = Metrics(self.model)
        self.lanes = engine.reserve()  # the memory of the state is taken now, and no more later
        self.responses = ResponseStore()
        self.worker = Worker(engine, self.metrics, engine.max_batch + settings.queue)
        # Prompts are encoded beside the event loop, one at a time: the cores are the model's.
        self._encoders = anyio.CapacityLimiter(1)

    async def read(self, request: Request, kind: type[B]) -> B:
        """The body of a request. Raises ApiError where it is too long, too slow, no JSON or not of the kind."""
        limit, chunks, size = self.settings.body, [], 0
        sort = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if sort != "application/json" and not sort.endswith("+json"):
            raise ApiError(415, f"the body is {sort[:80]}: send JSON, with Content-Type: application/json")
        try:
            with anyio.fail_after(_BODY_SECONDS):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        raise ApiError(413, f"the body is longer than {limit} bytes")
                    chunks.append(chunk)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS} seconds") from None
        except ClientDisconnect:
            raise ClientGone from None
        data = b"".join(chunks)
        return await self.beside(lambda: parse(kind, data)) if size > 100_000 else parse(kind, data)

    def check_model(self, name: str | None) -> str:
        """The model's name in the answer. Raises ApiError for one that is not here."""
        if name is None or name in self.settings.names or "*" in self.settings.names:
            return name or self.model
        there = ", ".join(sorted({self.model, *self.settings.names} - {"*"}))
        said = f"there is no model {name[:200]!r} here, but {there}"
        raise ApiError(404, said, code="model_not_found", param="model")

    async def beside(self, work: Callable[[], T]) -> T:
        """`work`, in a thread beside the event loop."""
        return await anyio.to_thread.run_sync(work, limiter=self._encoders)

    async def encode(
        self, prompt: str | Sequence[int], *, special: bool = True, fits: bool = True
    ) -> Sequence[int] | NDArray[Any]:
        """Token ids of a prompt, as the engine takes them. special: with the tokenizer's special tokens, of a text.
        fits: refuse what is too long."""

        def work() -> Sequence[int] | NDArray[Any]:
            tokenizer = self.engine.tokenizer
            if not isinstance(prompt, str) or tokenizer is None:
                return self._fitting(prompt)
            ids = tokenizer.encode(prompt, add_special_tokens=special)
            return self._fitting(ids) if fits else ids

        return await self.beside(work)

    async def encode_chat(
        self, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any], *, fits: bool = True
    ) -> Sequence[int] | NDArray[Any]:
        """Token ids of a conversation, in the words of the chat template. variables: the template's own."""
        engine = self.engine
        if taken := {"self", "messages", "tools"} & variables.keys():
            said = f"chat_template_kwargs.{min(taken)}: no variable of a template's own"
            raise ApiError(400, said, param="chat_template_kwargs")

        def work() -> Sequence[int] | NDArray[Any]:
            if engine.chat_template is None or engine.tokenizer is None:
                return engine.encode_chat(messages)  # which says what is missing
            text = engine.chat_template.render(messages, tools, **variables)
            ids = engine.tokenizer.encode(text, add_special_tokens=False)
            return self._fitting(ids) if fits else ids

        return await self.beside(work)

    async def text_of_prompt(self, prompt: str | Sequence[int]) -> str:
        """A prompt as text. Raises ApiError where it cannot be."""
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            return prompt
        if tokenizer is None:
            raise ApiError(400, "the artifact has no tokenizer, so token ids have no text", param="prompt")
        if max(prompt, default=0) >= 1 << 32:
            raise ApiError(400, f"token id {max(prompt)} is out of range", param="tokens")
        return await self.beside(lambda: tokenizer.decode(prompt, skip_special_tokens=False))

    def _fitting(self, ids: str | Sequence[int]) -> NDArray[Any]:
        limit = self.engine.max_length
        if not isinstance(ids, str) and len(ids) >= limit:
            said = f"This model's maximum context length is {limit} tokens, and the prompt has {len(ids)}: "
            said += "context_length_exceeded"
            raise ApiError(400, said, code="context_length_exceeded", param="messages")
        return self.engine.encode(ids)

    def requests(self, ids: Any, settings: Sequence[GenerationSettings]) -> list[EngineRequest]:
        """Of one prompt, which is read once for all of them."""
        first = EngineRequest(ids, settings[0])
        return [first, *(first.fork(other) for other in settings[1:])]

    async def prepare(self, asked: Conversation, sampling: Sampling, tokens: int | None, **settings: Any) -> Prepared:
        """Requests that answer a conversation. tokens: of an answer, None = what fits. settings: further generation
        settings."""
        ids = await self.encode_chat(asked.messages, asked.tools or None, asked.variables)
        longest = self.longest(len(ids), tokens, self.engine.generation_config.get("max_new_tokens"))
        return Prepared(self.requests(ids, sampling.settings(self.engine, longest, **settings)))

    def longest(self, prompt_tokens: int, wanted: int | None, default: int | None = None) -> int:
        """Tokens of an answer, at most: those wanted, else `default`, else all that fit."""
        room = self.engine.max_length - prompt_tokens
        return min(x for x in (wanted or default or room, room, self.settings.max_tokens) if x is not None)

    async def submit(self, requests: Sequence[EngineRequest], *, streams: bool) -> Job:
        """Let them wait for lanes; `end` must follow. Raises ApiError where they are too many, or too many wait."""
        if len(requests) > self.settings.choices:
            said = f"{len(requests)} answers are asked for in one request, and {self.settings.choices} are allowed"
            raise ApiError(400, said, param="n")
        job = Job(requests, streams=streams, buffer=self.settings.buffer)
        job.timer = asyncio.get_running_loop().call_later(self.settings.timeout, self._expire, job)
        try:
            await self.worker.submit(job)
        except BaseException:
            self.end(job)
            raise
        return job

    def end(self, job: Job) -> None:
        """What still runs of it is cancelled."""
        if job.timer is not None:
            job.timer.cancel()
        self.worker.cancel(job)

    def _expire(self, job: Job) -> None:
        job.fail(overloaded(f"the answer took longer than {self.settings.timeout:g} seconds", 5))
        self.worker.cancel(job)

    async def whole(self, request: Request, requests: Sequence[EngineRequest]) -> None:
        """Let the engine answer the requests. Raises what ended one of them; ClientGone where nobody waits any more."""

        async def work() -> None:
            job = await self.submit(requests, streams=False)
            try:
                async for update in job.updates(self.settings.keep_alive):
                    if update is not None and update.error is not None:
                        raise update.error
            finally:
                self.end(job)

        await unless_gone(request.receive, work())

    async def stream(self, requests: Sequence[EngineRequest], rendering: Rendering) -> Response:
        """The answers as a stream of events."""
        job = await self.submit(requests, streams=True)
        return EventStream(self._events(job, rendering), self.settings.stall, on_end=lambda: self.end(job))

    async def _events(self, job: Job, rendering: Rendering) -> AsyncGenerator[bytes]:
        try:
            yield rendering.begin()
            async for update in job.updates(self.settings.keep_alive):
                if update is None:
                    yield KEEP_ALIVE
                    continue
                if update.error is not None:
                    raise update.error
                if chunk := rendering.add(update):
                    yield chunk
            yield rendering.end()
        except Exception as error:
            known = api_error(error)
            if known.code == "internal_error":
                log.error("a stream failed", exc_info=error)
            yield rendering.fail(known)
