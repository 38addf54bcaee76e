"""An answer as clients see it: text, and calls of tools, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kvexport.runtime.request import FinishReason, Request
from kvexport.serve.answers import text_of
from kvexport.serve.worker import Update


class Part(NamedTuple):
    """What is new of an answer. text: more of its text. call: a call begins, of the tool `name`, known by `id`.
    arguments: more of the JSON `text` of that call's arguments. nth: which call of the answer."""

    kind: Literal["text", "call", "arguments"]
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


class Reader(Protocol):
    """Finds the calls in a text that arrives piece by piece."""

    def read(self, text: str, last: bool) -> list[Part]:
        """The parts that are final with this piece."""
        ...


class PlainReader:
    """Of answers that call no tools."""

    def read(self, text: str, last: bool) -> list[Part]:
        """The piece."""
        return [Part("text", text)] if text else []


@dataclass
class Answer:
    """One answer as far as it is made. finish_reason: in OpenAI's words."""

    reader: Reader = field(default_factory=PlainReader)
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, text: str, finish_reason: FinishReason | None) -> list[Part]:
        """A further piece; what is new with it."""
        parts = []
        for part in self.reader.read(text, finish_reason is not None):
            if part.kind == "text":
                self.text += part.text
            elif part.kind == "call":
                self.calls.append(Call(part.id, part.name))
            else:
                self.calls[-1].arguments += part.text
            parts.append(part._replace(nth=len(self.calls) - 1))
        if finish_reason is not None:
            self.finish_reason = "tool_calls" if self.calls and finish_reason == "stop" else finish_reason
        return parts

    def update(self, update: Update) -> list[Part]:
        """What a step made."""
        return self.add(text_of(update.tokens), update.finish_reason)


def finished(request: Request, reader: Callable[[], Reader] = PlainReader) -> Answer:
    """The answer of a request that has finished."""
    answer = Answer(reader())
    answer.add(text_of(request.tokens), request.finish_reason)
    return answer
