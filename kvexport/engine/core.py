"""The core of the inference engine: requests are added, and every step advances all of them.

Running an artifact needs numpy and the packages of its backend, but neither torch nor transformers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.artifact.manifest import Manifest
from kvexport.backends.adapters import Adapters
from kvexport.backends.model_state import LoadedModel, ModelState
from kvexport.engine.calls import ModelCalls
from kvexport.engine.forks import Forks
from kvexport.engine.lane_pool import LanePool
from kvexport.engine.lanes import Lanes
from kvexport.engine.options import EngineOptions
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import DECODING, FINISHED, FinishReason, Ids, Prompt, Request, Timing, empty_lane
from kvexport.engine.scheduler import Schedule, Scheduler
from kvexport.engine.speculation import drafter_of
from kvexport.engine.turns import Turns
from kvexport.errors import DeadlineError, KvexportError, UsageError
from kvexport.images.rows import RowCache, chunk_borders, places_of
from kvexport.language.chat import read_json
from kvexport.language.grammar import Grammars
from kvexport.language.settings import GenerationSettings
from kvexport.language.tokenizer import Tokenizer
from kvexport.state.lane import pinned
from kvexport.state.periodic import new_periodic
from kvexport.state.snapshot import Origin, Snapshot


class EngineCore:
    """An inference engine: a loaded model and the requests that it answers.

    `step` advances every request that was added. Threads may share an engine: they take turns step by step, and their
    requests run together.

    A running request has one lane, which is one row of the batch. The engine allocates lanes when requests need them,
    up to `options.lanes`. To add lanes, the engine at least doubles their number, and copies the KV caches of the
    existing lanes. Requests without a lane wait.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        model: LoadedModel,
        options: EngineOptions | None = None,
        adapters: Adapters | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Create an inference engine without requests. `kvexport.load` is the usual way to get one."""
        options = options or EngineOptions()
        limits = manifest.limits
        self.path, self.manifest, self.options, self.model = path, manifest, options, model
        self.plan, self.adapters = manifest.cache, adapters or Adapters()
        self.vocabulary = manifest.model.vocabulary
        self.max_length, self.max_batch = limits.max_length, limits.max_batch
        if options.lanes is not None:
            self._check_count(options.lanes)
            self.max_batch = options.lanes
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, self.vocabulary)
        self.generation_config = read_json(path / "generation_config.json")
        self.timing = Timing()
        # On a GPU no prefix is saved: a copy of a lane to the host takes longer than reading its tokens again.
        saves = options.prefix_memory and model.in_host_memory
        self.prefixes = Prefixes(limits.prefill_chunk, options.prefix_memory) if saves else None
        self.drafter = drafter_of(manifest) if options.drafts else None
        self.image_rows = RowCache()
        self._scheduler = Scheduler(self.max_batch, limits.prefill_chunk, self._follows)
        self._requests: dict[int, Request] = {}  # requests that have not finished
        self._pool = LanePool(self.lanes, self.max_batch)
        self._forks = Forks(self._scheduler, self._pool)
        self._calls = ModelCalls(self._pool, self._forks, limits.prefill_chunk, self.max_length)
        self._turns = Turns()
        self._closed = False
        if self._periodic:  # allocates the full cache of periodic selection now
            self._pool.make(1, others=False)

    # ---- the life of an engine ----

    def close(self) -> None:
        """Cancel all requests and free the KV caches. The weights are freed when no other engine uses the model.

        A closed engine refuses requests. A second call of `close` does nothing.
        """
        with self._turns:
            for request_id in list(self._requests):
                self.cancel(request_id)
            self._closed = True
            self._calls.forget_ahead()
            self._pool.drop()
            self.drafter = self.prefixes = None

    @cached_property
    def origin(self) -> Origin:
        """The model and format version that the engine writes into its snapshots (saved states of sequences)."""
        return Origin.of(self.manifest)

    @property
    def _periodic(self) -> bool:
        return self.manifest.recipe.cache.periodic.slots is not None

    def new_state(self, lanes: int) -> ModelState:
        return self.model.new_state(self.plan, lanes)

    def lanes(self, count: int) -> Lanes:
        """Return `count` empty lanes (batch entries) with their own KV caches, for callers that append tokens."""
        self._check_count(count)
        limits = self.manifest.limits
        return Lanes(
            new_periodic(self.manifest, self.model, count) if self._periodic else self.new_state(count),
            self.plan,
            count,
            prefill_chunk=limits.prefill_chunk,
            merge_every=limits.merge_every,
            merge_prompts=self.manifest.recipe.cache.merge_prompts,
        )

    def reserve(self) -> Lanes:
        """Allocate the KV caches of all batch lanes that requests may ever use, so that memory does not grow later.

        `reserve` may be called only while no request runs. All calls of `reserve` return the same lanes.
        """
        with self._turns:
            self._calls.forget_ahead()
            self._pool.make(self.max_batch, others=False)
            return self._pool.lanes

    def running(self) -> list[Request]:
        return self._scheduler.running()

    def pending(self) -> list[Request]:
        return list(self._requests.values())

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.busy

    # ---- requests ----

    def add(self, request: Request) -> int:
        with self._turns:
            self._require_open()
            if request.start is not None:
                self.origin.check(request.start.origin)
            request.load_adapter(self.adapters)
            ids = self.encode(request.prompt, after=request.start)
            new = len(ids) if request.start is None else len(ids) - len(request.start.ids)
            places = places_of(ids[len(ids) - new :], request.images, self.manifest.images)
            request.check_pins(ids, self.manifest)
            request.prepare(ids, self.settings(), self.grammars)
            request.places = np.concatenate([np.zeros(len(ids) - new, np.int64), places])
            borders = chunk_borders(request.places, request.images, request.done, self.manifest.limits.prefill_chunk)
            request.timing.prompt_tokens += request.unread
            if self.prefixes is not None and not request.done:
                request.keys = self.prefixes.keys(request.keyed_ids, borders, request.digest, request.pins)
            self._requests[request.id] = request
            self._scheduler.add(request)
            return request.id

    def cancel(self, request_id: int) -> bool:
        """End a request and free its lane of the batch. Return False if the request had finished already."""
        with self._turns:
            request = self._requests.get(request_id)
            if request is None:
                return False
            self._take_out(request, "cancelled")
            return True

    def step(self) -> list[Request]:
        """Run one engine step: read one prompt chunk, and decode one token of every request whose prompt is read."""
        with self._turns:
            self._require_open()
            # A call that ran ahead gives its tokens before lanes begin, move or are saved.
            early = [] if self._calls.ahead is None or self._goes_on() else self._catch_up()
            work = self._schedule()
            try:
                advanced = self._run(work)
            finally:
                self._finish(work)
            return list({request.id: request for request in (*early, *work.expired, *advanced)}.values())

    # ---- the parts of a step ----

    def _goes_on(self) -> bool:
        call = self._calls.ahead
        assert call is not None
        return self._scheduler.decodes_only and all(request.state is DECODING for request in call.requests)

    def _catch_up(self) -> list[Request]:
        call = self._calls.ahead
        assert call is not None
        work = Schedule(decode=[request for request in call.requests if request.state is DECODING])
        try:
            return self._calls.take_ahead(follow=False)
        except BaseException as error:
            self._fail(work.decode, error)
            raise
        finally:
            self._finish(work)

    def _schedule(self) -> Schedule:
        expired = self._expire()
        self._scheduler.rows = self._calls.rows_within(self.options.latency_budget)
        work = self._scheduler.next()
        return work._replace(expired=expired) if expired else work

    def _run(self, work: Schedule) -> list[Request]:
        requests: Sequence[Request] = (*work.admitted, *work.moved)
        advanced: list[Request] = []
        try:
            self._forks.keep()
            for request in work.moved:
                self._pool.copy(work.source, request.lane)
            if requests := work.admitted:
                advanced += self._give_lanes(requests)
            if requests := work.prefill:
                advanced += self._calls.prefill(requests, self.prefixes)
            if requests := work.decode:
                steady = self.options.ahead and self._scheduler.decodes_only and not (work.moved or work.admitted)
                advanced += self._calls.decode(requests, self.drafter, steady=steady)
        except BaseException as error:
            self._fail(requests, error)
            raise
        return advanced

    def _finish(self, work: Schedule) -> None:
        """Free the batch lanes of finished requests, and store a snapshot of each request that has `keep` set."""
        self._forks.forget()
        for request in self._scheduler.update(work):
            self._requests.pop(request.id, None)
            if request.finish_reason in ("stop", "length"):
                self._count_slots(request)
                if request.keep:
                    request.snapshot = self._snapshot(request)

    def _count_slots(self, request: Request) -> None:
        lanes, timing = self._pool.lanes, request.timing
        timing.cache_tokens += lanes.length[request.lane]
        timing.cache_slots += min(round(lanes.occupied(request.lane)), lanes.length[request.lane])
        timing.pinned_tokens += pinned(request.pins)
        timing.over_budget += round(max(0.0, len(request.ids) - lanes.budget))

    def _take_out(self, request: Request, reason: FinishReason) -> None:
        if request.keep and not request.places[request.done :].any():  # snapshots hold no unread images
            request.snapshot = self._snapshot(request)
        self._requests.pop(request.id)
        request.finish(reason)
        self._scheduler.remove(request)

    def _snapshot(self, request: Request) -> Snapshot:
        if request.lane >= 0:
            saved = self._pool.lanes.save(request.lane)
        else:  # it waits, and would have started from this state
            saved = empty_lane(self.plan) if request.start is None else request.start.saved
        return request.snapshot_with(saved, self.origin)

    def _expire(self) -> list[Request]:
        expired = self._scheduler.expired(time.monotonic())
        for request in expired:
            self._scheduler.remove(request)
            self._requests.pop(request.id)
            request.finish("error", DeadlineError("there was no lane for the request before its deadline"))
        return expired

    def _follows(self, request: Request, prefilling: Sequence[Request]) -> bool:
        if self.prefixes is None or request.fork_of is not None:
            return False
        return self.prefixes.leads(request, prefilling)

    def _give_lanes(self, admitted: Sequence[Request]) -> list[Request]:
        """Fill each new request's KV cache: with nothing, a saved prefix, a snapshot, or another prompt's cache."""
        running = self._scheduler.running()
        self._pool.make(max(request.lane for request in admitted) + 1, others=len(running) > len(admitted))
        advanced = []
        for request in admitted:
            if self._pool.state.top_logits is not None:
                request.timing.whole_rows = request.timing.whole_rows or 0
            if request.fork_of is not None:
                rows = self._forks.begin(request, request.fork_of)
                advanced.append(self._calls.choose(request, rows, 0, decoded=False))
            elif request.start is not None and request.start.length:
                self._pool.begin(request.lane, request.start.saved)
            else:
                self._pool.begin(request.lane, self.prefixes.begin(request) if self.prefixes is not None else None)
            self._pool.lanes.pin(request.lane, request.pins)
            if self.adapters.by_name:
                self._pool.state.adapt(request.lane, range(0) if request.loaded is None else request.loaded.rows)
        return advanced

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        why = error if isinstance(error, Exception) else KvexportError("a step of the engine was interrupted")
        for request in requests:
            self._pool.poisoned(request.lane)
            if request.state is not FINISHED:
                request.finish("error", why)

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed", "load the artifact again: kvexport.load(PATH)")

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.max_batch:
            raise UsageError(
                f"{count} sequences at once, but the artifact was built for 1 to {self.max_batch}",
                f"at most {self.max_batch} prompts in one call (on the server --lanes {self.max_batch}), or "
                + self.manifest.build_command(f"limits.max_batch={max(1, count)}"),
            )

    # ---- text ----

    def settings(self, **overrides: Any) -> GenerationSettings:
        return GenerationSettings.from_generation_config(self.generation_config, **overrides)

    def encode(self, prompt: Prompt, *, after: Snapshot | None = None) -> Ids:
        """Return the token ids of a prompt, [n] int64, after the ids of the snapshot `after` if there is one."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("the artifact has no tokenizer.json, so a prompt cannot be text", "pass token ids")
            prompt = self.tokenizer.encode(prompt) if after is None else self.tokenizer.encode_within(prompt)
        ids = _checked_ids(prompt, self.vocabulary, empty=after is not None)
        if after is not None:
            ids = np.concatenate([after.ids, ids])
        if ids.size >= self.max_length:
            raise UsageError(
                f"the prompt has {ids.size} tokens; with one token of answer it exceeds limits.max_length "
                f"{self.max_length}",
                f"a shorter prompt, or {self.manifest.build_command(f'limits.max_length={ids.size + 256}')}",
            )
        return ids


def _checked_ids(prompt: Sequence[int] | Ids, vocabulary: int, *, empty: bool) -> Ids:
    """Return token ids as [n] int64.

    Raise UsageError if one is out of range, or if there is none and `empty` is False.
    """
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size == 0 and not empty):
        raise UsageError("the prompt is empty", "give at least one token")
    if ids.size and ids.dtype.kind not in "iu":
        raise UsageError(f"token ids are integers, the prompt holds {ids.dtype}", "pass text, or a list of integers")
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        bad = int(ids[(ids < 0) | (ids >= vocabulary)][0])
        raise UsageError(
            f"token id {bad} is out of range: the vocabulary has {vocabulary}", "use the artifact's own tokenizer"
        )
    return ids.astype(np.int64)
