"""A generation request: one prompt, its settings, and the state of its answer."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.adapters import Adapter, Adapters
from kvexport.backends.lane_state import slot_places
from kvexport.errors import SnapshotError, UsageError
from kvexport.images.rows import PromptImages
from kvexport.language.grammar import Grammars
from kvexport.language.sampling import LogitsProcessor, Sampler
from kvexport.language.settings import GenerationSettings
from kvexport.language.text_stream import CONTEXT, TextStream
from kvexport.language.token import Token
from kvexport.plan.cache import CachePlan
from kvexport.schema.state import RING
from kvexport.state.lane import Counters, Pins, Saved, joined, pinned
from kvexport.state.snapshot import Origin, Snapshot

Ids = NDArray[np.int64]
Prompt = str | Sequence[int] | Ids
Ranges = Sequence[tuple[int, int]]
Pin = int | Ranges
Processors = LogitsProcessor | Sequence[LogitsProcessor] | None
FinishReason = Literal["stop", "length", "cancelled", "error"]


class State(Enum):
    """The states of a request, in order. A request may finish from any state."""

    WAITING = "waiting"  # it has no lane yet
    PREFILLING = "prefilling"  # it has a lane, and its prompt is read chunk by chunk
    DECODING = "decoding"  # it has a lane, and every step gives a token
    FINISHED = "finished"


WAITING, PREFILLING, DECODING, FINISHED = State


@dataclass
class Timing:
    """Token counts and durations of one `generate` call, summed over its prompts, or of a request by itself.

    Attributes:
        prompt_tokens: Tokens of the prompts that were read.
        generated_tokens: Generated tokens.
        prefill_seconds: Seconds of the model calls that read the prompts, merges included. A call may also read prompts
            of other callers.
        decode_seconds: Seconds of the decode calls, merges included.
        steps: Decode steps. A step gives a token to each sequence that decodes.
        decoded_tokens: Tokens from decode steps: all generated tokens except the first of each answer, which comes from
            the prompt's last row of logits.
        drafted_tokens: Tokens that were drafted (guessed).
        accepted_tokens: Drafted tokens that were accepted. A decode step gives a sequence one token and its accepted
            tokens.
        whole_rows: Decoded tokens whose choice needed a whole row of logits from the device; None if logits are on the
            host.
        cache_tokens: Tokens that the KV caches had seen when the requests ended.
        cache_slots: KV-cache slots that were occupied when the requests ended, on average over the KV heads that evict
            entries.
        pinned_tokens: Tokens that were pinned: kept in slots of their own, whatever was evicted.
        over_budget: Prompt tokens beyond the average budget of the KV heads that evict entries.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    whole_rows: int | None = None
    cache_tokens: int = 0
    cache_slots: int = 0
    pinned_tokens: int = 0
    over_budget: int = 0

    @property
    def compression(self) -> str:
        """The text "N slots stand for M tokens", about the KV caches at the end of the requests."""
        return f"{self.cache_slots:,} slots stand for {self.cache_tokens:,} tokens"


@dataclass(eq=False)
class Bundle:
    """Data shared by requests whose prompts were submitted together: token counts, durations and new tokens.

    The requests of a bundle start to decode together, after all their prompts (of those that have lanes) are read. This
    order takes the fewest model calls.

    Attributes:
        timing: The token counts and durations of all requests of the bundle together.
        new: Tokens of all requests of the bundle that the caller has not taken yet.
    """

    timing: Timing = field(default_factory=Timing)
    new: deque[Token] = field(default_factory=deque)


@dataclass(frozen=True)
class PromptEnd:
    """The logits and the KV cache at the end of a prompt, from which forks (further answers to it) start.

    Attributes:
        row: The logits after the prompt [vocabulary].
        lane: The lane (row of the batch) that read the prompt.
        saved: The saved state of that lane; None while the lane has not changed since it read the prompt.
    """

    row: NDArray[np.float32]
    lane: int
    saved: Saved | None = None


@dataclass(eq=False)
class Request:
    """A generation request: a prompt, the settings of its answer, and the answer so far.

    Attributes:
        prompt: Text or token ids.
        settings: Generation settings; None takes those of a snapshot whose answer is resumed, otherwise the
            checkpoint's.
        bundle: The data shared with the requests that were submitted together; None for a single request.
        sequence: The number of the prompt among those that were submitted together.
        start: The snapshot (saved sequence) that the prompt continues. With an empty prompt the request resumes the
            snapshot's own answer.
        keep: Whether the request's state is stored as a `snapshot` when it finishes.
        fork_of: The request whose prompt this request shares, so that it is read once. See `fork`.
        priority: The waiting request with the lowest number gets a lane first, among equals the one that came first.
        deadline: A time of `time.monotonic()`. A request that has not got a lane by this time ends with a
            DeadlineError.
        processors: Functions that change the logits before each token is chosen.
        adapter: The name of the LoRA adapter that answers; None for the model without an adapter, or, if the request
            resumes a snapshot's answer, for the snapshot's adapter.
        images: The encoded images of the prompt, from `Engine.encode_with_images`.
        pin: Ranges (first, end) of the prompt's tokens that are never evicted from the cache, counted from the
            beginning of the prompt.
        id: The engine's number of the request, from 1. The engine writes `id` and all following attributes.
        state: Waiting, prefilling, decoding or finished.
        lane: The request's lane (row of the batch); -1 without one.
        ids: Token ids of `start` and of the prompt, [n] int64.
        places: For each of `ids`, the number (from 1) of the vector of `images` in its place; 0 for none.
        pins: Ranges (first, end) of the pinned ones of `ids`, those of `start` included.
        done: The number of `ids` that have been read.
        tokens: The generated tokens.
        finish_reason: The reason why the answer ended.
        error: The error that ended the request.
        timing: The token counts and durations of the request, or of all requests of its bundle.
        cached_tokens: The number of `ids` that came from a snapshot or a saved prefix.
        snapshot: The state when the request finished, if `keep` is set.
        prompt_end: The logits and KV cache after the prompt, stored until all forks have begun.
        keys: Hashes of the prompt's beginnings, by which saved prefixes are found (`Prefixes.keys`).
        borders: The numbers of prompt tokens after which the lane is saved for other prompts with this beginning.
        sampler: The sampler, which chooses the tokens.
        text: The detokenizer, which turns tokens into text; None without a tokenizer.
        loaded: The loaded LoRA adapter of the request; None for the model without one.
    """

    prompt: Prompt
    settings: GenerationSettings | None = None
    bundle: Bundle | None = None
    sequence: int = 0
    start: Snapshot | None = None
    keep: bool = False
    fork_of: Request | None = field(default=None, repr=False)
    priority: int = 0
    deadline: float | None = None
    processors: Sequence[LogitsProcessor] = ()
    adapter: str | None = None
    images: PromptImages | None = field(default=None, repr=False)
    pin: Ranges = ()
    id: int = field(default=0, init=False)
    state: State = field(default=WAITING, init=False)
    lane: int = field(default=-1, init=False)
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    places: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False, repr=False)
    pins: Pins = field(default=(), init=False, repr=False)
    done: int = field(default=0, init=False)
    tokens: list[Token] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    timing: Timing = field(init=False)
    cached_tokens: int = field(default=0, init=False)
    snapshot: Snapshot | None = field(default=None, init=False, repr=False)
    prompt_end: PromptEnd | None = field(default=None, init=False, repr=False)
    keys: dict[int, bytes] = field(default_factory=dict, init=False, repr=False)
    borders: set[int] = field(default_factory=set, init=False, repr=False)
    sampler: Sampler = field(init=False, repr=False)
    text: TextStream | None = field(default=None, init=False, repr=False)
    loaded: Adapter | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.timing = Timing() if self.bundle is None else self.bundle.timing

    def fork(self, settings: GenerationSettings | None = None) -> Request:
        """Return a request for another answer to the same prompt. Add it to the engine after this request.

        The prompt is read once, and the fork's answer begins from a copy of this request's KV cache.

        Args:
            settings: The settings of the fork; None takes those of this request. With equal settings the fork gets
                another answer only if tokens are sampled without a seed.
        """
        return Request(
            self.prompt,
            settings or self.settings,
            start=self.start,
            fork_of=self,
            priority=self.priority,
            deadline=self.deadline,
            processors=self.processors,
            adapter=self.adapter,
            images=self.images,
            pin=self.pin,
        )

    def initialize(self, ids: Ids, sampler: Sampler, text: TextStream | None, done: int = 0) -> None:
        """Set the token ids, sampler and detokenizer of a request; the first `done` ids have been read already."""
        if self.id:
            raise ValueError("a request is added once")
        self.ids, self.sampler, self.text = ids, sampler, text
        self.done = self.cached_tokens = done
        self.id = next(_ids)

    def prepare(self, ids: Ids, default: GenerationSettings, grammars: Grammars) -> None:
        """Make the request's sampler and detokenizer, in their saved states if the request resumes a snapshot."""
        start, resumed = self.start, self.start if self._resumes else None
        settings = self.settings or (resumed.settings if resumed else None) or default
        state = resumed.sampler if resumed else None
        answered = len(state["generated"]) if state is not None else 0
        constraint = grammars.start(settings.grammar, settings.eos_token_ids) if settings.grammar is not None else None
        sampler = Sampler(settings, ids[: len(ids) - answered], grammars.vocabulary, constraint, self.processors)
        if state is not None:
            sampler.restore(state)
        text = None
        if grammars.tokenizer is not None:
            stops, shown = settings.stop_strings, settings.shown_ids
            text = TextStream(grammars.tokenizer, stops, context_ids=ids[-CONTEXT:].tolist(), shown_ids=shown)
            if resumed and resumed.text is not None:
                text.restore(resumed.text)
        done = 0 if start is None else start.length
        if answered:
            if sampler.finish_reason is not None:
                raise UsageError(
                    f"the snapshot's answer has ended: {sampler.finish_reason}", "a prompt, or a larger max_new_tokens"
                )
            done = len(ids)  # the next step decodes from the last token
        elif done >= len(ids):
            raise UsageError("the snapshot has nothing to go on with", "give at least one token")
        self.initialize(ids, sampler, text, done)

    def check_pins(self, ids: Ids, manifest: Manifest) -> None:
        """Set the tokens that stay in the cache, with those of the snapshot; raise UsageError if they have no room."""
        before, after = (0, ()) if self.start is None else (len(self.start.ids), self.start.counters.pins)
        ranges = [_range(pin, len(ids) - before) for pin in self.pin]
        self.pins = joined([*after, *((before + first, before + end) for first, end in ranges)])
        count, room = pinned(self.pins), manifest.recipe.cache.pinned
        if count <= room:
            return
        if not any(layer.merges for layer in manifest.cache.caches):
            raise UsageError(
                f"the request pins {count} tokens, but the artifact evicts nothing ({manifest.recipe.cache.method}): "
                "every token is kept",
                "leave the pins out",
            )
        raise UsageError(
            f"the request pins {count} tokens, and the artifact has room for {room} (cache.pinned)",
            f"pin fewer, or {manifest.build_command(f'cache.pinned={count}')}",
        )

    def load_adapter(self, adapters: Adapters) -> None:
        """Look up the request's LoRA adapter; raise SnapshotError if the snapshot it continues has another adapter."""
        start = self.start
        self.loaded = adapters.get(self.adapter)
        if start is None:
            return
        if self.adapter is None and self._resumes:
            self.loaded = adapters.of_digest(start.adapter)
        if start.adapter != self.digest:
            name = next((known.name for known in adapters.by_name.values() if known.digest == start.adapter), None)
            adapter = f"the adapter {name or 'of other files'}"
            raise SnapshotError(
                f"the snapshot is of {'the model without an adapter' if start.adapter is None else adapter}, the "
                f"request is for {self.adapter or 'the model without one'}",
                "go on with the adapter that the sequence began with, or begin a new sequence",
            )

    @property
    def _resumes(self) -> bool:
        """Whether the request has no prompt of its own, and continues the answer or unread prompt of its snapshot."""
        return self.start is not None and len(self.prompt) == 0

    def snapshot_with(self, saved: Saved, origin: Origin) -> Snapshot:
        """Return a snapshot of the request, whose KV cache is in `saved`."""
        text = None if self.text is None or self.state is FINISHED else self.text.state()
        sampler = self.sampler
        return Snapshot(
            origin,
            self.seen,
            saved.state,
            saved.counters._replace(pins=self.pins),
            sampler.state(),
            text,
            sampler.settings,
            self.digest,
            self.digests,
        )

    @property
    def digest(self) -> str | None:
        """The hash of the request's LoRA adapter; None for the model without an adapter."""
        return None if self.loaded is None else self.loaded.digest

    @property
    def digests(self) -> tuple[str, ...]:
        """The hashes of all images of the sequence, in order: images of the snapshot `start`, then of the prompt."""
        earlier = () if self.start is None else self.start.images
        return earlier if self.images is None else (*earlier, *self.images.digests)

    @property
    def keyed_ids(self) -> NDArray[np.int64]:
        """The token ids of the prompt, in which a hash of each image replaces the image's placeholder tokens."""
        if self.images is None:
            return self.ids
        return np.where(self.places > 0, self.images.keys[self.places - 1], self.ids)

    @property
    def unread(self) -> int:
        """The number of prompt tokens that no model call has read yet."""
        return len(self.ids) - self.done

    @property
    def last_token(self) -> int:
        """The latest token of the answer, which is the input of the next decode step."""
        return self.tokens[-1].id if self.tokens else int(self.ids[-1])

    @property
    def seen(self) -> NDArray[np.int64]:
        """The token ids of the prompt and of the answer so far."""
        return np.concatenate([self.ids, np.array([token.id for token in self.tokens], np.int64)])

    def room(self, max_length: int) -> int:
        """Return how many tokens the answer may still get if prompt and answer together have at most `max_length`."""
        left = self.sampler.settings.max_new_tokens - len(self.sampler.generated)
        return min(left, max_length - len(self.ids) - len(self.tokens))

    def is_foreseen(self, max_length: int) -> bool:
        """Return whether the next token certainly has the largest logit, and the answer may go on after it.

        The result is False if `keep` is set, because the KV cache is then saved at the end of the answer. Prompt and
        answer together have at most `max_length` tokens.
        """
        return self.room(max_length) > 1 and not self.keep and self.sampler.takes_largest

    def continues_with(self, token: int) -> bool:
        """Return whether the answer goes on and its last token equals the drafted (guessed) token `token`."""
        return self.state is DECODING and self.tokens[-1].id == token

    def begin(self, lane: int) -> None:
        """Assign a batch lane to the request: it starts to read its prompt, or to decode if the prompt is read."""
        self._require(WAITING)
        if self.fork_of is not None:
            self.skip(len(self.ids))
        self.state, self.lane = PREFILLING if self.unread else DECODING, lane

    def skip(self, done: int) -> None:
        """Note that the first `done` prompt tokens need no prefill, because the KV cache already contains them."""
        self.timing.prompt_tokens -= done - self.done
        self.done = self.cached_tokens = done

    def read(self, count: int) -> None:
        """Note that a model call read `count` prompt tokens. After the prompt's last token the request decodes."""
        self._require(PREFILLING)
        if not 0 < count <= self.unread:
            raise ValueError(f"{count} tokens read of a prompt that has {self.unread} left")
        self.done += count
        if not self.unread:
            self.state = DECODING

    def take(self, token: int, max_length: int) -> None:
        """Add the next token to the answer, and finish the request if the token or `max_length` ends the answer."""
        self._require(DECODING)
        reason = self.sampler.finish_reason
        if reason is None and len(self.ids) + len(self.tokens) + 1 >= max_length:
            reason = "length"
        piece, text = "", self.text
        if text is not None:
            # A token that ends the answer is no part of its text, unless it is the marker of a tool call.
            hidden = token in self.sampler.ends and token not in self.sampler.settings.shown_ids
            piece = "" if hidden else text.push(token)
            if text.stopped:
                reason = "stop"
            if reason:
                piece += text.flush()
        new_token = Token(self.sequence, token, piece, reason, *(self.sampler.logprobs or ()))
        self.tokens.append(new_token)
        if self.bundle is not None:
            self.bundle.new.append(new_token)
        if reason:
            self.finish(reason)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Finish the request from any state, with a reason and possibly an error."""
        if self.state is FINISHED:
            raise ValueError(f"the request has finished: {self.finish_reason}")
        self.state, self.finish_reason, self.error = FINISHED, reason, error

    def _require(self, state: State) -> None:
        if self.state is not state:
            raise ValueError(f"the request is {self.state.value}, not {state.value}")


def _range(pin: object, tokens: int) -> tuple[int, int]:
    """Return one pinned (never evicted) range of a prompt's tokens as (first, end).

    Raise UsageError for anything else.
    """
    ends = tuple(pin) if isinstance(pin, tuple | list) else ()
    whole = len(ends) == 2 and all(isinstance(end, int | np.integer) for end in ends)
    if not whole or not 0 <= ends[0] <= ends[1] <= tokens:
        raise UsageError(
            f"pin holds {str(pin)[:80]}, which is no range of the prompt's {tokens} tokens",
            "pass ranges (first, end), such as [(0, 100)] for the first 100 tokens",
        )
    return int(ends[0]), int(ends[1])


def ranges_of(pin: Pin) -> Ranges:
    """Return the tokens that a caller pins (never evicts) as ranges (first, end); a number n means the first n."""
    if isinstance(pin, int | np.integer):
        return [(0, int(pin))] if pin else []
    return pin


def empty_lane(plan: CachePlan) -> Saved:
    """Return the saved state of a new sequence: no KV-cache entries, and counters of 0."""
    places = slot_places(plan)
    state = {}
    for name, _, layer, kind in plan.state_names():
        shape = list(layer.shapes(1)[kind][1:])
        if (axis := 1 if kind in RING else places[name].axis) is not None:
            shape[axis] = 0
        state[name] = np.zeros(shape, layer.dtypes()[kind])
    return Saved(state, Counters((0,) * len(plan.heads("capacity")), 0, 0))


def as_processors(processors: Processors) -> tuple[LogitsProcessor, ...]:
    """Return one logits processor, several or none as a tuple. Raise UsageError for anything else."""
    functions = () if processors is None else (processors,) if callable(processors) else tuple(processors)
    if wrong := [function for function in functions if not callable(function)]:
        raise UsageError(
            f"logits_processor holds {wrong[0]!r}, which is no function",
            "pass a function of (token ids, logits) that returns logits, or a list of such functions",
        )
    return functions


_ids = itertools.count(1)
