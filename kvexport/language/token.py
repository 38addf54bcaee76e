"""The type of a generated token that the engine returns."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Token(NamedTuple):
    """One generated token, with the text that it completes.

    Attributes:
        sequence: The number of the prompt within the call of the engine.
        id: The token id.
        text: The text that is final with this token. It is empty while a character or a stop string is incomplete.
        finish_reason: Set on the last token of a sequence: "stop" (eos or stop string) or "length".
        logprob: The token's log probability; None unless `GenerationSettings.logprobs` is set.
        top_logprobs: The likeliest tokens and their log probabilities.
    """

    sequence: int
    id: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
