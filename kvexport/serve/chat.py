"""The route /v1/chat/completions, with OpenAI's fields and vLLM's additions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.engine.request import Request as EngineRequest
from kvexport.language.answer import Answer, Delta
from kvexport.serve.answers import TokenTexts
from kvexport.serve.conversation import (
    Conversation,
    Prepared,
    continuation,
    effort,
    template_messages,
    template_variables,
)
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import Objects, Sampling, Texts, refuse
from kvexport.serve.service import Service
from kvexport.serve.sessions import turn_of
from kvexport.serve.streams import DONE, error_event, event
from kvexport.serve.worker import Update


class ChatBody(Sampling):
    messages: Objects = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    modalities: Texts | None = None
    audio: dict[str, Any] | None = None
    functions: list[Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def conversation(self, request: Request) -> Conversation:
        refuse(self, "modalities", (["text"],), "answers are text")
        refuse(self, "audio", (), "answers are text")
        refuse(self, "functions", ([],), "send tools")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
        own = template_variables(self.chat_template_kwargs, self.add_generation_prompt)
        turn = turn_of(request, self.session_id, self.n or 1)
        messages = template_messages(self.messages)
        continued = continuation(messages, self.continue_final_message, self.add_generation_prompt)
        variables = {**effort(self.reasoning_effort, "reasoning_effort"), **own, **continued}
        parallel = self.parallel_tool_calls is not False
        return Conversation(messages, self.tools or [], self.tool_choice, parallel, variables, self.form(), turn)


async def chat_completions(service: Service, request: Request) -> Response:
    body = await service.read(request, ChatBody)
    model = service.check_model(body.model)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    conversation = body.conversation(request)
    conversation.adapter = service.adapter(body.model)
    own = {f"chat_template_kwargs.{name}": [name] for name in body.chat_template_kwargs or ()}
    service.name_unread(request, {"reasoning_effort": effort(body.reasoning_effort, "reasoning_effort"), **own})
    prepared = await service.requests_for(conversation, body, limit, logprobs=logprobs)
    texts = TokenTexts(service.engine.tokenizer) if body.logprobs else None
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    if body.stream:
        options = body.stream_options
        rendering = ChatStream(head, prepared, texts, usage=bool(options and options.include_usage))
        return await service.stream(prepared, rendering)
    await service.whole(request, prepared)
    choices = [_choice(i, finished, prepared.requests[i], texts) for i, finished in enumerate(prepared.finished())]
    return JSONResponse(
        {**head, "object": "chat.completion", "choices": choices, "usage": prepared.usage()}, headers=prepared.headers
    )


def _choice(index: int, answer: Answer, request: EngineRequest, texts: TokenTexts | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    logprobs = texts and texts.chat(request.tokens)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}


class ChatStream:
    def __init__(self, head: dict[str, Any], prepared: Prepared, texts: TokenTexts | None, *, usage: bool) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._prepared, self._answers = prepared, prepared.answers()
        self._texts, self._usage = texts, usage

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, first) for index in range(len(self._answers)))

    def add(self, update: Update) -> bytes:
        i, answer = update.choice, self._answers[update.choice]
        logprobs = self._texts.chat(update.tokens) if self._texts is not None and update.tokens else None
        chunks = []
        for delta in answer.add(update.text, update.finish_reason):
            chunks.append(self._chunk(i, _fields(delta), logprobs))
            logprobs = None
        if logprobs:  # the tokens end within a character or a stop string, so their text waits
            chunks.append(self._chunk(i, {}, logprobs))
        if update.finish_reason:
            chunks.append(self._chunk(i, {}, None, answer.finish_reason))
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._prepared.usage()}) + DONE

    def fail(self, error: ApiError) -> bytes:
        return error_event(error, "")

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})


def _fields(delta: Delta) -> dict[str, Any]:
    if delta.kind == "text":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "arguments":
        return {"tool_calls": [{"index": delta.nth, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.nth, "id": delta.id, "type": "function", "function": function}]}
