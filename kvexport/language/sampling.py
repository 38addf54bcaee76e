"""Sampling: the choice of a sequence's next token from its logits, in NumPy, as transformers 5.23 defines it.

The processors and their order are those of `GenerationMixin._get_logits_processor`: bias, repetition penalty, minimum
of new tokens, then, with sampling, temperature, top_k, top_p and min_p. The kept tokens and their probabilities are
equal to those of transformers. The draw is not: NumPy's generator replaces torch's. OpenAI's penalties come after the
repetition penalty, as in vLLM.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvexport.backends.rows import TopLogits
from kvexport.errors import KvexportError, UsageError
from kvexport.language.grammar import Constraint
from kvexport.language.settings import GenerationSettings
from kvexport.language.top_logits import Scores, scores_of

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# A user's change of the logits: (token ids of prompt and answer [n] int64, logits [vocabulary] float32) -> logits.
LogitsProcessor = Callable[[Ids, Floats], Floats]

_BLOCK = 512
_SORTED_AT_ONCE = 256


class Logprobs(NamedTuple):
    """Log probabilities of the token that one decode step chose, and of the likeliest tokens.

    Attributes:
        chosen: The log probability of the chosen token.
        top: The likeliest tokens and their log probabilities, descending. Of equal tokens the lowest id comes first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """The sampler of one sequence, which chooses tokens and remembers them.

    Its draws depend only on its settings, its prompt and the logits, never on the batch.

    Args:
        settings: The settings of the sequence.
        prompt_ids: The token ids of the prompt. They count only for the repetition penalty.
        vocab_size: The length of the logits.
        constraint: The state in the settings' grammar, of this sequence alone.
        processors: The user's own changes of the logits, called in this order with prompt and answer.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        prompt_ids: Sequence[int] | Ids,
        vocab_size: int,
        constraint: Constraint | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Create the sampler of a sequence that has no generated tokens yet.

        Raises:
            UsageError: A token id of the prompt is out of range.
        """
        self.settings = settings
        self.vocab_size = vocab_size
        self._constraint = constraint
        self._processors = tuple(processors)
        self._prompt_ids = np.asarray(prompt_ids, dtype=np.int64) if processors else None
        self.generated: list[int] = []
        self.logprobs: Logprobs | None = None  # of the token chosen last, if the settings ask for them
        # Ids beyond the logits (an embedding larger than the head) cannot come out, so they carry no penalty.
        self._ends = () if settings.ignore_eos else settings.eos_token_ids
        self._eos_ids = np.array([i for i in self._ends if i < vocab_size], dtype=np.int64)
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
        """Return why the sequence ends with the last sampled token, or None if it goes on.

        Returns:
            "stop" for an eos token or the end of the grammar, "length" for max_new_tokens, None if the sequence goes
            on.
            `kvexport.language.text.TextStream` finds stop strings in the text.
        """
        if self.generated and self.generated[-1] in self._ends:
            return "stop"
        if self._constraint is not None and self._constraint.finished:
            return "stop"
        return "length" if len(self.generated) >= self.settings.max_new_tokens else None

    def next(self, logits: npt.ArrayLike) -> int:
        """Sample the next token from a row of logits, and remember it.

        Args:
            logits: [vocab_size] float32 or float16, not changed.

        Returns:
            The token id. Greedy decoding takes the lowest id among equal maxima, as torch.argmax does on the CPU.

        Raises:
            KvexportError: The logits hold NaN or +inf, or leave no token possible.
            UsageError: The logits have another shape.
        """
        scores = self._scores(logits)
        if self._random is None:
            token = int(scores.argmax())
        else:
            ids, probabilities = _distribution(scores, self.settings, len(self.generated))
            token = int(ids[_draw(probabilities, self._random.random())])
        if self.settings.logprobs is not None:
            self.logprobs = _logprobs(np.asarray(logits, dtype=np.float32), token, self.settings.logprobs)
        return self._remember(token)

    def next_of(self, top: TopLogits) -> int | None:
        """Sample the next token as `next` does, but from the row's n largest logits alone.

        Returns:
            The token id. None, and no token is chosen, if the largest logits do not determine it.
        """
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
        chosen = _distribution_of(scores, self.settings, self.vocab_size)
        if chosen is None:
            return None
        ids, probabilities = chosen
        return self._remember(int(ids[_draw(probabilities, self._random.random())]))

    def _remember(self, token: int) -> int:
        self.generated.append(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._is_seen is not None:
            self._is_seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        return token

    def may_settle(self, count: int) -> bool:
        """Return whether the `count` largest logits of a row can ever be enough to sample a token."""
        return not self._processors and may_settle(self.settings, count, self.vocab_size)

    def twin(self) -> Sampler:
        """Return a copy of the sampler with the same random draws, without grammar and log probabilities."""
        other = copy.copy(self)
        other.settings = dataclasses.replace(self.settings, logprobs=None)
        other.generated, other._constraint, other._processors = list(self.generated), None, ()
        other._random = copy.deepcopy(self._random)
        other._is_seen, other._counts = (None if x is None else x.copy() for x in (self._is_seen, self._counts))
        return other

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
        """Restore the `state` of a sampler with equal settings and prompt, so that the same tokens follow.

        Raises:
            UsageError: The state is damaged, or belongs to other settings.
        """
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
        """Return the tokens that `next` could sample with their probabilities, without sampling one.

        Args:
            logits: [vocab_size] float32 or float16, not changed.

        Returns:
            Token ids [n], ascending, and their probabilities [n], whose sum is 1; one token for greedy decoding.

        Raises:
            KvexportError: The logits hold NaN or +inf, or leave no token possible.
            UsageError: The logits have another shape.
        """
        scores = self._scores(logits)
        if self._random is None:
            return np.array([scores.argmax()], dtype=np.int64), np.ones(1)
        return _distribution(scores, self.settings, len(self.generated))

    def _scores(self, logits: npt.ArrayLike) -> Floats:
        """Return a row of logits after all changes (bias, penalties, grammar), checked for NaN and +inf."""
        scores = np.asarray(logits, dtype=np.float32)
        if scores.shape != (self.vocab_size,):
            raise UsageError(
                f"logits of shape {list(scores.shape)} for a vocabulary of {self.vocab_size}", "pass one row of logits"
            )
        scores = self._changed(scores, None)
        _check_maximum(scores, len(self.generated))
        return scores

    def _changed(self, logits: Floats, ids: npt.NDArray[np.integer[Any]] | None) -> Floats:
        """Return the logits of `ids` (None: of all tokens) after bias, penalties, eos suppression and grammar.

        The caller's own array is returned if none of them applies.
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
    """Return whether the `count` largest logits of a row can ever be enough to sample a token with these settings.

    They cannot if a penalty or a bias can raise other tokens; if neither top_k, top_p nor min_p excludes tokens; or if
    log probabilities need the sum over the whole row.
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


def _logprobs(logits: Floats, token: int, count: int) -> Logprobs:
    """Return the log probabilities, log(softmax(logits)), of a token and of the `count` likeliest tokens."""
    _check_maximum(logits, 0)
    largest = float(logits.max())
    log_sum = largest + math.log(float(np.exp(logits - np.float32(largest)).sum(dtype=np.float64)))
    ids = _top_ids(logits, count) if 0 < count < logits.size else np.arange(min(count, logits.size))
    order = ids[np.lexsort((ids, -logits[ids]))][:count]
    return Logprobs(float(logits[token]) - log_sum, tuple((int(i), float(logits[i]) - log_sum) for i in order))


def _distribution(scores: Floats, settings: GenerationSettings, step: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Return the tokens that temperature, top_k, top_p and min_p keep in transformers' order, and their probabilities.

    Returns:
        The kept token ids, ascending, and their probabilities.
    """
    if settings.temperature != 1.0:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scores = scores / settings.temperature
        _check_maximum(scores, step, f" after division by the temperature {settings.temperature}")
    k = settings.top_k
    ids = _top_ids(scores, k) if 0 < k < scores.size else np.flatnonzero(scores > -np.inf)
    values = scores[ids]
    return _narrowed(ids, values, settings.top_p, settings.min_p)


def _narrowed(ids: Ids, values: Floats, top_p: float, min_p: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Return the tokens that top_p and min_p keep, with their probabilities.

    Args:
        ids: Token ids.
        values: Their scores, all finite.
        top_p: The probability mass to keep.
        min_p: The least probability relative to that of the likeliest token.
    """
    if top_p < 1.0:
        kept = _top_p_indices(values, top_p)
        ids, values = ids[kept], values[kept]
    if min_p > 0.0:
        probabilities = _softmax(values)
        kept = np.flatnonzero(probabilities >= min_p * probabilities.max())
        ids, values = ids[kept], values[kept]
    weights = np.exp(values - values.max()).astype(np.float64)
    return ids, weights / weights.sum()


def _distribution_of(
    scores: Scores, settings: GenerationSettings, vocabulary: int
) -> tuple[Ids, npt.NDArray[np.float64]] | None:
    """Return the tokens that could be sampled and their probabilities, or None if the largest logits do not suffice.

    The largest logits settle the first of the three filters that applies. The later filters see what it kept.
    """
    top_p, min_p = settings.top_p, settings.min_p
    if 0 < settings.top_k < vocabulary:
        kept = scores.top_k(settings.top_k)
    elif top_p < 1.0:
        kept, top_p = scores.top_p(top_p), 1.0
    elif min_p > 0.0:
        kept, min_p = scores.min_p(min_p), 0.0
    else:
        return None
    return None if kept is None else _narrowed(*kept, top_p, min_p)


def _top_ids(scores: Floats, k: int) -> Ids:
    """Return the token ids, ascending, of all finite scores not below the k-th largest (with ties more than k)."""
    # The k-th largest of the blocks' maxima is at most the k-th largest score, and finding it reads each score once. A
    # few times k scores pass this bound. A partition of the whole vocabulary would cost ten times as much.
    width = min(_BLOCK, scores.size // (4 * k))
    ids = np.arange(scores.size)
    if width > 4:
        maxima = scores[: scores.size // width * width].reshape(-1, width).max(axis=1)
        ids = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    values = scores[ids]
    kept: Ids = ids[(values >= np.partition(values, -k)[-k]) & (values > -np.inf)]
    return kept


def _top_p_indices(values: Floats, top_p: float) -> Ids:
    """Return the indices, ascending, of the finite scores `values` [n] that nucleus sampling (top_p) keeps.

    It drops values whose cumulative probability, from the least, is within 1 - top_p. Of equal values the higher
    indices are kept; transformers leaves the order to torch.sort, which is not stable.
    """
    probabilities, bound = _softmax(values), np.float32(1.0 - top_p)
    stays = np.zeros(values.size, dtype=bool)
    undecided, fallen = np.arange(values.size), 0.0
    # A quickselect by mass: each round decides the values above or below a pivot, so that only the values at the
    # boundary are sorted.
    while undecided.size > _SORTED_AT_ONCE:
        rest = values[undecided]
        pivot = np.median(rest[:: rest.size // 64])
        is_low = rest < pivot
        if not is_low.any():
            break
        # Indices from flatnonzero cost a fifth of indexing with an unpredictable mask.
        low, high = undecided[np.flatnonzero(is_low)], undecided[np.flatnonzero(~is_low)]
        mass = float(probabilities[low].sum(dtype=np.float64))
        if np.float32(fallen + mass) <= bound:
            undecided, fallen = high, fallen + mass
        else:
            undecided = low
            stays[high] = True
    order = undecided[np.argsort(values[undecided], kind="stable")]
    # torch.cumsum adds float32 in double, rounds every sum to float32 and compares with the bound as float32.
    cumulative = (fallen + np.cumsum(probabilities[order], dtype=np.float64)).astype(np.float32)
    stays[order[cumulative > bound]] = True
    if not stays.any():
        stays[order[-1]] = True
    return np.flatnonzero(stays)


def _softmax(values: Floats) -> Floats:
    weights = np.exp(values - values.max())
    return np.asarray(weights / np.float32(weights.sum(dtype=np.float64)), dtype=np.float32)


def _draw(probabilities: npt.NDArray[np.float64], uniform: float) -> int:
    """Return the index that a uniform number in [0, 1) selects from the cumulated probabilities.

    An index of probability 0 is never returned.
    """
    cumulative = np.cumsum(probabilities)
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), last)


def _check_maximum(scores: Floats, step: int, where: str = "") -> None:
    # argmax stops at the first NaN, so the maximum alone tells NaN, +inf and "all -inf" apart from a usable row.
    best = int(scores.argmax())
    value = float(scores[best])
    if math.isfinite(value):
        return
    if value == -math.inf:
        raise KvexportError(
            f"every logit of new token {step} is -inf{where}: no token is possible",
            "lower min_new_tokens, the penalty or the bias, or give a grammar that allows more",
        )
    fix = "run `kvexport validate` on the artifact" if not where else "raise the temperature"
    raise KvexportError(
        f"logit {best} of new token {step} is {value}{where}",
        f"{fix}; a float16 model that overflows needs dtype float32",
    )
