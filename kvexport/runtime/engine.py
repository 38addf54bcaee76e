"""Running an artifact: `load` it, then `generate` or `stream`. Needs numpy and what its backend needs; neither torch
nor transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from kvexport import backends
from kvexport.artifact.manifest import Manifest
from kvexport.artifact.reading import load_manifest
from kvexport.backends.base import LoadOptions, ModelState, Sessions
from kvexport.backends.rows import HostRows, Rows
from kvexport.errors import UsageError
from kvexport.runtime.chat import ChatTemplate, Message, read_chat_template
from kvexport.runtime.lanes import Lanes
from kvexport.runtime.sampling import GenerationSettings, Sampler, may_settle
from kvexport.runtime.text import FILE_NAME, TextStream, Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Token:
    """One generated token. sequence: which prompt. text: what is final with it (may be empty while a character or a
    stop string is incomplete). finish_reason: set on the last token of a sequence: "stop" (eos or stop string) or
    "length"."""

    sequence: int
    id: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None


@dataclass
class Completion:
    """What one prompt became. token_ids: generated ones, an eos included. text: "" where the artifact has no
    tokenizer."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None


@dataclass
class Timing:
    """Of the last call: prompt and generated tokens of all sequences, seconds in prefill and decode (merging included),
    decode steps.
    whole_rows: tokens of decode steps for whose choice a whole row of logits left the device; None where logits are on
    the host anyway."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    whole_rows: int | None = None


class Engine:
    """A loaded artifact. Not safe to use from several threads at once; sequences of one call share its batch."""

    def __init__(self, path: Path, manifest: Manifest, sessions: Sessions) -> None:
        self.path = path
        self.manifest = manifest
        self.plan = manifest.cache
        self.vocabulary = manifest.model.vocabulary
        self.max_length = manifest.limits.max_length
        self.max_batch = manifest.limits.max_batch
        self.tokenizer = Tokenizer.from_folder(path) if (path / FILE_NAME).exists() else None
        config = path / "generation_config.json"
        self.generation_config: dict[str, Any] = json.loads(config.read_text()) if config.exists() else {}
        self.timing = Timing()
        self.sessions = sessions
        self._lanes: Lanes | None = None
        self._calls = 0  # of `lanes`: a stream whose lanes were given to another call must not go on

    def new_state(self, lanes: int) -> ModelState:
        """State for `lanes` sequences, all empty, over the engine's sessions."""
        return self.sessions.new_state(self.plan, lanes)

    def lanes(self, count: int) -> Lanes:
        """Empty lanes for `count` sequences; the state of an earlier call is reused where the count is the same, so
        that one is over."""
        self._check_count(count)
        self._calls += 1
        if self._lanes is None or self._lanes.count != count:
            self._lanes = None  # the old state goes before the new one comes
            limits = self.manifest.limits
            self._lanes = Lanes(
                self.new_state(count),
                self.plan,
                count,
                prefill_chunk=limits.prefill_chunk,
                merge_every=limits.merge_every,
            )
        else:
            self._lanes.clear()
        return self._lanes

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.max_batch:
            raise UsageError(
                f"{count} sequences at once, but the artifact was built for 1 to {self.max_batch}",
                f"kvexport build --recipe NAME --set limits.max_batch={count}, or fewer prompts in one call",
            )

    def settings(self, **overrides: Any) -> GenerationSettings:
        """The checkpoint's generation settings with `overrides` on top (fields of GenerationSettings)."""
        return GenerationSettings.from_generation_config(self.generation_config, **overrides)

    def encode(self, prompt: Prompt) -> NDArray[np.int64]:
        """Token ids of a prompt, checked. Raises UsageError: empty, an id out of range, longer than the artifact's
        max_length."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("the artifact has no tokenizer.json, so a prompt cannot be text", "pass token ids")
            prompt = self.tokenizer.encode(prompt)
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0:
            raise UsageError("the prompt is empty", "give at least one token")
        if ids.dtype.kind not in "iu":
            raise UsageError(
                f"token ids are integers, the prompt holds {ids.dtype}", "pass text, or a list of integers"
            )
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            bad = int(ids[(ids < 0) | (ids >= self.vocabulary)][0])
            raise UsageError(
                f"token id {bad} is out of range: the vocabulary has {self.vocabulary}",
                "use the artifact's own tokenizer",
            )
        if ids.size >= self.max_length:
            raise UsageError(
                f"the prompt has {ids.size} tokens; with one token of answer it exceeds limits.max_length "
                f"{self.max_length}",
                f"kvexport build --recipe NAME --set limits.max_length={ids.size + 256}, or a shorter prompt",
            )
        return ids.astype(np.int64)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: GenerationSettings | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        **overrides: Any,
    ) -> Iterator[Token]:
        """Generate token by token, for one prompt or a ragged batch of them, in whatever order they come.

        prompts: text or token ids, or a list of either. settings: default `self.settings(**overrides)`.
        on_prefill(done, all) is called after every chunk of the prompts. Raises UsageError for prompts and settings
        that cannot be used, and from a stream that goes on after another call of this engine began.
        """
        batch = [self.encode(p) for p in _as_batch(prompts)]
        chosen = settings or self.settings(**overrides)
        self._check_count(len(batch))
        return self._run(batch, chosen, on_prefill)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], settings: GenerationSettings | None = None, **overrides: Any
    ) -> list[Completion]:
        """Generate to the end; one `Completion` per prompt, in their order. Arguments and errors as `stream`."""
        batch = [self.encode(p) for p in _as_batch(prompts)]
        completions = [Completion(len(ids)) for ids in batch]
        for token in self.stream([ids.tolist() for ids in batch], settings, **overrides):
            completion = completions[token.sequence]
            completion.token_ids.append(token.id)
            completion.text += token.text
            completion.finish_reason = token.finish_reason
        return completions

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template, None where it has none."""
        return read_chat_template(self.path)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> NDArray[np.int64]:
        """Token ids of a conversation in the words of the checkpoint's chat template, ready to be answered. Arguments
        as `ChatTemplate.render`, errors as there and of `encode`; UsageError where there is no template."""
        if self.chat_template is None or self.tokenizer is None:
            lacks = "chat template" if self.chat_template is None else f"{FILE_NAME}, so a prompt cannot be text"
            raise UsageError(f"the artifact has no {lacks}", "pass a prompt to generate, or build an instruct model")
        text = self.chat_template.render(messages, tools, **variables)
        return self.encode(self.tokenizer.encode(text, add_special_tokens=False))

    def chat(
        self, messages: Sequence[Message], settings: GenerationSettings | None = None, **overrides: Any
    ) -> Completion:
        """The answer to a conversation: `messages` are mappings with "role" and "content", the last one the user's.
        Settings and errors as `generate` and `encode_chat`."""
        return self.generate([self.encode_chat(messages).tolist()], settings, **overrides)[0]

    def _run(
        self,
        batch: list[NDArray[np.int64]],
        settings: GenerationSettings,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Iterator[Token]:
        lanes = self.lanes(len(batch))
        call = self._calls
        backend = cast(ModelState, lanes.backend)
        self.timing = Timing(prompt_tokens=sum(map(len, batch)), whole_rows=None if backend.top_logits is None else 0)
        narrow = bool(backend.top_logits) and may_settle(settings, backend.top_logits or 0, self.vocabulary)
        samplers = [Sampler(settings, ids, self.vocabulary) for ids in batch]
        texts = [
            TextStream(self.tokenizer, settings.stop_strings, context_ids=ids.tolist()) if self.tokenizer else None
            for ids in batch
        ]
        start = time.perf_counter()
        rows: Rows = HostRows(lanes.prefill(batch, on_prefill))
        self.timing.prefill_seconds = time.perf_counter() - start
        nothing = np.zeros(0, dtype=np.int64)
        running = set(range(len(batch)))
        while True:
            next_tokens = [nothing] * len(batch)
            for lane in sorted(running):
                self._require_newest(call)
                token = self._choose(lane, samplers[lane], texts[lane], rows, lanes.length[lane])
                if token.finish_reason:
                    running.discard(lane)
                next_tokens[lane] = np.array([token.id])
                self.timing.generated_tokens += 1
                yield token
            if not running:
                return
            self._require_newest(call)
            start = time.perf_counter()
            step = [t if lane in running else nothing for lane, t in enumerate(next_tokens)]
            rows = lanes.append_by(backend.step, step) if narrow else HostRows(lanes.append(step)[:, 0])
            self.timing.decode_seconds += time.perf_counter() - start
            self.timing.steps += 1

    def _require_newest(self, call: int) -> None:
        """What a call reads and writes is the next one's as soon as that begins."""
        if call != self._calls:
            raise UsageError(
                "another call of this engine began before this stream ended", "end one first, or load a second engine"
            )

    def _choose(self, lane: int, sampler: Sampler, text: TextStream | None, rows: Rows, length: int) -> Token:
        top = rows.top_logits(lane)
        token = None if top is None else sampler.next_of(top)
        if token is None:
            start = time.perf_counter()
            row = rows.row(lane)
            if self.timing.whole_rows is not None and self.timing.steps:
                self.timing.whole_rows += 1
                self.timing.decode_seconds += time.perf_counter() - start
            token = sampler.next(row)
        reason = sampler.finish_reason
        if reason is None and length + 1 >= self.max_length:
            reason = "length"
        piece = text.push(token) if text else ""
        if text and text.stopped:
            reason = "stop"
        if text and reason:
            piece += text.flush()
        return Token(lane, token, piece, reason)


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    cuda_graph: bool | None = None,
    verify: bool = True,
) -> Engine:
    """Load an artifact. threads: None takes the recipe's (0 = the backend's choice). backend: by name, None takes the
    recipe's; one that runs the ONNX graphs as they are runs every artifact. device, cuda_graph: of backends that have
    such settings, None takes the recipe's.

    verify: False skips the sha256 of every file (not their sizes and names, and not the digests of plans, which are
    code); only for files that you have just verified. Raises UsageError (nothing there, no such backend or device),
    ArtifactError (damaged, not prepared for the backend), EnvironmentProblem (what the backend needs is missing, or was
    prepared on another machine).
    """
    path = Path(path)
    manifest = load_manifest(path, verify=verify)
    chosen = backends.get(manifest.recipe.backend.name if backend is None else backend)
    return Engine(path, manifest, chosen.load(path, manifest, LoadOptions(threads, device, cuda_graph)))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items:
        raise UsageError("there is no prompt", "give at least one")
    if all(isinstance(item, (int, np.integer)) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
