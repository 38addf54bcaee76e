"""Lanes: which sequence sits where in the batch, how full its cache may be, and when it has to merge.

A lane merges on its own account, never because a neighbour needs room: what a sequence generates does not depend on the batch it
is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan

T = TypeVar("T")


class Backend(Protocol):
    """What runs the two graphs on the state of a fixed number of lanes."""

    def decode(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append [lanes, T] tokens of which the first query_length [lanes, 1] are real; logits [lanes, 1 or T, vocabulary]. The array
        may be overwritten by the next call."""
        ...

    def merge(self, first: int, last: int) -> None:
        """Bring lanes first <= lane < last back within their budgets."""
        ...

    def reset(self) -> None:
        """Empty every lane."""
        ...


class Lanes:
    """Drives a backend so that no cache ever exceeds its capacity."""

    def __init__(self, backend: Backend, plan: CachePlan, lanes: int, *, prefill_chunk: int, merge_every: int) -> None:
        self.backend = backend
        self.count = lanes
        self.prefill_chunk = prefill_chunk
        self.merge_every = merge_every
        self._capacity = np.array([layer.capacity for layer in plan.layers])
        self._budget = np.array([layer.budget for layer in plan.layers])
        self._merges = np.array([layer.merges for layer in plan.layers])
        # Slots that were taken when a lane last merged (at most: a window may have dropped more), [lanes, layers]; the tokens since; and
        # how many tokens may come on top of the former before a cache is full, and before one is over its budget. A step asks the last
        # three alone: between two runs of a model the processor's caches hold neither numpy's code nor its arrays.
        self._held = np.zeros((lanes, len(plan.layers)), dtype=np.int64)
        self._added, self._room, self._spare = [0] * lanes, [0] * lanes, [0] * lanes
        self.length = np.zeros(lanes, dtype=np.int64)  # tokens seen
        self._count(range(lanes))

    def reset(self) -> None:
        """Empty every lane."""
        self.backend.reset()
        self._held[:] = 0
        self.length[:] = 0
        self._count(range(self.count))

    def _count(self, lanes: Iterable[int]) -> None:
        """Start counting anew from `_held`."""
        for lane in lanes:
            held = self._held[lane]
            self._added[lane] = 0
            self._room[lane] = int((self._capacity - held).min())
            self._spare[lane] = int((self._budget - held)[self._merges].min()) if self._merges.any() else self._room[lane]

    def append(self, tokens: Sequence[NDArray[np.int64]], *, prefill: bool = False) -> NDArray[np.float32]:
        """Append at most `prefill_chunk` tokens per lane (none leaves a lane as it is) and merge where it is due: a chunk of a prompt
        at once, decoded tokens every `merge_every`. Logits as the backend gives them."""
        return self.append_by(self.backend.decode, tokens, prefill=prefill)

    def append_by(
        self, decode: Callable[[NDArray[np.int64], NDArray[np.int64]], T], tokens: Sequence[NDArray[np.int64]], *, prefill: bool = False
    ) -> T:
        """As `append`, by another of the backend's calls; what that gives."""
        counts = [len(t) for t in tokens]
        width = max(counts)
        if width == 0 or width > self.prefill_chunk:
            raise ValueError(f"a call takes 1 to {self.prefill_chunk} tokens of a sequence, not {width}")
        self._merge([self._is_full(lane, count) for lane, count in enumerate(counts)])
        if any(self._is_full(lane, count) for lane, count in enumerate(counts)):
            raise ValueError("a sequence is longer than the cache was built for")
        input_ids = np.zeros((self.count, width), dtype=np.int64)
        for lane, ids in enumerate(tokens):
            input_ids[lane, : counts[lane]] = ids
        added = np.array(counts, dtype=np.int64)
        given = decode(input_ids, added[:, None])
        self.length += added
        self._added = [a + count for a, count in zip(self._added, counts, strict=True)]
        self._merge([count > 0 and self._is_due(lane, prefill) for lane, count in enumerate(counts)])
        return given

    def _is_full(self, lane: int, count: int) -> bool:
        return self._added[lane] + count > self._room[lane]

    def _is_due(self, lane: int, prefill: bool) -> bool:
        return self._added[lane] > self._spare[lane] and (prefill or self._added[lane] >= self.merge_every)

    def prefill(self, prompts: Sequence[NDArray[np.int64]], on_chunk: Callable[[int, int], None] | None = None) -> NDArray[np.float32]:
        """Append whole prompts, chunk by chunk; the logits [lanes, vocabulary] after each prompt's last token. on_chunk(tokens done,
        tokens in all) is called after every chunk."""
        last: NDArray[np.float32] | None = None
        longest = max(len(p) for p in prompts)
        for start in range(0, longest, self.prefill_chunk):
            parts = [p[start : start + self.prefill_chunk] for p in prompts]
            logits = self.append(parts, prefill=True)
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

    def _merge(self, due: list[bool]) -> None:
        """Merge the lanes that are due, one call per run of neighbours."""
        if not any(due) or not self._merges.any():
            return
        lane = 0
        while lane < self.count:
            first = lane
            while lane < self.count and due[lane]:
                self._held[lane] += self._added[lane]
                lane += 1
            if lane > first:
                self.backend.merge(first, lane)
                held = self._held[first:lane]
                self._held[first:lane] = np.where(self._merges, np.minimum(held, self._budget), held)
                self._count(range(first, lane))
            lane += 1
