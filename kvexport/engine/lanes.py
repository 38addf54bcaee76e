"""Lanes: how full the cache of each row of the batch is, and when it has to merge.

A lane merges on its own account, never because a neighbour needs room: what a sequence generates does not depend on the
batch it is in. Prompts merge chunk by chunk, or once, at their end (`cache.merge_prompts`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.base import LaneState, ModelState
from kvexport.backends.lane_state import with_whole_rings, without_replaced
from kvexport.cache import CachePlan
from kvexport.recipe.fields import MOST
from kvexport.state.lane import Counters, Saved

T = TypeVar("T")
Tokens = Sequence[int] | NDArray[np.int64]


class Lanes:
    """Drives a backend so that no cache ever exceeds its capacity."""

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
        self._capacity = np.array([layer.capacity for layer in plan.caches])
        self._budget = np.array([layer.budget for layer in plan.caches])
        self._merges = np.array([layer.merges for layer in plan.caches])
        # See `Counters`, [lanes, layers].
        self._held = np.zeros((lanes, len(plan.caches)), dtype=np.int64)
        # What a step asks and counts is Python's own integers, lane by lane, and its arrays are filled through views:
        # between two runs of a model the processor holds neither numpy's code nor the addresses of its pages, and
        # finding them again takes longer than all else here. Tokens since the last merge; how many may come before a
        # cache is full, and before one is over its budget.
        self._added, self._room, self._spare = [0] * lanes, [0] * lanes, [0] * lanes
        self.length = [0] * lanes  # tokens seen
        self.merges = 0  # how often a lane merged
        self._step = np.zeros((2, lanes, 1), dtype=np.int64)  # one token of every lane, and whether it is real
        self._step_ids, self._step_counts = (part.data.cast("B").cast("q") for part in self._step)
        self._count(range(lanes))

    def clear(self, first: int = 0, last: int | None = None, *, poisoned: bool = False) -> None:
        """Empty lanes first <= lane < last, all of them by default. poisoned: see `LaneState.clear`."""
        last = self.count if last is None else last
        self.state.clear(first, last, poisoned=poisoned)
        self._held[first:last] = 0
        self.length[first:last] = [0] * (last - first)
        self._count(range(first, last))

    def counters(self, lane: int) -> Counters:
        """What is counted of a lane now."""
        return Counters(tuple(self._held[lane].tolist()), self._added[lane], self.length[lane])

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Copies of a lane's state tensors (see `ModelState.read`)."""
        return self._state().read(lane, names)

    def view(self, lane: int) -> Mapping[str, NDArray[Any]] | None:
        """A lane's state tensors where they are (see `ModelState.view`)."""
        return self._state().view(lane)

    def write(self, lane: int, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over some of a lane's state tensors (see `ModelState.write`), every layer using as many slots as
        before."""
        self._state().write(lane, state)

    def save(self, lane: int) -> Saved:
        """A lane, for `restore`: all that is read of it later. A merge alone reads reference queries, so those are left
        out that will be replaced by then."""
        state = without_replaced(self._plan, self.read(lane), self.before_merge(lane))
        return Saved(state, self.counters(lane))

    def restore(self, lane: int, saved: Saved) -> None:
        """Make a lane what another was, of whatever lanes of the same plan that merge as often."""
        self._state().write(lane, with_whole_rings(self._plan, saved.state), saved.counters.length)
        self._set(lane, saved.counters)

    def before_merge(self, lane: int) -> int:
        """So many tokens, at the least, come to a lane before it merges next."""
        due = max(self._spare[lane] + 1, 1 if self._every_chunk else self.merge_every)
        full = self._room[lane] - self.prefill_chunk + 1  # then a chunk may find no room
        return max(min(due, full) - self._added[lane], 0)

    def copy(self, source: int, target: int) -> None:
        """Make a lane the same as another."""
        self._state().copy(source, target)
        self._set(target, self.counters(source))

    def _state(self) -> ModelState:
        return cast(ModelState, self.state)

    def _set(self, lane: int, counters: Counters) -> None:
        self._held[lane] = counters.held
        self.length[lane] = counters.length
        self._count((lane,), counters.added)

    def _count(self, lanes: Iterable[int], added: int = 0) -> None:
        """Start counting anew from `_held`."""
        for lane in lanes:
            held = self._held[lane]
            self._added[lane] = added
            # Positions are int32, and kernels count on from them over a cache: where that ends every sequence does.
            left = MOST - int(self._capacity.max()) - (self.length[lane] - added)
            self._room[lane] = min(int((self._capacity - held).min()), left)
            self._spare[lane] = (
                int((self._budget - held)[self._merges].min()) if self._merges.any() else self._room[lane]
            )

    def grow(self, state: LaneState, count: int) -> None:
        """Go on over another state, of more lanes, the first of which are these."""
        new = count - self.count
        self.state, self.count = state, count
        self._held = np.concatenate([self._held, np.zeros((new, self._held.shape[1]), dtype=np.int64)])
        self._step = np.zeros((2, count, 1), dtype=np.int64)
        self._step_ids, self._step_counts = (part.data.cast("B").cast("q") for part in self._step)
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
    ) -> NDArray[np.float32]:
        """Append at most `prefill_chunk` tokens per lane (none leaves a lane as it is) and merge where it is due: a
        chunk of a prompt at once, decoded tokens every `merge_every`. first: the lane of tokens[0], the next ones being
        those of its neighbours, while all other lanes take no part; None: there are tokens for each lane. unread: lanes
        whose prompts go on after this chunk; where prompts merge at their end, theirs do not merge yet. Logits as
        `LaneState.decode` gives them."""
        decode = self.state.decode if prefill else self.state.advance
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
        """As `append`, by another call of the state than `decode`; what that gives."""
        given = self._append(decode, tokens, first or 0, every=first is None)
        waits = () if self._every_chunk else unread
        counts, at_once = [len(t) for t in tokens], prefill and self._every_chunk
        if due := [
            lane
            for lane, count in enumerate(counts, first or 0)
            if count > 0 and lane not in waits and self._is_due(lane, at_once)
        ]:
            self._merge(due)
        return given

    def draft(self, tokens: Sequence[Tokens], *, first: int) -> NDArray[np.float32]:
        """As `append` of decoded tokens, some of which may be rolled back: nothing merges before `settle`, which
        follows for every lane that got tokens."""
        return self._append(self.state.decode, tokens, first)

    def settle(self, lane: int, rejected: int) -> None:
        """Forget the last so many of the tokens of a lane that `draft` appended, and merge where it is due."""
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
        """Append without a merge after it. every: there have to be tokens for each lane."""
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
        given = decode(*self._inputs(tokens, counts, width), first)
        for lane, count in enumerate(counts, first):
            self._added[lane] += count
            self.length[lane] += count
        return given

    def _inputs(
        self, tokens: Sequence[Tokens], counts: list[int], width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """input_ids [n, width] and query_length [n, 1] for n lanes."""
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

    def prefill(
        self, prompts: Sequence[NDArray[np.int64]], on_chunk: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Append whole prompts, chunk by chunk; the logits [lanes, vocabulary] after each prompt's last token.
        on_chunk(tokens done, tokens in all) is called after every chunk."""
        last: NDArray[np.float32] | None = None
        longest = max(len(p) for p in prompts)
        for start in range(0, longest, self.prefill_chunk):
            parts = [p[start : start + self.prefill_chunk] for p in prompts]
            unread = [lane for lane, prompt in enumerate(prompts) if len(prompt) > start + self.prefill_chunk]
            logits = self.append(parts, prefill=True, unread=unread)
            for lane, part in enumerate(parts):
                if len(part):
                    row = logits[lane, len(part) - 1 if logits.shape[1] > 1 else 0]
                    if last is None:
                        last = np.zeros((self.count, row.shape[0]), dtype=np.float32)
                    last[lane] = row
            if on_chunk is not None:
                on_chunk(min(start + self.prefill_chunk, longest), longest)
        if last is None:
            raise ValueError("no prompt has a token")
        return last

    def _merge(self, due: list[int]) -> None:
        """Merge the lanes that are due, in their order, one call per run of neighbours."""
        if not self._merges.any():
            return
        for _, run in itertools.groupby(enumerate(due), lambda item: item[1] - item[0]):
            lanes = [lane for _, lane in run]
            first, last = lanes[0], lanes[-1] + 1
            self.state.merge(first, last)
            self.merges += len(lanes)
            held = self._held[first:last] + np.array(self._added[first:last])[:, None]
            self._held[first:last] = np.where(self._merges, np.minimum(held, self._budget), held)
            self._count(lanes)
