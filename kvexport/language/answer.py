"""The parts of a generated chat answer (text, reasoning, tool calls), and the grammar that an answer follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvexport.language import harmony
from kvexport.language.chat import ChatTemplate
from kvexport.language.grammar import Grammar
from kvexport.language.harmony import ChannelReader, has_channels
from kvexport.language.reasoning import CLOSING, OPENING, Reader, ReasoningReader, is_open, thinks
from kvexport.language.tokenizer import Tokenizer
from kvexport.language.tool_calls import Piece
from kvexport.language.tools import CallForm, Tool, calls_grammar, form_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    id: str  # random; the message with the tool's result names it
    name: str  # of the tool
    arguments: str = ""  # JSON text


class PlainReader:
    def read(self, text: str, last: bool) -> list[Piece]:
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

    def add(self, text: str, finish_reason: str | None) -> list[Delta]:
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


@dataclass(frozen=True)
class AnswerPlan:
    """The grammar that a model's chat answer follows, and the parsers that split the answer into its parts."""

    grammar: Grammar | None = None
    prefix: Sequence[int] = ()  # token ids that follow the prompt and are no part of the answer
    shown_ids: tuple[int, ...] = ()  # special tokens whose names the text has
    tools: Sequence[Tool] = ()  # tools that the answer may call
    calls: CallForm | None = None  # format of the model's tool calls
    reasoning: bool | None = None  # whether the prompt ends within reasoning; None for a model without reasoning
    # Whether the prompt ends with the header of the final channel; None for a model without channels
    channels: bool | None = None

    def answer(self) -> Answer:
        return Answer(self._reader(), str if self.calls is None else self.calls.new_id)

    def _reader(self) -> Reader:
        if self.channels is not None:
            return ChannelReader([tool["function"]["name"] for tool in self.tools], self.channels)
        reader: Reader = PlainReader() if self.calls is None else self.calls.reader(self.tools)
        return reader if self.reasoning is None else ReasoningReader(self.reasoning, reader)


def plan_answer(
    template: ChatTemplate | None,
    tokenizer: Tokenizer | None,
    ids: Sequence[int] | NDArray[Any],
    tools: Sequence[Tool] = (),
    must: bool = False,
    grammar: Grammar | None = None,
    *,
    parallel: bool = True,
    reasons: bool = True,
) -> AnswerPlan:
    """Return how to generate and split a chat answer to the prompt `ids` [n]: the grammar, and the parsers.

    The answer may call `tools`; with `must` it has to call one, and with `parallel` it may call several. `grammar`
    holds for an answer without calls. With `reasons`, reasoning is split from the text.
    """
    calls = form_of(template) if tools else None
    if tokenizer is None:
        return AnswerPlan(grammar, tools=tools, calls=calls)
    if calls is not None and must:
        grammar = calls_grammar(calls, tools, tokenizer, parallel=parallel)
    shown = () if calls is None else calls.shown_ids(tokenizer)
    prefix: Sequence[int] = ()
    reasoning = channels = None
    if reasons and thinks(template):
        shown += tokenizer.special((OPENING, CLOSING))
        reasoning = grammar is None and is_open(ids, tokenizer)  # a grammar restricts the first token already
    if has_channels(template):
        shown = tokenizer.special(harmony.MARKERS)
        channels = grammar is not None and not must
        prefix = tokenizer.encode_within(harmony.FINAL) if channels else ()
    return AnswerPlan(grammar, prefix, shown, tools, calls, reasoning, channels)
