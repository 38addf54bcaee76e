"""The routes /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.serve.answers import TokenTexts
from kvexport.serve.conversation import template_messages, template_variables
from kvexport.serve.errors import ApiError
from kvexport.serve.fields import Body, Objects, TokenIds
from kvexport.serve.service import Service


class TokenizeBody(Body):
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: TokenIds


async def tokenize(service: Service, request: Request) -> Response:
    body = await service.read(request, TokenizeBody)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give it, or messages, and not both", param="prompt")
    if body.prompt is not None:
        ids = await service.prompts.encode(body.prompt, special=body.add_special_tokens is not False, fits=False)
    else:
        variables = template_variables(body.chat_template_kwargs, body.add_generation_prompt)
        chat = await service.prompts.encode_chat(
            template_messages(body.messages or []), body.tools, variables, fits=False
        )
        ids = chat.ids
    texts = TokenTexts(service.engine.tokenizer)
    tokens = [int(i) for i in ids]
    strings = [texts.text(i) for i in tokens] if body.return_token_strs else None
    limit = service.engine.max_length
    return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})


async def detokenize(service: Service, request: Request) -> Response:
    body = await service.read(request, DetokenizeBody)
    service.check_model(body.model)
    return JSONResponse({"prompt": await service.prompts.text_of(body.tokens)})
