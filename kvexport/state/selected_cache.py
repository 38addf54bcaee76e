"""A smaller KV cache with copies of selected entries of a full cache, which the same ONNX graph and weights can read.

Drafts (`kvexport.engine.cache_drafter`) and periodic decode steps (`kvexport.state.periodic`) read it. Its entries are
the sinks, the latest entries and, if the full cache's method keeps scores, the other entries with the highest scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.model_state import LoadedModel
from kvexport.errors import UsageError
from kvexport.plan.cache import CachePlan
from kvexport.schema.state import SCALES, StateTensor

Slots = NDArray[np.int64]  # slots of a layer [KV heads, n], or [1, n] for all its heads
LaneTensors = Mapping[str, NDArray[Any]]  # views [KV heads, slots, ...] of one lane's tensors, by their input names
ENTRY = ("key", "value", "position", *(tensor.name for tensor in SCALES))  # the tensors of an entry, besides its votes


def by_heads(plan: CachePlan, tensors: Mapping[str, NDArray[Any]]) -> LaneTensors:
    """Return views [KV heads, slots, ...] of one lane's state tensors; of a score, [KV heads, K, slots]."""
    views = dict(tensors)
    for i, cache in enumerate(plan.caches):
        for tensor in cache.state:
            if tensor.slot_axis is not None:
                x, axis = tensors[tensor.past(i)], tensor.slot_axis - 1
                heads = x.reshape(
                    *x.shape[:axis], cache.kv_heads, x.shape[axis] // cache.kv_heads, *x.shape[axis + 1 :]
                )
                views[tensor.past(i)] = np.moveaxis(heads, axis, 0)
    return views


class SelectedCache:
    """Smaller KV caches that hold copies of entries of full caches, one smaller cache for each batch lane.

    The copied entries are the sinks, the latest entries, and the entries of highest score if slots have scores. There
    is
    one lane at first.
    """

    def __init__(self, manifest: Manifest, model: LoadedModel, plan: CachePlan, what: str, fix: str) -> None:
        self.plan = plan
        self.scored = manifest.recipe.cache.build_method().statistics[0].kind != "none"
        self.state, self.lanes = model.new_state(plan, 1), 1
        if self.state.view(0) is None:
            raise UsageError(f"{what} copies entries in the host's memory, and the cache is on a device", fix)

    def extend(self, lanes: int) -> None:
        if lanes > self.lanes:
            self.state, self.lanes = self.state.grown(lanes), lanes

    def view(self, lane: int) -> LaneTensors:
        tensors = self.state.view(lane)
        assert tensors is not None
        return by_heads(self.plan, tensors)

    def select(self, i: int, score: NDArray[np.float32] | None, used: int) -> Slots:
        """Return which KV-cache slots of a layer of the full cache the selected cache copies, ascending.

        Args:
            i: The layer.
            score: Scores of the slots [KV heads, at least used], which choose among the slots between sinks and latest
                slots. None takes the latest slots.
            used: Occupied slots of the full cache.

        Returns:
            Slots [KV heads, n], or [1, n] if all heads take the same.
        """
        layer = self.plan.caches[i]
        sinks, budget, recent = layer.sinks, layer.budget[0], layer.recent[0]
        if used <= budget:
            return np.arange(used)[None]
        if score is None:
            return np.concatenate([np.arange(sinks), np.arange(used - budget + sinks, used)])[None]
        between = score[:, sinks : used - recent]
        count = budget - sinks - recent
        highest = np.sort(np.argpartition(between, -count, axis=1)[:, -count:], axis=1) + sinks
        first, latest = np.arange(sinks), np.arange(used - recent, used)
        heads = len(highest)
        return np.concatenate([np.tile(first, (heads, 1)), highest, np.tile(latest, (heads, 1))], axis=1)

    def entry_tensors(self, i: int) -> Iterable[StateTensor]:
        """Return the state tensors of layer `i` that make up a KV-cache entry, such as its keys and values."""
        return [tensor for tensor in self.plan.caches[i].state if tensor.name in ENTRY]

    def copy(self, i: int, source: LaneTensors, target: LaneTensors, selected: Slots, start: int) -> None:
        """Copy KV-cache slots of a layer from one cache to another, and empty the slots after them."""
        end = start + selected.shape[1]
        for tensor in self.entry_tensors(i):
            old, new = source[tensor.past(i)], target[tensor.past(i)]
            for head in range(len(old)):
                # With a mode that may raise, NumPy would copy through a buffer.
                np.take(old[head], selected[head % len(selected)], axis=0, out=new[head, start:end], mode="clip")
        votes = target[f"past_key_values.{i}.votes"]
        votes[:, start:end], votes[:, end:] = 1, 0
