"""What every route needs of the engine: bodies read, prompts encoded, requests answered whole or as a stream."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from kvexport.cache import state_bytes
from kvexport.engine.engine import Engine
from kvexport.engine.request import Request as EngineRequest
from kvexport.language.grammar import Grammar
from kvexport.language.reasoning import is_open, shown_ids, thinks
from kvexport.language.tools import calls_grammar, check_tools, choose, form_of
from kvexport.serve import tracing
from kvexport.serve.bodies import read_bytes
from kvexport.serve.conversation import Conversation, Prepared
from kvexport.serve.errors import ApiError, api_error, overloaded
from kvexport.serve.fields import B, Sampling, parse
from kvexport.serve.metrics import Metrics
from kvexport.serve.response_store import ResponseStore
from kvexport.serve.sessions import Sessions, Start
from kvexport.serve.settings import ServeSettings
from kvexport.serve.streams import KEEP_ALIVE, EventStream, unless_gone
from kvexport.serve.worker import Job, Update, Worker
from kvexport.state.sessions import next_turn
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport.artifact.manifest import Manifest
    from kvexport.language.settings import GenerationSettings
    from kvexport.language.text import Tokenizer

T = TypeVar("T")
log = logging.getLogger("kvexport.serve")
_SHORT_TEXT = 1 << 16  # characters; a shorter text is encoded in milliseconds, and its tokens are counted exactly
_LARGE_TEXT = 1 << 20  # characters; encoding a longer text takes some 100 MB


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
        options = replace(
            engine.options,
            latency_budget=settings.latency_budget,
            preempts=settings.preempts,
            prefix_memory=settings.prefix_memory,
        )
        self.engine = engine = engine.with_options(options)
        self.settings = settings
        self.model = next((name for name in settings.names if name != "*"), "kvexport")
        self.metrics = Metrics(self.model)
        self.sessions = Sessions(engine.manifest, settings)
        self.session_bytes = session_bytes(engine.manifest)
        self.lanes = engine.reserve()  # the memory of the state is taken now, and no more later
        self.responses = ResponseStore()
        self.tracing = tracing.start(self.model)
        self.worker = Worker(engine, self.metrics, engine.max_batch + settings.queue, self.tracing)
        # Prompts are encoded beside the event loop, one at a time: the cores are the model's.
        self._encoders = anyio.CapacityLimiter(1)

    async def read(self, request: Request, kind: type[B]) -> B:
        """The body of a request. Raises ApiError where it is too long, too slow, no JSON or not of the kind."""
        sort = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if sort != "application/json" and not sort.endswith("+json"):
            raise ApiError(415, f"the body is {sort[:80]}: send JSON, with Content-Type: application/json")
        data = await read_bytes(request, self.settings.body)
        return await self.beside(lambda: parse(kind, data)) if len(data) > 100_000 else parse(kind, data)

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
            ids = self._encoded(tokenizer, prompt, special=special)
            return self._fitting(ids) if fits else ids

        return await self.beside(work)

    async def encode_chat(
        self, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any], *, fits: bool = True
    ) -> Sequence[int] | NDArray[Any]:
        """Token ids of a conversation, in the words of the chat template. variables: the template's own."""
        engine = self.engine

        def work() -> Sequence[int] | NDArray[Any]:
            if engine.chat_template is None or engine.tokenizer is None:
                return engine.encode_chat(messages)  # which says what is missing
            text = engine.chat_template.render(messages, tools, **variables)
            ids = self._encoded(engine.tokenizer, text, special=False)
            return self._fitting(ids) if fits else ids

        return await self.beside(work)

    def _next_turn(
        self, snapshot: Snapshot, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any]
    ) -> NDArray[Any] | None:
        return next_turn(self.engine, snapshot, messages, tools, **variables)

    def _encoded(self, tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text. A text that cannot fit whatever its tokens are is refused before."""
        least = tokenizer.least_tokens(text)
        if least >= self.engine.max_length and len(text) > _SHORT_TEXT:
            self.check_length(least, at_least=True)
        try:
            return tokenizer.encode(text, add_special_tokens=special)
        finally:
            if len(text) > _LARGE_TEXT:
                give_back_memory()

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
        if not isinstance(ids, str):
            self.check_length(len(ids))
        return self.engine.encode(ids)

    def check_length(self, tokens: int, *, at_least: bool = False) -> None:
        """Check that at least one token can follow a prompt.

        Args:
            tokens: The tokens of the prompt.
            at_least: The prompt may have more tokens than that.

        Raises:
            ApiError: The prompt fills the model's context.
        """
        limit = self.engine.max_length
        if tokens >= limit:
            count = f"at least {tokens}" if at_least else str(tokens)
            message = f"This model's maximum context length is {limit} tokens, and the prompt has {count}: "
            raise ApiError(400, message + "context_length_exceeded", code="context_length_exceeded", param="messages")

    def requests(self, ids: Any, settings: Sequence[GenerationSettings], priority: int = 0) -> list[EngineRequest]:
        """Of one prompt, which is read once for all of them."""
        deadline = time.monotonic() + self.settings.timeout
        first = EngineRequest(ids, settings[0], priority=priority, deadline=deadline)
        return [first, *(first.fork(other) for other in settings[1:])]

    async def prepare(self, asked: Conversation, sampling: Sampling, tokens: int | None, **settings: Any) -> Prepared:
        """Requests that answer a conversation. tokens: of an answer, None = what fits. settings: further generation
        settings."""
        tools, form = check_tools(asked.tools), asked.form
        callable_, must = choose(tools, asked.tool_choice)
        calls = form_of(self.engine.chat_template) if callable_ else None
        shown = tools if callable_ else None
        start = Start() if asked.session is None else await self.sessions.start(asked.session)
        new = None
        if (known := start.snapshot) is not None:
            new = await self.beside(lambda: self._next_turn(known, asked.messages, shown, asked.variables))
        if new is None:
            start = replace(start, snapshot=None)
        ids = await self.encode_chat(asked.messages, shown, asked.variables) if new is None else new
        tokenizer = self.engine.tokenizer
        if calls is not None and tokenizer is not None:
            settings["shown_ids"] = calls.shown_ids(tokenizer) or None
            if must:
                form = calls_grammar(calls, callable_, tokenizer, parallel=asked.parallel)
        reasoning = None
        if self.settings.reasoning and tokenizer is not None and thinks(self.engine.chat_template):
            settings["shown_ids"] = (*(settings.get("shown_ids") or ()), *shown_ids(tokenizer)) or None
            reasoning = form is None and is_open(ids, tokenizer)  # a form holds from the first token on
        default = self.engine.generation_config.get("max_new_tokens")
        prepared = await self.follow(ids, start, asked.session, sampling, tokens, default, form=form, **settings)
        return Prepared(prepared.requests, asked.session, start, callable_, calls, reasoning)

    async def follow(
        self,
        ids: Sequence[int] | NDArray[Any],
        start: Start,
        session: str | None,
        sampling: Sampling,
        tokens: int | None,
        default: int | None,
        *,
        form: Grammar | None = None,
        **settings: Any,
    ) -> Prepared:
        """Requests for answers to token ids, after the state `start` where there is one."""
        self.check_choices(sampling.n or 1)
        length = len(ids) + (0 if start.snapshot is None else len(start.snapshot.ids))
        self.check_length(length)
        longest = self.longest(length, tokens, default)
        chosen = sampling.settings(self.engine, longest, grammar=form, **settings)
        if form is not None:  # compiled beside the engine's steps, which then find it
            await self.beside(lambda: self.engine.grammars.start(form, chosen[0].eos_token_ids))
        requests = self.requests(ids, chosen, sampling.priority or 0)
        if session is not None:
            requests[0].start, requests[0].keep = start.snapshot, True
        return Prepared(requests, session, start)

    def check_choices(self, answers: int) -> None:
        """Raises ApiError where so many are too many for one request."""
        if answers > self.settings.choices:
            said = f"{answers} answers are asked for in one request, and {self.settings.choices} are allowed"
            raise ApiError(400, said[:200], param="n")

    def longest(self, prompt_tokens: int, wanted: int | None, default: int | None = None) -> int:
        """Tokens of an answer, at most: those wanted, else `default`, else all that fit."""
        room = self.engine.max_length - prompt_tokens
        return min(x for x in (wanted or default or room, room, self.settings.max_tokens) if x is not None)

    async def submit(self, requests: Sequence[EngineRequest], *, streams: bool) -> Job:
        """Let them wait for lanes; `end` must follow. Raises ApiError where too many wait."""
        job = Job(requests, streams=streams, buffer=self.settings.buffer)
        job.parent = None if self.tracing is None else self.tracing.parent()
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

    async def whole(self, request: Request, asked: Prepared) -> None:
        """Let the engine answer. Raises what ended one of them; ClientGone where nobody waits any more."""

        async def work() -> None:
            job = await self.submit(asked.requests, streams=False)
            try:
                async for update in job.updates(self.settings.keep_alive):
                    if update is not None and update.error is not None:
                        raise update.error
            finally:
                self.end(job)
            await self._keep(asked)

        await unless_gone(request.receive, work())

    async def _keep(self, asked: Prepared) -> None:
        if asked.session is not None and (snapshot := asked.requests[0].snapshot) is not None:
            await self.sessions.keep(asked.session, snapshot, asked.start)

    async def stream(self, asked: Prepared, rendering: Rendering) -> Response:
        """The answers as a stream of events."""
        job = await self.submit(asked.requests, streams=True)
        events = self._events(job, asked, rendering)
        return EventStream(events, self.settings.stall, on_end=lambda: self.end(job), headers=asked.headers)

    async def _events(self, job: Job, asked: Prepared, rendering: Rendering) -> AsyncGenerator[bytes]:
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
            await self._keep(asked)  # before the client can know that its next turn may come
            yield rendering.end()
        except Exception as error:
            known = api_error(error)
            if known.code == "internal_error":
                log.error("a stream failed", exc_info=error)
            yield rendering.fail(known)


def give_back_memory() -> None:
    """Return freed memory to the system: the C library keeps what a long text took. Does nothing without glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def session_bytes(manifest: Manifest) -> int:
    """Of one session, at most."""
    return state_bytes(manifest.recipe, manifest.cache) + 16 * manifest.limits.max_length + (1 << 20)
