"""Encoding of clients' prompts as token ids, outside the event loop's thread, with checks of their length."""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from kvexport.engine.engine import Engine
from kvexport.engine.request import Ranges
from kvexport.errors import UsageError
from kvexport.language.chat import PIN_FIELD, images_of_messages
from kvexport.language.pins import refuse_beside_images, render_pinned
from kvexport.serve.errors import ApiError
from kvexport.serve.pictures import with_pictures
from kvexport.serve.settings import ServeSettings
from kvexport.state.lane import joined, pinned
from kvexport.state.sessions import next_turn, pins_after
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport.images.rows import PromptImages
    from kvexport.language.tokenizer import Tokenizer

T = TypeVar("T")
_SHORT_TEXT = 1 << 16  # characters; a shorter text is encoded in milliseconds, and its tokens are counted exactly
LONG_TEXT = 100_000  # characters; longer texts are encoded in a thread of their own, and short ones do not wait
LARGE_TEXT = 1 << 20  # characters; encoding a longer text takes some 100 MB


class EncodedChat(NamedTuple):
    """A conversation, or its continuation of a snapshot, as token ids, images and ranges that are never evicted."""

    ids: NDArray[Any]
    images: PromptImages | None
    pins: Ranges


class Beside(Protocol):
    """Type of a function that runs another function outside of the event loop's thread."""

    def __call__(self, work: Callable[[], T], size: int = 0, images: int = 0, /) -> Awaitable[T]: ...


class Prompts:
    def __init__(self, engine: Engine, beside: Beside, settings: ServeSettings) -> None:
        self.engine = engine
        # With room for pinned tokens, the first system messages and tools are pinned if they fit.
        self._room = engine.manifest.recipe.cache.pinned
        self._pins_system = settings.pins_system and self._room > 0
        self._beside, self._settings = beside, settings

    async def encode(
        self, prompt: str | Sequence[int], *, special: bool = True, within: bool = False, fits: bool = True
    ) -> Sequence[int] | NDArray[Any]:
        """Return the token ids of a prompt; `within`: the prompt continues a sequence and gets no special tokens."""

        def work() -> Sequence[int] | NDArray[Any]:
            tokenizer = self.engine.tokenizer
            if not isinstance(prompt, str) or tokenizer is None:
                return self._fitting(prompt)
            ids = self._encoded(tokenizer, prompt, special=special, within=within)
            return self._fitting(ids) if fits else ids

        return await self._beside(work, len(prompt))

    async def encode_chat(
        self, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any], *, fits: bool = True
    ) -> EncodedChat:
        """Return a conversation's token ids, images and never-evicted ranges; encode images only if `fits` is set."""
        engine = self.engine
        bound, pictures = self._bound(messages)

        def work() -> EncodedChat:
            check = partial(self.check_length, at_least=True) if fits else None
            text, images = engine.chat_text(bound, tools, variables, rows=fits, check=check)
            assert engine.tokenizer is not None
            ids = self._encoded(engine.tokenizer, text, special=False)
            pins = self._pins(text, ids, bound, tools, variables)
            return EncodedChat(self._fitting(ids) if fits else np.array(ids, np.int64), images, pins)

        return await self._beside(work, _characters(messages), pictures)

    def _bound(self, messages: Sequence[Any]) -> tuple[list[Mapping[str, Any]], int]:
        bound, pictures = with_pictures(messages, self.engine.manifest, self._settings)
        if pictures:
            refuse_beside_images(bound)
        return bound, pictures

    def _pins(
        self, text: str, ids: Sequence[int], messages: Sequence[Any], tools: Any, variables: Mapping[str, Any]
    ) -> Ranges:
        """Return the ranges of a conversation's token ids that are never evicted; `text` has image placeholders."""
        template, tokenizer = self.engine.chat_template, self.engine.tokenizer
        marked = any(message.get(PIN_FIELD) is not None for message in messages)
        if template is None or tokenizer is None or not (marked or self._pins_system):
            return ()
        # Up to its first image a conversation has the same text with and without the images.
        plain, images = images_of_messages(messages)
        spec = self.engine.manifest.images
        marker = spec.marker if images and spec is not None else ""
        spans = render_pinned(template, plain, tools, variables)[1] if marked else []
        pins = tokenizer.ranges(text, ids, spans) if spans else []
        if self._pins_system:
            with suppress(UsageError):  # a template that shows no place where the front ends
                spans = render_pinned(template, plain, tools, variables, system=True, image=marker)[1]
                front = tokenizer.ranges(text, ids, spans)
                pins = front if pinned(joined(front)) <= self._room else pins
        return pins

    async def next_turn(
        self, snapshot: Snapshot, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any]
    ) -> EncodedChat | None:
        """Return what a conversation adds to a snapshot; None if the conversation does not continue the snapshot.

        A conversation whose pinned (never evicted) tokens differ from the snapshot's does not continue the snapshot.
        """
        bound, pictures = self._bound(messages)

        def work() -> EncodedChat | None:
            check = partial(self.check_length, at_least=True)
            added = next_turn(self.engine, snapshot, bound, tools, check, **variables)
            if added is None:
                return None
            ids, images, text = added
            if not (self._room or any(message.get(PIN_FIELD) is not None for message in messages)):
                return EncodedChat(ids, images, ())
            assert self.engine.tokenizer is not None
            whole = self._encoded(self.engine.tokenizer, text, special=False)
            pins = pins_after(
                snapshot, ids, np.array(whole, np.int64), self._pins(text, whole, bound, tools, variables)
            )
            return None if pins is None else EncodedChat(ids, images, pins)

        return await self._beside(work, _characters(messages), pictures)

    async def text_of(self, prompt: str | Sequence[int]) -> str:
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
    contents = [message.get("content") or "" for message in messages]
    return sum(len(x) if isinstance(x, str) else sum(len(part.get("text", "")) for part in x) for x in contents)


def give_back_memory() -> None:
    """Return freed heap memory to the system (malloc_trim of glibc). Without glibc the call does nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
