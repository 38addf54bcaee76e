"""Prefix cache: the beginning that several prompts share is read once.

After a prompt chunk was read and merged, the KV cache of its lane may be saved under the hash of all tokens so far.
Chunks are cut from the beginning of the sequence, so prompts with the same beginning have the same chunks. A later
prompt continues from the saved KV cache, and gets the same answer as without the prefix cache.
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
from kvexport.state.lane import Pins, Saved, within

Keys = dict[int, bytes]  # chunk border -> hash of the prompt's tokens before it
_REMEMBERED = 1 << 16  # the largest number of hashes of earlier prompts' chunk borders that are stored


class Prefixes:
    """A prefix cache: saved KV caches of prompt beginnings, at most `limit` bytes; the least recently used go first."""

    def __init__(self, chunk: int, limit: int) -> None:
        self.chunk, self.limit = chunk, limit
        self.nbytes = self.queries = self.hits = 0
        self._saved: OrderedDict[bytes, Saved] = OrderedDict()
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def keys(self, ids: NDArray[np.int64], borders: Iterable[int], adapter: str | None = None, pins: Pins = ()) -> Keys:
        """Return the hashes of a prompt's tokens up to the end of each chunk before its last token.

        The last token of a prompt is always read again, because the logits after the token are needed. Prompts have
        different hashes if their LoRA adapters differ, or their pinned (never evicted) tokens.
        """
        hashed, keys, start = hashlib.sha256((adapter or "").encode()), Keys(), 0
        for border in borders:
            hashed.update(ids[start:border].tobytes())
            if here := within(pins, start, border):
                hashed.update(repr(here).encode())
            keys[border], start = hashed.digest(), border
        return keys

    def begin(self, request: Request) -> Saved | None:
        """Return the state of the longest saved prefix of a request's prompt; None to read the whole prompt.

        The function adds to `request.borders` the ends of prompt chunks at which the KV cache should be saved.
        """
        keys = request.keys
        read = next((border for border in reversed(keys) if keys[border] in self._saved), 0)
        request.borders |= self._borders(keys, read)
        for key in keys.values():
            self._passed[key] = None
            self._passed.move_to_end(key)
        while len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)
        self.queries += len(request.ids)
        if not read:
            return None
        self.hits += read
        request.skip(read)
        self._saved.move_to_end(keys[read])
        return self._saved[keys[read]]

    def _borders(self, keys: Keys, read: int) -> set[int]:
        """Return the ends of prompt chunks at which a prompt's KV cache should be saved for later prompts.

        The result has the end of the prompt's last full chunk, ends at doubling distances before that, and the last end
        up to which an earlier prompt had the same tokens, because the next prompt is likely to differ there too.
        """
        last, back = max(keys, default=0), self.chunk
        borders = {last}
        while last - back > read:
            borders.add(max((border for border in keys if border <= last - back), default=0))
            back *= 2
        borders.add(next((border for border in reversed(keys) if keys[border] in self._passed), 0))
        return {border for border in borders if border > read}

    def leads(self, request: Request, prefilling: Iterable[Request]) -> bool:
        """Return whether another request, whose prompt is being read, will save a prefix that `request` can use."""
        keys = request.keys
        have = next((border for border in reversed(keys) if keys[border] in self._saved), 0)
        for other in prefilling:
            shared = next((border for border in reversed(keys) if other.keys.get(border) == keys[border]), 0)
            if shared > have and shared > other.done and other.state is PREFILLING:
                other.borders.add(shared)
                return True
        return False

    def save(self, requests: Sequence[Request], rows: Rows, lanes: Lanes) -> None:
        """Save the KV caches of requests that have read a chunk of the prompt after which a prefix should be saved.

        A KV cache that may contain NaN is not saved. `rows` are the logits after the prompt tokens that were read.
        """
        for i, request in enumerate(requests):
            if request.done not in request.borders or not np.isfinite(rows.row(i)).all():
                continue
            key = request.keys[request.done]
            # A lane that exceeds the memory limit is not copied.
            if key in self._saved or lanes.saved_bytes(request.lane) > self.limit:
                continue
            self._saved[key] = lanes.save(request.lane)
            self.nbytes += _bytes_of(self._saved[key])
            self._shrink()

    def _shrink(self) -> None:
        while self.nbytes > self.limit:
            self.nbytes -= _bytes_of(self._saved.popitem(last=False)[1])


def _bytes_of(saved: Saved) -> int:
    return sum(array.nbytes for array in saved.state.values())
