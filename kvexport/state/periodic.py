"""Decoding over some entries of a full KV cache, which are selected again after a number of tokens (`cache.periodic`).

The full cache evicts nothing: it reads prompts and gets the entries of decoded tokens. A decode step reads the selected
cache, a smaller one with copies of selected entries. The selected entries are the sinks (first positions), the latest
entries and, if the method keeps scores, the other entries with the highest scores. Every `every` tokens, counted from
the beginning of the sequence, a step reads the full cache instead, so that the scores of all entries include the
current query. These scores then select the new entries. Between two selections only the scores of selected entries are
updated. Until a sequence has more tokens than the selected cache has slots, all steps read the full cache.

The length of the sequence alone decides when entries are selected, and the selection of a lane (row of the batch) is
saved with the lane. Answers therefore do not depend on the batch, or on the moment of a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.model_state import LoadedModel, ModelState
from kvexport.backends.rows import Rows
from kvexport.errors import UsageError
from kvexport.plan.cache import CachePlan
from kvexport.plan.planner import selected_plan
from kvexport.recipe.cache import PeriodicSection
from kvexport.schema.state import SCALES, StateTensor

READ = "read_positions"  # the tensor of a saved lane with the positions of the selected entries
Slots = NDArray[np.int64]  # slots of a layer [KV heads, n], or [1, n] for all its heads
LaneTensors = Mapping[str, NDArray[Any]]  # views [KV heads, slots, ...] of one lane's tensors, by their input names
ENTRY = ("key", "value", "position", *(tensor.name for tensor in SCALES))  # the tensors of an entry, besides its votes


def by_heads(plan: CachePlan, tensors: Mapping[str, NDArray[Any]]) -> LaneTensors:
    """Return views [KV heads, ...] of one batch lane's state tensors, split into the slots of each KV head."""
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
    """For each batch lane, small KV caches with copies of entries that were selected from the lane's full KV caches."""

    def __init__(self, manifest: Manifest, model: LoadedModel, plan: CachePlan) -> None:
        self.plan = plan
        self.scored = manifest.recipe.cache.build_method().statistics[0].kind != "none"
        self.state, self.lanes = model.new_state(plan, 1), 1
        if self.state.view(0) is None:
            raise UsageError(
                "cache.periodic copies entries in the host's memory, and the cache is on a device",
                "--set cache.periodic.slots=null, or backend.device=cpu",
            )

    def extend(self, lanes: int) -> None:
        if lanes > self.lanes:
            self.state, self.lanes = self.state.grown(lanes), lanes

    def view(self, lane: int) -> LaneTensors:
        tensors = self.state.view(lane)
        assert tensors is not None
        return by_heads(self.plan, tensors)

    def select(self, i: int, score: NDArray[np.float32] | None, used: int) -> Slots:
        """Return the slots [KV heads, n] of a full cache to copy, ascending; [1, n] for all heads.

        Scores [KV heads, at least `used`] select among the slots between the sinks and the latest ones; without scores,
        the latest slots are selected.
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
        return [tensor for tensor in self.plan.caches[i].state if tensor.name in ENTRY]

    def copy(self, i: int, source: LaneTensors, target: LaneTensors, selected: Slots, start: int) -> None:
        """Copy KV-cache slots of a layer from one cache to another, and empty all later slots of the target."""
        end = start + selected.shape[1]
        for tensor in self.entry_tensors(i):
            old, new = source[tensor.past(i)], target[tensor.past(i)]
            for head in range(len(old)):
                # With a mode that may raise, NumPy would copy through a buffer.
                np.take(old[head], selected[head % len(selected)], axis=0, out=new[head, start:end], mode="clip")
        votes = target[f"past_key_values.{i}.votes"]
        votes[:, start:end], votes[:, end:] = 1, 0


@dataclass(frozen=True)
class _Content:
    """The content of a sequence's selected cache: copied slots of the full cache, then tokens from `start` on."""

    slots: list[Slots]  # copied slots of the full cache, for each layer
    start: int  # number of the first token behind the copied slots
    copied: int  # number of tokens that are in the full cache. Later tokens are only in the selected cache.


def new_periodic(manifest: Manifest, model: LoadedModel, lanes: int) -> PeriodicState:
    settings, plan = manifest.recipe.cache.periodic, selected_plan(manifest.recipe, manifest.cache)
    assert plan is not None
    selected = SelectedCache(manifest, model, plan)
    selected.extend(lanes)
    return PeriodicState(model.new_state(manifest.cache, lanes), selected, settings)


class PeriodicState(ModelState):
    """KV caches whose decode steps (`advance`) mostly read a smaller cache of entries selected from the full cache.

    The full cache evicts nothing and never moves an entry, so the slot of a token is its number in the sequence.
    `decode` always reads the full cache.
    """

    top_logits: int | None = None

    def __init__(self, full: ModelState, selected: SelectedCache, settings: PeriodicSection) -> None:
        self._full, self._selected, self._settings = full, selected, settings
        self._layers = range(len(selected.plan.caches))
        self._contents: dict[int, _Content] = {}
        self._length = [0] * selected.lanes

    def advance(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Run a decode step for batch lanes, which mostly reads only selected cache entries, and return logits.

        A model call with several tokens of a lane, such as a prompt chunk, reads the full cache.
        """
        if input_ids.shape[1] > 1:
            return self.decode(input_ids, query_length, first)
        selected_length = np.zeros_like(query_length)
        for i in np.flatnonzero(query_length[:, 0]).tolist():
            selected_length[i] = self._reads_selected(first + i)
        full_length, full_logits = query_length - selected_length, None
        if full_length.any():
            full_logits = self._full.decode(input_ids, full_length, first)
            for i in np.flatnonzero(full_length[:, 0]).tolist():
                self._length[first + i] += 1
                self._forget(first + i)
        if not selected_length.any():
            assert full_logits is not None
            return full_logits
        logits = self._selected.state.decode(input_ids, selected_length, first)
        for i in np.flatnonzero(selected_length[:, 0]).tolist():
            self._length[first + i] += 1
        return logits if full_logits is None else np.where(selected_length[:, :, None] > 0, logits, full_logits)

    def _reads_selected(self, lane: int) -> bool:
        """Return whether a decode step reads only a sequence's selected cache entries; if so, update them first."""
        length, content, settings = self._length[lane], self._contents.get(lane), self._settings
        assert settings.slots is not None
        if length < settings.slots or length % settings.every == 0:
            self._settle(lane)
            return False
        if content is None or content.slots[0].shape[1] + length - content.start >= settings.slots:
            self._settle(lane)
            scores: list[NDArray[np.float32] | None] = [None for _ in self._layers]
            if self._selected.scored:
                full = self._view(lane)
                scores = [full[f"past_key_values.{i}.score"][:, 0, :length] for i in self._layers]
            self._place(lane, [self._selected.select(i, score, length) for i, score in enumerate(scores)])
        return True

    def _place(self, lane: int, slots: list[Slots]) -> None:
        full, own, length = self._view(lane), self._selected.view(lane), self._length[lane]
        for i, selected in enumerate(slots):
            self._selected.copy(i, full, own, selected, 0)
        self._contents[lane] = _Content(slots, length, length)
        self._give_statistics(lane)
        self._selected.state.write(lane, {}, length)

    def _settle(self, lane: int) -> None:
        """Update a sequence's full KV cache with the tokens and statistics that only its selected cache has."""
        content, length = self._contents.get(lane), self._length[lane]
        if content is None:
            return
        full, own = self._view(lane), self._selected.view(lane)
        for i in self._layers:
            used = content.slots[i].shape[1] + content.copied - content.start
            if new := length - content.copied:
                self._selected.copy(i, own, full, np.arange(used, used + new)[None], content.copied)
        self._contents[lane] = content = replace(content, copied=length)
        self._give_statistics(lane, to_full=True)
        self._full.write(lane, {}, length)

    def _give_statistics(self, lane: int, *, to_full: bool = False) -> None:
        """Copy the scores and other statistics of a sequence's slots from the full to the selected cache, or back."""
        content, full, own = self._contents[lane], self._view(lane), self._selected.view(lane)
        late = np.arange(content.start, content.copied)
        for i in self._layers:
            slots = [np.concatenate([head, late]) for head in content.slots[i]]
            for tensor in self._selected.plan.caches[i].state:
                if tensor.name in ENTRY or tensor.name == "votes":
                    continue
                full_tensor, selected_tensor = full[tensor.past(i)], own[tensor.past(i)]
                if tensor.slot_axis is None:
                    (full_tensor if to_full else selected_tensor)[...] = selected_tensor if to_full else full_tensor
                    continue
                for head in range(len(full_tensor)):
                    selected = slots[head % len(slots)]
                    of_full, of_selected = (
                        np.moveaxis(x[head], tensor.slot_axis - 1, 0) for x in (full_tensor, selected_tensor)
                    )
                    if to_full:
                        of_full[selected] = of_selected[: len(selected)]
                    else:
                        of_selected[: len(selected)] = of_full[selected]

    def _view(self, lane: int) -> LaneTensors:
        return by_heads(self._selected.plan, self._tensors(lane))

    def _tensors(self, lane: int) -> Mapping[str, NDArray[Any]]:
        tensors = self._full.view(lane)
        assert tensors is not None
        return tensors

    def _forget(self, lane: int) -> None:
        self._contents.pop(lane, None)

    def _positions(self, lane: int) -> dict[str, NDArray[np.int32]]:
        content, full, positions = self._contents[lane], self._view(lane), {}
        late = np.arange(content.start, content.copied)
        for i, slots in enumerate(content.slots):
            position = full[f"past_key_values.{i}.position"]
            selected = np.append(slots, np.tile(late, (len(slots), 1)), 1)
            every = np.broadcast_to(selected, (len(position), selected.shape[1]))
            positions[f"past_key_values.{i}.{READ}"] = np.take_along_axis(position, every, axis=1)
        return positions

    def _restore(self, lane: int, positions: Mapping[str, NDArray[Any]]) -> None:
        full, length, slots = self._view(lane), self._length[lane], []
        for i in self._layers:
            position = full[f"past_key_values.{i}.position"][:, :length]
            order = np.argsort(position, axis=1, kind="stable")
            saved = positions[f"past_key_values.{i}.{READ}"]
            inside = [np.searchsorted(p[o], w) for p, o, w in zip(position, order, saved, strict=True)]
            slots.append(np.take_along_axis(order, np.clip(np.stack(inside), 0, length - 1), axis=1))
        self._place(lane, slots)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        for i in np.flatnonzero(query_length[:, 0]).tolist():
            self._settle(first + i)
            self._forget(first + i)
        logits = self._full.decode(input_ids, query_length, first)
        for i, count in enumerate(query_length[:, 0].tolist(), first):
            self._length[i] += count
        return logits

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        return self._full.step(input_ids, query_length, first)

    def merge(self, first: int, last: int) -> None:
        self._full.merge(first, last)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        for each in (self._full, self._selected.state):
            each.clear(first, last, poisoned=poisoned)
        for lane in range(first, last):
            self._forget(lane)
            self._length[lane] = 0

    def grown(self, lanes: int) -> PeriodicState:
        for lane in self._contents:
            self._settle(lane)
        full = self._full.grown(lanes)
        self._selected.extend(lanes)
        more = PeriodicState(full, self._selected, self._settings)
        more._contents = self._contents
        more._length[: len(self._length)] = self._length
        return more

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        self._settle(lane)
        tensors = self._full.read(lane, names)
        return tensors | self._positions(lane) if names is None and lane in self._contents else tensors

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        self._settle(lane)
        self._forget(lane)
        positions = {name: array for name, array in state.items() if name.endswith(f".{READ}")}
        self._full.write(lane, {name: array for name, array in state.items() if name not in positions}, past_length)
        # Otherwise values that are not finite would stay in empty slots.
        self._selected.state.clear(lane, lane + 1, poisoned=True)
        if past_length is not None:
            self._length[lane] = past_length
        if positions:
            self._restore(lane, positions)

    def rollback(self, lane: int, count: int) -> None:
        self._settle(lane)
        self._forget(lane)
        self._full.rollback(lane, count)
        self._length[lane] -= count

    def copy(self, source: int, target: int) -> None:
        self._settle(source)
        self._full.copy(source, target)
        self._selected.state.copy(source, target)
        self._forget(target)
        if source in self._contents:
            self._contents[target] = self._contents[source]
        self._length[target] = self._length[source]

    def view(self, lane: int) -> Mapping[str, NDArray[Any]]:
        self._settle(lane)
        return self._tensors(lane)

    def get_state(self) -> dict[str, NDArray[Any]]:
        for lane in self._contents:
            self._settle(lane)
        return self._full.get_state()

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        self._contents.clear()
        self._full.set_state(state, past_length)
        self._length[: len(past_length)] = past_length[:, 0].tolist()
