"""The start of a request: with a new prompt, with a prompt after a snapshot, or within a snapshot's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.adapters import Adapter, Adapters
from kvexport.backends.lane_state import slot_places
from kvexport.cache import CachePlan
from kvexport.engine.request import FINISHED, Prompt, Request
from kvexport.errors import SnapshotError, UsageError
from kvexport.language.grammar import Grammars
from kvexport.language.sampling import Sampler
from kvexport.language.settings import GenerationSettings
from kvexport.language.text_stream import CONTEXT, TextStream
from kvexport.language.tokenizer import Tokenizer
from kvexport.schema.state import RING
from kvexport.state.lane import Counters, Saved
from kvexport.state.snapshot import Origin, Snapshot

if TYPE_CHECKING:
    Ids = NDArray[np.int64]


def resumes(request: Request) -> bool:
    """Return whether a request without a prompt resumes its snapshot's answer or unread prompt."""
    return request.start is not None and len(request.prompt) == 0


def adapter_of(request: Request, adapters: Adapters) -> Adapter | None:
    """Return the LoRA adapter of a request; None for the model without an adapter."""
    start = request.start
    adapter = adapters.get(request.adapter)
    if start is None:
        return adapter
    if request.adapter is None and resumes(request):
        adapter = adapters.of_digest(start.adapter)
    if start.adapter != (None if adapter is None else adapter.digest):
        name = next((known.name for known in adapters.by_name.values() if known.digest == start.adapter), None)
        whose = "the model without an adapter" if start.adapter is None else f"the adapter {name or 'of other files'}"
        raise SnapshotError(
            f"the snapshot is of {whose}, the request is for {request.adapter or 'the model without one'}",
            "go on with the adapter that the sequence began with, or begin a new sequence",
        )
    return adapter


def prepare(request: Request, ids: Ids, default: GenerationSettings, grammars: Grammars) -> None:
    """Set a request's sampler, detokenizer and token ids before it waits for a lane."""
    start, again = request.start, resumes(request)
    settings = request.settings or (start.settings if start is not None and again else None) or default
    state = start.sampler if start is not None and again else None
    answered = len(state["generated"]) if state is not None else 0
    constraint = grammars.start(settings.grammar, settings.eos_token_ids) if settings.grammar is not None else None
    sampler = Sampler(settings, ids[: len(ids) - answered], grammars.vocabulary, constraint, request.processors)
    if state is not None:
        sampler.restore(state)
    tokenizer = grammars.tokenizer
    text = None
    if tokenizer is not None:
        stops, shown = settings.stop_strings, settings.shown_ids
        text = TextStream(tokenizer, stops, context_ids=ids[-CONTEXT:].tolist(), shown_ids=shown)
    if start is not None and again and start.text is not None and text is not None:
        text.restore(start.text)
    done = 0 if start is None else start.length
    if answered:
        if sampler.finish_reason is not None:
            raise UsageError(
                f"the snapshot's answer has ended: {sampler.finish_reason}", "a prompt, or a larger max_new_tokens"
            )
        done = len(ids)  # the next step decodes from the last token
    elif done >= len(ids):
        raise UsageError("the snapshot has nothing to go on with", "give at least one token")
    request.initialize(ids, sampler, text, done)


def encode(
    prompt: Prompt, tokenizer: Tokenizer | None, vocabulary: int, max_length: int, after: Snapshot | None
) -> Ids:
    """Return the token ids of a prompt, after checks of their range and number. See `Engine.encode`."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError("the artifact has no tokenizer.json, so a prompt cannot be text", "pass token ids")
        prompt = tokenizer.encode(prompt, add_special_tokens=after is None)
    ids = _checked_ids(prompt, vocabulary, empty=after is not None)
    if after is not None:
        ids = np.concatenate([after.ids, ids])
    if ids.size >= max_length:
        raise UsageError(
            f"the prompt has {ids.size} tokens; with one token of answer it exceeds limits.max_length {max_length}",
            f"kvexport build --recipe NAME --set limits.max_length={ids.size + 256}, or a shorter prompt",
        )
    return ids


def _checked_ids(prompt: Sequence[int] | Ids, vocabulary: int, *, empty: bool) -> Ids:
    """Return token ids as [n] int64. Raise UsageError for other values, or for no ids unless `empty` is set."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size == 0 and not empty):
        raise UsageError("the prompt is empty", "give at least one token")
    if ids.size and ids.dtype.kind not in "iu":
        raise UsageError(f"token ids are integers, the prompt holds {ids.dtype}", "pass text, or a list of integers")
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        bad = int(ids[(ids < 0) | (ids >= vocabulary)][0])
        raise UsageError(
            f"token id {bad} is out of range: the vocabulary has {vocabulary}", "use the artifact's own tokenizer"
        )
    return ids.astype(np.int64)


def snapshot_of(request: Request, saved: Saved, origin: Origin) -> Snapshot:
    """Return a snapshot of a request: its saved KV cache with its tokens, sampler and settings."""
    text = None if request.text is None or request.state is FINISHED else request.text.state()
    state, settings = request.sampler.state(), request.sampler.settings
    return Snapshot(origin, request.seen, saved.state, saved.counters, state, text, settings, request.digest)


def waiting_state(request: Request, plan: CachePlan) -> Saved:
    """Return the saved state that a request without a lane begins with: an empty one if it brings none."""
    if request.parked is not None:
        return request.parked
    return _nothing_saved(plan) if request.start is None else request.start.saved


def _nothing_saved(plan: CachePlan) -> Saved:
    """Return the saved state of an empty lane: no KV-cache entries and counters of 0."""
    places = slot_places(plan)
    state = {}
    for name, _, layer, kind in plan.state_names():
        shape = list(layer.shapes(1)[kind][1:])
        if (axis := 1 if kind in RING else places[name].axis) is not None:
            shape[axis] = 0
        state[name] = np.zeros(shape, layer.dtypes()[kind])
    return Saved(state, Counters((0,) * len(plan.heads("capacity")), 0, 0))
