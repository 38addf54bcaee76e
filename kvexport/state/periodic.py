"""Decoding over some entries of a full KV cache, which are selected again after a number of tokens (`cache.periodic`).

The full cache evicts nothing: it reads prompts and gets the entries of decoded tokens. A decode step reads the selected
cache, a smaller one with copies of selected entries. Every `every` tokens, counted from the beginning of the sequence,
a step reads the full cache instead, so that the method's scores of all entries include the current query. These scores
then select the new entries. Decode steps read the new entries at once or, if a thread selects them, exactly `delay`
steps later. Between two selections only the scores of selected entries are updated. Until a sequence has more tokens
than the selected cache has slots, all steps read the full cache.

The length of the sequence alone decides when entries are selected, and the selection of a lane is saved with the lane.
Answers therefore do not depend on the batch, on threads, or on the moment of a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Manifest
from kvexport.backends.model_state import LoadedModel, ModelState
from kvexport.backends.rows import Rows
from kvexport.plan.planner import selected_plan
from kvexport.recipe.periodic import PeriodicSection
from kvexport.state.mapped_file import mapped
from kvexport.state.selected_cache import ENTRY, LaneTensors, SelectedCache, Slots, by_heads

# Tensors of a saved lane: the positions of the selected entries, and of those that are selected next.
READ, NEXT = "read_positions", "next_positions"
# For each layer: slots of the full cache, and copies of their content.
_Selection = tuple[list[Slots], list[dict[str, NDArray[Any]]]]


@dataclass(frozen=True)
class _Next:
    """A pending selection of the KV-cache entries that later decode steps will read."""

    selection: Future[_Selection]  # slots, and copies of their content
    start: int  # number of tokens in the full cache when the slots were selected


@dataclass(frozen=True)
class _Content:
    """The content of one lane's selected cache: copied slots of the full cache, then the tokens from `start` on."""

    slots: list[Slots]  # copied slots of the full cache, for each layer
    start: int  # number of the first token behind the copied slots
    copied: int  # number of tokens that are in the full cache. Later tokens are only in the selected cache.
    next: _Next | None = None  # next selection of slots, if one was started


def new_periodic(manifest: Manifest, model: LoadedModel, lanes: int) -> PeriodicState:
    """Return empty KV caches for `lanes` sequences, whose decode steps read selected entries of the full cache."""
    settings, plan = manifest.recipe.cache.periodic, selected_plan(manifest.recipe, manifest.cache)
    assert plan is not None
    fix = "--set cache.periodic.slots=null, or backend.device=cpu"
    selected = SelectedCache(manifest, model, plan, "cache.periodic", fix)
    memory = None
    if settings.store is not None:
        memory = partial(mapped, folder=settings.store, limit=settings.limit)
    selected.extend(lanes)
    return PeriodicState(model.new_state(manifest.cache, lanes, memory), selected, settings)


class PeriodicState(ModelState):
    """KV caches whose `decode` reads the full cache, and whose decode steps (`advance`) mostly read selected entries.

    A full cache that evicts nothing never moves an entry, so the slot of a token is its number in the sequence.
    """

    top_logits: int | None = None

    def __init__(self, full: ModelState, selected: SelectedCache, settings: PeriodicSection) -> None:
        self._full, self._selected, self._settings = full, selected, settings
        self._layers = range(len(selected.plan.caches))
        self._contents: dict[int, _Content] = {}
        self._length = [0] * selected.lanes
        self._thread: ThreadPoolExecutor | None = None

    def advance(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Run a decode step for lanes, which mostly reads only selected entries, and return logits.

        Calls with several tokens of a lane read the full cache.
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
                self._select_next(first + i)
        if not selected_length.any():
            assert full_logits is not None
            return full_logits
        logits = self._selected.state.decode(input_ids, selected_length, first)
        for i in np.flatnonzero(selected_length[:, 0]).tolist():
            self._length[first + i] += 1
        return logits if full_logits is None else np.where(selected_length[:, :, None] > 0, logits, full_logits)

    def _reads_selected(self, lane: int) -> bool:
        """Return whether a lane's decode step reads the selected cache, after bringing that cache up to date.

        Otherwise the step reads the full cache.
        """
        length, content, settings = self._length[lane], self._contents.get(lane), self._settings
        assert settings.slots is not None
        if length < settings.slots or length % settings.every == 0:
            self._settle(lane)
            return False
        if content is not None and content.next is not None and length >= content.next.start + settings.delay:
            self._settle(lane)
            slots, copies = content.next.selection.result()
            self._place(lane, slots, content.next.start, copies)
        elif content is None or content.slots[0].shape[1] + length - content.start >= settings.slots:
            self._settle(lane)
            self._place(lane, self._select(self._scores(lane), length), length)
        return True

    def _select_next(self, lane: int) -> None:
        """Select again the KV-cache entries that decode steps read, after a step that read the full KV cache."""
        content = self._contents.get(lane)
        if content is None:
            return
        if not self._settings.delay:
            self._forget(lane)
            return
        length, full = self._length[lane], self._view(lane)
        for i in self._layers:
            used = content.slots[i].shape[1] + content.copied - content.start
            self._selected.copy(i, full, self._selected.view(lane), np.arange(content.copied, length)[None], used)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "selection")
        selection = self._thread.submit(self._select_and_copy, full, self._scores(lane), length)
        self._contents[lane] = replace(content, copied=length, next=_Next(selection, length))
        self._give_statistics(lane)
        self._selected.state.write(lane, {}, length)

    def _select_and_copy(self, full: LaneTensors, scores: list[NDArray[np.float32] | None], length: int) -> _Selection:
        """Choose the entries that decode steps read by their scores; return the slots with copies of their content.

        The function may run in a thread: it reads only tensors that no step of the full cache changes.
        """
        slots = self._select(scores, length)
        return slots, [self._copies(i, full, selected) for i, selected in enumerate(slots)]

    def _select(self, scores: list[NDArray[np.float32] | None], length: int) -> list[Slots]:
        return [self._selected.select(i, score, length) for i, score in enumerate(scores)]

    def _scores(self, lane: int) -> list[NDArray[np.float32] | None]:
        """Return copies of the scores [KV heads, used] by which each layer's KV-cache slots are selected.

        None takes the latest slots.
        """
        if not self._selected.scored:
            return [None for _ in self._layers]
        full, length = self._view(lane), self._length[lane]
        return [full[f"past_key_values.{i}.score"][:, 0, :length].copy() for i in self._layers]

    def _copies(self, i: int, full: LaneTensors, selected: Slots) -> dict[str, NDArray[Any]]:
        copies = {}
        for tensor in self._selected.entry_tensors(i):
            source = full[tensor.past(i)]
            rows = [np.take(source[h], selected[h % len(selected)], axis=0, mode="clip") for h in range(len(source))]
            copies[tensor.past(i)] = np.stack(rows)
        return copies

    def _place(
        self, lane: int, slots: list[Slots], start: int, copies: list[dict[str, NDArray[Any]]] | None = None
    ) -> None:
        """Fill a lane's selected cache with copies of slots of the full cache, then of the tokens from `start` on.

        The full cache must be up to date.
        """
        full, own, length = self._view(lane), self._selected.view(lane), self._length[lane]
        for i, selected in enumerate(slots):
            count = selected.shape[1]
            if copies is None:
                self._selected.copy(i, full, own, selected, 0)
            else:
                self._selected.copy(i, copies[i], own, np.arange(count)[None], 0)
            if length > start:
                self._selected.copy(i, full, own, np.arange(start, length)[None], count)
        self._contents[lane] = _Content(slots, start, length)
        self._give_statistics(lane)
        self._selected.state.write(lane, {}, length)

    def _settle(self, lane: int) -> None:
        """Update a lane's full cache with the tokens and statistics that only the selected cache has."""
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
        """Copy the slots' scores and other statistics from a lane's full cache to its selected cache, or back."""
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
        """Return the positions of the entries that decode steps read, and of those of the pending selection."""
        content, full, positions = self._contents[lane], self._view(lane), {}
        late = np.arange(content.start, content.copied)
        slots_by_kind = {READ: [np.append(x, np.tile(late, (len(x), 1)), 1) for x in content.slots]}
        if content.next is not None:
            slots_by_kind[NEXT] = content.next.selection.result()[0]
        for kind, slots in slots_by_kind.items():
            for i, selected in enumerate(slots):
                position = full[f"past_key_values.{i}.position"]
                every = np.broadcast_to(selected, (len(position), selected.shape[1]))
                positions[_named(i, kind)] = np.take_along_axis(position, every, axis=1)
        return positions

    def _restore(self, lane: int, positions: Mapping[str, NDArray[Any]]) -> None:
        """Rebuild a lane's selected cache from the full cache, with the entries at the saved positions."""
        full, length, slots_by_name = self._view(lane), self._length[lane], {}
        for name, saved in positions.items():
            position = full[name.rpartition(".")[0] + ".position"][:, :length]
            order = np.argsort(position, axis=1, kind="stable")
            inside = [np.searchsorted(p[o], w) for p, o, w in zip(position, order, saved, strict=True)]
            slots_by_name[name] = np.take_along_axis(order, np.clip(np.stack(inside), 0, length - 1), axis=1)
        self._place(lane, [slots_by_name[_named(i, READ)] for i in self._layers], length)
        if _named(0, NEXT) in slots_by_name:
            slots, selection = [slots_by_name[_named(i, NEXT)] for i in self._layers], Future[_Selection]()
            selection.set_result((slots, [self._copies(i, full, selected) for i, selected in enumerate(slots)]))
            start = (length - 1) // self._settings.every * self._settings.every + 1
            self._contents[lane] = replace(self._contents[lane], next=_Next(selection, start))

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append tokens to batch lanes over the full KV cache and return logits, as `LaneState.decode` describes."""
        for i in np.flatnonzero(query_length[:, 0]).tolist():
            self._settle(first + i)
            self._forget(first + i)
        logits = self._full.decode(input_ids, query_length, first)
        for i, count in enumerate(query_length[:, 0].tolist(), first):
            self._length[i] += count
        return logits

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """Append one token to each lane over the full KV cache; return host logits as `ModelState.step` describes."""
        return self._full.step(input_ids, query_length, first)

    def merge(self, first: int, last: int) -> None:
        """Run the merge graph on lanes first <= lane < last. It evicts nothing, since the lanes keep all entries."""
        self._full.merge(first, last)

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Empty the full and the selected caches of lanes first <= lane < last, as `LaneState.clear` describes."""
        for each in (self._full, self._selected.state):
            each.clear(first, last, poisoned=poisoned)
        for lane in range(first, last):
            self._forget(lane)
            self._length[lane] = 0

    def grown(self, lanes: int) -> PeriodicState:
        """Return a state with more batch lanes, the first of which are copies of these; see `ModelState.grown`."""
        for lane in self._contents:
            self._settle(lane)
        full = self._full.grown(lanes)
        self._selected.extend(lanes)
        more = PeriodicState(full, self._selected, self._settings)
        more._contents, more._thread = self._contents, self._thread
        more._length[: len(self._length)] = self._length
        return more

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of one lane's state tensors from the full KV cache, as `ModelState.read` describes.

        If `names` is None, the positions of the selected entries are included.
        """
        self._settle(lane)
        tensors = self._full.read(lane, names)
        return tensors | self._positions(lane) if names is None and lane in self._contents else tensors

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        """Overwrite one lane's state tensors and rebuild its selected cache by saved positions (`ModelState.write`)."""
        self._settle(lane)
        self._forget(lane)
        positions = {name: array for name, array in state.items() if name.endswith((f".{READ}", f".{NEXT}"))}
        self._full.write(lane, {name: array for name, array in state.items() if name not in positions}, past_length)
        # Otherwise values that are not finite would stay in empty slots.
        self._selected.state.clear(lane, lane + 1, poisoned=True)
        if past_length is not None:
            self._length[lane] = past_length
        if positions:
            self._restore(lane, positions)

    def rollback(self, lane: int, count: int) -> None:
        """Remove a lane's last `count` tokens; the next step selects entries again."""
        self._settle(lane)
        self._forget(lane)
        self._full.rollback(lane, count)
        self._length[lane] -= count

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one batch lane over that of another, as `ModelState.copy` describes."""
        self._settle(source)
        self._full.copy(source, target)
        self._selected.state.copy(source, target)
        self._forget(target)
        if source in self._contents:
            self._contents[target] = self._contents[source]
        self._length[target] = self._length[source]

    def view(self, lane: int) -> Mapping[str, NDArray[Any]]:
        """Return views of the full KV cache's tensors of one lane, as `ModelState.view` describes."""
        self._settle(lane)
        return self._tensors(lane)

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all state tensors (full KV caches of all lanes), as `ModelState.get_state` describes."""
        for lane in self._contents:
            self._settle(lane)
        return self._full.get_state()

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        self._contents.clear()
        self._full.set_state(state, past_length)
        self._length[: len(past_length)] = past_length[:, 0].tolist()


def _named(i: int, kind: str) -> str:
    return f"past_key_values.{i}.{kind}"
