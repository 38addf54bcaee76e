"""What is told of answers, in the parts that several APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvexport.engine.request import Request
from kvexport.language.token import Token

if TYPE_CHECKING:
    from kvexport.language.text import Tokenizer

# JSON has no infinity; vLLM and OpenAI give this for a token that cannot come.
_NEVER = -9999.0


def text_of(tokens: Sequence[Token]) -> str:
    """What the tokens added to the text."""
    return "".join(token.text for token in tokens)


def stop_string(request: Request) -> str | None:
    """The stop string that ended an answer."""
    return None if request.text is None else request.text.stop_string


def usage_of(requests: Sequence[Request], answers: int = 1) -> dict[str, Any]:
    """Tokens read and written. answers: so many requests, one after the other, share a prompt."""
    prompts = requests[::answers]
    read, generated = sum(len(request.ids) for request in prompts), sum(len(request.tokens) for request in requests)
    return {
        "prompt_tokens": read,
        "completion_tokens": generated,
        "total_tokens": read + generated,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
    }


class TokenTexts:
    """Tokens as logprobs show them: each by itself, special ones too."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """What a token spells alone; U+FFFD for a part of a character."""
        return str(token) if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """As chat completions give them."""
        entries = []
        for token in tokens:
            top = [self._entry(other, value) for other, value in token.top_logprobs]
            entries.append({**self._entry(token.id, token.logprob or 0.0), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def completion(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        """As completions give them. offset: characters of the text before these tokens."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self.text(token.id) for token in tokens],
            "token_logprobs": [max(token.logprob or 0.0, _NEVER) for token in tokens],
            "top_logprobs": [
                {self.text(other): max(value, _NEVER) for other, value in token.top_logprobs} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _NEVER), "bytes": whole}
