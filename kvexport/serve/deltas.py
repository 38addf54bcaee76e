"""A generated answer as API clients see it: text, reasoning and tool calls, in the order of their generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvexport.engine.request import FinishReason
from kvexport.language.reasoning import Reader
from kvexport.language.tool_calls import Piece
from kvexport.serve.answers import text_of
from kvexport.serve.worker import Update


class Delta(NamedTuple):
    """A piece of a streamed answer: new text, new reasoning, the start of a tool call, or a part of its arguments."""

    # "text" or "reasoning" for new text; "call" for the start of a call; "arguments" for new arguments
    kind: Literal["text", "call", "arguments", "reasoning"]
    text: str = ""  # new text, or new JSON of the arguments
    id: str = ""
    name: str = ""  # tool that is called
    nth: int = -1  # number of the call in the answer, from 0


@dataclass
class ToolCall:
    """A tool call in a generated answer: the tool's name and JSON arguments."""

    id: str
    name: str  # tool that is called
    arguments: str = ""  # arguments, as JSON text


class PlainReader:
    """A parser of answers without tool calls, which returns all text unchanged."""

    def read(self, text: str, last: bool) -> list[Piece]:
        """Return the new text of an answer unchanged, as one piece."""
        return [Piece("text", text)] if text else []


@dataclass
class Answer:
    """One generated answer so far, separated into text, reasoning and tool calls."""

    reader: Reader  # splits the text into pieces
    new_id: Callable[[], str]
    text: str = ""  # text so far
    reasoning: str = ""  # reasoning so far
    calls: list[ToolCall] = field(default_factory=list)  # calls so far
    finish_reason: str | None = None  # reason in OpenAI's words, None while the answer runs

    def add(self, text: str, finish_reason: FinishReason | None) -> list[Delta]:
        """Add new text to the answer, and return the pieces (text, reasoning, tool calls) that it completes."""
        deltas = []
        for piece in self.reader.read(text, finish_reason is not None):
            if piece.kind == "text":
                self.text += piece.text
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            elif piece.kind == "call":
                self.calls.append(ToolCall(self.new_id(), piece.name))
            else:
                self.calls[-1].arguments += piece.text
            number = self.calls[-1].id if self.calls else ""
            deltas.append(Delta(piece.kind, piece.text, number, piece.name, len(self.calls) - 1))
        if finish_reason is not None:
            self.finish_reason = "tool_calls" if self.calls and finish_reason == "stop" else finish_reason
        return deltas

    def update(self, update: Update) -> list[Delta]:
        """Add the tokens of one engine step to the answer, and return the new pieces (text, reasoning, tool calls)."""
        return self.add(text_of(update.tokens), update.finish_reason)
