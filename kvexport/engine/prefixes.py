"""Prompt snapshots: what many prompts begin with is read once.

A lane is saved where a chunk of a prompt ends, after the chunk was merged, under the hash of all tokens up to there. A
prompt that begins with the same tokens has the same chunks, so that it goes on from there as if it had read them: with
the tokens of a cold run. Borders of chunks count from the beginning of the sequence.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.rows import Rows
from kvexport.engine.lanes import Lanes
from kvexport.engine.request import PREFILLING, Request
from kvexport.state.lane import Saved

Keys = dict[int, bytes]  # of a prompt: the hash of its tokens up to every border
_REMEMBERED = 1 << 16  # hashes of borders that were passed


class Prefixes:
    """Saved lanes of at most `limit` bytes, the least recently used of which make room for others. chunk: tokens
    between borders. queries, hits: tokens of prompts that were looked for, and found."""

    def __init__(self, chunk: int, limit: int) -> None:
        self.chunk, self.limit = chunk, limit
        self.nbytes = self.queries = self.hits = 0
        self._saved: OrderedDict[bytes, Saved] = OrderedDict()
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """How many lanes are saved."""
        return len(self._saved)

    def keys(self, ids: NDArray[np.int64]) -> Keys:
        """The hashes of a prompt. Its last token is behind all borders: the logits after it have to be computed."""
        hashed, keys = hashlib.sha256(), Keys()
        for border in range(self.chunk, len(ids), self.chunk):
            hashed.update(ids[border - self.chunk : border].tobytes())
            keys[border] = hashed.digest()
        return keys

    def begin(self, request: Request) -> Saved | None:
        """Where a request's prompt goes on from, the farthest of what is saved; None: it is read from its beginning.
        Says in `request.borders` where its lane is to be saved."""
        keys = request.keys
        found = next((border for border in reversed(keys) if keys[border] in self._saved), 0)
        request.borders |= self._wanted(keys, found)
        for key in keys.values():
            self._passed[key] = None
            self._passed.move_to_end(key)
        while len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)
        self.queries += len(request.ids)
        if not found:
            return None
        self.hits += found
        request.skip(found)
        self._saved.move_to_end(keys[found])
        return self._saved[keys[found]]

    def _wanted(self, keys: Keys, found: int) -> set[int]:
        """The prompt's last border, some before it, fewer the farther back, and the last one that another prompt passed
        as well: there the next one will part from both."""
        last, back = max(keys, default=0), self.chunk
        wanted = {last}
        while last - back > found:
            wanted.add(last - back)
            back *= 2
        wanted.add(next((border for border in reversed(keys) if keys[border] in self._passed), 0))
        return {border for border in wanted if border > found}

    def leads(self, request: Request, prefilling: Iterable[Request]) -> bool:
        """Whether one of those whose prompts are being read will soon save what this request can go on from: waiting
        for it is faster than reading the same beside it."""
        keys = request.keys
        have = next((border for border in reversed(keys) if keys[border] in self._saved), 0)
        for other in prefilling:
            shared = next((border for border in reversed(keys) if other.keys.get(border) == keys[border]), 0)
            if shared > have and shared > other.done and other.state is PREFILLING:
                other.borders.add(shared)
                return True
        return False

    def save(self, requests: Sequence[Request], rows: Rows, lanes: Lanes) -> None:
        """Keep the lanes of requests that have read up to a border where they are to be saved; none that may hold
        NaN. rows: the logits after what was read."""
        for i, request in enumerate(requests):
            if request.done in request.borders and np.isfinite(rows.row(i)).all():
                self._put(request, lanes.save(request.lane))

    def _put(self, request: Request, saved: Saved) -> None:
        key, size = request.keys[request.done], _bytes_of(saved)
        if key in self._saved or size > self.limit:
            return
        self._saved[key] = saved
        self.nbytes += size
        while self.nbytes > self.limit:
            self.nbytes -= _bytes_of(self._saved.popitem(last=False)[1])


def _bytes_of(saved: Saved) -> int:
    return sum(array.nbytes for array in saved.state.values())
