"""Sampling: the choice of a sequence's next token from its logits, in NumPy, as transformers 5.23 defines it.

The steps and their order are those of `GenerationMixin._get_logits_processor` in transformers: bias, repetition
penalty, minimum of new tokens, then, with sampling, temperature, top_k, top_p and min_p
(`kvexport.language.distribution`). OpenAI's penalties come after the repetition penalty, as in vLLM. The random draw
differs from that of transformers: NumPy's generator replaces torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvexport.backends.rows import TopLogits
from kvexport.errors import UsageError
from kvexport.language.distribution import (
    Floats,
    Ids,
    Logprobs,
    check_maximum,
    distribution_of,
    distribution_of_top,
    draw,
    logprobs_of,
    scores_of,
)
from kvexport.language.grammar import Constraint
from kvexport.language.settings import GenerationSettings

# A user's change of the logits: (token ids of prompt and answer [n] int64, logits [vocabulary] float32) -> logits.
LogitsProcessor = Callable[[Ids, Floats], Floats]


class Sampler:
    """The sampler of one sequence, which chooses tokens and remembers them.

    The sampler's draws depend only on its settings, its prompt and the logits, never on the batch.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        prompt_ids: Sequence[int] | Ids,
        vocab_size: int,
        constraint: Constraint | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self._constraint = constraint
        self._processors = tuple(processors)
        self._prompt_ids = np.asarray(prompt_ids, dtype=np.int64) if processors else None
        self.generated: list[int] = []
        self.logprobs: Logprobs | None = None  # of the token chosen last, if the settings ask for them
        # Ids beyond the logits (an embedding larger than the head) cannot come out, so they carry no penalty.
        self.ends = () if settings.ignore_eos else settings.eos_token_ids  # any of these tokens ends the sequence
        self._eos_ids = np.array([i for i in self.ends if i < vocab_size], dtype=np.int64)
        self._random = np.random.default_rng(settings.seed) if settings.do_sample else None
        self._is_seen: npt.NDArray[np.bool_] | None = None
        if settings.repetition_penalty != 1.0:
            prompt = np.asarray(prompt_ids, dtype=np.int64)
            if prompt.size and prompt.min() < 0:
                raise UsageError(f"the prompt holds the token id {prompt.min()}", "give token ids of at least 0")
            self._is_seen = np.zeros(vocab_size, dtype=bool)
            self._is_seen[prompt[prompt < vocab_size]] = True
        penalised = settings.presence_penalty != 0 or settings.frequency_penalty != 0
        self._counts = np.zeros(vocab_size, dtype=np.int32) if penalised else None
        self._bias = _dense(settings.logit_bias, vocab_size) if settings.logit_bias else None

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        if self.generated and self.generated[-1] in self.ends:
            return "stop"
        if self._constraint is not None and self._constraint.finished:
            return "stop"
        return "length" if len(self.generated) >= self.settings.max_new_tokens else None

    def next(self, logits: npt.ArrayLike) -> int:
        scores = self._scores(logits)
        if self._random is None:
            token = int(scores.argmax())
        else:
            ids, probabilities = distribution_of(scores, self.settings, len(self.generated))
            token = int(ids[draw(probabilities, self._random.random())])
        if self.settings.logprobs is not None:
            self.logprobs = logprobs_of(np.asarray(logits, dtype=np.float32), token, self.settings.logprobs)
        return self._remember(token)

    def next_of(self, top: TopLogits) -> int | None:
        """Sample the next token from the n largest logits alone; None if other logits could change the result."""
        if self._processors:
            return None
        if top.ids.size == self.vocab_size:
            row = np.empty(self.vocab_size, dtype=np.float32)
            row[top.ids] = top.values
            return self.next(row)
        if self.settings.may_raise or self.settings.logprobs is not None:
            return None
        temperature = 1.0 if self._random is None else self.settings.temperature
        scores = scores_of(top, self._changed(top.values, top.ids), temperature)
        if scores is None:
            return None
        if self._random is None:
            best = scores.values.max()
            return self._remember(int(scores.ids[scores.values == best].min())) if best > scores.floor else None
        distribution = distribution_of_top(scores, self.settings, self.vocab_size)
        if distribution is None:
            return None
        ids, probabilities = distribution
        return self._remember(int(ids[draw(probabilities, self._random.random())]))

    def _remember(self, token: int) -> int:
        self.generated.append(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._is_seen is not None:
            self._is_seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        return token

    @property
    def takes_largest(self) -> bool:
        """Whether the next token certainly has the largest logit, so that sampling needs no other logit."""
        changes = (self._random, self._bias, self._is_seen, self._counts, self._constraint, self.settings.logprobs)
        return all(change is None for change in changes) and not self._processors and not self._suppresses()

    def may_settle(self, count: int) -> bool:
        return not self._processors and may_settle(self.settings, count, self.vocab_size)

    def state(self) -> dict[str, list[int]]:
        """Return the sampler's state for `restore`: the chosen tokens, and the random generator's state and increment.

        The generator's state is empty for greedy decoding.
        """
        drawn: list[int] = []
        if self._random is not None:
            inner: Any = self._random.bit_generator.state["state"]
            drawn = [int(inner["state"]), int(inner["inc"])]
        return {"generated": list(self.generated), "random": drawn}

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        try:
            generated, random = [int(i) for i in state["generated"]], [int(i) for i in state["random"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is no state of a sampler: {error!r}", "pass the value of Sampler.state") from error
        if any(not 0 <= i < self.vocab_size for i in generated) or any(not 0 <= i < 2**128 for i in random):
            raise UsageError("the state of a sampler holds numbers out of range", "pass the value of Sampler.state")
        if len(random) != (0 if self._random is None else 2):
            was = "sampling" if random else "greedy"
            raise UsageError(f"the state is that of a {was} sequence", f"set do_sample to {str(bool(random)).lower()}")
        self.generated = []
        for token in generated:
            self._remember(token)
        if self._random is not None:
            position = {"state": random[0], "inc": random[1]}
            self._random.bit_generator.state = {
                "bit_generator": "PCG64",
                "state": position,
                "has_uint32": 0,
                "uinteger": 0,
            }

    def distribution(self, logits: npt.ArrayLike) -> tuple[Ids, npt.NDArray[np.float64]]:
        scores = self._scores(logits)
        if self._random is None:
            return np.array([scores.argmax()], dtype=np.int64), np.ones(1)
        return distribution_of(scores, self.settings, len(self.generated))

    def _scores(self, logits: npt.ArrayLike) -> Floats:
        scores = np.asarray(logits, dtype=np.float32)
        if scores.shape != (self.vocab_size,):
            raise UsageError(
                f"logits of shape {list(scores.shape)} for a vocabulary of {self.vocab_size}", "pass one row of logits"
            )
        scores = self._changed(scores, None)
        check_maximum(scores, len(self.generated))
        return scores

    def _changed(self, logits: Floats, ids: npt.NDArray[np.integer[Any]] | None) -> Floats:
        """Return the logits of the tokens `ids` (None: all tokens) after bias, penalties, eos suppression and grammar.

        If nothing applies, the caller's own array is returned.
        """
        suppresses = self._suppresses()
        changes = (self._bias, self._is_seen, self._counts, self._constraint, self._processors or None)
        if all(change is None for change in changes) and not suppresses:
            return logits
        scores: Floats = logits.copy()
        if self._bias is not None:
            scores += self._bias if ids is None else self._bias[ids]
        if self._is_seen is not None:
            self._penalise(scores, np.flatnonzero(self._is_seen if ids is None else self._is_seen[ids]))
        if self._counts is not None:
            counts = self._counts if ids is None else self._counts[ids]
            places = np.flatnonzero(counts)
            scores[places] -= np.float32(self.settings.frequency_penalty) * counts[places].astype(np.float32)
            scores[places] -= np.float32(self.settings.presence_penalty)
        if suppresses:
            scores[self._eos_ids if ids is None else np.isin(ids, self._eos_ids)] = -np.inf
        if self._processors:
            scores = self._processed(scores)
        if self._constraint is not None:
            allowed = self._constraint.mask()
            scores[~(allowed if ids is None else allowed[ids])] = -np.inf
        return scores

    def _processed(self, scores: Floats) -> Floats:
        """Return a row of logits after the user's logits processors, which run after penalties, before the grammar."""
        assert self._prompt_ids is not None
        ids = np.concatenate([self._prompt_ids, np.array(self.generated, np.int64)])
        for processor in self._processors:
            scores = np.array(processor(ids, scores), dtype=np.float32)
            if scores.shape != (self.vocab_size,):
                raise UsageError(
                    f"a logits_processor returned an array of shape {list(scores.shape)}, expected [{self.vocab_size}]",
                    "return the row of logits that the function was called with, changed or not",
                )
        return scores

    def _suppresses(self) -> bool:
        return len(self.generated) < self.settings.min_new_tokens and self._eos_ids.size > 0

    def _penalise(self, scores: Floats, places: Ids) -> None:
        seen, penalty = scores[places], self.settings.repetition_penalty
        with np.errstate(over="ignore"):
            scores[places] = np.where(seen < 0, seen * penalty, seen / penalty)


def may_settle(settings: GenerationSettings, count: int, vocabulary: int) -> bool:
    """Return whether the `count` largest logits of a row can ever be enough to sample a token with certain settings.

    The largest logits are not enough in three cases: a penalty or a bias can raise the logits of other tokens; none of
    top_k, top_p and min_p excludes tokens; log probabilities need the sum over the whole row.
    """
    if count >= vocabulary:
        return True
    if settings.may_raise or settings.logprobs is not None:
        return False
    return not settings.do_sample or 0 < settings.top_k < count or settings.top_p < 1 or settings.min_p > 0


def _dense(bias: Mapping[int, float], vocabulary: int) -> Floats:
    if max(bias) >= vocabulary:
        raise UsageError(f"logit_bias names the token {max(bias)}", f"give token ids below {vocabulary}")
    dense = np.zeros(vocabulary, dtype=np.float32)
    dense[list(bias)] = list(bias.values())
    return dense
