"""The inference engine's public interface: generate, stream and chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.model_state import ImageEncoder
from kvexport.engine.completion import Completion, as_batch, collect
from kvexport.engine.core import EngineCore
from kvexport.engine.options import EngineOptions
from kvexport.engine.request import (
    FINISHED,
    Bundle,
    Pin,
    Processors,
    Prompt,
    Ranges,
    Request,
    as_processors,
    ranges_of,
)
from kvexport.errors import UsageError
from kvexport.images.decode import ImageInput
from kvexport.images.rows import PromptImages, encode_images, with_images
from kvexport.images.tiles import ImageSpec
from kvexport.language.answer import plan_answer
from kvexport.language.chat import PIN_FIELD, ChatTemplate, Message, images_of_messages, read_chat_template
from kvexport.language.forms import response_form
from kvexport.language.pins import refuse_beside_images, render_pinned
from kvexport.language.settings import GenerationSettings
from kvexport.language.token import Token
from kvexport.language.tokenizer import FILE_NAME, Tokenizer
from kvexport.language.tools import check_tools, choose

P = TypeVar("P")


class Engine(EngineCore):
    """An inference engine: a loaded model that answers prompts with `generate`, `stream` and `chat`.

    `generate`, `stream` and `chat` are loops over `step`, which advances the requests of all callers. An engine is a
    context manager; leaving the context closes the engine.
    """

    def with_options(self, options: EngineOptions) -> Engine:
        """Return a new engine over the same loaded model, with other options and without requests.

        Both engines share weights, tokenizer, compiled grammars and chat template.
        """
        other = Engine(self.path, self.manifest, self.model, options, self.adapters, self.tokenizer)
        other.grammars = self.grammars
        other.generation_config, other.chat_template = self.generation_config, self.chat_template
        other.image_rows = self.image_rows
        return other

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        *,
        images: Sequence[ImageInput] | Sequence[Sequence[ImageInput]] = (),
        pin: Pin = 0,
        adapter: str | None = None,
        logits_processor: Processors = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **overrides: Any,
    ) -> Iterator[Token]:
        """Generate answers token by token, for one prompt or for several at once.

        Closing the iterator cancels its requests. If the iterator is neither read nor closed, its requests still
        advance with the steps that other callers run.

        Args:
            prompts: Text or token ids, or a list of either. At most `EngineOptions.lanes` prompts run at once; the
                others wait.
            settings: The generation settings; None takes the checkpoint's settings, changed by `overrides`.
            images: The images of the prompt, or a list of images for each prompt: paths, bytes of files, or images of
                Pillow. They replace the model's markers in the prompt (`<image>` in most models), or precede a prompt
                without markers.
            pin: How many of every prompt's first tokens are never evicted from the cache, or ranges (first, end) of its
                tokens. The artifact needs room for them (`cache.pinned`).
            adapter: The name of the LoRA adapter that answers; None for the model without an adapter.
            logits_processor: A function, or several, called before every token with the token ids of prompt and answer,
                [n] int64, and the logits, [vocabulary] float32. It returns the logits to choose from.
            on_prefill: A function called after every prompt chunk with the number of prompt tokens read so far and the
                number of all prompt tokens.
            overrides: Generation settings by name, such as `max_new_tokens=50`; ignored if `settings` is not None.

        Yields:
            Tokens in the order in which they are chosen. `Token.sequence` is the number of the prompt.

        Raises:
            UsageError: A prompt or a setting cannot be used.
            Exception: The error of a sequence that failed, after the other sequences have ended.
        """
        batch = self._encoded(prompts, images)
        pins = [ranges_of(pin)] * len(batch)
        generation = settings or self.settings(**overrides)
        return self.stream_encoded(batch, generation, adapter, logits_processor, on_prefill, pins)

    def stream_encoded(
        self,
        prompts: Sequence[tuple[Prompt, PromptImages | None]],
        settings: GenerationSettings,
        adapter: str | None = None,
        logits_processor: Processors = None,
        on_prefill: Callable[[int, int], None] | None = None,
        pins: Sequence[Ranges] = (),
    ) -> Iterator[Token]:
        """Generate answers as `stream` does, for prompts that `encode_with_images` has encoded."""
        batch = [(self.encode(prompt), images) for prompt, images in prompts]
        bundle, processors = Bundle(), as_processors(logits_processor)
        requests = [
            Request(ids, settings, bundle, i, processors=processors, adapter=adapter, images=images, pin=pin)
            for i, ((ids, images), pin) in enumerate(zip(batch, pins or [()] * len(batch), strict=True))
        ]
        return self._tokens_of(requests, bundle, on_prefill)

    def _tokens_of(
        self, requests: Sequence[Request], bundle: Bundle, on_prefill: Callable[[int, int], None] | None
    ) -> Iterator[Token]:
        self.timing = bundle.timing
        done, total = 0, sum(len(request.prompt) for request in requests)
        try:
            for request in requests:
                self.add(request)
            while True:
                while bundle.new:  # a step of another caller may have added tokens
                    yield bundle.new.popleft()
                if all(request.state is FINISHED for request in requests):
                    break
                self.step()
                if done < total:
                    before, done = done, sum(request.done for request in requests)
                    if on_prefill is not None and done > before:
                        on_prefill(done, total)
        finally:
            for request in requests:
                self.cancel(request.id)
        if failed := [request.error for request in requests if request.error is not None]:
            raise failed[0]

    def _encoded(
        self, prompts: Prompt | Sequence[Prompt], images: Sequence[Any]
    ) -> list[tuple[NDArray[np.int64], PromptImages | None]]:
        """Return for each prompt its token ids and its encoded images."""
        batch = as_batch(prompts)
        if not images:
            return [(self.encode(prompt), None) for prompt in batch]
        single = isinstance(prompts, str) or isinstance(prompts[0], int | np.integer)
        lists = [images] if single else list(images)
        if len(lists) != len(batch) or not all(isinstance(one, list | tuple) for one in lists):
            raise UsageError(
                f"images are not given for each of {len(batch)} prompts", "images=[[IMAGE, ...], ...], a list for each"
            )
        pairs = zip(batch, lists, strict=True)
        return [self.encode_with_images(p, one) for p, one in pairs]

    def encode_with_images(
        self, prompt: Prompt, images: Sequence[ImageInput], *, add_special_tokens: bool = True
    ) -> tuple[NDArray[np.int64], PromptImages | None]:
        """Return the token ids of a prompt with images, [n] int64, and the encoded images, for `Request.images`.

        For a prompt without images the second result is None.

        Args:
            prompt: Text, or token ids that have a placeholder for each vector that the image encoder makes of the
                images.
            images: The images, in their order in the prompt.
            add_special_tokens: Whether the tokenizer adds its special tokens to a text.

        Raises:
            UsageError: The artifact reads no images, or an image cannot be read.
            EnvironmentProblem: Pillow is not installed.
        """
        encoded = None
        if images:
            prompt, encoded = self._with_images(prompt, images)
        if isinstance(prompt, str) and self.tokenizer is not None:
            prompt = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return self.encode(prompt), encoded

    def require_images(self) -> ImageSpec:
        """Return how the artifact reads images; raise UsageError if it reads none."""
        if self.manifest.images is None:
            reason = self.manifest.no_images or "its model reads text alone"
            raise UsageError(f"the artifact reads no images: {reason}", "leave out the images")
        return self.manifest.images

    def _with_images(
        self, prompt: P, images: Sequence[ImageInput], *, rows: bool = True, **options: Any
    ) -> tuple[P | str, PromptImages]:
        """Insert the image placeholders into a prompt; return the prompt and the encoded images.

        `encode_images` explains `options`.
        """
        spec = self.require_images()
        encoded, texts = encode_images(images, spec, self._encode_tile if rows else None, self.image_rows, **options)
        return with_images(prompt, texts, spec) if isinstance(prompt, str) else prompt, encoded

    def _encode_tile(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        # On a GPU the encoder's stream is the decoder's, which a step may just be recording as a CUDA graph.
        with nullcontext() if self.model.in_host_memory else self._turns:
            return cast(ImageEncoder, self.model).encode_tile(pixels)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        *,
        images: Sequence[ImageInput] | Sequence[Sequence[ImageInput]] = (),
        pin: Pin = 0,
        adapter: str | None = None,
        logits_processor: Processors = None,
        **overrides: Any,
    ) -> list[Completion]:
        """Generate the complete answer to one prompt, or to several at once.

        Args:
            prompts: Text or token ids, or a list of either. At most `EngineOptions.lanes` prompts run at once; the
                others wait.
            settings: The generation settings; None takes the checkpoint's settings, changed by `overrides`.
            images: The images of the prompt, or a list of images for each prompt, as in `stream`.
            pin: The tokens of every prompt that are never evicted from the cache, as in `stream`.
            adapter: The name of the LoRA adapter that answers; None for the model without an adapter.
            logits_processor: A function, or several, that changes the logits before every token, as in `stream`.
            overrides: Generation settings by name, such as `max_new_tokens=50`; ignored if `settings` is not None.

        Returns:
            One completion for each prompt, in the order of the prompts.

        Raises:
            UsageError: A prompt or a setting cannot be used.
            Exception: The error of a sequence that failed.
        """
        batch = self._encoded(prompts, images)
        pins = [ranges_of(pin)] * len(batch)
        generation = settings or self.settings(**overrides)
        stream = self.stream_encoded(batch, generation, adapter, logits_processor, pins=pins)
        return collect([len(ids) for ids, _ in batch], stream)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template; None if the checkpoint has none."""
        return read_chat_template(self.path)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> NDArray[np.int64]:
        """Return the token ids of a conversation, [n] int64, up to the beginning of the next answer.

        Args:
            messages: The conversation's messages, mappings with "role" and "content".
            tools: JSON schemas of functions that the model may call.
            variables: Variables of the chat template, such as `enable_thinking`.

        Raises:
            UsageError: The artifact has no chat template, or the template refuses the messages.
        """
        return self.encode_chat_with_images(messages, tools, **variables)[0]

    def encode_pinned_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
        """Return a conversation's token ids, as `encode_chat` does, and the ranges of ids that are never evicted.

        Args:
            messages: The conversation's messages, without images. The text of a message with `"cache": "pin"` is
                pinned; with a first system message also everything that the template puts before the first other
                message, such as tools.
            tools: JSON schemas of functions that the model may call.
            variables: Variables of the chat template.

        Raises:
            UsageError: The artifact has no chat template, the template refuses the messages, or they have images.
        """
        template, tokenizer = self._chat_parts()
        if images_of_messages(messages)[1]:
            raise UsageError("encode_pinned_chat takes no images", "encode_chat_with_images, which pins nothing")
        text, spans = render_pinned(template, messages, tools, variables or {})
        ids = tokenizer.encode(text, add_special_tokens=False)
        return self.encode(ids), tokenizer.ranges(text, ids, spans) if spans else []

    def _chat_parts(self) -> tuple[ChatTemplate, Tokenizer]:
        if self.chat_template is None or self.tokenizer is None:
            lacks = "chat template" if self.chat_template is None else f"{FILE_NAME}, so a prompt cannot be text"
            raise UsageError(f"the artifact has no {lacks}", "pass a prompt to generate, or build an instruct model")
        return self.chat_template, self.tokenizer

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        **options: Any,
    ) -> tuple[str, PromptImages | None]:
        """Return a conversation as text with the placeholder tokens of its images, and its encoded images or None.

        Args:
            messages: Messages as for `encode_chat_with_images`.
            tools: JSON schemas of functions that the model may call.
            variables: Variables of the chat template, such as `enable_thinking`.
            options: With `rows=False` the images are not encoded, for a caller that only counts tokens. `read` and
                `check` are passed on to `kvexport.images.rows.encode_images`.

        Raises:
            UsageError: The artifact has no chat template that shows images, or an image cannot be read.
        """
        plain, images = images_of_messages(messages)
        text, spec = self._chat_parts()[0].render(plain, tools, **variables), self.manifest.images
        if not images:
            return text, None
        if spec is not None and (places := text.count(spec.marker)) != len(images):
            raise UsageError(
                f"the chat template makes {places} places for images ({spec.marker}) of a conversation with "
                f"{len(images)} images",
                f"messages whose text does not hold {spec.marker} itself, or generate with a prompt in place of chat",
            )
        return self._with_images(text, images, **options)

    def encode_chat_with_images(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> tuple[NDArray[np.int64], PromptImages | None]:
        """Return the token ids of a conversation, as `encode_chat` does, and its encoded images.

        Args:
            messages: Messages whose content may be a list of parts. A part {"type": "image", "image": IMAGE} has an
                image: a path, the bytes of a file, or an image of Pillow.
            tools: JSON schemas of functions that the model may call.
            variables: Variables of the chat template, such as `enable_thinking`.

        Raises:
            UsageError: The artifact has no chat template that shows images, or an image cannot be read.
        """
        text, images = self.chat_text(messages, tools, variables)
        assert self.tokenizer is not None
        return self.encode(self.tokenizer.encode(text, add_special_tokens=False)), images

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        stream: Literal[False] = False,
        adapter: str | None = None,
        logits_processor: Processors = None,
        **overrides: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        stream: Literal[True],
        adapter: str | None = None,
        logits_processor: Processors = None,
        **overrides: Any,
    ) -> Iterator[Token]: ...

    def chat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        stream: bool = False,
        adapter: str | None = None,
        logits_processor: Processors = None,
        **overrides: Any,
    ) -> Completion | Iterator[Token]:
        """Generate the answer to a conversation of chat messages.

        Args:
            messages: Mappings with "role" and "content"; the last message is the user's or a tool's. The content may
                have images as in `encode_chat_with_images`. The text of a message with `"cache": "pin"` is never
                evicted from the cache, as in `encode_pinned_chat`.
            settings: The generation settings; None takes the checkpoint's settings, changed by `overrides`.
            tools: Functions that the model may call, as OpenAI's API describes them. With tools,
                `Completion.tool_calls` has the calls, and `Completion.text` contains neither calls nor reasoning.
            tool_choice: "auto" (or None), "none", "required" or the name of a tool, as in OpenAI's API.
            response_format: The format of the answer, as in OpenAI's API: {"type": "json_object"}, or {"type":
                "json_schema", "json_schema": {"schema": ...}}. `GenerationSettings.grammar` is more general.
            stream: True returns an iterator that yields each token when it is chosen. The tokens' text includes tool
                calls and reasoning.
            adapter: The name of the LoRA adapter that answers; None for the model without an adapter.
            logits_processor: A function, or several, that changes the logits before every token, as in `stream`.
            overrides: Generation settings by name, such as `max_new_tokens=50`; ignored if `settings` is not None.

        Raises:
            UsageError: The artifact has no chat template, or messages, tools or settings cannot be used.
        """
        generation = settings or self.settings(**overrides)
        form = response_form(response_format)
        if form is not None and generation.grammar is not None:
            raise UsageError("there are a grammar and a response_format", "give one of them")
        allowed, must = choose(check_tools(tools), tool_choice)
        shown_tools, pins = tools if allowed else None, list[tuple[int, int]]()
        refuse_beside_images(messages)
        encoded, images = self.encode_chat_with_images(messages, shown_tools)
        if any(message.get(PIN_FIELD) is not None for message in messages):
            pins = self.encode_pinned_chat(messages, shown_tools)[1]
        ids = encoded.tolist()
        grammar = form or generation.grammar
        plan = plan_answer(self.chat_template, self.tokenizer, ids, allowed, must, grammar, reasons=bool(tools))
        shown = (*generation.shown_ids, *plan.shown_ids)
        generation = replace(generation, grammar=plan.grammar, shown_ids=shown)
        ids += plan.prefix
        tokens = self.stream_encoded([(ids, images)], generation, adapter, logits_processor, pins=[pins])
        return tokens if stream else collect([len(ids)], tokens)[0].split(plan)
