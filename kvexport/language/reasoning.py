"""The reasoning of an answer, apart from what it says: models that think first write <think> ... </think>, where their
chat template has not opened it already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from kvexport.language.chat import ChatTemplate
from kvexport.language.text import Tokenizer, overlap
from kvexport.language.token import Token
from kvexport.language.tool_calls import Piece

OPENING, CLOSING = "<think>", "</think>"
_TAIL = 8  # tokens at the end of a prompt, in which an opening is looked for


class Reader(Protocol):
    """Reads the text behind the reasoning."""

    def read(self, text: str, last: bool) -> list[Piece]:
        """The pieces that are final with more text. last: there is no more."""
        ...


def thinks(template: ChatTemplate | None) -> bool:
    """Whether a chat template knows of reasoning."""
    return template is not None and any(CLOSING in source for source in template.sources.values())


def is_open(ids: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> bool:
    """Whether a prompt [n] ends within reasoning, which the answer goes on with."""
    end = tokenizer.decode([int(i) for i in ids[-_TAIL:]], skip_special_tokens=False)
    return end.rstrip().endswith(OPENING)


def shown_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The markers that are special tokens, which texts leave out otherwise (`GenerationSettings.shown_ids`)."""
    found = (tokenizer.token_id(marker) for marker in (OPENING, CLOSING))
    return tuple(token for token in found if token is not None and token in tokenizer.special_ids)


def reasoning_tokens(tokens: Sequence[Token], opened: bool) -> int:
    """How many tokens of an answer are reasoning, its markers included. opened: the prompt ended within."""
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
    """Of one answer. opened: it begins within reasoning. then: reads what follows. White space around the reasoning,
    and before what follows it, is not shown."""

    def __init__(self, opened: bool, then: Reader) -> None:
        self._then = then
        self._at: Literal["start", "within", "gap", "behind"] = "within" if opened else "start"
        self._waiting = ""
        self._begun = False  # whether any of the reasoning was shown

    def read(self, text: str, last: bool) -> list[Piece]:
        """The pieces that are final with more text. last: there is no more."""
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
