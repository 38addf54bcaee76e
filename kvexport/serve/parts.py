"""An answer as clients see it: text, and calls of tools, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvexport.engine.request import FinishReason
from kvexport.language.reasoning import Reader
from kvexport.language.tool_calls import Piece
from kvexport.serve.answers import text_of
from kvexport.serve.worker import Update


class Part(NamedTuple):
    """What is new of an answer. text, reasoning: more of its text, or of its reasoning. call: a call begins, of the
    tool `name`, known by `id`. arguments: more of the JSON `text` of that call's arguments. nth: which call of the
    answer."""

    kind: Literal["text", "call", "arguments", "reasoning"]
    text: str = ""
    id: str = ""
    name: str = ""
    nth: int = -1


@dataclass
class Call:
    """Of a tool. arguments: JSON."""

    id: str
    name: str
    arguments: str = ""


class PlainReader:
    """Of answers that call no tools."""

    def read(self, text: str, last: bool) -> list[Piece]:
        """The text as it is."""
        return [Piece("text", text)] if text else []


@dataclass
class Answer:
    """One answer as far as it is made. new_id: for calls. finish_reason: in OpenAI's words."""

    reader: Reader
    new_id: Callable[[], str]
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, text: str, finish_reason: FinishReason | None) -> list[Part]:
        """A further piece; what is new with it."""
        parts = []
        for piece in self.reader.read(text, finish_reason is not None):
            if piece.kind == "text":
                self.text += piece.text
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            elif piece.kind == "call":
                self.calls.append(Call(self.new_id(), piece.name))
            else:
                self.calls[-1].arguments += piece.text
            number = self.calls[-1].id if self.calls else ""
            parts.append(Part(piece.kind, piece.text, number, piece.name, len(self.calls) - 1))
        if finish_reason is not None:
            self.finish_reason = "tool_calls" if self.calls and finish_reason == "stop" else finish_reason
        return parts

    def update(self, update: Update) -> list[Part]:
        """What a step made."""
        return self.add(text_of(update.tokens), update.finish_reason)
