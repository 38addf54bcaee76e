"""Lanes, the rows of the batch. Each lane has a KV cache, and this module decides when the cache is compressed.

Compressing merges cache slots until the cache is within its budget. A lane is compressed only when its own cache needs
room, never because of another lane, so the tokens of a sequence do not depend on the batch. Prompts are compressed
after every chunk, or once at their end (`cache.merge_prompts`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.lane_state import with_whole_rings, without_replaced
from kvexport.backends.model_state import LaneState, ModelState
from kvexport.images.rows import CallImages
from kvexport.plan.cache import CachePlan
from kvexport.recipe.fields import MOST
from kvexport.state.lane import Counters, Pins, Saved, within

T = TypeVar("T")
Tokens = Sequence[int] | NDArray[np.int64]


class Lanes:
    """The lanes (rows of the batch) of a model's state. Their KV caches are compressed before they exceed capacity."""

    def __init__(
        self,
        state: LaneState,
        plan: CachePlan,
        lanes: int,
        *,
        prefill_chunk: int,
        merge_every: int,
        merge_prompts: Literal["chunks", "end"] = "chunks",
    ) -> None:
        self.state = state
        self._plan = plan
        self.count = lanes
        self.prefill_chunk = prefill_chunk
        self.merge_every = merge_every
        self._every_chunk = merge_prompts == "chunks"
        # Slots of each KV head of all layers.
        self._capacity, self._budget = plan.heads("capacity"), plan.heads("budget")
        self._merges = np.array([layer.merges for layer in plan.caches for _ in layer.capacity], bool)
        self._merges &= self._budget < self._capacity
        # Whether a KV head evicts tokens that the model still sees. In a layer with a sliding window, a head whose
        # budget covers the window evicts none of them.
        windows = np.array([layer.sliding_window for layer in plan.caches for _ in layer.capacity], np.int64)
        self._compresses = self._merges & ((windows == 0) | (self._budget < windows))
        # Names of the positions of caches from which pinned tokens could be evicted. In a layer with a sliding window
        # they leave with the window.
        self._pinnable = [
            f"past_key_values.{i}.position" for i, x in enumerate(plan.caches) if x.merges and not x.sliding_window
        ]
        self._pins: list[Pins] = [()] * lanes  # see `Counters`
        # Slots occupied after the last merge [lanes, KV heads]; see `Counters`.
        self._held = np.zeros((lanes, len(self._capacity)), dtype=np.int64)
        # A step counts in Python integers, lane by lane, and fills its arrays through memory views. While the model
        # runs, numpy's code and page addresses leave the processor's caches, so a call of numpy would take longer than
        # all other work of this class. For each lane, _added has the tokens since the last merge, _room the tokens that
        # fit after the last merge, and _spare the tokens after which a KV head is at its budget.
        self._added, self._room, self._spare = [0] * lanes, [0] * lanes, [0] * lanes
        self.length = [0] * lanes  # tokens seen
        self.merges = 0  # merges of single lanes
        self._step = np.zeros((2, lanes, 1), dtype=np.int64)  # for every lane a token, and 1 if the token is real
        self._step_ids, self._step_counts = (row.data.cast("B").cast("q") for row in self._step)
        self._count(range(lanes))

    def clear(self, first: int = 0, last: int | None = None, *, poisoned: bool = False) -> None:
        """Empty the KV caches of batch lanes first <= lane < last, or of all. `poisoned`: caches may contain NaN."""
        last = self.count if last is None else last
        self.state.clear(first, last, poisoned=poisoned)
        self._held[first:last] = 0
        self.length[first:last] = [0] * (last - first)
        self._pins[first:last] = [()] * (last - first)
        self._count(range(first, last))

    def counters(self, lane: int) -> Counters:
        """Return a sequence's counters: slots of each KV head after the last merge, tokens since then, all tokens."""
        return Counters(tuple(self._held[lane].tolist()), self._added[lane], self.length[lane], self._pins[lane])

    def pin(self, lane: int, pins: Pins) -> None:
        """Set the position ranges (first, end) of a sequence whose tokens are never evicted.

        Tokens in the ranges that were read before must have been pinned when they were read. The cache needs room for
        all of them (recipe key `cache.pinned`).
        """
        self._pins[lane] = pins

    def occupied(self, lane: int) -> float:
        """Return how many slots a sequence occupies, averaged over KV heads that evict; if none does, its tokens."""
        if not self._compresses.any():
            return self.length[lane]
        return float(self._held[lane][self._compresses].mean()) + self._added[lane]

    @property
    def budget(self) -> float:
        """The budget in cache slots, averaged over the KV heads that evict entries; infinite if no head evicts."""
        return float(self._budget[self._compresses].mean()) if self._compresses.any() else math.inf

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of one sequence's state tensors in host memory, as `ModelState.read` does."""
        return self._state().read(lane, names)

    def save(self, lane: int) -> Saved:
        """Return the state tensors and counters of one sequence, for `restore`.

        Recent queries that a method stores for its merges are left out if newer queries will replace them before the
        next merge.
        """
        state = without_replaced(self._plan, self.read(lane), self.before_merge(lane))
        return Saved(state, self.counters(lane))

    def saved_bytes(self, lane: int) -> int:
        """Return an upper bound of the bytes that `save` copies: occupied slots and stored recent queries."""
        used = iter(np.minimum(self._held[lane] + self._added[lane], self._capacity).tolist())
        caches = [
            replace(x, capacity=x.first_slots(max(itertools.islice(used, x.kv_heads)))) for x in self._plan.caches
        ]
        return replace(self._plan, caches=tuple(caches)).bytes()

    def restore(self, lane: int, saved: Saved) -> None:
        """Load a saved sequence, which may come from another engine with equal cache shapes and merge interval."""
        self._state().write(lane, with_whole_rings(self._plan, saved.state), saved.counters.length)
        self._set(lane, saved.counters)

    def before_merge(self, lane: int) -> int:
        """Return the smallest number of tokens that a sequence gets before its KV cache is compressed again."""
        due = max(self._spare[lane] + 1, 1 if self._every_chunk else self.merge_every)
        full = self._room[lane] - self.prefill_chunk + 1  # with more tokens, the next prompt chunk might not fit
        return max(min(due, full) - self._added[lane], 0)

    def copy(self, source: int, target: int) -> None:
        self._state().copy(source, target)
        self._set(target, self.counters(source))

    def _state(self) -> ModelState:
        return cast(ModelState, self.state)

    def _set(self, lane: int, counters: Counters) -> None:
        self._held[lane] = counters.held
        self.length[lane] = counters.length
        self._pins[lane] = counters.pins
        self._count((lane,), counters.added)

    def _count(self, lanes: Iterable[int], added: int = 0) -> None:
        for lane in lanes:
            occupied = self._held[lane]
            self._added[lane] = added
            # Positions are int32, and kernels add up to a capacity to a position. A sequence ends before one overflows.
            left = MOST - int(self._capacity.max(initial=0)) - (self.length[lane] - added)
            self._room[lane] = int((self._capacity - occupied).min(initial=left))
            self._spare[lane] = (
                int((self._budget - occupied)[self._merges].min()) if self._merges.any() else self._room[lane]
            )

    def grow(self, state: LaneState, count: int) -> None:
        new = count - self.count
        self.state, self.count = state, count
        self._held = np.concatenate([self._held, np.zeros((new, self._held.shape[1]), dtype=np.int64)])
        self._step = np.zeros((2, count, 1), dtype=np.int64)
        self._step_ids, self._step_counts = (row.data.cast("B").cast("q") for row in self._step)
        self._pins.extend([()] * new)
        for counts in (self._added, self._room, self._spare, self.length):
            counts.extend([0] * new)
        self._count(range(count - new, count))

    def append(
        self,
        tokens: Sequence[Tokens],
        *,
        first: int | None = None,
        prefill: bool = False,
        unread: Collection[int] = (),
        images: CallImages | None = None,
    ) -> NDArray[np.float32]:
        """Append tokens to batch lanes, compress the KV caches that are due, and return the logits.

        A cache over its budget is compressed after a prompt chunk (unless prompts are compressed at their end), or,
        during decoding, once it has `merge_every` new tokens.
        """
        decode = self.state.decode if prefill else self.state.advance
        if images is not None:
            decode = partial(self._state().decode_images, images=images)
        return self.append_by(decode, tokens, first=first, prefill=prefill, unread=unread)

    def append_by(
        self,
        decode: Callable[[NDArray[np.int64], NDArray[np.int64], int], T],
        tokens: Sequence[Tokens],
        *,
        first: int | None = None,
        prefill: bool = False,
        unread: Collection[int] = (),
    ) -> T:
        """Append tokens to batch lanes as `append` does, but by the model call `decode`; return what it returns."""
        result = self._append(decode, tokens, first or 0, every=first is None)
        waits = () if self._every_chunk else unread
        counts, at_once = [len(t) for t in tokens], prefill and self._every_chunk
        if due := [
            lane
            for lane, count in enumerate(counts, first or 0)
            if count > 0 and lane not in waits and self._is_due(lane, at_once)
        ]:
            self._merge(due)
        return result

    def begin(
        self, decode: Callable[[NDArray[np.int64], NDArray[np.int64], int], T], tokens: Sequence[Tokens], *, first: int
    ) -> T:
        """Append tokens to batch lanes by the model call `decode`; `merge_due` compresses the KV caches later."""
        return self._append(decode, tokens, first)

    def merge_due(self, lanes: Sequence[int]) -> None:
        """Compress those KV caches of batch lanes (in ascending order) that have `merge_every` new decoded tokens."""
        if due := [lane for lane in lanes if self._is_due(lane, at_once=False)]:
            self._merge(due)

    def draft(self, tokens: Sequence[Tokens], *, first: int) -> NDArray[np.float32]:
        """Append each sequence's last and drafted tokens without compression; then call `settle` for each lane."""
        return self._append(self.state.decode, tokens, first)

    def settle(self, lane: int, rejected: int) -> None:
        """Remove a sequence's last `rejected` drafted tokens; then compress its KV cache if enough tokens are new."""
        if rejected:
            self._state().rollback(lane, rejected)
            self._added[lane] -= rejected
            self.length[lane] -= rejected
        if self._is_due(lane, at_once=False):
            self._merge([lane])

    def _append(
        self,
        decode: Callable[[NDArray[np.int64], NDArray[np.int64], int], T],
        tokens: Sequence[Tokens],
        first: int,
        *,
        every: bool = False,
    ) -> T:
        counts = [len(t) for t in tokens]
        if every and len(counts) != self.count:
            raise ValueError(f"a call takes tokens for each of {self.count} sequences, not for {len(counts)}")
        width = max(counts)
        if width == 0 or width > self.prefill_chunk:
            raise ValueError(f"a call takes 1 to {self.prefill_chunk} tokens of a sequence, not {width}")
        if full := [lane for lane, count in enumerate(counts, first) if self._is_full(lane, count)]:
            self._merge(full)
            if any(self._is_full(lane, counts[lane - first]) for lane in full):
                raise ValueError(f"a sequence is longer than the cache was built for, or than positions, {MOST}")
        result = decode(*self._inputs(tokens, counts, width), first)
        for lane, count in enumerate(counts, first):
            self._added[lane] += count
            self.length[lane] += count
        return result

    def _inputs(
        self, tokens: Sequence[Tokens], counts: list[int], width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if width == 1:
            for i, count in enumerate(counts):
                self._step_counts[i] = count
                if count:
                    self._step_ids[i] = tokens[i][0]
            n = len(counts)
            return (self._step[0], self._step[1]) if n == self.count else (self._step[0, :n], self._step[1, :n])
        input_ids = np.zeros((len(counts), width), dtype=np.int64)
        for i, ids in enumerate(tokens):
            input_ids[i, : counts[i]] = ids
        return input_ids, np.array(counts, dtype=np.int64)[:, None]

    def _is_full(self, lane: int, count: int) -> bool:
        return self._added[lane] + count > self._room[lane]

    def _is_due(self, lane: int, at_once: bool) -> bool:
        return self._added[lane] > self._spare[lane] and (at_once or self._added[lane] >= self.merge_every)

    def prefill(self, prompts: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        last: NDArray[np.float32] | None = None
        for start in range(0, max(map(len, prompts)), self.prefill_chunk):
            chunks = [p[start : start + self.prefill_chunk] for p in prompts]
            unread = [lane for lane, prompt in enumerate(prompts) if len(prompt) > start + self.prefill_chunk]
            logits = self.append(chunks, prefill=True, unread=unread)
            for lane, chunk in enumerate(chunks):
                if len(chunk):
                    row = logits[lane, len(chunk) - 1 if logits.shape[1] > 1 else 0]
                    if last is None:
                        last = np.zeros((self.count, row.shape[0]), dtype=np.float32)
                    last[lane] = row
        if last is None:
            raise ValueError("no prompt has a token")
        return last

    def _merge(self, due: list[int]) -> None:
        """Compress the KV caches of batch lanes, with one call of the merge graph for each range of lanes."""
        if not self._merges.any():
            return
        for _, run in itertools.groupby(enumerate(due), lambda item: item[1] - item[0]):
            lanes = [lane for _, lane in run]
            first, last = lanes[0], lanes[-1] + 1
            pinned = [lane for lane in lanes if within(self._pins[lane], 0, self.length[lane])]
            for lane in pinned:
                self._age_pins(lane)
            self.state.merge(first, last)
            for lane in pinned:
                self._restore_pins(lane)
            self.merges += len(lanes)
            occupied = self._held[first:last] + np.array(self._added[first:last])[:, None]
            self._held[first:last] = np.where(self._merges, np.minimum(occupied, self._budget), occupied)
            self._count(lanes)

    def _age_pins(self, lane: int) -> None:
        """Lower the positions of a sequence's pinned (never evicted) slots below 0, where a merge evicts nothing.

        A pinned slot is never merged, so no other slot has its position.
        """
        length, bounds = self.length[lane], np.array(self._pins[lane]).reshape(-1)
        with self._positions(lane) as positions:
            for position in positions:
                # A range holds the positions that an odd number of bounds, its first position included, is not above.
                position[np.searchsorted(bounds, position, side="right") % 2 == 1] -= length

    def _restore_pins(self, lane: int) -> None:
        with self._positions(lane) as positions:
            for position in positions:
                position[position < 0] += self.length[lane]

    @contextmanager
    def _positions(self, lane: int) -> Iterator[list[NDArray[Any]]]:
        """Yield a sequence's slot positions, one array for each layer that can pin slots; changes are written back."""
        view = self._state().view(lane)
        state = self._state().read(lane, self._pinnable) if view is None else view
        yield [state[name] for name in self._pinnable]
        if view is None:
            self._state().write(lane, state)
