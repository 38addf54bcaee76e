"""The service behind every HTTP route: it reads bodies, encodes prompts, and runs requests on the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from kvexport.engine.engine import Engine
from kvexport.engine.request import Ranges
from kvexport.engine.request import Request as EngineRequest
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.images.rows import KEPT_ROWS
from kvexport.language.answer import plan_answer
from kvexport.language.grammar import Grammar
from kvexport.language.tools import check_tools, choose
from kvexport.plan.memory import ServerMemory
from kvexport.plan.planner import state_bytes
from kvexport.serve.bodies import read_bytes
from kvexport.serve.conversation import Conversation, Prepared
from kvexport.serve.errors import ApiError, api_error, overloaded
from kvexport.serve.fields import B, Sampling, parse
from kvexport.serve.metrics import Metrics
from kvexport.serve.prompts import LARGE_TEXT, LONG_TEXT, EncodedChat, Prompts, give_back_memory
from kvexport.serve.response_store import ResponseStore
from kvexport.serve.sessions import Sessions, Turn
from kvexport.serve.settings import ServeSettings
from kvexport.serve.streams import KEEP_ALIVE, EventStream, unless_gone
from kvexport.serve.worker import Job, Update, Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport.artifact.manifest import Manifest
    from kvexport.images.rows import PromptImages

T = TypeVar("T")
IGNORED = "X-Ignored-Fields"  # a response header that names fields of the request that the server does not know
log = logging.getLogger("kvexport.serve")


class Rendering(Protocol):
    """Interface of a class that writes server-sent events in the format of one HTTP API.

    Every method returns the bytes of events; b"" if there is no event.
    """

    def begin(self) -> bytes: ...

    def add(self, update: Update) -> bytes: ...

    def end(self) -> bytes: ...

    def fail(self, error: ApiError) -> bytes: ...


class Service:
    """The state of one HTTP server: the engine behind its worker thread, the limits, the sessions and the metrics."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        options = replace(engine.options, latency_budget=settings.latency_budget, prefix_memory=settings.prefix_memory)
        self.engine = engine = engine.with_options(options)
        if engine.tokenizer is not None:
            with suppress(EnvironmentProblem):  # a request with a grammar names the package that is missing
                engine.grammars.wrap()
        self.settings = settings
        if both := sorted({*settings.names} & engine.adapters.by_name.keys()):
            raise UsageError(
                f"{both[0]!r} is the name of the model and of an adapter", "--name NAME, or another name of the adapter"
            )
        self.model = next((name for name in settings.names if name != "*"), "kvexport")
        self.metrics = Metrics(self.model)
        self.sessions = Sessions(engine.manifest, settings)
        self.session_bytes = session_bytes(engine.manifest)
        self.lanes = engine.reserve()  # allocates the KV caches of all lanes now
        self.memory = ServerMemory(
            engine.manifest.bytes,
            state_bytes(engine.manifest.recipe, engine.plan, engine.max_batch),
            0 if engine.prefixes is None else engine.prefixes.limit,
            settings.session_memory,
            engine.adapters.nbytes,
            KEPT_ROWS if engine.manifest.images else 0,
        )
        self.responses = ResponseStore()
        self.worker = Worker(engine, self.metrics, engine.max_batch + settings.queue)
        # A thread beside the event loop's encodes prompts one at a time, because the model needs the other cores.
        # Long texts, images and grammars take seconds. They have threads of their own, so that short texts do not wait.
        self._encoders, self._long, self._images, self._compilers = (anyio.CapacityLimiter(n) for n in (1, 1, 1, 2))
        self.prompts = Prompts(engine, self.beside, settings)

    async def read(self, request: Request, kind: type[B]) -> B:
        media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise ApiError(415, f"the body is {media_type[:80]}: send JSON, with Content-Type: application/json")
        data = await read_bytes(request, self.settings.body)
        if len(data) > LARGE_TEXT:  # 0.1 s later the body and its values are freed
            asyncio.get_running_loop().call_later(0.1, give_back_memory)
        long = len(data) > LONG_TEXT
        body = await self.beside(lambda: parse(kind, data), len(data)) if long else parse(kind, data)
        request.state.ignored = []
        _name_ignored(request, body.ignored())
        return body

    def name_unread(self, request: Request, fields: Mapping[str, Collection[str]]) -> None:
        """Record which request fields the chat template ignores; `fields` has each field's template variables."""
        template = self.engine.chat_template
        source = "" if template is None else "".join(template.sources.values())
        _name_ignored(request, [name for name, sets in fields.items() if sets and not any(x in source for x in sets)])

    def check_model(self, name: str | None) -> str:
        if name is None or name in self.settings.names or "*" in self.settings.names or self.adapter(name):
            return name or self.model
        names = ", ".join(sorted({self.model, *self.settings.names, *self.engine.adapters.by_name} - {"*"}))
        message = f"there is no model {name[:200]!r} here, but {names}"
        raise ApiError(404, message, code="model_not_found", param="model")

    def adapter(self, model: str | None) -> str | None:
        """Return the LoRA adapter that a request names as its model; None if it names the model itself."""
        return model if model in self.engine.adapters.by_name else None

    async def beside(self, work: Callable[[], T], size: int = 0, images: int = 0) -> T:
        if images and _is_full(self._images, self.settings.queue):
            raise overloaded(f"{self.settings.queue} requests with images wait, and no more than that may")
        if images:  # their vectors take memory, so a request that the engine's queue will refuse gets none
            self.worker.require_room(1)
        limiter = self._images if images else self._long if size > LONG_TEXT else self._encoders
        return await anyio.to_thread.run_sync(work, limiter=limiter)

    async def requests_for(
        self, conversation: Conversation, sampling: Sampling, tokens: int | None, **settings: Any
    ) -> Prepared:
        tools = check_tools(conversation.tools)
        callable_, must = choose(tools, conversation.tool_choice)
        shown = tools if callable_ else None
        encoded: EncodedChat | None = None
        turn = conversation.turn
        if turn is not None:
            await self.sessions.begin(turn)
            loaded = self.engine.adapters.get(conversation.adapter)
            if (known := turn.snapshot) is not None and known.adapter == (None if loaded is None else loaded.digest):
                encoded = await self.prompts.next_turn(known, conversation.messages, shown, conversation.variables)
            if encoded is None:
                turn.snapshot = None
        if encoded is None:
            encoded = await self.prompts.encode_chat(conversation.messages, shown, conversation.variables)
        ids, images, pins = encoded
        plan = plan_answer(
            self.engine.chat_template,
            self.engine.tokenizer,
            ids,
            callable_,
            must,
            conversation.form,
            parallel=conversation.parallel,
            reasons=self.settings.reasoning,
        )
        default = self.engine.generation_config.get("max_new_tokens")
        requests = await self.follow(
            [*ids, *plan.prefix] if plan.prefix else ids,
            turn,
            sampling,
            tokens,
            default,
            form=plan.grammar,
            adapter=conversation.adapter,
            images=images,
            pins=pins,
            shown_ids=plan.shown_ids or None,
            **settings,
        )
        return Prepared(requests, turn, plan)

    async def follow(
        self,
        ids: Sequence[int] | NDArray[Any],
        turn: Turn | None,
        sampling: Sampling,
        tokens: int | None,
        default: int | None,
        *,
        form: Grammar | None = None,
        adapter: str | None = None,
        images: PromptImages | None = None,
        pins: Ranges = (),
        **settings: Any,
    ) -> list[EngineRequest]:
        """Return engine requests that answer a prompt of token ids, which may continue a session's saved state.

        The prompt is read once, however many answers `sampling` asks for.
        """
        self.check_choices(sampling.n or 1)
        loaded = self.engine.adapters.get(adapter)
        snapshot = None if turn is None else turn.snapshot
        if turn and snapshot and snapshot.adapter != (None if loaded is None else loaded.digest):
            message = f"session {turn.name} was begun with another adapter than the model {adapter or self.model}"
            raise ApiError(409, message, code="session_of_another_adapter", param="model")
        length = len(ids) + (0 if snapshot is None else len(snapshot.ids))
        self.prompts.check_length(length)
        longest = self.longest(length, tokens, default)
        generation = sampling.settings(self.engine, longest, grammar=form, **settings)
        # The grammar is compiled here, so that the engine's steps do not wait for it.
        if form is not None and not self.engine.grammars.has(form):
            if _is_full(self._compilers, self.settings.queue):
                raise overloaded(f"{self.settings.queue} grammars wait to be compiled, and no more than that may")
            await anyio.to_thread.run_sync(
                lambda: self.engine.grammars.start(form, generation[0].eos_token_ids), limiter=self._compilers
            )
        first = EngineRequest(
            ids,
            generation[0],
            start=snapshot,
            keep=turn is not None,
            priority=sampling.priority or 0,
            deadline=time.monotonic() + self._seconds(turn),
            adapter=adapter,
            images=images,
            pin=pins,
        )
        return [first, *(first.fork(other) for other in generation[1:])]

    def _seconds(self, turn: Turn | None) -> float:
        return max(0.0, self.settings.timeout - (0.0 if turn is None else turn.waited))

    def check_choices(self, answers: int) -> None:
        if answers > self.settings.choices:
            message = f"the request asks for {answers} answers, and {self.settings.choices} are allowed"
            raise ApiError(400, message[:200], param="n")

    def longest(self, prompt_tokens: int, limit: int | None, default: int | None = None) -> int:
        """Return the largest number of tokens of an answer: `limit` or `default`, but at most what fits the context."""
        room = self.engine.max_length - prompt_tokens
        return min(x for x in (limit or default or room, room, self.settings.max_tokens) if x is not None)

    async def submit(self, prepared: Prepared, *, streams: bool) -> Job:
        """Queue engine requests until they get lanes (rows of the batch).

        The caller must pass the returned job to `end`.
        """
        job = Job(prepared.requests, streams=streams, buffer=self.settings.buffer)
        seconds = self._seconds(prepared.turn)
        job.timer = asyncio.get_running_loop().call_later(seconds, self._expire, job)
        try:
            await self.worker.submit(job)
        except BaseException:
            self.end(job)
            raise
        return job

    def end(self, job: Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
        self.worker.cancel(job)

    def _expire(self, job: Job) -> None:
        job.fail(overloaded(f"the answer took longer than {self.settings.timeout:g} seconds", 5))
        self.worker.cancel(job)

    async def whole(self, request: Request, prepared: Prepared) -> None:
        async def work() -> None:
            job = await self.submit(prepared, streams=False)
            try:
                async for update in job.updates(self.settings.keep_alive):
                    if update is not None and update.error is not None:
                        raise update.error
            finally:
                self.end(job)
            await self._keep(prepared)

        await unless_gone(request.receive, work())

    async def _keep(self, prepared: Prepared) -> None:
        if prepared.turn is not None and (snapshot := prepared.requests[0].snapshot) is not None:
            await self.sessions.keep(prepared.turn, snapshot)

    async def stream(self, prepared: Prepared, rendering: Rendering) -> Response:
        job = await self.submit(prepared, streams=True)
        events = self._events(job, prepared, rendering)
        return EventStream(events, self.settings.stall, on_end=lambda: self.end(job), headers=prepared.headers)

    async def _events(self, job: Job, prepared: Prepared, rendering: Rendering) -> AsyncGenerator[bytes]:
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
            await self._keep(prepared)  # before the client sees the end and may send its next turn
            yield rendering.end()
        except Exception as error:
            known = api_error(error)
            if known.code == "internal_error":
                log.error("a stream failed", exc_info=error)
            yield rendering.fail(known)


def _is_full(limiter: anyio.CapacityLimiter, queue: int) -> bool:
    return limiter.available_tokens < 1 and limiter.statistics().tasks_waiting >= queue


def _name_ignored(request: Request, names: Iterable[str]) -> None:
    request.state.ignored += [re.sub(r"[^!-~]", "?", name)[:40] for name in itertools.islice(names, 20)]


def session_bytes(manifest: Manifest) -> int:
    return state_bytes(manifest.recipe, manifest.cache) + 16 * manifest.limits.max_length + (1 << 20)
