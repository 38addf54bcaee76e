"""The whole answers (completions) to prompts that are submitted together, collected over the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvexport.engine.request import FINISHED, Bundle, FinishReason, Prompt, Request, Timing
from kvexport.errors import UsageError
from kvexport.language.answer import AnswerPlan, ToolCall
from kvexport.language.token import Token


@dataclass
class Completion:
    """The generated answer to one prompt.

    Attributes:
        prompt_tokens: The number of tokens of the prompt.
        token_ids: The generated token ids, an eos token included.
        text: The generated text; "" if the artifact has no tokenizer.
        finish_reason: The reason why the answer ended; None while it goes on.
        logprobs: The log probability of each generated token; empty unless `GenerationSettings.logprobs` is set.
        top_logprobs: For each generated token, the likeliest token ids at that place with their log probabilities;
            empty
            unless `GenerationSettings.logprobs` is set.
        reasoning: The reasoning that the model wrote before the answer, if `Engine.chat` was called with tools, or if
            the model's answers have channels. Otherwise `text` includes the reasoning.
        tool_calls: The model's calls of tools, if `Engine.chat` was called with tools.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def append(self, token: Token) -> None:
        """Add the next generated token to the answer."""
        self.token_ids.append(token.id)
        self.text += token.text
        self.finish_reason = token.finish_reason
        if token.logprob is not None:
            self.logprobs.append(token.logprob)
            self.top_logprobs.append(token.top_logprobs)

    def split(self, plan: AnswerPlan) -> Completion:
        """Move reasoning and tool calls out of the text of the finished answer, and return this completion."""
        answer = plan.answer()
        answer.add(self.text, self.finish_reason)
        self.text, self.reasoning, self.tool_calls = answer.text, answer.reasoning, answer.calls
        return self


class Steps(Protocol):
    """The methods of an engine that `tokens_of` calls to run requests."""

    timing: Timing  # of the latest call of `tokens_of`, which sets it

    def add(self, request: Request) -> int:
        """Queue a request until it gets a lane (row of the batch), and return its number."""
        ...

    def cancel(self, request_id: int) -> bool:
        """End a request of the engine by its number. Return False if the request had finished already."""
        ...

    def step(self) -> list[Request]:
        """Advance all requests of the engine by one step, and return those that got tokens or failed."""
        ...


def tokens_of(
    engine: Steps, requests: Sequence[Request], bundle: Bundle, on_prefill: Callable[[int, int], None] | None
) -> Iterator[Token]:
    """Run requests that were submitted together, and yield their tokens in the order in which they are chosen.

    `on_prefill` is called with the number of prompt tokens read so far and the number of all prompt tokens.
    """
    engine.timing = bundle.timing
    done, total = 0, sum(len(request.prompt) for request in requests)
    try:
        for request in requests:
            engine.add(request)
        while True:
            while bundle.new:  # a step of another caller may have added tokens
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
    """Collect the tokens of several prompts, of `prompt_tokens` tokens each, into one completion per prompt."""
    completions = [Completion(count) for count in prompt_tokens]
    for token in tokens:
        completions[token.sequence].append(token)
    return completions


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list: one prompt becomes a list of one. Raise UsageError if there is none."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items:
        raise UsageError("there is no prompt", "give at least one")
    if all(isinstance(item, (int, np.integer)) for item in items):
        return [items]
    return items
