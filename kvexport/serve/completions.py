"""/v1/completions: a prompt is continued as it is."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.engine.request import Request as EngineRequest
from kvexport.serve.answers import TokenTexts, text_of, usage_of
from kvexport.serve.conversation import Prepared
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import Sampling, TokenIds, refuse
from kvexport.serve.service import Service
from kvexport.serve.sessions import Start, session_name
from kvexport.serve.streams import DONE, error_event, event
from kvexport.serve.worker import Update

_TOKENS = 16  # of an answer where nothing is said, as OpenAI has it


class CompletionBody(Sampling):
    """Of /v1/completions."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Each of them. Raises ApiError where there is none, and for what cannot be followed."""
        refuse(self, "suffix", ("",), "the model continues prompts, it fills no gaps")
        refuse(self, "best_of", (1, self.n or 1), "all n answers are given")
        if self.echo and self.logprobs is not None:
            said = "echo with logprobs: those of a prompt's tokens are not computed"
            raise ApiError(400, said, param="logprobs", code="unsupported_value")
        given: Any = [self.prompt] if isinstance(self.prompt, str) or not _is_nested(self.prompt) else self.prompt
        if not all(map(len, given)):
            raise ApiError(400, "prompt: it is empty", param="prompt")
        return list(given)


def _is_nested(prompt: list[Any]) -> bool:
    return bool(prompt) and not isinstance(prompt[0], int)


async def completions(service: Service, request: Request) -> Response:
    """Continue prompts, whole or as a stream."""
    body = await service.read(request, CompletionBody)
    model = service.check_model(body.model)
    texts = TokenTexts(service.engine.tokenizer)
    prompts, answers, form = body.prompts(), body.n or 1, body.form()
    service.check_choices(answers * len(prompts))
    session = session_name(request, body.session_id, answers * len(prompts))
    # The prompt does not bring what stood before it, so a lost state ends the request.
    start = Start() if session is None else await service.sessions.start(session, required=True)
    asked, echoes = Prepared([], session, start), []
    for prompt in prompts:
        ids = await service.encode(prompt, special=start.snapshot is None)
        made = await service.follow(
            ids, start, session, body, body.max_tokens, _TOKENS, form=form, logprobs=body.logprobs
        )
        asked.requests = [*asked.requests, *made.requests]
        echoes.append(await service.text_of_prompt(prompt) if body.echo else "")
    requests = asked.requests
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:
        shown = [echoes[i // answers] for i in range(len(requests))]
        told = texts if body.logprobs is not None else None
        usage = answers if body.stream_options and body.stream_options.include_usage else 0
        return await service.stream(asked, CompletionStream(head, requests, shown, told, usage))
    await service.whole(request, asked)
    choices = []
    for i, answer in enumerate(requests):
        logprobs = None if body.logprobs is None else texts.completion(answer.tokens, 0)
        text = echoes[i // answers] + text_of(answer.tokens)
        choices.append({"index": i, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason})
    return JSONResponse({**head, "choices": choices, "usage": usage_of(requests, answers)}, headers=asked.headers)


class CompletionStream:
    """The chunks of a completion. echoes: of each answer what stands before it. texts: where logprobs are told. usage:
    0, or how many answers share a prompt: a last chunk says how many tokens there were."""

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
        """The prompts, where they are wanted."""
        return b"".join(self._chunk(i, echo, None, None) for i, echo in enumerate(self._echoes) if echo)

    def add(self, update: Update) -> bytes:
        """The new text of an answer."""
        i, text, told = update.choice, text_of(update.tokens), None
        if self._texts is not None and update.tokens:
            told = self._texts.completion(update.tokens, self._written[i])
        self._written[i] += len(text)
        return self._chunk(i, text, told, update.finish_reason) if text or told or update.finish_reason else b""

    def end(self) -> bytes:
        """The usage, and that nothing follows."""
        if not self._usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage_of(self._requests, self._usage)}) + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error; nothing follows."""
        return error_event(error, "")

    def _chunk(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})
