"""A generated token, as callers get it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Token(NamedTuple):
    """One generated token. sequence: which prompt of its call. text: what is final with it (may be empty while a
    character or a stop string is incomplete). finish_reason: set on the last token of a sequence: "stop" (eos or stop
    string) or "length". logprob, top_logprobs: see `GenerationSettings.logprobs`; None and nothing where not asked
    for."""

    sequence: int
    id: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
