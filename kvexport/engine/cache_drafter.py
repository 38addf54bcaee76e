"""Speculative decoding whose drafter is the model itself, with a copy of only some entries of its KV cache.

A draft step reads all weights, but only some entries of the cache. All entries of the small cache are copies from the
full cache, those of accepted tokens too. The small cache can therefore be rebuilt at any time. After any change of a
lane (another request, a snapshot, a move) its entries are selected again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.model_state import LoadedModel
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import Request
from kvexport.errors import KvexportError
from kvexport.plan.cache import CachePlan
from kvexport.state.selected_cache import LaneTensors, SelectedCache, Slots, by_heads

# The largest share of a step's bytes that a draft step may read. Two drafted tokens, each accepted with a probability
# of 0.8, still pay then if the call that verifies them costs 1.2 steps.
PAYS = 0.5


@dataclass
class _Copied:
    """The counters of one sequence in the drafter's small copy of the KV cache."""

    request: Request
    length: int  # tokens that the full cache had seen at the last copy
    used: list[int]  # used slots of each cache
    since: int = 0  # tokens since the entries were selected


class CacheDrafter:
    """A drafter for speculative decoding that runs the engine's own model over smaller copies of its KV caches."""

    def __init__(self, manifest: Manifest, model: LoadedModel, plan: CachePlan) -> None:
        self._full, self._plan, self._settings = manifest.cache, plan, manifest.recipe.speculate
        self._max_length = manifest.limits.max_length
        files = manifest.files.items()  # copied and linked weights
        self._weights = sum(x.bytes for name, x in files if name.endswith(".weights") or name.startswith("weights/"))
        self._selected = SelectedCache(
            manifest,
            model,
            plan,
            "speculate.draft is cache, which",
            "--set speculate.draft=ngram, or backend.device=cpu",
        )
        self._copied: dict[int, _Copied] = {}

    def __call__(self, requests: Sequence[Request], lanes: Lanes) -> list[list[int]]:
        """Draft the next tokens of each request, and return one list of token ids for each.

        A draft is empty if it would not save time (`speculate.after`), or if the full cache has no more entries than
        the small cache would.
        """
        drafts: list[list[int]] = [[] for _ in requests]
        left = [self._most(request, lanes) for request in requests]
        if max(left) < 1 or (self._settings.after is None and not self._pays(requests, lanes)):
            return drafts
        self._selected.extend(requests[-1].lane + 1)
        for request, count in zip(requests, left, strict=True):
            if count:
                self._copy(request, lanes)
        samplers = [request.sampler.twin() for request in requests]
        last = [request.last_token for request in requests]
        ids, counts = (np.zeros((requests[-1].lane + 1, 1), np.int64) for _ in range(2))
        while any(left):
            for i, request in enumerate(requests):
                ids[request.lane], counts[request.lane] = last[i], left[i] > 0
            logits = self._selected.state.decode(ids, counts)
            for i in [i for i, count in enumerate(left) if count]:
                try:
                    last[i] = samplers[i].next(logits[requests[i].lane, 0])
                except KvexportError:  # if no token can be sampled, the full cache's logits raise the error
                    left[i] = 0
                else:
                    drafts[i].append(last[i])
                    left[i] -= 1
        return drafts

    def _most(self, request: Request, lanes: Lanes) -> int:
        """Return the largest number of tokens to draft for a request; 0 if drafting would not save time."""
        if lanes.length[request.lane] <= max(self._settings.budget, self._settings.after or 0):
            return 0
        return max(0, min(self._settings.tokens, request.room(self._max_length) - 1))

    def _pays(self, requests: Sequence[Request], lanes: Lanes) -> bool:
        lengths = [lanes.length[request.lane] for request in requests]
        return self._weights + _bytes_read(self._plan, lengths) <= PAYS * (
            self._weights + _bytes_read(self._full, lengths)
        )

    def _copy(self, request: Request, lanes: Lanes) -> None:
        """Update the drafter's small KV cache of a request from the full cache.

        The entries since the last copy are added, or all entries are selected again.
        """
        lane, length = request.lane, lanes.length[request.lane]
        tensors, own = lanes.view(lane), self._selected.view(lane)
        assert tensors is not None
        full = by_heads(self._full, tensors)
        copied, layers = self._copied.get(lane), range(len(self._plan.caches))
        new = length - copied.length if copied is not None and copied.request is request else -1
        if copied is None or new < 0 or copied.since + new > self._settings.rebuild:
            copied, new = _Copied(request, length, [0] * len(layers)), 0
            scores = [full[f"past_key_values.{i}.score"][:, 0] if self._selected.scored else None for i in layers]
            selected = [self._selected.select(i, scores[i], self._used(i, full, length)) for i in layers]
        else:
            selected = [np.arange(new)[None] + (self._used(i, full, length) - new) for i in layers]
        for i in layers:
            self._selected.copy(i, full, own, self._slots(i, full, selected[i]), copied.used[i])
            copied.used[i] += selected[i].shape[1]
        copied.length, copied.since = length, copied.since + new
        self._copied[lane] = copied
        self._selected.state.write(lane, {}, length)

    def _used(self, i: int, full: Mapping[str, NDArray[Any]], length: int) -> int:
        return int(np.count_nonzero(full[f"past_key_values.{i}.votes"][0])) if self._full.caches[i].merges else length

    def _slots(self, i: int, full: LaneTensors, entries: Slots) -> Slots:
        """Return the KV-cache slots that hold the entries with given numbers; entries are numbered by position.

        An entry's number is its slot, unless a sliding window has dropped entries. A layer with a window has no scores,
        and all its heads keep the same positions.
        """
        if not self._full.caches[i].merges:
            return entries
        positions = full[f"past_key_values.{i}.position"][:, : self._used(i, full, 0)]
        slots: Slots = np.take(np.argsort(positions, axis=1, kind="stable"), entries[0], axis=1, mode="clip")
        return slots


def _bytes_read(plan: CachePlan, lengths: Sequence[int]) -> int:
    return sum(layer.slot_bytes() * min(length, layer.budget[0]) for layer in plan.caches for length in lengths)
