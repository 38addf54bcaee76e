"""Conversations of HTTP requests: messages as API clients send them, converted for the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvexport.bounded_json import MOST_VALUES, count_values, read_json
from kvexport.engine.request import Request
from kvexport.language.answer import Answer, AnswerPlan
from kvexport.language.chat import PIN, PIN_FIELD, Pin
from kvexport.language.grammar import Grammar
from kvexport.language.reasoning import reasoning_tokens
from kvexport.serve.answers import text_of as text_of_tokens
from kvexport.serve.answers import usage_of
from kvexport.serve.errors import ApiError
from kvexport.serve.pictures import KINDS, Picture, picture_of
from kvexport.serve.sessions import RESTARTED, Turn


@dataclass
class Conversation:
    """A conversation that an HTTP request wants answered, in the same form for every chat API."""

    messages: list[dict[str, Any]]  # messages in the form that chat templates read
    tools: list[dict[str, Any]] = field(default_factory=list)  # tools, as OpenAI defines them
    tool_choice: str | dict[str, Any] | None = None  # choice of tools, as OpenAI defines it
    parallel: bool = True  # whether an answer may have several tool calls
    variables: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    form: Grammar | None = None  # grammar of the answer; None for free text
    turn: Turn | None = None  # turn of a session (stored conversation); None without a session
    adapter: str | None = None  # LoRA adapter that answers; None for the model without one


@dataclass
class Prepared:
    requests: Sequence[Request]  # one request for each answer
    turn: Turn | None = None  # turn of a session (stored conversation); only with a single request
    plan: AnswerPlan = field(default_factory=AnswerPlan)  # how the answers' text is split

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of the response: why a session's state was lost."""
        return {RESTARTED: self.turn.lost} if self.turn is not None and self.turn.lost else {}

    def answers(self) -> list[Answer]:
        return [self.plan.answer() for _ in self.requests]

    def usage(self) -> dict[str, Any]:
        usage = usage_of(self.requests, len(self.requests))
        if (opened := self.plan.reasoning) is not None:
            count = sum(reasoning_tokens(request.tokens, opened) for request in self.requests)
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def finished(self) -> list[Answer]:
        answers = self.answers()
        for answer, request in zip(answers, self.requests, strict=True):
            answer.add(text_of_tokens(request.tokens), request.finish_reason)
        return answers


_TEXT = ("text", "input_text", "output_text")
_TAKEN = {"self", "engine", "snapshot", "messages", "tools", "check"}
_ROLES = {"developer": "system"}  # chat templates know OpenAI's older name


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages of an API client into messages for a chat template: contents as texts, arguments as objects."""
    converted, left = [], MOST_VALUES
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        role = message.get("role")
        if not isinstance(role, str):
            raise ApiError(400, f"{where}.role: a message needs a role", param=f"{where}.role")
        entry = {**message, "role": _ROLES.get(role, role)}
        if "content" in message:
            entry["content"] = content_of(message["content"], f"{where}.content")
        if message.get("tool_calls"):
            entry["tool_calls"], left = _calls(message["tool_calls"], f"{where}.tool_calls", left)
        converted.append(entry)
    return converted


def pin_of(*parts: tuple[str, Any]) -> dict[str, Any]:
    """Return the field that keeps a message in the KV cache, if one of the message's `parts` has this field."""
    marked = [(f"{where}.{PIN_FIELD}", part[PIN_FIELD]) for where, part in parts if part.get(PIN_FIELD) is not None]
    for where, value in marked:
        if value != PIN:
            message = f'{where}: {str(value)[:80]!r} is unknown ("{PIN_FIELD}": "{PIN}", or no {PIN_FIELD})'
            raise ApiError(400, message, param=where)
    return {PIN_FIELD: Pin(marked[0][0])} if marked else {}


def template_variables(variables: Mapping[str, Any] | None, add_generation_prompt: bool | None) -> dict[str, Any]:
    if taken := _TAKEN & (variables or {}).keys():
        message = f"chat_template_kwargs.{min(taken)}: the server itself sets this variable"
        raise ApiError(400, message, param="chat_template_kwargs")
    more = {} if add_generation_prompt is None else {"add_generation_prompt": add_generation_prompt}
    return {**(variables or {}), **more}


def continuation(messages: Sequence[Mapping[str, Any]], asked: bool | None, new_turn: bool | None) -> dict[str, Any]:
    if asked and new_turn:
        message = "continue_final_message and add_generation_prompt are both true"
        raise ApiError(400, message, param="continue_final_message")
    continues = asked if asked is not None else bool(messages and messages[-1].get("prefix"))
    return {"continue_final_message": True} if continues else {}


_EFFORTS = {"none": "none", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}
_EFFORTS["max"] = "high"  # Anthropic's name


def effort(asked: Any, where: str) -> dict[str, Any]:
    """Return the chat template's variables for a reasoning effort; "none" ends the reasoning of Qwen and DeepSeek."""
    if asked is None:
        return {}
    if not isinstance(asked, str) or asked not in _EFFORTS:
        raise ApiError(400, f"{where}: expected one of {', '.join(_EFFORTS)}", param=where, code="invalid_value")
    known = _EFFORTS[asked]
    return {"reasoning_effort": known, **({"enable_thinking": False, "thinking": False} if asked == "none" else {})}


def text_of(content: Any, where: str) -> str | None:
    """Return the text of a message's content; the texts of several parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: expected a text or a list of parts", param=where)
    return "\n".join(_text(part, f"{where}.{i}") for i, part in enumerate(content))


def content_of(content: Any, where: str) -> str | list[dict[str, Any]] | None:
    """Return a message's content for a chat template: its text, or a list of parts if it has images."""
    if not isinstance(content, list):
        return text_of(content, where)
    return joined([part_of(part, f"{where}.{i}") for i, part in enumerate(content)])


def part_of(part: Any, where: str) -> str | Picture:
    if isinstance(part, Mapping) and part.get("type") in KINDS:
        return picture_of(part, where)
    return _text(part, where)


def joined(parts: Sequence[str | Picture]) -> str | list[dict[str, Any]]:
    """Return one text from a message's texts, joined by line breaks; a list of parts if there are images."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, str):
        return part
    if kind in _TEXT and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in _TEXT or not isinstance(kind, str):
        raise ApiError(400, f"{where}: expected a text, or a part with a text", param=where)
    message = f"{where}: a part of type {kind[:40]!r}, where text is expected"
    raise ApiError(400, message, param=where, code="unsupported_value")


def _calls(calls: Any, where: str, left: int) -> tuple[list[dict[str, Any]], int]:
    """Parse the JSON arguments of tool calls; return the calls, and how many of `left` allowed JSON values remain."""
    converted = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{where}.{i}: a call needs a function with a name", param=f"{where}.{i}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:  # a call that the server generated may be incomplete
                left -= count_values(arguments.encode(), left)
                if left < 0:
                    problem = f"all arguments together have more than {MOST_VALUES} JSON values and keys"
                    raise ApiError(413, problem, code="body_too_long", param=f"{where}.{i}.function.arguments")
                arguments = read_json(arguments or "{}", cut=True)
            except ValueError:
                message = f"{where}.{i}.function.arguments: not JSON"
                raise ApiError(400, message, param=f"{where}.{i}.function.arguments") from None
        converted.append({**call, "function": {**function, "arguments": arguments}})
    return converted, left
