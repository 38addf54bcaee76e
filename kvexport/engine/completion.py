"""Prompts that are given together: a loop over an engine's steps, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvexport.engine.request import FINISHED, Bundle, FinishReason, Prompt, Request, Timing
from kvexport.errors import UsageError
from kvexport.language.token import Token


@dataclass
class Completion:
    """The answer to one prompt. token_ids: generated ones, an eos included. text: "" where the artifact has no
    tokenizer."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def append(self, token: Token) -> None:
        """Take the next token."""
        self.token_ids.append(token.id)
        self.text += token.text
        self.finish_reason = token.finish_reason


class Steps(Protocol):
    """What the loop needs of an engine. timing: becomes that of the call."""

    timing: Timing

    def add(self, request: Request) -> int:
        """See `Engine.add`."""
        ...

    def cancel(self, request_id: int) -> bool:
        """See `Engine.cancel`."""
        ...

    def step(self) -> list[Request]:
        """See `Engine.step`."""
        ...


def tokens_of(
    engine: Steps, requests: Sequence[Request], bundle: Bundle, on_prefill: Callable[[int, int], None] | None
) -> Iterator[Token]:
    """The tokens of a call's requests, as `Engine.stream` gives them."""
    engine.timing = bundle.timing
    done, total = 0, sum(len(request.prompt) for request in requests)
    try:
        for request in requests:
            engine.add(request)
        while True:
            while bundle.new:  # a step of another call may have put them there
                yield bundle.new.popleft()
            if all(request.state is FINISHED for request in requests):
                break
            engine.step()
            if done < total:
                before, done = done, sum(request.done for request in requests)
                if on_prefill is not None and done > before:
                    on_prefill(done, total)
    finally:
        for request in requests:
            engine.cancel(request.id)
    if failed := [request.error for request in requests if request.error is not None]:
        raise failed[0]


def collect(prompt_tokens: Sequence[int], tokens: Iterable[Token]) -> list[Completion]:
    """Return the completion of each prompt.

    Args:
        prompt_tokens: The number of tokens of each prompt.
        tokens: The tokens of all prompts, in the order in which they were chosen.
    """
    completions = [Completion(count) for count in prompt_tokens]
    for token in tokens:
        completions[token.sequence].append(token)
    return completions


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list of them. Raises UsageError where there is none."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items:
        raise UsageError("there is no prompt", "give at least one")
    if all(isinstance(item, (int, np.integer)) for item in items):
        return [items]
    return items
