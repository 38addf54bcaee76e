"""Encoding of clients' prompts as token ids, outside the event loop's thread, with checks of their length."""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from kvexport.engine.engine import Engine
from kvexport.engine.request import Ranges
from kvexport.errors import UsageError
from kvexport.language.chat import PIN_FIELD
from kvexport.language.pins import render_pinned
from kvexport.serve.errors import ApiError
from kvexport.state.lane import joined, pinned
from kvexport.state.sessions import next_turn, pins_after
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport.language.tokenizer import Tokenizer

T = TypeVar("T")
_SHORT_TEXT = 1 << 16  # characters; a shorter text is encoded in milliseconds, and its tokens are counted exactly
LONG_TEXT = 100_000  # characters; longer texts are encoded in a thread of their own, and short ones do not wait
LARGE_TEXT = 1 << 20  # characters; encoding a longer text takes some 100 MB


class Beside(Protocol):
    """Type of a function that runs another function outside of the event loop's thread."""

    def __call__(self, work: Callable[[], T], size: int = 0, /) -> Awaitable[T]:
        """Run `work` on `size` characters outside of the event loop's thread, and return its result."""
        ...


class Prompts:
    """Encoder of clients' prompts and conversations, with the tokenizer and the chat template of a server's engine."""

    def __init__(self, engine: Engine, beside: Beside, *, pins_system: bool = False) -> None:
        self.engine = engine
        # With room for pinned tokens, the first system messages and tools are pinned if they fit.
        self._room = engine.manifest.recipe.cache.pinned
        self._pins_system = pins_system and self._room > 0
        self._beside = beside

    async def encode(
        self, prompt: str | Sequence[int], *, special: bool = True, within: bool = False, fits: bool = True
    ) -> Sequence[int] | NDArray[Any]:
        """Return the token ids of a prompt; `within` says that it continues a sequence, and gets no special tokens."""

        def work() -> Sequence[int] | NDArray[Any]:
            tokenizer = self.engine.tokenizer
            if not isinstance(prompt, str) or tokenizer is None:
                return self._fitting(prompt)
            ids = self._encoded(tokenizer, prompt, special=special, within=within)
            return self._fitting(ids) if fits else ids

        return await self._beside(work, len(prompt))

    async def encode_chat(
        self, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any], *, fits: bool = True
    ) -> Sequence[int] | NDArray[Any]:
        return (await self.encode_pinned_chat(messages, tools, variables, fits=fits))[0]

    async def encode_pinned_chat(
        self, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any], *, fits: bool = True
    ) -> tuple[NDArray[Any], Ranges]:
        """Return the token ids of a conversation, and the ranges of ids that are pinned."""
        return await self._beside(
            lambda: self._pinned_chat(messages, tools, variables, fits=fits), _characters(messages)
        )

    def _pinned_chat(
        self, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any], *, fits: bool
    ) -> tuple[NDArray[Any], Ranges]:
        template, tokenizer = self.engine.chat_template, self.engine.tokenizer
        if template is None or tokenizer is None:
            return self.engine.encode_chat(messages), ()  # raises an error that names the missing file
        text, spans = render_pinned(template, messages, tools, variables)
        ids = self._encoded(tokenizer, text, special=False)
        encoded = self._fitting(ids) if fits else np.array(ids, np.int64)
        pins = tokenizer.ranges(text, ids, spans) if spans else []
        if self._pins_system:
            with suppress(UsageError):  # a template that shows no place where the front ends
                spans = render_pinned(template, messages, tools, variables, system=True)[1]
                front = tokenizer.ranges(text, ids, spans)
                pins = front if pinned(joined(front)) <= self._room else pins
        return encoded, pins

    async def next_turn(
        self, snapshot: Snapshot, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any]
    ) -> tuple[NDArray[Any], Ranges] | None:
        """Return the token ids that a conversation adds to a snapshot, and which are pinned; None if it adds none.

        A conversation that pins other tokens of the snapshot than were pinned does not continue it.
        """

        def work() -> tuple[NDArray[Any], Ranges] | None:
            ids = next_turn(self.engine, snapshot, messages, tools, **variables)
            if ids is None or not (self._room or any(message.get(PIN_FIELD) for message in messages)):
                return None if ids is None else (ids, ())
            pins = pins_after(snapshot, ids, *self._pinned_chat(messages, tools, variables, fits=False))
            return None if pins is None else (ids, pins)

        return await self._beside(work, _characters(messages))

    async def text_of(self, prompt: str | Sequence[int]) -> str:
        """Return a prompt as text; a prompt of token ids is decoded."""
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            return prompt
        if tokenizer is None:
            raise ApiError(400, "the artifact has no tokenizer, so token ids have no text", param="prompt")
        if max(prompt, default=0) >= 1 << 32:
            raise ApiError(400, f"token id {max(prompt)} is out of range", param="tokens")
        return await self._beside(lambda: tokenizer.decode(prompt, skip_special_tokens=False), len(prompt))

    def check_length(self, tokens: int, *, at_least: bool = False) -> None:
        """Check that a prompt leaves room for at least one token of an answer in the model's context."""
        limit = self.engine.max_length
        if tokens >= limit:
            count = f"at least {tokens}" if at_least else str(tokens)
            message = f"This model's maximum context length is {limit} tokens, and the prompt has {count}: "
            raise ApiError(400, message + "context_length_exceeded", code="context_length_exceeded", param="messages")

    def _encoded(self, tokenizer: Tokenizer, text: str, *, special: bool, within: bool = False) -> list[int]:
        """Return the token ids of a text. A long text that cannot fit the model's context is refused beforehand."""
        least = tokenizer.least_tokens(text)
        if least >= self.engine.max_length and len(text) > _SHORT_TEXT:
            self.check_length(least, at_least=True)
        try:
            return tokenizer.encode_within(text) if within else tokenizer.encode(text, add_special_tokens=special)
        finally:
            if len(text) > LARGE_TEXT:
                give_back_memory()

    def _fitting(self, ids: str | Sequence[int]) -> NDArray[Any]:
        if not isinstance(ids, str):
            self.check_length(len(ids))
        return self.engine.encode(ids)


def _characters(messages: Sequence[Any]) -> int:
    return sum(len(str(message.get("content") or "")) for message in messages)


def give_back_memory() -> None:
    """Return freed heap memory to the system (malloc_trim of glibc). Without glibc the call does nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
