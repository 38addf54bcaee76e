"""Calls of the model that read prompts, decode and verify drafts, and the sampling of the requests' next tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from kvexport.backends.model_state import Pending
from kvexport.backends.rows import HostRows, Rows
from kvexport.engine.forks import Forks
from kvexport.engine.lane_pool import LanePool
from kvexport.engine.lanes import Tokens
from kvexport.engine.prefixes import Prefixes
from kvexport.engine.request import DECODING, Request, Timing
from kvexport.engine.speculation import Drafter
from kvexport.errors import KvexportError
from kvexport.images.rows import call_images, chunk_end


@dataclass(frozen=True)
class Ahead:
    """A decode call that the device already computes, and whose logits the host has not read yet."""

    # Requests of the call, in the order of their lanes. A request that ended after the call began needs no logits.
    requests: Sequence[Request]
    rows: Pending  # a function that waits for the logits and returns them


class ModelCalls:
    def __init__(self, pool: LanePool, forks: Forks, chunk: int, max_length: int) -> None:
        self.ahead: Ahead | None = None
        self._row_seconds = 0.0  # of one row (one token of one lane), on average over recent prefill calls
        self._pool, self._forks = pool, forks
        self._chunk, self._max_length = chunk, max_length

    def rows_within(self, seconds: float | None) -> int | None:
        if seconds is None:
            return None
        return int(seconds / self._row_seconds) if self._row_seconds else 0

    def prefill(self, requests: Sequence[Request], prefixes: Prefixes | None) -> list[Request]:
        """Read the next prompt chunk of each request in one model call.

        The requests must have neighbouring batch lanes.
        """
        start = time.perf_counter()
        parts = [slice(r.done, chunk_end(r.places, r.images, r.done, self._chunk)) for r in requests]
        chunks = [request.ids[part] for request, part in zip(requests, parts, strict=True)]
        unread = [request.lane for request, chunk in zip(requests, chunks, strict=True) if len(chunk) < request.unread]
        images = call_images([(r.places[part], r.images) for r, part in zip(requests, parts, strict=True)])
        logits = self._pool.lanes.append(chunks, first=requests[0].lane, prefill=True, unread=unread, images=images)
        cost = (time.perf_counter() - start) / (len(chunks) * max(map(len, chunks)))
        self._row_seconds += (cost - self._row_seconds) * (0.2 if self._row_seconds else 1.0)
        last = [len(chunk) - 1 if logits.shape[1] > 1 else 0 for chunk in chunks]
        rows = HostRows(logits[np.arange(len(chunks)), last])
        for timing in _timings(requests):
            timing.prefill_seconds += time.perf_counter() - start
        for request, chunk in zip(requests, chunks, strict=True):
            request.read(len(chunk))
        if prefixes is not None:
            prefixes.save(requests, rows, self._pool.lanes)
        read = [(i, request) for i, request in enumerate(requests) if request.state is DECODING]
        for i, request in read:
            self._forks.read(request, rows, i)
        return [self.choose(request, rows, i, decoded=False) for i, request in read]

    def decode(self, requests: Sequence[Request], drafter: Drafter | None, *, steady: bool = False) -> list[Request]:
        """Decode each request's next token in one model call, and return the requests that got tokens.

        With a drafter, a request may get several tokens: those of its draft that the model confirms. With `steady`, the
        next call will decode the same requests, so on a GPU it may begin before this one's tokens are read.

        The call covers all lanes (rows of the batch) up to the last request's lane. Lanes without one of the requests
        get no token, and their KV caches do not change.
        """
        start = time.perf_counter()
        if self.ahead is None and steady and drafter is None and self._may_follow(requests):
            self.ahead = Ahead(requests, self._begin(requests, self._pool.state.begin))
        if self.ahead is not None:
            return self.take_ahead(follow=steady and self._may_follow(requests))
        if drafter is not None and any(drafts := drafter(requests, self._pool.lanes)):
            return self._verify(requests, drafts, start)
        lanes, state = self._pool.lanes, self._pool.state
        tokens = _last_tokens(requests)
        rows: Rows
        count = state.top_logits
        if count and any(request.sampler.may_settle(count) for request in requests):
            rows = lanes.append_by(state.step, tokens, first=0)
        else:
            rows = HostRows(lanes.append(tokens, first=0)[:, 0])
        for timing in _timings(requests):
            timing.decode_seconds += time.perf_counter() - start
            timing.steps += 1
        return [self.choose(request, rows, request.lane) for request in requests]

    def _may_follow(self, requests: Sequence[Request]) -> bool:
        """Return whether every request takes the token of the largest logit next, so that the device can choose it."""
        return self._pool.state.runs_ahead and all(request.is_foreseen(self._max_length) for request in requests)

    def _begin(self, requests: Sequence[Request], decode: Callable[..., Pending]) -> Pending:
        """Start a decode call without compressing any KV cache; return a function that waits for the logits.

        The function `decode` starts the call with the last token of each request. If the device chose these tokens
        itself, `decode` may ignore its argument and use the device's tokens (`ModelState.follow`).
        """
        return self._pool.lanes.begin(decode, _last_tokens(requests), first=0)

    def take_ahead(self, *, follow: bool) -> list[Request]:
        """Read the logits of the decode call that runs on the device, and return the requests that got tokens.

        With `follow`, the device gets its next decode call before the logits are read. A request may have ended after
        the decode call started. The token appended to its KV cache then has no effect, because the cache is cleared
        before another request uses it.
        """
        start, call = time.perf_counter(), self.ahead
        assert call is not None
        self.ahead = None
        requests = [request for request in call.requests if request.state is DECODING]
        self._pool.lanes.merge_due([request.lane for request in requests])
        if follow:
            state = self._pool.state
            self.ahead = Ahead(requests, self._begin(requests, lambda *_: state.follow()))
        rows = call.rows()
        for timing in _timings(requests):
            timing.decode_seconds += time.perf_counter() - start
            timing.steps += 1
        for request in call.requests:
            if request.state is DECODING:
                self.choose(request, rows, request.lane)
            elif (top := rows.top_logits(request.lane)) is None or not isfinite(top.mass):
                self._pool.poisoned(request.lane)
        return requests

    def forget_ahead(self) -> None:
        """Wait for the decode call that runs on the device, if there is one, and drop its logits."""
        call, self.ahead = self.ahead, None
        if call is not None:
            call.rows()

    def _verify(self, requests: Sequence[Request], drafts: Sequence[Tokens], start: float) -> list[Request]:
        """Verify drafted (guessed) tokens in one model call, which reads each sequence's last token and its draft.

        Each row of logits gives one token of the answer, up to the first token that differs from the draft. That
        drafted token and all after it are removed from the KV cache. `start` is the time (time.perf_counter()) at which
        the step began.
        """
        lanes = self._pool.lanes
        tokens: list[Tokens] = [()] * (requests[-1].lane + 1)
        for request, draft in zip(requests, drafts, strict=True):
            tokens[request.lane] = (request.last_token, *draft)
        logits = lanes.draft(tokens, first=0)
        for request, draft in zip(requests, drafts, strict=True):
            rows, accepted = HostRows(logits[request.lane]), 0
            self.choose(request, rows, 0)
            while accepted < len(draft) and request.continues_with(draft[accepted]):
                accepted += 1
                self.choose(request, rows, accepted)
            lanes.settle(request.lane, len(draft) - accepted)
            request.timing.drafted_tokens += len(draft)
            request.timing.accepted_tokens += accepted
        for timing in _timings(requests):
            timing.decode_seconds += time.perf_counter() - start
            timing.steps += 1
        return list(requests)

    def choose(self, request: Request, rows: Rows, index: int, *, decoded: bool = True) -> Request:
        timing = request.timing
        try:
            top = rows.top_logits(index)
            token = None if top is None else request.sampler.next_of(top)
            if token is None:
                start = time.perf_counter()
                row = rows.row(index)
                if timing.whole_rows is not None and request.tokens:
                    timing.whole_rows += 1
                    timing.decode_seconds += time.perf_counter() - start
                token = request.sampler.next(row)
                if self.ahead is not None and top is not None and token != top.token:
                    raise KvexportError(
                        f"the device's search for the largest logits puts the token {top.token} before the token "
                        f"{token} of an equal logit and a lower number",
                        "EngineOptions(ahead=False)",
                    )
        except KvexportError as error:
            self._pool.poisoned(request.lane)
            request.finish("error", error)
        else:
            timing.generated_tokens += 1
            timing.decoded_tokens += decoded
            request.take(token, self._max_length)
        return request


def _last_tokens(requests: Sequence[Request]) -> list[Tokens]:
    """Return the last token of each request, one item per batch lane up to the last request's; empty for idle lanes."""
    tokens: list[Tokens] = [()] * (requests[-1].lane + 1)
    for request in requests:
        tokens[request.lane] = (request.last_token,)
    return tokens


def _timings(requests: Sequence[Request]) -> Iterable[Timing]:
    return {id(request.timing): request.timing for request in requests}.values()
