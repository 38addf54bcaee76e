"""Running an artifact: `load` it, then `generate` or `stream`. Needs numpy and what its backend needs; neither torch
nor transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport import backends
from kvexport.artifact.manifest import Manifest
from kvexport.artifact.reading import load_manifest
from kvexport.backends.base import LoadedModel, LoadOptions, ModelState
from kvexport.engine.calls import ModelCalls
from kvexport.engine.completion import Completion, as_batch, tokens_of
from kvexport.engine.forks import Forks
from kvexport.engine.lane_pool import LanePool
from kvexport.engine.lanes import Lanes
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import FINISHED, Call, FinishReason, Prompt, Request, Timing
from kvexport.engine.scheduler import Scheduler
from kvexport.engine.speculation import drafter_of
from kvexport.engine.start import encode, nothing_saved, prepare, snapshot_of
from kvexport.errors import DeadlineError, KvexportError, QueueFullError, UsageError
from kvexport.language.chat import ChatTemplate, Message, read_chat_template, read_json
from kvexport.language.grammar import Grammars
from kvexport.language.settings import GenerationSettings
from kvexport.language.text import FILE_NAME, Tokenizer
from kvexport.language.token import Token
from kvexport.ranks import model as ranks
from kvexport.state.periodic import new_periodic
from kvexport.state.snapshot import Origin, Snapshot


class Engine:
    """A loaded artifact. `add` requests and `step`: every step advances all of them. `stream` and `generate` do that
    for prompts given together, and may run beside one another and beside added requests. Not safe to use from several
    threads at once.

    Every request that runs holds one lane of the state. There are as many lanes as ever were needed at once, so that
    one prompt takes the memory of one. When requests join those that run, lanes are added by copying (at least as many
    as there are, so that it happens seldom), up to limits.max_batch; beyond that requests wait.
    """

    def __init__(self, path: Path, manifest: Manifest, model: LoadedModel, lanes: int | None = None) -> None:
        """lanes: how many sequences run at once, at most; None = limits.max_batch."""
        self.path = path
        self.manifest = manifest
        self.plan = manifest.cache
        self.vocabulary = manifest.model.vocabulary
        self.max_length = manifest.limits.max_length
        self.max_batch = manifest.limits.max_batch
        if lanes is not None:
            self._check_count(lanes)
            self.max_batch = lanes
        self.tokenizer = Tokenizer.from_folder(path) if (path / FILE_NAME).exists() else None
        self.grammars = Grammars(self.tokenizer, self.vocabulary)
        self.generation_config = read_json(path / "generation_config.json")
        self.timing = Timing()  # of the last call of `stream` or `generate`
        self.model = model
        self._scheduler = Scheduler(self.max_batch, manifest.limits.prefill_chunk, self._follows)
        self._requests: dict[int, Request] = {}  # those that have not finished
        self._pool = LanePool(self.lanes, self.max_batch)
        self._forks = Forks(self._scheduler, self._pool)
        chunk = manifest.limits.prefill_chunk
        self._calls = ModelCalls(self._pool, self._forks, chunk, self.vocabulary, self.max_length)
        self.max_waiting: int | None = None
        self.latency_budget: float | None = None
        self.preempts = False  # whether a request takes the lane of one of a worse priority, which goes on later
        self.parked = 0  # how often that was
        self.prefixes: Prefixes | None = None
        self.drafter = drafter_of(manifest, model)
        if self._periodic:  # what the machine lacks is said now; a file takes its room now, and no more later
            self._pool.make(self.max_batch if manifest.recipe.cache.periodic.store else 1, others=False)

    @cached_property
    def origin(self) -> Origin:
        """What its snapshots belong to."""
        return Origin.of(self.manifest)

    @property
    def _periodic(self) -> bool:
        return self.manifest.recipe.cache.periodic.slots is not None

    def new_state(self, lanes: int) -> ModelState:
        """State for `lanes` sequences, all empty, over the engine's model."""
        return self.model.new_state(self.plan, lanes)

    def lanes(self, count: int) -> Lanes:
        """Empty lanes for `count` sequences of given tokens, with a state of their own: no request runs in them."""
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
        """All lanes that requests may ever hold, made at once, so that the state takes its memory now and no more
        later. At any time when no request runs; the lanes are the same every time."""
        self._pool.make(self.max_batch, others=False)
        return self._pool.lanes

    def running(self) -> list[Request]:
        """The requests that hold a lane, in the order of the lanes."""
        return self._scheduler.running()

    @property
    def busy(self) -> bool:
        """Whether there is anything for `step` to do."""
        return self._scheduler.busy

    def add(self, request: Request) -> int:
        """Let a request wait for a lane; returns the id to `cancel` it by. Raises UsageError for a prompt that cannot
        be used, SnapshotError for a `start` of another artifact, QueueFullError where `max_waiting` wait already."""
        if self.max_waiting is not None and self._scheduler.excess >= self.max_waiting:
            raise QueueFullError(f"{len(self._scheduler.waiting)} requests wait already", "try again later")
        if request.start is not None:
            self.origin.check(request.start.origin)
        prepare(request, self.encode(request.prompt, after=request.start), self.settings(), self.grammars)
        request.timing.prompt_tokens += request.unread
        if self.prefixes is not None and not request.done:
            request.keys = self.prefixes.keys(request.ids)
        self._requests[request.id] = request
        self._scheduler.add(request)
        return request.id

    def cancel(self, request_id: int) -> bool:
        """End a request and free its lane; False where it had finished."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._take_out(request, "cancelled")
        return True

    def preempt(self, request_id: int) -> Snapshot:
        """End a request, wherever it is, and give its state: `Request((), start=snapshot)` goes on with it, and gets
        the tokens that this one would have got. Raises UsageError where it has finished."""
        request = self._requests.get(request_id)
        if request is None:
            raise UsageError(f"there is no request {request_id} that has not finished", "one that waits or runs")
        request.keep = True
        self._take_out(request, "preempted")
        assert request.snapshot is not None
        return request.snapshot

    def _take_out(self, request: Request, reason: FinishReason) -> None:
        if request.keep:
            request.snapshot = self._snapshot(request)
        self._requests.pop(request.id)
        request.finish(reason)
        self._scheduler.remove(request)

    def _snapshot(self, request: Request) -> Snapshot:
        """Of a request between two steps, or of one that finished in this one."""
        if request.lane >= 0:
            saved = self._pool.lanes.save(request.lane)
        elif request.parked is not None:
            saved = request.parked
        else:
            saved = nothing_saved(self.plan) if request.start is None else request.start.saved
        return snapshot_of(request, saved, self.origin)

    def step(self) -> list[Request]:
        """Read a chunk of a prompt, and decode a token of every request whose prompt is read. Returns the requests that
        got a token or failed: where logits cannot be sampled from, their request fails alone. An error of a run ends
        the requests that took part in it, since nobody knows their state then, and is raised."""
        advanced = self._expire()
        self._scheduler.rows = self._rows()
        if self.preempts and (displaced := self._scheduler.displaced()) is not None:
            self._park(displaced)
        work = self._scheduler.next()
        requests: Sequence[Request] = (*work.admitted, *work.moved)
        try:
            self._forks.keep()
            for request in work.moved:
                self._pool.copy(work.source, request.lane)
            for act, requests in (
                (self._give_lanes, work.admitted),
                (lambda given: self._calls.prefill(given, self.prefixes), work.prefill),
                (lambda given: self._calls.decode(given, self.drafter), work.decode),
            ):
                if requests:
                    advanced += act(requests)
        except BaseException as error:
            self._fail(requests, error)
            raise
        finally:
            self._forks.forget()
            for request in self._scheduler.update(work):
                self._requests.pop(request.id, None)
                if request.keep and request.finish_reason in ("stop", "length"):
                    request.snapshot = self._snapshot(request)
        return advanced

    def _park(self, request: Request) -> None:
        """Take a request's lane, and let it wait as if it had just come; what it was answered so far stays."""
        saved = self._pool.lanes.save(request.lane)
        self._scheduler.remove(request)
        request.park(saved)
        self._scheduler.add(request)
        self.parked += 1

    def _expire(self) -> list[Request]:
        """End the requests that waited beyond their deadline."""
        expired = self._scheduler.expired(time.monotonic())
        for request in expired:
            self._scheduler.remove(request)
            self._requests.pop(request.id)
            request.finish("error", DeadlineError("there was no lane for the request before its deadline"))
        return expired

    def _follows(self, request: Request, prefilling: Sequence[Request]) -> bool:
        if self.prefixes is None or request.fork_of is not None or request.parked is not None:
            return False
        return self.prefixes.leads(request, prefilling)

    def _rows(self) -> int | None:
        """How many rows a call of prompts may have within the latency budget."""
        if self.latency_budget is None:
            return None
        seconds = self._calls.row_seconds
        return int(self.latency_budget / seconds) if seconds else 0

    def _give_lanes(self, admitted: Sequence[Request]) -> list[Request]:
        """Make sure that the lanes of new requests are there, and each as its request starts; forks get their first
        token."""
        running = self._scheduler.running()
        self._pool.make(max(request.lane for request in admitted) + 1, others=len(running) > len(admitted))
        advanced = []
        for request in admitted:
            if self._pool.state.top_logits is not None:
                request.timing.whole_rows = request.timing.whole_rows or 0
            if request.parked is not None:
                self._pool.begin(request.lane, request.parked)
                request.parked = None
            elif request.fork_of is not None:
                rows = self._forks.begin(request, request.fork_of)
                advanced.append(self._calls.choose(request, rows, 0))
            elif request.start is not None and request.start.length:
                self._pool.begin(request.lane, request.start.saved)
            else:
                self._pool.begin(request.lane, self.prefixes.begin(request) if self.prefixes is not None else None)
        return advanced

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        why = error if isinstance(error, Exception) else KvexportError("a step of the engine was interrupted")
        for request in requests:
            self._pool.poisoned(request.lane)
            if request.state is not FINISHED:
                request.finish("error", why)

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.max_batch:
            raise UsageError(
                f"{count} sequences at once, but the artifact was built for 1 to {self.max_batch}",
                f"kvexport build --recipe NAME --set limits.max_batch={count}, or fewer prompts in one call",
            )

    def settings(self, **overrides: Any) -> GenerationSettings:
        """The checkpoint's generation settings with `overrides` on top (fields of GenerationSettings)."""
        return GenerationSettings.from_generation_config(self.generation_config, **overrides)

    def encode(self, prompt: Prompt, *, after: Snapshot | None = None) -> NDArray[np.int64]:
        """Token ids of a prompt, checked; with those of a snapshot before them. Raises UsageError: empty, an id out of
        range, longer than the artifact's max_length."""
        return encode(prompt, self.tokenizer, self.vocabulary, self.max_length, after)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        **overrides: Any,
    ) -> Iterator[Token]:
        """Generate token by token, for one prompt or a ragged batch of them, in whatever order they come.

        prompts: text or token ids, or a list of either. settings: default `self.settings(**overrides)`.
        on_prefill(done, all), tokens of all prompts, is called after every chunk that was read. A stream that is closed
        cancels its requests; one that is neither read on nor closed goes on with the steps of other calls. Raises
        UsageError for prompts and settings that cannot be used, and where a sequence fails its error, when the others
        have ended.
        """
        batch = [self.encode(p) for p in as_batch(prompts)]
        chosen = settings or self.settings(**overrides)
        self._check_count(len(batch))
        call = Call()
        requests = [Request(ids, chosen, call, i) for i, ids in enumerate(batch)]
        return tokens_of(self, requests, call, on_prefill)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], settings: GenerationSettings | None = None, **overrides: Any
    ) -> list[Completion]:
        """Generate to the end; one `Completion` per prompt, in their order. Arguments and errors as `stream`."""
        batch = [self.encode(p) for p in as_batch(prompts)]
        completions = [Completion(len(ids)) for ids in batch]
        for token in self.stream(batch, settings, **overrides):
            completion = completions[token.sequence]
            completion.token_ids.append(token.id)
            completion.text += token.text
            completion.finish_reason = token.finish_reason
        return completions

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template, None where it has none."""
        return read_chat_template(self.path)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> NDArray[np.int64]:
        """Token ids of a conversation in the words of the checkpoint's chat template, ready to be answered. Arguments
        as `ChatTemplate.render`, errors as there and of `encode`; UsageError where there is no template."""
        if self.chat_template is None or self.tokenizer is None:
            lacks = "chat template" if self.chat_template is None else f"{FILE_NAME}, so a prompt cannot be text"
            raise UsageError(f"the artifact has no {lacks}", "pass a prompt to generate, or build an instruct model")
        text = self.chat_template.render(messages, tools, **variables)
        return self.encode(self.tokenizer.encode(text, add_special_tokens=False))

    def chat(
        self, messages: Sequence[Message], settings: GenerationSettings | None = None, **overrides: Any
    ) -> Completion:
        """The answer to a conversation: `messages` are mappings with "role" and "content", the last one the user's.
        Settings and errors as `generate` and `encode_chat`."""
        return self.generate([self.encode_chat(messages).tolist()], settings, **overrides)[0]


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    cuda_graph: bool | None = None,
    verify: bool = True,
    lanes: int | None = None,
    float_input: bool = False,
) -> Engine:
    """Load an artifact. lanes: how many sequences may run at once, None takes limits.max_batch, which is the most.
    threads: None takes the recipe's (0 = the backend's choice). backend: by name, None takes the
    recipe's; one that runs the ONNX graphs as they are runs every artifact. device, cuda_graph: of backends that have
    such settings, None takes the recipe's. float_input: packed weights are multiplied with inputs as they are, which
    kernels otherwise round (docs/contract.md); takes the package onnx.

    verify: False skips the sha256 of every file (not their sizes and names, and not the digests of plans, which are
    code); only for files that you have just verified. Raises UsageError (nothing there, no such backend or device),
    ArtifactError (damaged, not prepared for the backend), EnvironmentProblem (what the backend needs is missing, or was
    prepared on another machine).
    """
    path = Path(path)
    manifest = load_manifest(path, verify=verify)
    chosen = backends.get(manifest.recipe.backend.name if backend is None else backend)
    return Engine(
        path, manifest, ranks.load(chosen, path, manifest, LoadOptions(threads, device, cuda_graph, float_input)), lanes
    )
