"""Separation of a model's reasoning (<think> ... </think>) from the text of its answer.

Some chat templates write the opening marker <think> at the end of the prompt themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from kvexport.language.chat import ChatTemplate
from kvexport.language.text_stream import overlap
from kvexport.language.token import Token
from kvexport.language.tokenizer import Tokenizer
from kvexport.language.tool_calls import Piece

OPENING, CLOSING = "<think>", "</think>"
_TAIL = 8  # tokens at the end of a prompt that may hold the opening marker


class Reader(Protocol):
    def read(self, text: str, last: bool) -> list[Piece]: ...


def thinks(template: ChatTemplate | None) -> bool:
    return template is not None and any(CLOSING in source for source in template.sources.values())


def is_open(ids: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> bool:
    """Return whether the prompt `ids` [n] ends inside <think>, so that the answer begins with reasoning."""
    end = tokenizer.decode([int(i) for i in ids[-_TAIL:]], skip_special_tokens=False)
    return end.rstrip().endswith(OPENING)


def reasoning_tokens(tokens: Sequence[Token], opened: bool) -> int:
    """Return how many tokens of an answer are reasoning, the markers <think> and </think> included."""
    text = OPENING if opened else ""
    for count, token in enumerate(tokens, 1):
        text = (text + token.text).lstrip()
        if not OPENING.startswith(text[: len(OPENING)]):
            return 0
        if CLOSING in text:
            return count
        if text.startswith(OPENING):
            text = OPENING + text[len(OPENING) :][-len(CLOSING) :]
    return len(tokens) if text.startswith(OPENING) else 0


class ReasoningReader:
    """A streaming parser that separates the reasoning (<think> ... </think>) of one answer from the text after it.

    White space around the reasoning, and before the text that follows it, is dropped.
    """

    def __init__(self, opened: bool, then: Reader) -> None:
        self._then = then
        self._at: Literal["start", "within", "gap", "behind"] = "within" if opened else "start"
        self._waiting = ""
        self._begun = False  # whether some reasoning was shown

    def read(self, text: str, last: bool) -> list[Piece]:
        self._waiting += text
        pieces: list[Piece] = []
        if self._at == "start":
            self._read_start(last)
        if self._at == "within":
            self._read_within(pieces, last)
        if self._at == "gap" and (bare := self._waiting.lstrip()):
            self._at, self._waiting = "behind", bare
        if self._at == "behind" or last:
            rest = self._waiting if self._at == "behind" else ""
            self._waiting = ""
            pieces += self._then.read(rest, last)
        return pieces

    def _read_start(self, last: bool) -> None:
        bare = self._waiting.lstrip()
        if bare.startswith(OPENING):
            self._at, self._waiting = "within", bare[len(OPENING) :]
        elif last or not OPENING.startswith(bare):
            self._at = "behind"

    def _read_within(self, pieces: list[Piece], last: bool) -> None:
        waiting = self._waiting if self._begun else self._waiting.lstrip()
        at = waiting.find(CLOSING)
        if at >= 0:
            final, self._at, self._waiting = waiting[:at].rstrip(), "gap", waiting[at + len(CLOSING) :]
        else:
            final = waiting if last else waiting[: len(waiting) - overlap(waiting, CLOSING)].rstrip()
            self._waiting = waiting[len(final) :]
        if final:
            self._begun = True
            pieces.append(Piece("reasoning", final))
