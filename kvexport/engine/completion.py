"""The whole answers (completions) to prompts that are submitted together, collected from their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvexport.engine.request import FinishReason, Prompt
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
