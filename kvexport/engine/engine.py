"""The inference engine's public interface: generate, stream and chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from kvexport.engine.completion import Completion, as_batch, collect, tokens_of
from kvexport.engine.core import EngineCore
from kvexport.engine.options import EngineOptions
from kvexport.engine.request import Bundle, Processors, Prompt, Request, as_processors
from kvexport.errors import UsageError
from kvexport.language.chat import ChatTemplate, Message, read_chat_template
from kvexport.language.settings import GenerationSettings
from kvexport.language.token import Token
from kvexport.language.tokenizer import FILE_NAME


class Engine(EngineCore):
    """An inference engine: a loaded model that answers prompts with `generate`, `stream` and `chat`.

    These are loops over `step`, which advances every request of every caller. The engine is a context manager; leaving
    it closes the engine. `EngineCore` lists the attributes.
    """

    def with_options(self, options: EngineOptions) -> Engine:
        """Return another engine over the same loaded model with other options and no requests.

        Both engines share weights, tokenizer, compiled grammars and chat template.
        """
        other = Engine(self.path, self.manifest, self.model, options, self.adapters)
        other.tokenizer, other.grammars = self.tokenizer, self.grammars
        other.generation_config, other.chat_template = self.generation_config, self.chat_template
        return other

    def __enter__(self) -> Engine:
        """Enter the context manager and return this engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the context manager: cancel all requests and close the engine."""
        self.close()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        *,
        adapter: str | None = None,
        logits_processor: Processors = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **overrides: Any,
    ) -> Iterator[Token]:
        """Generate answers token by token, for one prompt or for several at once.

        Closing the iterator cancels its requests. If the iterator is neither read nor closed, its requests advance with
        the steps of other calls.

        Args:
            prompts: Text or token ids, or a list of either.
            settings: The settings; None takes `self.settings(**overrides)`.
            adapter: The name of the LoRA adapter that answers; None for the model without one.
            logits_processor: A function, or several, called before every token with the token ids of prompt and answer,
                [n] int64, and the logits, [vocabulary] float32. It returns the logits to choose from.
            on_prefill: Called after every chunk with the tokens that have been read and the tokens of all prompts.
            overrides: See `settings`; ignored if `settings` is not None.

        Yields:
            Tokens in the order in which they are chosen. `Token.sequence` is the number of the prompt.

        Raises:
            UsageError: A prompt or a setting cannot be used.
            Exception: The error of a sequence that failed, after the other sequences have ended.
        """
        batch = [self.encode(p) for p in as_batch(prompts)]
        generation = settings or self.settings(**overrides)
        self._check_count(len(batch))
        bundle, processors = Bundle(), as_processors(logits_processor)
        requests = [
            Request(ids, generation, bundle, i, processors=processors, adapter=adapter) for i, ids in enumerate(batch)
        ]
        return tokens_of(self, requests, bundle, on_prefill)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        *,
        adapter: str | None = None,
        logits_processor: Processors = None,
        **overrides: Any,
    ) -> list[Completion]:
        """Generate the complete answer to one prompt, or to several at once.

        Args:
            prompts: Text or token ids, or a list of either.
            settings: The settings; None takes `self.settings(**overrides)`.
            adapter: See `stream`.
            logits_processor: See `stream`.
            overrides: See `settings`; ignored if `settings` is not None.

        Returns:
            One completion for each prompt, in the order of the prompts.

        Raises:
            UsageError: A prompt or a setting cannot be used.
            Exception: The error of a sequence that failed.
        """
        batch = [self.encode(p) for p in as_batch(prompts)]
        stream = self.stream(batch, settings, adapter=adapter, logits_processor=logits_processor, **overrides)
        return collect([len(ids) for ids in batch], stream)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template; None if the checkpoint has none."""
        return read_chat_template(self.path)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> NDArray[np.int64]:
        """Return the token ids of a conversation, [n] int64, up to the beginning of the next answer.

        Args:
            messages: Mappings with "role" and "content".
            tools: JSON schemas of functions that the model may call.
            variables: Variables of the chat template, such as `enable_thinking`.

        Raises:
            UsageError: The artifact has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None or self.tokenizer is None:
            lacks = "chat template" if self.chat_template is None else f"{FILE_NAME}, so a prompt cannot be text"
            raise UsageError(f"the artifact has no {lacks}", "pass a prompt to generate, or build an instruct model")
        text = self.chat_template.render(messages, tools, **variables)
        return self.encode(self.tokenizer.encode(text, add_special_tokens=False))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        *,
        stream: Literal[False] = False,
        **overrides: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        *,
        stream: Literal[True],
        **overrides: Any,
    ) -> Iterator[Token]: ...

    def chat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        *,
        stream: bool = False,
        **overrides: Any,
    ) -> Completion | Iterator[Token]:
        """Generate the answer to a conversation of chat messages.

        Args:
            messages: Mappings with "role" and "content", the last one the user's.
            settings: The settings; None takes `self.settings(**overrides)`.
            stream: True returns an iterator of tokens, each as soon as it is chosen.
            overrides: See `settings`; also `adapter` and `logits_processor`.

        Raises:
            UsageError: The artifact has no chat template, or messages or settings cannot be used.
        """
        prompt = self.encode_chat(messages).tolist()
        if stream:
            return self.stream([prompt], settings, **overrides)
        return self.generate([prompt], settings, **overrides)[0]
