"""The routes /v1/messages and /v1/messages/count_tokens, with Anthropic's fields."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.bounded_json import read_json
from kvexport.engine.request import Request as EngineRequest
from kvexport.language.answer import Delta
from kvexport.language.forms import response_form
from kvexport.language.reasoning import thinks
from kvexport.serve.answers import kv_cache_of, stop_string
from kvexport.serve.conversation import (
    Conversation,
    Prepared,
    content_of,
    continuation,
    effort,
    joined,
    part_of,
    pin_of,
    text_of,
)
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import MOST_STOPS, Body, Objects, Sampling, StopString
from kvexport.serve.service import Service
from kvexport.serve.sessions import turn_of
from kvexport.serve.streams import error_event, event
from kvexport.serve.worker import Update

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(Body):
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        messages: list[dict[str, Any]] = []
        if self.system:
            blocks = self.system if isinstance(self.system, list) else []
            marks = pin_of(*((f"system.{i}", block) for i, block in enumerate(blocks)))
            messages.append({"role": "system", "content": text_of(self.system, "system"), **marks})
        for i, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{i}")
        tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or [])]
        parallel = not (self.tool_choice or {}).get("disable_parallel_tool_use")
        last = messages[-1]
        prefill = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
        return Conversation(messages, tools, self._choice(), parallel, continuation(messages, prefill, None))

    def _choice(self) -> str | dict[str, Any]:
        choice = self.tool_choice or {"type": "auto"}
        if choice.get("type") == "tool" and isinstance(choice.get("name"), str):
            return {"type": "function", "function": {"name": choice["name"]}}
        if choice.get("type") not in _CHOICES:
            raise ApiError(400, "tool_choice: its type is auto, any, none, or tool with a name", param="tool_choice")
        return _CHOICES[choice["type"]]


class MessagesBody(CountBody):
    KEYS: ClassVar[Mapping[str, Collection[str]]] = {"output_config": ("format", "effort"), "thinking": ("type",)}

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    output_config: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    session_id: str | None = None

    def template_variables(self, service: Service) -> dict[str, Any]:
        wanted = self.effort()
        kind = (self.thinking or {}).get("type")
        if kind is None:
            return wanted
        if kind != "disabled" and not (service.settings.reasoning and thinks(service.engine.chat_template)):
            message = "thinking: this model does none; leave the field out, or send the type disabled"
            raise ApiError(400, message, param="thinking", code="unsupported_value")
        return {**wanted, "enable_thinking": kind != "disabled"}

    def effort(self) -> dict[str, Any]:
        return effort((self.output_config or {}).get("effort"), "output_config.effort")

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences or None
        )


async def messages(service: Service, request: Request) -> Response:
    body = await service.read(request, MessagesBody)
    model = service.check_model(body.model)
    conversation = body.conversation()
    conversation.variables |= body.template_variables(service)
    conversation.turn = turn_of(request, body.session_id)
    conversation.adapter = service.adapter(body.model)
    service.name_unread(request, {"output_config.effort": body.effort()})
    conversation.form = response_form((body.output_config or {}).get("format"), "output_config.format")
    prepared = await service.requests_for(conversation, body.sampling(), body.max_tokens)
    stream = MessageStream({"id": f"msg_{uuid.uuid4().hex}", "model": model}, prepared)
    if body.stream:
        return await service.stream(prepared, stream)
    await service.whole(request, prepared)
    finished = prepared.requests[0]
    (answer,) = prepared.finished()
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text or not (answer.calls or answer.reasoning):
        content.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    ended = _ended(finished, answer.finish_reason)
    return JSONResponse(
        {**stream.message(), "content": content, **ended, "usage": _usage(finished)}, headers=prepared.headers
    )


async def count_tokens(service: Service, request: Request) -> Response:
    body = await service.read(request, CountBody)
    service.check_model(body.model)
    conversation = body.conversation()
    tools = conversation.tools or None
    chat = await service.prompts.encode_chat(conversation.messages, tools, conversation.variables, fits=False)
    return JSONResponse({"input_tokens": len(chat.ids)})


class MessageStream:
    def __init__(self, head: Mapping[str, Any], prepared: Prepared) -> None:
        self._head = head
        self._request = prepared.requests[0]
        self._answer = prepared.answers()[0]
        self._block, self._open = -1, ""  # the number and the kind of the block that is being written

    def message(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message", "role": "assistant", **self._head, **empty}

    def begin(self) -> bytes:
        usage = {**_usage(self._request), "output_tokens": 0}
        return _event("message_start", message={**self.message(), "usage": usage}) + _event("ping")

    def add(self, update: Update) -> bytes:
        return b"".join(map(self._events_of, self._answer.add(update.text, update.finish_reason)))

    def _events_of(self, delta: Delta) -> bytes:
        if delta.kind == "call":
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            return self._close() + self._begin("tool_use", block)
        if delta.kind == "arguments":
            return self._delta({"type": "input_json_delta", "partial_json": delta.text})
        start = b""
        if delta.kind == "reasoning":
            if self._open != "thinking":
                start = self._close() + self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return start + self._delta({"type": "thinking_delta", "thinking": delta.text})
        if self._open != "text":
            start = self._close() + self._begin("text", {"type": "text", "text": ""})
        return start + self._delta({"type": "text_delta", "text": delta.text})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._block, self._open = self._block + 1, kind
        return _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._block)

    def end(self) -> bytes:
        delta = _ended(self._request, self._answer.finish_reason)
        return (
            self._close() + _event("message_delta", delta=delta, usage=_usage(self._request)) + _event("message_stop")
        )

    def fail(self, error: ApiError) -> bytes:
        return error_event(error, "/v1/messages")


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _ended(request: EngineRequest, reason: str | None) -> dict[str, Any]:
    if reason == "stop" and (stop := stop_string(request)) is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _REASONS.get(reason or "", "end_turn"), "stop_sequence": None}


def _usage(request: EngineRequest) -> dict[str, Any]:
    return {
        "input_tokens": len(request.ids) - request.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": request.cached_tokens,
        "output_tokens": len(request.tokens),
        "kv_cache": kv_cache_of([request]),
    }


def _input(arguments: str) -> Any:
    """Return the arguments of a tool call, parsed from JSON. Arguments that were cut short are returned as text."""
    try:
        return read_json(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        message = f"{where}: a tool needs a name and an input_schema; this server runs no tools itself"
        raise ApiError(400, message, param=where, code="unsupported_value")
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}.role: expected user or assistant", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, f"{where}.content") or "", **pin_of((where, message))}]
    texts = [(f"{where}.content.{i}", block) for i, block in enumerate(content) if _is_text(block)]
    converted: dict[str, Any] = {"role": role, **pin_of((where, message), *texts)}
    results, parts, calls = [], [], []
    for i, block in enumerate(content):
        place = f"{where}.content.{i}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = content_of(block.get("content"), f"{place}.content") or ""
            marks = pin_of((where, message), (place, block))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text, **marks})
        elif kind == "thinking":
            converted["reasoning_content"] = str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            parts.append(part_of(block, place))
    if calls:
        converted["tool_calls"] = calls
    if parts or calls or not results:
        results.append({**converted, "content": joined(parts)})
    return results


def _is_text(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "text"
