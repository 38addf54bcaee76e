"""The route /v1/responses, with OpenAI's fields: text and function calls. A response may continue an earlier one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.language.answer import Answer, Delta
from kvexport.language.chat import PIN_FIELD, Pin
from kvexport.language.forms import response_form
from kvexport.serve.conversation import Conversation, Prepared, effort, pin_of, template_messages
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import Body, Objects, Sampling, refuse
from kvexport.serve.service import Service
from kvexport.serve.sessions import turn_of
from kvexport.serve.streams import event
from kvexport.serve.worker import Update


class ResponsesBody(Body):
    KEYS: ClassVar[Mapping[str, Collection[str]]] = {"text": ("format",), "reasoning": ("effort",)}

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None

    def to_conversation(self, service: Service) -> tuple[Conversation, list[dict[str, Any]]]:
        """Return the conversation, which may continue an earlier response, and its messages without `instructions`."""
        refuse(self, "background", (False,), "the client waits for its answer")
        refuse(self, "conversation", (), "send previous_response_id")
        earlier: list[dict[str, Any]] = []
        if self.previous_response_id is not None:
            stored = service.responses.get(self.previous_response_id, "previous_response_id").messages
            # Errors name the fields of this request, and not those of the one that sent a message.
            marks = {PIN_FIELD: Pin("previous_response_id")}
            earlier = [{**message, **marks} if PIN_FIELD in message else message for message in stored]
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = earlier + template_messages(_messages(items))
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or [])]
        parallel = self.parallel_tool_calls is not False
        variables = effort((self.reasoning or {}).get("effort"), "reasoning.effort")
        return Conversation([*first, *messages], tools, self.tool_choice, parallel, variables), messages


async def create_response(service: Service, request: Request) -> Response:
    body = await service.read(request, ResponsesBody)
    model = service.check_model(body.model)
    conversation, messages = body.to_conversation(service)
    conversation.turn, conversation.adapter = turn_of(request, None), service.adapter(body.model)
    service.name_unread(request, {"reasoning.effort": conversation.variables})
    conversation.form = response_form((body.text or {}).get("format"), "text.format")
    sampling = Sampling(temperature=body.temperature, top_p=body.top_p)
    prepared = await service.requests_for(conversation, sampling, body.max_output_tokens)
    response = ResponseStream(service, _head(body, model), prepared, messages if body.store is not False else None)
    if body.stream:
        return await service.stream(prepared, response)
    await service.whole(request, prepared)
    (answer,) = prepared.finished()
    items = [Item("reasoning", text=answer.reasoning)] if answer.reasoning else []
    if answer.text or not (items or answer.calls):
        items.append(Item("message", text=answer.text))
    items += [Item("function_call", call.id, call.name, call.arguments) for call in answer.calls]
    return JSONResponse(response.finish(answer, items), headers=prepared.headers)


async def get_response(service: Service, request: Request) -> Response:
    return JSONResponse(service.responses.get(request.path_params["name"]).body)


async def delete_response(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.responses.remove(name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_KINDS = {"text": "message", "reasoning": "reasoning"}  # the kind of item for each kind of delta


class Item:
    def __init__(self, kind: str, call_id: str = "", name: str = "", text: str = "") -> None:
        self.kind, self.call_id, self.name, self.text = kind, call_id, name, text
        self.id = f"{_IDS[kind]}_{uuid.uuid4().hex}"

    def content(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def data(self, status: str) -> dict[str, Any]:
        common = {"id": self.id, "type": self.kind, "status": status}
        begun = status != "in_progress"
        if self.kind == "message":
            return {**common, "role": "assistant", "content": [self.content()] if begun else []}
        if self.kind == "reasoning":
            return {**common, "summary": [], "content": [self.content()] if begun else []}
        arguments = self.text if begun else ""
        return {**common, "call_id": self.call_id, "name": self.name, "arguments": arguments}


class ResponseStream:
    """A response, as events or whole. If `messages` is not None, the response is stored for later requests."""

    def __init__(
        self, service: Service, head: dict[str, Any], prepared: Prepared, messages: list[dict[str, Any]] | None
    ) -> None:
        self._service, self._head, self._prepared, self._messages = service, head, prepared, messages
        self._answer = prepared.answers()[0]
        self._items: list[Item] = []
        self._open = False
        self._number = -1

    def finish(self, answer: Answer, items: list[Item]) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        output = [item.data(status if item is items[-1] else "completed") for item in items]
        usage = _usage(self._prepared.usage())
        body = {**self._head, "status": status, "incomplete_details": details, "output": output, "usage": usage}
        if self._messages is not None:
            answered: dict[str, Any] = {"role": "assistant", "content": answer.text}
            if answer.reasoning:
                answered["reasoning_content"] = answer.reasoning
            if answer.calls:
                answered["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in answer.calls
                ]
            self._service.responses.put(body, [*self._messages, answered])
        return body

    def begin(self) -> bytes:
        response = {**self._head, "status": "in_progress"}
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def add(self, update: Update) -> bytes:
        return b"".join(map(self._events_of, self._answer.add(update.text, update.finish_reason)))

    def end(self) -> bytes:
        cut = self._answer.finish_reason == "length"
        start = b"" if self._items else self._begin(Item("message"))
        last = self._close("incomplete" if cut else "completed")
        body = self.finish(self._answer, self._items)
        return start + last + self._event(body["status"], response=body)

    def fail(self, error: ApiError) -> bytes:
        details = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self._head, "status": "failed", "error": details})

    def _events_of(self, delta: Delta) -> bytes:
        if delta.kind == "call":
            return self._close() + self._begin(Item("function_call", delta.id, delta.name))
        start = b""
        kind = _KINDS.get(delta.kind)
        if kind is not None and not (self._open and self._items[-1].kind == kind):
            start = self._close() + self._begin(Item(kind))
        item = self._items[-1]
        item.text += delta.text
        if delta.kind == "arguments":
            return start + self._item_event("function_call_arguments.delta", delta=delta.text)
        if delta.kind == "reasoning":
            return start + self._item_event("reasoning_text.delta", content_index=0, delta=delta.text)
        return start + self._item_event("output_text.delta", content_index=0, delta=delta.text, logprobs=[])

    def _begin(self, item: Item) -> bytes:
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        begun = self._event("output_item.added", output_index=index, item=item.data("in_progress"))
        if item.kind != "function_call":
            begun += self._item_event("content_part.added", content_index=0, part=item.content())
        return begun

    def _close(self, status: str = "completed") -> bytes:
        if not self._open:
            return b""
        self._open = False
        item, index = self._items[-1], len(self._items) - 1
        if item.kind == "message":
            done = self._item_event("output_text.done", content_index=0, text=item.text, logprobs=[])
            done += self._item_event("content_part.done", content_index=0, part=item.content())
        elif item.kind == "reasoning":
            done = self._item_event("reasoning_text.done", content_index=0, text=item.text)
            done += self._item_event("content_part.done", content_index=0, part=item.content())
        else:
            done = self._item_event("function_call_arguments.done", name=item.name, arguments=item.text)
        return done + self._event("output_item.done", output_index=index, item=item.data(status))

    def _item_event(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1].id, output_index=len(self._items) - 1, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": self._number, **data}, name)


def _head(body: ResponsesBody, model: str) -> dict[str, Any]:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details") or {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "kv_cache": usage["kv_cache"],
    }


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        message = f"{where}: a tool is a function with a name and parameters; this server runs no tools itself"
        raise ApiError(400, message, param=where, code="unsupported_value")
    return {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool}}


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            sent: dict[str, Any] = {key: item[key] for key in ("role", "content") if key in item}
            messages.append({**sent, **pin_of((f"input.{i}", item))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1].get("role") == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({**result, **pin_of((f"input.{i}", item))})
        elif kind != "reasoning":
            message = f"input.{i}: an item of type {str(kind)[:40]!r} is not supported"
            raise ApiError(400, message, param=f"input.{i}", code="unsupported_value")
    return messages
