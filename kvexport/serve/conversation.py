"""Messages as OpenAI's clients send them, and as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvexport.engine.request import Request
from kvexport.language.grammar import Grammar
from kvexport.language.reasoning import Reader, ReasoningReader, reasoning_tokens
from kvexport.language.tools import CallForm, Tool
from kvexport.serve.answers import text_of as text_of_tokens
from kvexport.serve.answers import usage_of
from kvexport.serve.errors import ApiError
from kvexport.serve.parts import Answer, PlainReader
from kvexport.serve.sessions import RESTARTED, Start


@dataclass
class Conversation:
    """What every chat API's body comes to. messages: as chat templates take them. tools, tool_choice: as OpenAI has
    them. parallel: whether an answer may have several calls. variables: the template's own. form: what the answer keeps
    to. session: where its state stays."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel: bool = True
    variables: dict[str, Any] = field(default_factory=dict)
    form: Grammar | None = None
    session: str | None = None


@dataclass
class Prepared:
    """What can be answered. requests: one for each answer. session: where the state of the only one stays. tools: that
    may be called, in the form `calls`. reasoning: whether the prompt ended within reasoning; None where the model does
    none.
    """

    requests: Sequence[Request]
    session: str | None = None
    start: Start = field(default_factory=Start)
    tools: Sequence[Tool] = ()
    calls: CallForm | None = None
    reasoning: bool | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer: one that says why a conversation was read again, if its state was lost."""
        return {RESTARTED: self.start.lost} if self.start.lost else {}

    def answers(self) -> list[Answer]:
        """One for each request, nothing made yet."""
        return [Answer(self._reader(), str if self.calls is None else self.calls.new_id) for _ in self.requests]

    def _reader(self) -> Reader:
        reader: Reader = PlainReader() if self.calls is None else self.calls.reader(self.tools)
        return reader if self.reasoning is None else ReasoningReader(self.reasoning, reader)

    def usage(self) -> dict[str, Any]:
        """Tokens read and written, of all answers to the one prompt."""
        usage = usage_of(self.requests, len(self.requests))
        if self.reasoning is not None:
            count = sum(reasoning_tokens(request.tokens, self.reasoning) for request in self.requests)
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def finished(self) -> list[Answer]:
        """Of requests that have finished."""
        answers = self.answers()
        for answer, request in zip(answers, self.requests, strict=True):
            answer.add(text_of_tokens(request.tokens), request.finish_reason)
        return answers


_TEXT = ("text", "input_text", "output_text")
_TAKEN = {"self", "engine", "snapshot", "messages", "tools"}
_ROLES = {"developer": "system"}  # OpenAI's newer word; templates know the older one


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Contents are text, the arguments of tool calls are objects. Raises ApiError for media and for what is no
    message."""
    result = []
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        role = message.get("role")
        if not isinstance(role, str):
            raise ApiError(400, f"{where}.role: a message needs a role", param=f"{where}.role")
        made = {**message, "role": _ROLES.get(role, role)}
        if "content" in message:
            made["content"] = text_of(message["content"], f"{where}.content")
        if message.get("tool_calls"):
            made["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
        result.append(made)
    return result


def template_variables(given: Mapping[str, Any] | None, add_generation_prompt: bool | None) -> dict[str, Any]:
    """A template's own variables. Raises ApiError for names that mean something else."""
    if taken := _TAKEN & (given or {}).keys():
        said = f"chat_template_kwargs.{min(taken)}: no variable of a template's own"
        raise ApiError(400, said, param="chat_template_kwargs")
    more = {} if add_generation_prompt is None else {"add_generation_prompt": add_generation_prompt}
    return {**(given or {}), **more}


def text_of(content: Any, where: str) -> str | None:
    """The text of a content: text already, or parts of it, one a line."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: neither text nor a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in _TEXT or not isinstance(kind, str):
            raise ApiError(400, f"{where}.{i}: no part of a text", param=f"{where}.{i}")
        else:
            said = f"{where}.{i}: a part of type {kind[:40]!r}, but this model reads text alone"
            raise ApiError(400, said, param=f"{where}.{i}", code="unsupported_value")
    return "\n".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    made = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{where}.{i}: a call needs a function with a name", param=f"{where}.{i}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                said = f"{where}.{i}.function.arguments: not JSON"
                raise ApiError(400, said, param=f"{where}.{i}.function.arguments") from None
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made
