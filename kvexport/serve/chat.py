"""/v1/chat/completions, as OpenAI's clients speak it and with vLLM's additions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.runtime.request import Request as EngineRequest
from kvexport.serve.answers import TokenTexts, text_of, usage_of
from kvexport.serve.conversation import template_messages
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import Sampling, refuse
from kvexport.serve.service import Service
from kvexport.serve.streams import DONE, event
from kvexport.serve.worker import Update


class ChatBody(Sampling):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    functions: list[Any] | None = None

    def check(self) -> None:
        """Raises ApiError for what cannot be followed."""
        refuse(self, "modalities", (["text"],), "answers are text")
        refuse(self, "audio", (), "answers are text")
        refuse(self, "functions", ([],), "send tools")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: they are told with logprobs = true", param="top_logprobs")


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    body = await service.read(request, ChatBody)
    model = service.check_model(body.model)
    body.check()
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    ids = await service.encode_chat(template_messages(body.messages), None, variables)
    limit = body.max_completion_tokens or body.max_tokens
    tokens = service.longest(len(ids), limit, service.engine.generation_config.get("max_new_tokens"))
    told = (body.top_logprobs or 0) if body.logprobs else None
    requests = service.requests(ids, body.settings(service.engine, tokens, logprobs=told))
    texts = TokenTexts(service.engine.tokenizer) if body.logprobs else None
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    if body.stream:
        options = body.stream_options
        rendering = ChatStream(head, requests, texts, usage=bool(options and options.include_usage))
        return await service.stream(requests, rendering)
    await service.whole(request, requests)
    choices = [choice(i, r, texts) for i, r in enumerate(requests)]
    usage = usage_of(requests, len(requests))
    return JSONResponse({**head, "object": "chat.completion", "choices": choices, "usage": usage})


def choice(index: int, request: EngineRequest, texts: TokenTexts | None) -> dict[str, Any]:
    """One finished answer."""
    message = {"role": "assistant", "content": text_of(request.tokens), "refusal": None}
    told = texts and texts.chat(request.tokens)
    return {"index": index, "message": message, "logprobs": told, "finish_reason": request.finish_reason}


class ChatStream:
    """The chunks of a chat completion. texts: where logprobs are told. usage: a last chunk says how many tokens there
    were."""

    def __init__(
        self, head: dict[str, Any], requests: Sequence[EngineRequest], texts: TokenTexts | None, *, usage: bool
    ) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._requests, self._texts, self._usage = requests, texts, usage

    def begin(self) -> bytes:
        """The role of each answer."""
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, first) for index in range(len(self._requests)))

    def add(self, update: Update) -> bytes:
        """The new text of one of them."""
        text, told = text_of(update.tokens), None
        if self._texts is not None and update.tokens:
            told = self._texts.chat(update.tokens)
        chunk = self._chunk(update.choice, {"content": text}, told) if text or told else b""
        return chunk + self._chunk(update.choice, {}, None, update.finish_reason) if update.finish_reason else chunk

    def end(self) -> bytes:
        """The usage, and that nothing follows."""
        if not self._usage:
            return DONE
        usage = usage_of(self._requests, len(self._requests))
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error; nothing follows."""
        return event(error.body("")) + DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})
