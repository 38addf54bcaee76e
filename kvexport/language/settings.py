"""The generation settings of a request, as transformers 5.23's GenerationConfig defines them.

Settings of GenerationConfig that would change the tokens and that kvexport does not support are refused, such as beams
and n-gram bans (`UNSUPPORTED`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvexport.errors import UsageError
from kvexport.language.grammar import Grammar

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

MOST_LOGPROBS = 20
ALIASES: Mapping[str, str] = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}
"""The names that vLLM and llama-cpp-python give to settings."""

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
GENERATION_KEYS = (*_SHARED_KEYS, "eos_token_id", "min_length", *UNSUPPORTED, *UNSUPPORTED_WHEN_SAMPLING)


@dataclass(frozen=True)
class GenerationSettings:
    """The generation settings of one sequence.

    Names, meanings and defaults are those of transformers' GenerationConfig, or of OpenAI's API for settings that
    GenerationConfig lacks, except where noted.

    Attributes:
        max_new_tokens: The largest number of tokens of the answer. The default is 256, because transformers' default,
            20 tokens with the prompt, is too small.
        min_new_tokens: The number of tokens before which no eos token comes.
        do_sample: Whether tokens are drawn at random. Otherwise the likeliest token is taken.
        temperature: The number that divides the logits. Used only with do_sample, as are top_k, top_p and min_p.
        top_k: The number of likeliest tokens that are kept, 0 = off. The default is 50, as in transformers.
        top_p: The probability mass of the likeliest tokens that are kept, 1 = off.
        min_p: The probability, relative to the likeliest token, below which tokens are dropped, 0 = off.
        repetition_penalty: The penalty on the logits of all tokens of the prompt and the answer, 1 = off.
        presence_penalty: The number subtracted once from the logit of every generated token, in [-2, 2]. Tokens of the
            prompt do not count.
        frequency_penalty: The number subtracted from a token's logit each time that the token was generated, in [-2,
            2].
        logit_bias: {token id: number added to the token's logit, in [-100, 100]}. -100 practically bans a token.
        logprobs: The number of likeliest tokens (0 to 20) whose log probabilities are returned with every token,
            besides the token's own; None for no log probabilities. They are those of the model's distribution before
            penalties, bias, grammar and temperature, as in vLLM by default. The prompt's log probabilities are not
            available, because the decoder returns only the logits after its last token.
        ignore_eos: Whether an eos token does not end the sequence.
        grammar: The grammar of the answer. The answer ends where the grammar ends, and an eos token comes only where
            the grammar may end.
        seed: The seed of the sequence's own random generator, None = from the operating system.
        eos_token_ids: The tokens that end the sequence.
        stop_strings: The texts that end the sequence.
        shown_ids: Special tokens whose names appear in the text, for example markers of tool calls.

    Raises:
        UsageError: A value is out of range. The message names the field.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False
    grammar: Grammar | None = None
    seed: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    shown_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for generation settings that transformers refuses, or with which its generation fails."""
        for name, (is_allowed, expected) in _ALLOWED.items():
            value = getattr(self, name)
            _require(is_allowed(value), name, value, expected)
        most, temperature = self.max_new_tokens, self.temperature
        _require(self.min_new_tokens <= most, "min_new_tokens", self.min_new_tokens, f"at most max_new_tokens = {most}")
        _require(temperature > 0 or not self.do_sample, "temperature", temperature, _ALLOWED["temperature"][1])
        for token, value in self.logit_bias.items():
            whole = _is_least(0)(token) and _is_between(-100, 100)(value)
            _require(whole, "logit_bias", {token: value}, "token ids of at least 0, each with a number in [-100, 100]")

    @property
    def may_raise(self) -> bool:
        """Whether a penalty or bias can make a token's logit larger than the model computed it."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return min(penalties) < 0 or max(self.logit_bias.values(), default=0) > 0

    @classmethod
    def from_generation_config(cls, data: Mapping[str, Any], **overrides: Any) -> GenerationSettings:
        """Return generation settings from the content of a generation_config.json.

        Null counts as unset. Three kinds of keys are ignored: keys without an effect in kvexport; max_length, which
        counts the prompt (the recipe's limits.max_length limits prompt and answer together); and, without do_sample,
        all settings that only sampling uses.

        Args:
            data: The content of the file.
            **overrides: Fields of `GenerationSettings`, or names of `ALIASES`, whose values replace those of the file.
                None counts as missing. A temperature without do_sample samples, and a temperature of 0 takes the
                likeliest token, as in vLLM.

        Raises:
            UsageError: A key of `UNSUPPORTED` has an effect, an override is unknown, or a value is out of range.
        """
        overrides = _renamed(overrides)
        unknown = sorted(set(overrides) - {field.name for field in fields(cls)})
        if unknown:
            known = ", ".join((*(field.name for field in fields(cls)), *ALIASES))
            raise UsageError(f"unknown generation setting '{unknown[0]}'", f"use one of: {known}")
        values = {key: data[key] for key in _SHARED_KEYS if data.get(key) is not None}
        if data.get("eos_token_id") is not None:
            values["eos_token_ids"] = data["eos_token_id"]
        values.update((key, value) for key, value in overrides.items() if value is not None)
        for key in ("eos_token_ids", "stop_strings", "shown_ids"):
            if key in values:
                values[key] = _as_tuple(values[key])
        if overrides.get("do_sample") is None and (temperature := overrides.get("temperature")) is not None:
            values["do_sample"] = temperature != 0
            values["temperature"] = temperature or 1.0
        settings = cls(**values)
        _refuse_unsupported(data, settings, has_min_new_tokens="min_new_tokens" in values)
        return settings


def _renamed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in overrides.items():
        own = ALIASES.get(name, name)
        if own != name and overrides.get(own) is not None and value is not None:
            raise UsageError(f"{name} and {own} are two names of one setting", f"leave {name} out")
        if renamed.get(own) is None:
            renamed[own] = value
    return renamed


def _refuse_unsupported(data: Mapping[str, Any], settings: GenerationSettings, has_min_new_tokens: bool) -> None:
    neutral = {**UNSUPPORTED, **(UNSUPPORTED_WHEN_SAMPLING if settings.do_sample else {})}
    if not has_min_new_tokens:
        neutral["min_length"] = 0
    for key, default in neutral.items():
        value = data.get(key)
        if value is not None and value != default and value not in ([], {}):
            fix = f"set {key} to {'null' if default is None else str(default).lower()} in generation_config.json"
            raise UsageError(
                f"the generation config asks for {key} = {_shown(value)}, which this runtime does not do", fix
            )


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, (int, str)) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_least(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _is_between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and low <= value <= high


def _are(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(kind, value))


_IDS = (_are(_is_least(0)), "a tuple of token ids of at least 0")
_SWITCH = (lambda value: isinstance(value, bool), "true or false")
_PENALTY = (_is_between(-2, 2), "a number in [-2, 2], 0 = off")
# Of each setting: whether it may have a value, and the values that it may have, as text.
_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": _SWITCH,
    "ignore_eos": _SWITCH,
    "max_new_tokens": (_is_least(1), "an integer of at least 1"),
    "min_new_tokens": (_is_least(0), "an integer of at least 0"),
    "top_k": (_is_least(0), "an integer of at least 0"),
    "temperature": (_is_number, "a number above 0 (for greedy decoding: do_sample false)"),
    "top_p": (lambda value: _is_between(0, 1)(value) and value > 0, "a number in (0, 1], 1 = off"),
    "min_p": (_is_between(0, 1), "a number in [0, 1], 0 = off"),
    "repetition_penalty": (lambda value: _is_number(value) and value > 0, "a number above 0, 1 = off"),
    "seed": (lambda value: value is None or _is_least(0)(value), "an integer of at least 0, or null"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": (lambda value: isinstance(value, Mapping), "a mapping of token ids to numbers"),
    "grammar": (lambda value: value is None or isinstance(value, Grammar), "a kvexport.Grammar"),
    "logprobs": (
        lambda value: value is None or (_is_least(0)(value) and value <= MOST_LOGPROBS),
        f"an integer from 0 to {MOST_LOGPROBS}, or null",
    ),
    "eos_token_ids": _IDS,
    "shown_ids": _IDS,
    "stop_strings": (_are(lambda x: isinstance(x, str) and x != ""), "a tuple of strings, none of them empty"),
}


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {_shown(value)}", f"set {name} to {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
