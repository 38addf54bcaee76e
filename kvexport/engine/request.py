"""A request: one prompt to be answered, and where its answer stands."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.language.sampling import LogitsProcessor, Sampler
from kvexport.language.settings import GenerationSettings
from kvexport.language.text import TextStream
from kvexport.language.token import Token
from kvexport.state.lane import Saved
from kvexport.state.snapshot import Snapshot

Prompt = str | Sequence[int] | NDArray[np.int64]
Processors = LogitsProcessor | Sequence[LogitsProcessor] | None
FinishReason = Literal["stop", "length", "cancelled", "preempted", "error"]


class State(Enum):
    """Of a request, in this order; it may finish from each, and be parked while it holds a lane."""

    WAITING = "waiting"  # for a lane
    PREFILLING = "prefilling"  # it holds a lane, and its prompt is read chunk by chunk
    DECODING = "decoding"  # it holds a lane, and every step gives a token
    FINISHED = "finished"


WAITING, PREFILLING, DECODING, FINISHED = State


@dataclass
class Timing:
    """Of one call, or of one request by itself: prompt and generated tokens of all its sequences, seconds of the steps
    that prefilled and that decoded them (merging included; other requests may have shared them), decode steps.
    drafted_tokens, accepted_tokens: of speculative decoding; a step gives one token and those that it accepts.
    whole_rows: tokens of decode steps for whose choice a whole row of logits left the device; None where logits are on
    the host anyway."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    whole_rows: int | None = None

    @property
    def decoded_tokens(self) -> int:
        """Tokens of a sequence that steps gave: all but the first, which comes out of prefill."""
        return self.steps + self.accepted_tokens


@dataclass(eq=False)
class Bundle:
    """What the requests of prompts that are given together share.

    None of them decodes before the prompts of all that have a lane are read, which takes the fewest calls.

    Attributes:
        timing: The figures of all of them.
        new: Tokens of all of them that the caller has not taken yet.
    """

    timing: Timing = field(default_factory=Timing)
    new: deque[Token] = field(default_factory=deque)


@dataclass(frozen=True)
class PromptEnd:
    """What forks of a request start from. row: the logits after its prompt [vocabulary]. lane: its lane then.
    saved: that lane's state; None where the lane still is so."""

    row: NDArray[np.float32]
    lane: int
    saved: Saved | None = None


@dataclass(eq=False)
class Request:
    """A prompt, how it is to be answered, and the answer so far.

    prompt: text, or token ids. settings: None takes the checkpoint's. call: None where it stands by itself. sequence:
    which prompt of its call it is. start: where the prompt follows on; with an empty prompt the request goes on where
    the snapshot was. keep: whether there is a `snapshot` when it finishes. fork_of: see `fork`. priority: of those that
    wait the lowest comes first, then the one that came first. deadline: by `time.monotonic()`, in seconds; a request
    that has no lane until then ends by a DeadlineError.

    The rest is the engine's to write. id: its number there, from 1. lane: while it holds one. begun: when it got
    it, by `time.perf_counter()`, first. parked: its lane, while it waits because a request of a better priority has
    it. ids: the tokens of `start` and of the prompt [n] int64. done: how many of them are read. cached_tokens: how
    many of them it did not have to read. tokens: the answer. error: why it finished by "error". timing: its call's,
    or its own. prompt_end: for its forks, until they have begun. keys, borders: see `Prefixes`.
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
    id: int = field(default=0, init=False)
    state: State = field(default=WAITING, init=False)
    lane: int = field(default=-1, init=False)
    begun: float = field(default=0.0, init=False)
    parked: Saved | None = field(default=None, init=False, repr=False)
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
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

    def __post_init__(self) -> None:
        """Share the call's figures."""
        self.timing = Timing() if self.bundle is None else self.bundle.timing

    def fork(self, settings: GenerationSettings | None = None) -> Request:
        """Another answer to the same prompt, to be added beside this request: the prompt is read once, and a copy of
        the lane is where this answer begins. settings: None takes this request's, which give another answer only where
        tokens are drawn and there is no seed."""
        return Request(
            self.prompt,
            settings or self.settings,
            start=self.start,
            fork_of=self,
            priority=self.priority,
            deadline=self.deadline,
            processors=self.processors,
        )

    def prepare(self, ids: NDArray[np.int64], sampler: Sampler, text: TextStream | None, done: int = 0) -> None:
        """What an engine adds before the request waits. text: None where there is no tokenizer. done: so many ids are
        read already."""
        if self.id:
            raise ValueError("a request is added once")
        self.ids, self.sampler, self.text = ids, sampler, text
        self.done = self.cached_tokens = done
        self.id = next(_ids)

    @property
    def unread(self) -> int:
        """Tokens of the prompt that no call has read yet."""
        return len(self.ids) - self.done

    @property
    def last_token(self) -> int:
        """The token that is decoded next."""
        return self.tokens[-1].id if self.tokens else int(self.ids[-1])

    @property
    def seen(self) -> NDArray[np.int64]:
        """Prompt and answer so far."""
        return np.concatenate([self.ids, np.array([token.id for token in self.tokens], np.int64)])

    def room(self, max_length: int) -> int:
        """How many tokens may follow. max_length: of prompt and answer together."""
        left = self.sampler.settings.max_new_tokens - len(self.sampler.generated)
        return min(left, max_length - len(self.ids) - len(self.tokens))

    def goes_on_with(self, token: int) -> bool:
        """Whether its last token is this one, and another follows."""
        return self.state is DECODING and self.tokens[-1].id == token

    def begin(self, lane: int) -> None:
        """Waiting to prefilling, or to decoding where the prompt is read already: it got a lane."""
        self._require(WAITING)
        if self.fork_of is not None:
            self.skip(len(self.ids))
        self.state, self.lane = PREFILLING if self.unread else DECODING, lane
        self.begun = self.begun or time.perf_counter()

    def park(self, saved: Saved) -> None:
        """Back to waiting, from a lane that was saved."""
        if self.state not in (PREFILLING, DECODING):
            raise ValueError(f"the request is {self.state.value}, and holds no lane")
        self.state, self.lane, self.parked = WAITING, -1, saved

    def skip(self, done: int) -> None:
        """So many ids are read already, by another request."""
        self.timing.prompt_tokens -= done - self.done
        self.done = self.cached_tokens = done

    def read(self, count: int) -> None:
        """A call read so many tokens of the prompt; to decoding with the last of them."""
        self._require(PREFILLING)
        if not 0 < count <= self.unread:
            raise ValueError(f"{count} tokens read of a prompt that has {self.unread} left")
        self.done += count
        if not self.unread:
            self.state = DECODING

    def take(self, token: int, max_length: int) -> None:
        """The next token; to finished where it is the last. max_length: of prompt and answer together."""
        self._require(DECODING)
        reason = self.sampler.finish_reason
        if reason is None and len(self.ids) + len(self.tokens) + 1 >= max_length:
            reason = "length"
        piece, text = "", self.text
        if text is not None:
            piece = text.push(token)
            if text.stopped:
                reason = "stop"
            if reason:
                piece += text.flush()
        made = Token(self.sequence, token, piece, reason, *(self.sampler.logprobs or ()))
        self.tokens.append(made)
        if self.bundle is not None:
            self.bundle.new.append(made)
        if reason:
            self.finish(reason)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """To finished, from wherever it is."""
        if self.state is FINISHED:
            raise ValueError(f"the request has finished: {self.finish_reason}")
        self.state, self.finish_reason, self.error = FINISHED, reason, error

    def _require(self, state: State) -> None:
        if self.state is not state:
            raise ValueError(f"the request is {self.state.value}, not {state.value}")


def as_processors(processors: Processors) -> tuple[LogitsProcessor, ...]:
    """Return one function, several or none as a tuple. Raises UsageError for anything else."""
    functions = () if processors is None else (processors,) if callable(processors) else tuple(processors)
    if wrong := [function for function in functions if not callable(function)]:
        raise UsageError(
            f"logits_processor holds {wrong[0]!r}, which is no function",
            "pass a function of (token ids, logits) that returns logits, or a list of such functions",
        )
    return functions


_ids = itertools.count(1)
