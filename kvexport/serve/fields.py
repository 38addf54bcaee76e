"""Fields that the request bodies of all HTTP APIs share: their bounds, and the generation settings they set.

The server refuses a field of a wrong type, a field out of range, and a known field that it does not support and that
would change the answer. The server ignores an unknown field, as vLLM does, because clients send fields of other
servers. A response header names the ignored fields, nested ones too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvexport.bounded_json import TooManyValues, read_json
from kvexport.language.forms import OLDER_FORMS, older_form, response_form, structured_form
from kvexport.language.grammar import Grammar
from kvexport.serve.errors import ApiError

if TYPE_CHECKING:
    from kvexport.engine.engine import Engine
    from kvexport.language.settings import GenerationSettings

# The validation of a list ends at the first wrong element: errors for a million elements would take seconds.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Every generated token is compared with all stop strings, and its logits are changed by all biases.
MOST_STOPS, MOST_STOP_IDS, MOST_BIASES, LONGEST_STOP = 64, 1024, 4096, 1024
StopString = Annotated[str, Field(max_length=LONGEST_STOP)]
_SEEDS = 1 << 64
_LEAST_TEMPERATURE = 0.01  # as in vLLM: logits divided by a lower temperature may overflow
_TYPE = re.compile(
    r"(constrained-)?str|int|float|bool|[\w-]+\[.*\]"
)  # a type of a union, as pydantic writes it in the location of an error


class Body(BaseModel):
    """Base schema of HTTP request bodies. Types are exact ("1" is no number); NaN and infinity are refused."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    # Keys that the server reads of the fields that are objects of another API's form
    KEYS: ClassVar[Mapping[str, Collection[str]]] = {}

    model: str | None = None

    def ignored(self) -> list[str]:
        names = [*(self.model_extra or ())]
        for field, known in self.KEYS.items():
            names += [f"{field}.{key}" for key in dict(getattr(self, field) or {}) if key not in known]
        return names


def _few(biases: Any) -> Any:
    # `max_length` would be checked after 100,000 biases, with an error for each of them.
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} biases")
    return biases


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class Sampling(Body):
    KEYS: ClassVar[Mapping[str, Collection[str]]] = {"stream_options": ("include_usage",)}

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MOST_STOP_IDS)] | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    session_id: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    min_tokens: int | None = Field(None, ge=0)

    def form(self) -> Grammar | None:
        older = older_form({name: getattr(self, name) for name in OLDER_FORMS})
        return structured_form(self.structured_outputs) or older or response_form(self.response_format)

    def settings(self, engine: Engine, tokens: int, **more: Any) -> list[GenerationSettings]:
        """Return the generation settings of each of the request's `n` answers, which differ only in their seed."""
        drawn = [self.top_p, self.top_k, self.min_p, self.seed]
        sample = self.temperature > 0 if self.temperature is not None else None
        if sample is None and any(value is not None for value in drawn):
            sample = True
        values: dict[str, Any] = {
            "max_new_tokens": tokens,
            "min_new_tokens": None if self.min_tokens is None else min(self.min_tokens, tokens),
            "do_sample": sample,
            "temperature": max(self.temperature, _LEAST_TEMPERATURE) if self.temperature else None,
            "top_k": self._top_k(engine),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self._logit_bias(engine),
            "ignore_eos": self.ignore_eos,
            "stop_strings": self.stop or None,
            **more,
        }
        if self.stop_token_ids:
            ends = () if self.ignore_eos else engine.settings().eos_token_ids
            values |= {"eos_token_ids": (*ends, *self.stop_token_ids), "ignore_eos": False}
        return [
            engine.settings(**values, seed=None if self.seed is None else (self.seed + i) % _SEEDS)
            for i in range(self.n or 1)
        ]

    def _logit_bias(self, engine: Engine) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for token in self.logit_bias:
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < engine.vocabulary):
                message = f"logit_bias.{token[:40]} is no token id: they are 0 to {engine.vocabulary - 1}"
                raise ApiError(400, message, param="logit_bias")
        return {int(token): bias for token, bias in self.logit_bias.items()}

    def _top_k(self, engine: Engine) -> int | None:
        """Return top_k for sampling; 0 (off) if neither request nor checkpoint sets it, unlike transformers' 50."""
        if self.top_k is not None:
            return max(self.top_k, 0)
        return None if engine.generation_config.get("top_k") is not None else 0


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    try:
        content = read_json(data or b"{}")
    except TooManyValues as error:
        raise ApiError(413, f"the body has {error}", code="body_too_long") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}"[:500], code="invalid_json") from None
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        # A field that accepts several types has an error for each type. The deepest error is of the intended type.
        field = problems[0]["loc"][:1]
        first = max(problems, key=lambda one: len(one["loc"]) if one["loc"][:1] == field else 0)
        where = ".".join(step for step in map(str, first["loc"]) if not _TYPE.fullmatch(step))
        message = f"{where}: {first['msg']}" if where else f"the body cannot be used: {first['msg']}"
        raise ApiError(400, message[:500], param=where or None, code="invalid_value") from None


def refuse(body: BaseModel, name: str, allowed: Sequence[Any], reason: str) -> None:
    value = getattr(body, name)
    if value is not None and value not in allowed:
        shown = json.dumps(value, default=str)[:80]
        raise ApiError(400, f"{name} = {shown} is not supported: {reason}", param=name, code="unsupported_value")
