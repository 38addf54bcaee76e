"""Fields that the responses of several HTTP APIs share: text, token counts and log probabilities."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from kvexport.engine.request import Request
from kvexport.language.token import Token

if TYPE_CHECKING:
    from kvexport.language.tokenizer import Tokenizer

# JSON has no infinity. vLLM and OpenAI send this number for a token of probability 0.
_NEVER = -9999.0


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def stop_string(request: Request) -> str | None:
    return None if request.text is None else request.text.stop_string


def usage_of(requests: Sequence[Request], answers: int = 1) -> dict[str, Any]:
    """Return an HTTP response's `usage`: tokens and KV-cache compression; each prompt has `answers` answers."""
    prompts = requests[::answers]
    read, generated = sum(len(request.ids) for request in prompts), sum(len(request.tokens) for request in requests)
    return {
        "prompt_tokens": read,
        "completion_tokens": generated,
        "total_tokens": read + generated,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
        "kv_cache": kv_cache_of(requests, answers),
    }


def kv_cache_of(requests: Sequence[Request], answers: int = 1) -> dict[str, int]:
    """Return a response's `kv_cache`: used slots, tokens merged into others' slots, pinned tokens, tokens over budget.

    A prompt with several answers counts once.
    """
    timings = [request.timing for request in requests]
    slots = sum(timing.cache_slots for timing in timings)
    return {
        "slots": slots,
        "merged_tokens": sum(timing.cache_tokens for timing in timings) - slots,
        "pinned_tokens": sum(timing.pinned_tokens for timing in timings[::answers]),
        "prompt_tokens_over_budget": sum(timing.over_budget for timing in timings[::answers]),
    }


class TokenTexts:
    """The text of single tokens, special tokens included, for the log probabilities in an HTTP response."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return the text of one token id. A token that is only a part of a character has the text U+FFFD."""
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        """Return the bytes that one token adds to a text, with the space before a word."""
        if self._tokenizer is None:
            return str(token).encode()
        known = self._tokenizer.token_bytes
        return known[token] if token < len(known) else b""

    def _key(self, token: int, others: Container[str]) -> str:
        """Return a token's key in the object `top_logprobs`: its text, or "token_id:ID" if that key is taken."""
        try:
            text = self.bytes(token).decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))
        return f"token_id:{token}" if text in others else text

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        entries = []
        for token in tokens:
            top = [self._entry(other, value) for other, value in token.top_logprobs]
            entries.append({**self._entry(token.id, token.logprob or 0.0), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def completion(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        """Return `logprobs` of OpenAI's completions; `offset` is the number of characters before the tokens."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self.text(token.id) for token in tokens],
            "token_logprobs": [max(token.logprob or 0.0, _NEVER) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, _NEVER), "bytes": list(data)}

    def _top(self, token: Token) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, value in token.top_logprobs:
            top[self._key(other, top)] = max(value, _NEVER)
        return top
