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
    """Schema of the JSON body of /v1/completions."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Return the prompts of a completion request, each as text or token ids."""
        refuse(self, "suffix", ("",), "the model continues a prompt and fills no gap in it")
        refuse(self, "best_of", (1, self.n or 1), "the server returns all n answers")
        if self.echo and self.logprobs is not None:
            message = "echo with logprobs: log probabilities of the prompt's tokens are not computed"
            raise ApiError(400, message, param="logprobs", code="unsupported_value")
        prompts: Any = [self.prompt] if isinstance(self.prompt, str) or not _is_nested(self.prompt) else self.prompt
        if not all(map(len, prompts)):
            raise ApiError(400, "prompt: it is empty", param="prompt")
        return list(prompts)


def _is_nested(prompt: list[Any]) -> bool:
    return bool(prompt) and not isinstance(prompt[0], int)


async def completions(service: Service, request: Request) -> Response:
    """Answer /v1/completions: continue prompts, as one JSON object or as a stream."""
    body = await service.read(request, CompletionBody)
    model = service.check_model(body.model)
    texts = TokenTexts(service.engine.tokenizer)
    prompts, answers, form = body.prompts(), body.n or 1, body.form()
    service.check_choices(answers * len(prompts))
    turn = turn_of(request, body.session_id, answers * len(prompts))
    if turn is not None:  # the prompt has only the new text, so the request fails if the session's state is lost
        await service.sessions.begin(turn, required=True)
    prepared, echoes = Prepared([], turn), []
    for prompt in prompts:
        ids = await service.prompts.encode(prompt, within=turn is not None and turn.snapshot is not None)
        one = await service.follow(
            ids,
            turn,
            body,
            body.max_tokens,
            _TOKENS,
            form=form,
            adapter=service.adapter(body.model),
            logprobs=body.logprobs,
        )
        prepared.requests = [*prepared.requests, *one.requests]
        echoes.append(await service.prompts.text_of(prompt) if body.echo else "")
    requests = prepared.requests
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:
        before = [echoes[i // answers] for i in range(len(requests))]
        shown = texts if body.logprobs is not None else None
        usage = answers if body.stream_options and body.stream_options.include_usage else 0
        return await service.stream(prepared, CompletionStream(head, requests, before, shown, usage))
    await service.whole(request, prepared)
    choices = []
    for i, answer in enumerate(requests):
        logprobs = None if body.logprobs is None else texts.completion(answer.tokens, 0)
        text = echoes[i // answers] + text_of(answer.tokens)
        choices.append({"index": i, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason})
    return JSONResponse({**head, "choices": choices, "usage": usage_of(requests, answers)}, headers=prepared.headers)


class CompletionStream:
    """Writer of the server-sent events of a streamed completion."""

    def __init__(
        self,
        head: dict[str, Any],
        requests: Sequence[EngineRequest],
        echoes: Sequence[str],
        texts: TokenTexts | None,
        usage: int,
    ) -> None:
        self._head, self._requests, self._echoes, self._texts, self._usage = head, requests, echoes, texts, usage
        self._written = [0] * len(requests)

    def begin(self) -> bytes:
        """Return the first server-sent events, which repeat the prompts if the request sets `echo`."""
        return b"".join(self._chunk(i, echo, None, None) for i, echo in enumerate(self._echoes) if echo)

    def add(self, update: Update) -> bytes:
        i, text, logprobs = update.choice, update.text, None
        if self._texts is not None and update.tokens:
            logprobs = self._texts.completion(update.tokens, self._written[i])
        self._written[i] += len(text)
        return self._chunk(i, text, logprobs, update.finish_reason) if text or logprobs or update.finish_reason else b""

    def end(self) -> bytes:
        """Return the last server-sent events: the token counts, if the client wants them, and [DONE]."""
        if not self._usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage_of(self._requests, self._usage)}) + DONE

    def fail(self, error: ApiError) -> bytes:
        return error_event(error, "")

    def _chunk(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})
