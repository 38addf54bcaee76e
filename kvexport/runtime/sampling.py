"""The next token of one sequence from its logits, in numpy, with the meanings of transformers 5.23's GenerationConfig.

The processors and their order are those of `GenerationMixin._get_logits_processor`: repetition penalty, minimum of new
tokens, then, where sampling, temperature, top_k, top_p, min_p. The tokens kept and their probabilities are
transformers'; the draw is not (numpy's generator in place of torch's). Not covered: beams, n-gram bans and the rest of
`UNSUPPORTED`, which are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvexport.backends.rows import TopLogits
from kvexport.errors import KvexportError, UsageError
from kvexport.runtime.top_logits import Scores, scores_of

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# Keys of a generation_config.json that would change the tokens, each with the value that does nothing.
UNSUPPORTED: Mapping[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "token_healing": False,
    "max_time": None,
}
UNSUPPORTED_WHEN_SAMPLING: Mapping[str, Any] = {
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

_SHARED_KEYS = (
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop_strings",
)
_BLOCK = 512
_SORTED_AT_ONCE = 256


@dataclass(frozen=True)
class GenerationSettings:
    """How a sequence is continued; names, meanings and defaults are GenerationConfig's, but where said otherwise.

    temperature, top_k (0 = off, 50 where unset, as in transformers), top_p (1 = off), min_p (0 = off) count only with
    do_sample. repetition_penalty counts always, over prompt and generated tokens. min_new_tokens: no eos before so many
    tokens.
    max_new_tokens: 256 where unset, because transformers' 20 tokens of prompt and output together serve nobody.
    seed: of the sequence's own generator; null = from the operating system. eos_token_ids: any of them ends the
    sequence. Raises UsageError naming the field that cannot be used.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what transformers would refuse, or run into, at generation time."""
        _require(isinstance(self.do_sample, bool), "do_sample", self.do_sample, "true or false")
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0), ("top_k", 0)):
            value = getattr(self, name)
            _require(_is_integer(value) and value >= least, name, value, f"an integer of at least {least}")
        _require(
            self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"at most max_new_tokens = {self.max_new_tokens}",
        )
        expected = "a number above 0 (for greedy decoding: do_sample false)"
        _require(
            _is_number(self.temperature) and (self.temperature > 0 or not self.do_sample),
            "temperature",
            self.temperature,
            expected,
        )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1], 1 = off")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1], 0 = off")
        penalty = self.repetition_penalty
        _require(_is_number(penalty) and penalty > 0, "repetition_penalty", penalty, "a number above 0, 1 = off")
        _require(
            self.seed is None or (_is_integer(self.seed) and self.seed >= 0),
            "seed",
            self.seed,
            "an integer of at least 0, or null",
        )
        ids, strings = self.eos_token_ids, self.stop_strings
        whole = isinstance(ids, tuple) and all(_is_integer(i) and i >= 0 for i in ids)
        _require(whole, "eos_token_ids", ids, "a tuple of token ids of at least 0")
        filled = isinstance(strings, tuple) and all(isinstance(s, str) and s for s in strings)
        _require(filled, "stop_strings", strings, "a tuple of strings, none of them empty")

    @classmethod
    def from_generation_config(cls, data: Mapping[str, Any], **overrides: Any) -> GenerationSettings:
        """Settings from the content of a generation_config.json, with `overrides` (this class's fields; None = not
        given) on top.

        A null counts as unset. Keys that change nothing here are ignored, as are max_length (it counts the prompt; the
        recipe's limits.max_length bounds prompt and output together) and, without do_sample, everything that only
        sampling reads. Raises UsageError for a key of `UNSUPPORTED` with an effect, for an unknown override and for a
        value out of range.
        """
        unknown = sorted(set(overrides) - {field.name for field in fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise UsageError(f"unknown generation setting '{unknown[0]}'", f"use one of: {known}")
        values = {key: data[key] for key in _SHARED_KEYS if data.get(key) is not None}
        if data.get("eos_token_id") is not None:
            values["eos_token_ids"] = data["eos_token_id"]
        values.update((key, value) for key, value in overrides.items() if value is not None)
        for key in ("eos_token_ids", "stop_strings"):
            if key in values:
                values[key] = _as_tuple(values[key])
        settings = cls(**values)
        _refuse_unsupported(data, settings, min_new_tokens_given="min_new_tokens" in values)
        return settings


class Sampler:
    """Chooses the tokens of one sequence and remembers them. Its draws depend on its settings, prompt and logits alone,
    never on the batch the sequence is in.

    prompt_ids: the prompt's token ids; they count for the repetition penalty only. vocab_size: the length of the
        logits.
    """

    def __init__(self, settings: GenerationSettings, prompt_ids: Sequence[int] | Ids, vocab_size: int) -> None:
        """Start a sequence of which nothing is generated yet; UsageError for a negative token id."""
        self.settings = settings
        self.vocab_size = vocab_size
        self.generated: list[int] = []
        # Ids beyond the logits (an embedding larger than the head) cannot come out, so they carry no penalty.
        self._eos_ids = np.array([i for i in settings.eos_token_ids if i < vocab_size], dtype=np.int64)
        self._random = np.random.default_rng(settings.seed) if settings.do_sample else None
        self._is_seen: npt.NDArray[np.bool_] | None = None
        if settings.repetition_penalty != 1.0:
            prompt = np.asarray(prompt_ids, dtype=np.int64)
            if prompt.size and prompt.min() < 0:
                raise UsageError(f"the prompt holds the token id {prompt.min()}", "give token ids of at least 0")
            self._is_seen = np.zeros(vocab_size, dtype=bool)
            self._is_seen[prompt[prompt < vocab_size]] = True

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Why the sequence ends with the token last chosen: "stop" = an eos token, "length" = max_new_tokens; None = it
        goes on.
        Stop strings are found in the text: `kvexport.runtime.text.TextStream`."""
        if self.generated and self.generated[-1] in self.settings.eos_token_ids:
            return "stop"
        return "length" if len(self.generated) >= self.settings.max_new_tokens else None

    def next(self, logits: npt.ArrayLike) -> int:
        """Choose and remember the next token. logits: [vocab_size], float32 (float16 is widened); left as it is.

        Greedy takes the lowest id among equal maxima, as torch.argmax on CPU does. Raises KvexportError where the
        logits hold NaN or +inf, or leave no token possible; UsageError for another shape.
        """
        scores = self._scores(logits)
        if self._random is None:
            token = int(scores.argmax())
        else:
            ids, probabilities = _distribution(scores, self.settings, len(self.generated))
            token = int(ids[_draw(probabilities, self._random.random())])
        return self._remember(token)

    def next_of(self, top: TopLogits) -> int | None:
        """As `next`, from the row's largest logits alone; None, and nothing is chosen, where they do not prove what
        `next` would do: it then needs the row."""
        if top.ids.size == self.vocab_size:
            row = np.empty(self.vocab_size, dtype=np.float32)
            row[top.ids] = top.values
            return self.next(row)
        if self.settings.repetition_penalty < 1:
            return None
        scores = scores_of(top, self._lowered(top), 1.0 if self._random is None else self.settings.temperature)
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
        if self._is_seen is not None:
            self._is_seen[token] = True
        return token

    def distribution(self, logits: npt.ArrayLike) -> tuple[Ids, npt.NDArray[np.float64]]:
        """The tokens `next` could choose, ids ascending [n], and their probabilities [n], sum 1; one token where
        greedy.
        Chooses and remembers nothing. Errors: those of `next`."""
        scores = self._scores(logits)
        if self._random is None:
            return np.array([scores.argmax()], dtype=np.int64), np.ones(1)
        return _distribution(scores, self.settings, len(self.generated))

    def _scores(self, logits: npt.ArrayLike) -> Floats:
        """The logits after penalty and eos suppression; the caller's own array where neither applies."""
        scores = np.asarray(logits, dtype=np.float32)
        if scores.shape != (self.vocab_size,):
            raise UsageError(
                f"logits of shape {list(scores.shape)} for a vocabulary of {self.vocab_size}", "pass one row of logits"
            )
        suppress = self._suppresses()
        if self._is_seen is not None or suppress:
            scores = scores.copy()
        if self._is_seen is not None:
            self._penalise(scores, np.flatnonzero(self._is_seen))
        if suppress:
            scores[self._eos_ids] = -np.inf
        _check_maximum(scores, len(self.generated))
        return scores

    def _lowered(self, top: TopLogits) -> Floats:
        """The same of the largest logits, without the check."""
        values, suppress = top.values, self._suppresses()
        if self._is_seen is not None or suppress:
            values = values.copy()
        if self._is_seen is not None:
            self._penalise(values, np.flatnonzero(self._is_seen[top.ids]))
        if suppress:
            values[np.isin(top.ids, self._eos_ids)] = -np.inf
        return values

    def _suppresses(self) -> bool:
        return len(self.generated) < self.settings.min_new_tokens and self._eos_ids.size > 0

    def _penalise(self, scores: Floats, places: Ids) -> None:
        seen, penalty = scores[places], self.settings.repetition_penalty
        with np.errstate(over="ignore"):
            scores[places] = np.where(seen < 0, seen * penalty, seen / penalty)


def may_settle(settings: GenerationSettings, count: int, vocabulary: int) -> bool:
    """Whether the `count` largest logits can ever settle a token. A penalty below 1 raises other tokens; without top_k,
    top_p and min_p every token of the vocabulary may be drawn."""
    if count >= vocabulary:
        return True
    narrows = 0 < settings.top_k < count or settings.top_p < 1 or settings.min_p > 0
    return settings.repetition_penalty >= 1 and (narrows or not settings.do_sample)


def _distribution(scores: Floats, settings: GenerationSettings, step: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Temperature, top_k, top_p and min_p in transformers' order: ids that stay, ascending, and their probabilities."""
    if settings.temperature != 1.0:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scores = scores / settings.temperature
        _check_maximum(scores, step, f" after division by the temperature {settings.temperature}")
    k = settings.top_k
    ids = _top_ids(scores, k) if 0 < k < scores.size else np.flatnonzero(scores > -np.inf)
    values = scores[ids]
    return _narrowed(ids, values, settings.top_p, settings.min_p)


def _narrowed(ids: Ids, values: Floats, top_p: float, min_p: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    """top_p and min_p of the finite scores `values` of `ids`."""
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
    """`_distribution` from the largest logits; None where they leave it open. The first of the three that applies is
    settled by them, and those after it see what that one kept."""
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
    """The ids, ascending, of every finite score that is not below the k-th largest (so ties can make it more than
    k)."""
    # The k-th largest of the blocks' maxima is at most the k-th largest score, and finding it touches each score once:
    # what passes it is a few times k scores, where a partition of the whole vocabulary would cost ten times this.
    width = min(_BLOCK, scores.size // (4 * k))
    ids = np.arange(scores.size)
    if width > 4:
        maxima = scores[: scores.size // width * width].reshape(-1, width).max(axis=1)
        ids = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    values = scores[ids]
    kept: Ids = ids[(values >= np.partition(values, -k)[-k]) & (values > -np.inf)]
    return kept


def _top_p_indices(values: Floats, top_p: float) -> Ids:
    """Where, ascending, the finite `values` [n] stay: all but those whose cumulative probability, from the least, is
    within 1 - top_p. Of equal values the higher indices stay (transformers leaves it to torch.sort, which is not
    stable)."""
    probabilities, bound = _softmax(values), np.float32(1.0 - top_p)
    stays = np.zeros(values.size, dtype=bool)
    undecided, fallen = np.arange(values.size), 0.0
    # A quickselect by mass: each round decides the part above or below a pivot, so that only the values at the boundary
    # are sorted.
    while undecided.size > _SORTED_AT_ONCE:
        rest = values[undecided]
        pivot = np.median(rest[:: rest.size // 64])
        is_low = rest < pivot
        if not is_low.any():
            break
        # Indices from flatnonzero cost a fifth of what indexing with an unpredictable mask does.
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
    """The index whose share of the cumulated probabilities holds `uniform` in [0, 1); never one of probability 0."""
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
            "lower min_new_tokens or the penalty",
        )
    fix = "run `kvexport validate` on the artifact" if not where else "raise the temperature"
    raise KvexportError(
        f"logit {best} of new token {step} is {value}{where}",
        f"{fix}; a float16 model that overflows needs dtype float32",
    )


def _refuse_unsupported(data: Mapping[str, Any], settings: GenerationSettings, min_new_tokens_given: bool) -> None:
    neutral = {**UNSUPPORTED, **(UNSUPPORTED_WHEN_SAMPLING if settings.do_sample else {})}
    if not min_new_tokens_given:
        neutral["min_length"] = 0
    for key, nothing in neutral.items():
        value = data.get(key)
        if value is not None and value != nothing and value not in ([], {}):
            fix = f"set {key} to {'null' if nothing is None else str(nothing).lower()} in generation_config.json"
            raise UsageError(f"the generation config asks for {key} = {value!r}, which this runtime does not do", fix)


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, (int, str)) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value!r}", f"set {name} to {expected}")
