"""A part of the entries of a full cache, in a cache of its own under the same ONNX graph and the same weights: what
drafts (`kvexport.engine.cache_drafter`), and what decode steps read (`kvexport.state.periodic`).

Its entries are copied: sinks, the latest ones, and of the others those of the highest score where the full cache's
method keeps one. So they are what the model computed over the cache that they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.base import LoadedModel
from kvexport.cache import CachePlan
from kvexport.errors import UsageError
from kvexport.schema.state import SCALES, StateTensor

Slots = NDArray[np.int64]  # of a layer [KV heads, n], or [1, n] of all its heads
LaneTensors = Mapping[str, NDArray[Any]]  # of one lane, by their input names, with all their slots
ENTRY = ("key", "value", "position", *(tensor.name for tensor in SCALES))  # what an entry is, beside its votes


class CachePart:
    """Lanes of such caches, one to begin with; `plan` is theirs (`kvexport.cache.part_plan`). what, fix: of the
    UsageError where state is not in the host's memory."""

    def __init__(self, manifest: Manifest, model: LoadedModel, plan: CachePlan, what: str, fix: str) -> None:
        self.plan = plan
        self.scored = manifest.recipe.cache.build_method().statistics[0].kind != "none"
        self.state, self.lanes = model.new_state(plan, 1), 1
        if self.state.view(0) is None:
            raise UsageError(f"{what} copies entries in the host's memory, and the cache is on a device", fix)

    def make(self, lanes: int) -> None:
        """Make sure that so many lanes are there."""
        if lanes > self.lanes:
            self.state, self.lanes = self.state.grown(lanes), lanes

    def view(self, lane: int) -> LaneTensors:
        """A lane's tensors where they are."""
        found = self.state.view(lane)
        assert found is not None
        return found

    def chosen(self, i: int, score: NDArray[np.float32] | None, used: int) -> Slots:
        """The slots of layer i of a full cache that belong into the part, ascending. score: by which those between
        sinks and the latest are chosen [KV heads, at least used]; None where the latest are. used: slots of the full
        cache."""
        layer = self.plan.caches[i]
        if used <= layer.budget:
            return np.arange(used)[None]
        if score is None:
            return np.concatenate([np.arange(layer.sinks), np.arange(used - layer.budget + layer.sinks, used)])[None]
        between = score[:, layer.sinks : used - layer.recent]
        count = layer.budget - layer.sinks - layer.recent
        highest = np.sort(np.argpartition(between, -count, axis=1)[:, -count:], axis=1) + layer.sinks
        first, latest = np.arange(layer.sinks), np.arange(used - layer.recent, used)
        heads = len(highest)
        return np.concatenate([np.tile(first, (heads, 1)), highest, np.tile(latest, (heads, 1))], axis=1)

    def entry(self, i: int) -> Iterable[StateTensor]:
        """The state tensors of layer i that an entry is copied with."""
        return [tensor for tensor in self.plan.caches[i].state if tensor.name in ENTRY]

    def copy(self, i: int, source: LaneTensors, target: LaneTensors, chosen: Slots, start: int) -> None:
        """Copy a layer's slots to those of another cache from `start` on, and empty the ones after them."""
        end = start + chosen.shape[1]
        for tensor in self.entry(i):
            given, taken = source[tensor.past(i)], target[tensor.past(i)]
            for head in range(len(given)):
                # By a mode that never raises, or numpy would copy by way of a buffer.
                np.take(given[head], chosen[head % len(chosen)], axis=0, out=taken[head, start:end], mode="clip")
        votes = target[f"past_key_values.{i}.votes"]
        votes[:, start:end], votes[:, end:] = 1, 0
