"""The route /v1/completions, which continues prompts without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.engine.request import Request as EngineRequest
from kvexport.serve.answers import TokenTexts, text_of, usage_of
from kvexport.serve.conversation import Prepared
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import Sampling, Texts, TokenIds, refuse
from kvexport.serve.service import Service
from kvexport.serve.sessions import turn_of
from kvexport.serve.streams import DONE, error_event, event
from kvexport.serve.worker import Update

_TOKENS = 16  # the length of an answer if the request has no max_tokens, as in OpenAI's API


class CompletionBody(Sampling):
    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> Sequence[str | Sequence[int]]:
        refuse(self, "suffix", ("",), "the model continues a prompt and fills no gap in it")
        refuse(self, "best_of", (1, self.n or 1), "the server returns all n answers")
        refuse(self, "echo", (False,), "an answer has no text and no log probabilities of its prompt")
        single = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if single else self.prompt
        if not all(map(len, prompts)):
            raise ApiError(400, "prompt: it is empty", param="prompt")
        return list(prompts)


async def completions(service: Service, request: Request) -> Response:
    body = await service.read(request, CompletionBody)
    model = service.check_model(body.model)
    texts = TokenTexts(service.engine.tokenizer)
    prompts, answers, form = body.prompts(), body.n or 1, body.form()
    service.check_choices(answers * len(prompts))
    turn = turn_of(request, body.session_id, answers * len(prompts))
    if turn is not None:  # the prompt has only the new text, so the request fails if the session's state is lost
        await service.sessions.begin(turn, required=True)
    requests: list[EngineRequest] = []
    for prompt in prompts:
        ids = await service.prompts.encode(prompt, within=turn is not None and turn.snapshot is not None)
        requests += await service.follow(
            ids,
            turn,
            body,
            body.max_tokens,
            _TOKENS,
            form=form,
            adapter=service.adapter(body.model),
            logprobs=body.logprobs,
        )
    prepared = Prepared(requests, turn)
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:
        shown = texts if body.logprobs is not None else None
        usage = answers if body.stream_options and body.stream_options.include_usage else 0
        return await service.stream(prepared, CompletionStream(head, requests, shown, usage))
    await service.whole(request, prepared)
    choices = []
    for i, answer in enumerate(requests):
        logprobs = None if body.logprobs is None else texts.completion(answer.tokens, 0)
        text = text_of(answer.tokens)
        choices.append({"index": i, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason})
    return JSONResponse({**head, "choices": choices, "usage": usage_of(requests, answers)}, headers=prepared.headers)


class CompletionStream:
    def __init__(
        self,
        head: dict[str, Any],
        requests: Sequence[EngineRequest],
        texts: TokenTexts | None,
        usage: int,
    ) -> None:
        self._head, self._requests, self._texts, self._usage = head, requests, texts, usage
        self._written = [0] * len(requests)

    def begin(self) -> bytes:
        return b""

    def add(self, update: Update) -> bytes:
        i, text, logprobs = update.choice, update.text, None
        if self._texts is not None and update.tokens:
            logprobs = self._texts.completion(update.tokens, self._written[i])
        self._written[i] += len(text)
        return self._chunk(i, text, logprobs, update.finish_reason) if text or logprobs or update.finish_reason else b""

    def end(self) -> bytes:
        if not self._usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage_of(self._requests, self._usage)}) + DONE

    def fail(self, error: ApiError) -> bytes:
        return error_event(error, "")

    def _chunk(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})
