"""Lanes: which sequence sits where in the batch, how full its cache may be, and when it has to merge.

A lane merges on its own account, never because a neighbour needs room: what a sequence generates does not depend on the batch it
is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan


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
        self._used = np.zeros((lanes, len(plan.layers)), dtype=np.int64)  # upper bounds: a window may have dropped more
        self._since_merge = np.zeros(lanes, dtype=np.int64)
        self.length = np.zeros(lanes, dtype=np.int64)  # tokens seen

    def reset(self) -> None:
        """Empty every lane."""
        self.backend.reset()
        for array in (self._used, self._since_merge, self.length):
            array[:] = 0

    def append(self, tokens: Sequence[NDArray[np.int64]], *, prefill: bool = False) -> NDArray[np.float32]:
        """Append at most `prefill_chunk` tokens per lane (none leaves a lane as it is) and merge where it is due: a chunk of a prompt
        at once, decoded tokens every `merge_every`. Logits as the backend gives them."""
        counts = np.array([len(t) for t in tokens], dtype=np.int64)
        width = int(counts.max())
        if width == 0 or width > self.prefill_chunk:
            raise ValueError(f"a call takes 1 to {self.prefill_chunk} tokens of a sequence, not {width}")
        self._merge((self._used + counts[:, None] > self._capacity).any(1))
        if (self._used + counts[:, None] > self._capacity).any():
            raise ValueError("a sequence is longer than the cache was built for")
        input_ids = np.zeros((self.count, width), dtype=np.int64)
        for lane, ids in enumerate(tokens):
            input_ids[lane, : len(ids)] = ids
        logits = self.backend.decode(input_ids, counts[:, None])
        self._used += counts[:, None]
        self.length += counts
        self._since_merge += counts
        over = ((self._used > self._budget) & self._merges).any(1)
        self._merge(over & (counts > 0) & (prefill | (self._since_merge >= self.merge_every)))
        return logits

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

    def _merge(self, due: Any) -> None:
        """Merge the lanes that are due, one call per run of neighbours."""
        due = due & self._merges.any()
        lane = 0
        while lane < self.count:
            first = lane
            while lane < self.count and due[lane]:
                lane += 1
            if lane > first:
                self.backend.merge(first, lane)
                budget = np.where(self._merges, self._budget, self._capacity)
                self._used[first:lane] = np.minimum(self._used[first:lane], budget)
                self._since_merge[first:lane] = 0
            lane += 1
