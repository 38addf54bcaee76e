"""Comparison of kvexport's operators with the authors' merging code of ZeroMerge and KeepKV, on a model's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import torch
from torch import Tensor

from benchmarks.correctness.peer_caches import (
    TOLERANCE,
    Cache,
    Heads,
    Row,
    appended,
    differing,
    jaccard,
    mean,
    merged,
    prefilled,
    raw,
    row,
    same,
)
from kvexport.methods.keepkv import KeepKV
from kvexport.methods.zeromerge import ZeroMerge

STEPS = LATER = 32  # tokens decoded after the prompt; queries whose attention is compared after it
TAIL, DENSE, BUDGET = 24, 8, 64
ZERO = {"cache_budget": BUDGET, "cache_tail": TAIL, "cache_dense": DENSE, "metric": "dot_product"}
FACTORS = {"scale_factor": 0.6, "shrink_factor": 0.98}
# The residual region of `DENSE` slots among the slots that remain unprotected when one entry is evicted.
ZEROMERGE = ZeroMerge(residual=(DENSE + 0.5) / (BUDGET - TAIL))


class TheirZeroMerge:
    """ZeroMerge's cache of one layer.

    Its code is called as the forward function of its attention does: `cache_update` and the scored attention.
    """

    def __init__(self, code: SimpleNamespace, prompt: Heads, score_update: str) -> None:
        self.code, self.group = code, prompt.group
        self.settings = {**ZERO, **FACTORS, "score_update": score_update, "layer_idx": 0}
        self.state = SimpleNamespace(key_cache=[], value_cache=[], _seen_tokens=0)
        _, self.scores = self._attend(prompt, prompt.key, prompt.value, None)
        self._update(prompt, init_f=True)

    def step(self, new: Heads) -> Tensor:
        """Append one token and return its output [1, Hq, 1, Dv]."""
        key = torch.cat([self.state.key_cache[0], new.key], 2)
        value = torch.cat([self.state.value_cache[0], new.value], 2)
        weight = torch.cat([self.state.pos_weight[0], torch.ones_like(new.key[..., 0])], -1)
        output, self.scores = self._attend(new, key, value, weight)
        self._update(new, init_f=False)
        return output

    def cache(self) -> Cache:
        """Convert the cache to a `Cache`.

        ZeroMerge's scores are sums over the query heads of a group, kvexport's are their means, so they are divided by
        the group. The order of slots stands for positions.
        """
        weight, score = self.state.pos_weight[0].clone(), self.state.pos_score[0] / self.group
        position = torch.arange(weight.shape[-1], dtype=torch.int32).expand(weight.shape).contiguous()
        return Cache(
            self.state.key_cache[0].clone(), self.state.value_cache[0].clone(), weight, score[:, :, None], position
        )

    def _attend(self, new: Heads, key: Tensor, value: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        key, value = (self.code.repeat_kv(x, self.group) for x in (key, value))
        weight = None if weight is None else self.code.repeat_kv(weight, self.group)
        output, scores = self.code.score_scaled_dot_product_attention(
            new.query, key, value, pos_weight=weight, **FACTORS
        )
        return output, self.code.de_repeat_kv(scores, self.group)

    def _update(self, new: Heads, *, init_f: bool) -> None:
        self.code.cache_update(
            self.state, new.key.clone(), new.value.clone(), scores=self.scores, init_f=init_f, **self.settings
        )


def _decode(theirs: TheirZeroMerge, ours: Cache, new: Heads, recent: int) -> tuple[Cache, float]:
    """Append every token of `new` to both caches; return kvexport's cache and the largest difference of outputs."""
    worst = 0.0
    for t in range(new.key.shape[2]):
        token = new.part(t, t + 1)
        output, ours = appended(ours, token, ZEROMERGE, BUDGET + t)
        ours = merged(ours, ZEROMERGE, BUDGET, recent=recent)
        worst = max(worst, float((theirs.step(token) - output).abs().max() / output.abs().max().clamp(min=1.0)))
    return ours, worst


def compare_zeromerge(code: SimpleNamespace, texts: list[list[Heads]], length: int) -> list[Row]:
    """Compare ZeroMerge's prefill and decode steps with kvexport's, layer by layer of every text."""
    layers = [heads for text in texts for heads in text]
    return [*_zeromerge_decoding(code, layers, length), *_zeromerge_prompt(code, layers, length)]


def _zeromerge_decoding(code: SimpleNamespace, layers: list[Heads], length: int) -> list[Row]:
    equal, by_maximum, ring, outputs = [], [], [], 0.0
    for heads in layers:
        text, new, end = heads.part(0, length), heads.part(length, length + STEPS), length + STEPS
        theirs, maximum, other = (TheirZeroMerge(code, text, how) for how in ("sum", "max", "sum"))
        start = theirs.cache()
        ours, worst = _decode(theirs, start, new, TAIL)
        _decode(maximum, start, new, TAIL)
        early, _ = _decode(other, start, new, TAIL - 1)
        outputs = max(outputs, worst)
        equal.append((ours, theirs.cache()))
        by_maximum.append((ours, maximum.cache()))
        ring.append((early, theirs.cache(), heads.part(0, end), heads.part(end, end + LATER)))
    what = f"{STEPS} decoding steps from their cache after the prompt, recent = their cache_tail"
    why = "an entry that has just left their ring cannot be evicted in the same step; ours can"
    return [
        same("ZeroMerge", what, equal, outputs=outputs),
        same(
            "ZeroMerge", "the same, their score_update 'max' (default): a residual's score selects nothing", by_maximum
        ),
        differing("ZeroMerge", "the same, recent = their ring, cache_tail - 1", why, ring, 0.6),
    ]


def _zeromerge_prompt(code: SimpleNamespace, layers: list[Heads], length: int) -> list[Row]:
    scores, at_once, chunked, kept, kept_chunked = [], [], [], [], []
    for heads in layers:
        text, later = heads.part(0, length), heads.part(length, length + LATER)
        theirs, whole = TheirZeroMerge(code, text, "sum"), prefilled(text, ZEROMERGE, length, length)
        ratio = theirs.scores / heads.group / whole.score[:, :, 0]
        scores.append(float((ratio - 1).abs().max()))
        context = theirs.scores[..., : length - TAIL].topk(BUDGET - TAIL - DENSE).indices
        ours = merged(whole, ZEROMERGE, BUDGET, recent=TAIL), prefilled(text, ZEROMERGE, BUDGET, 32, recent=TAIL)
        for cache, rows, overlaps in zip(ours, (at_once, chunked), (kept, kept_chunked), strict=True):
            rows.append((cache, theirs.cache(), text, later))
            overlaps.append(float(jaccard(_context(cache, length), context).mean()))
    grouping = (
        "their residual slots are means of consecutive tokens, ours (and the paper's rule) of the largest dot product"
    )
    early = "in chunks of 32, what has left is not attended to again; residual slots by dot product"
    return [
        row(
            "ZeroMerge",
            "decayed score of every prompt token, relative",
            largest=max(scores),
            holds=max(scores) <= TOLERANCE,
        ),
        differing(
            "ZeroMerge",
            "the prompt at once",
            grouping,
            at_once,
            0.6,
            context_jaccard=mean(kept),
            holds=min(kept) == 1.0,
        ),
        differing("ZeroMerge", "the prompt in chunks", early, chunked, 0.6, context_jaccard=mean(kept_chunked)),
    ]


def _context(cache: Cache, length: int) -> Tensor:
    """Return positions [1, H, N] of the best unprotected slots that have not merged.

    Their number is that of ZeroMerge's context.
    """
    free = (cache.position < length - TAIL) & (cache.votes == 1)
    score = torch.where(free, cache.score[:, :, 0], -torch.inf)
    return cache.position.gather(-1, score.topk(BUDGET - TAIL - DENSE).indices).long()


class ReceivingKeepKV(KeepKV):
    """KeepKV in which recent slots can be targets, as in the authors' code."""

    recent_receives: ClassVar[bool] = True


RECENT, HEAVY = 16, 48
EVICT_FIRST = {"order": "evict-first", "zip": "mean"}
TINY_HALF = torch.finfo(torch.float16).tiny


def their_keepkv(
    code: SimpleNamespace,
    heads: Heads,
    *,
    sinks: int = 0,
    newest: float = 1.0,
    epsilon: float = 0.0,
    half: bool = False,
) -> Cache:
    """Return the cache after the authors' `KV_update` of a whole prompt, in which query heads have keys of their own.

    With `half`, cosines and the result are in float16, as in the authors' code. Otherwise `Tensor.half` is replaced by
    `Tensor.float` during the call.
    """
    state = SimpleNamespace(
        previous_recent_scores=None,
        cluster_cnt=None,
        recent_budget=RECENT,
        heavy_budget=HEAVY,
        cache_budget=RECENT + HEAVY,
        distance_weight=newest,
        sink_len=sinks,
        similarity_threshold=0.8,
        epsilon=epsilon,
        num_heads=heads.key.shape[1],
    )
    with mock.patch.object(torch.Tensor, "half", torch.Tensor.half if half else torch.Tensor.float):
        key, value = code.KV_update(state, (heads.key.clone(), heads.value.clone()), heads.logits().exp())
    votes, score = state.cluster_cnt[None], state.previous_recent_scores.mean(1)[None, :, None]
    position = torch.arange(votes.shape[-1], dtype=torch.int32).expand(votes.shape).contiguous()
    return Cache(key.float(), value.float(), votes, score, position)


def window_score(heads: Heads, decay: float, newest: float = 1.0) -> Tensor:
    """Return the stored score [1, H, T] whose bias-corrected average equals the authors' score.

    The authors' score is the mean of exp(logit) over those of the last `RECENT` queries that see the slot. The newest
    weighs `newest` times the oldest.
    """
    logits = heads.logits()[:, :, -RECENT:]
    weight = torch.linspace(1.0, newest, RECENT)[:, None] * logits.isfinite()
    average = (weight * logits.exp()).sum(2).log() - weight.sum(2).log()
    seen = torch.arange(logits.shape[-1], 0, -1)
    return average + torch.log1p(-torch.exp(seen * math.log(decay)))


def apart(heads: Heads) -> Heads:
    """Return the layer with recent keys in dimensions that no other key has, so that no other key is similar."""
    half, key = heads.key.shape[3] // 2, heads.key.clone()
    key[:, :, :-RECENT, half:] = 0
    key[:, :, -RECENT:, :half] = 0
    return replace(heads, key=key)


def compare_keepkv(code: SimpleNamespace, texts: list[list[Heads]], length: int) -> list[Row]:
    """Compare KeepKV where the rules are equal, then one difference at a time.

    The authors' code knows no groups, so every query head has keys of its own.
    """
    layers = [heads.ungrouped() for text in texts for heads in text]
    cases = [(heads.part(0, length), heads.part(length, length + LATER)) for heads in layers]
    strict, plain = ReceivingKeepKV(**EVICT_FIRST), KeepKV(**EVICT_FIRST)

    def ours(text: Heads, method: KeepKV = strict, score: Tensor | None = None, sinks: int = 0) -> Cache:
        score = window_score(text, method.decay) if score is None else score
        return merged(raw(text, score), method, RECENT + HEAVY, sinks=sinks, recent=RECENT)

    def theirs(text: Heads) -> Cache:
        return their_keepkv(code, text)

    def differ(
        what: str, why: str, our: Callable[[Heads], Cache], their: Callable[[Heads], Cache] = theirs, **options: float
    ) -> Row:
        return differing(
            "KeepKV", what, why, [(our(text), their(text), text, later) for text, later in cases], 1.0, **options
        )

    def average(text: Heads) -> Tensor:
        return prefilled(text, plain, length, length).score[:, :, 0]

    separate = [apart(text) for text, _ in cases]
    what = "the prompt at once: evicted entries, targets, keys, values, votes"
    return [
        same(
            "KeepKV", f"{what}; no recent key like any other", [(ours(text, plain), theirs(text)) for text in separate]
        ),
        same(
            "KeepKV", f"{what}; recent slots of ours made to receive", [(ours(text), theirs(text)) for text, _ in cases]
        ),
        differ("ours as it is", "recent slots receive in theirs, not in ours", lambda t: ours(t, plain)),
        differ(
            "4 sinks",
            "sinks and recent slots receive in theirs, not in ours",
            lambda t: ours(t, plain, sinks=4),
            lambda t: their_keepkv(code, t, sinks=4),
        ),
        differ(
            "the newest query weighs 1.2 (their default)",
            "theirs selects by it and merges by the plain mean; ours (preset keepkv-v1) does both by it",
            lambda t: ours(t, score=window_score(t, strict.decay, 1.2)),
            lambda t: their_keepkv(code, t, newest=1.2),
        ),
        differ(
            "epsilon (their default)",
            "theirs adds 6.1e-5 to every exp(logit)",
            ours,
            lambda t: their_keepkv(code, t, epsilon=TINY_HALF),
        ),
        differ(
            "half precision (theirs always), slots to 2e-3",
            "cosines, keys and values in float16",
            ours,
            lambda t: their_keepkv(code, t, half=True),
            tolerance=2e-3,
        ),
        differ(
            "our score",
            f"theirs is a mean over {RECENT} queries, ours (and the paper) averages all",
            lambda t: ours(t, score=average(t)),
        ),
        differ(
            "our order",
            "theirs evicts first at the prompt, ours merges first (the paper's Table 3)",
            lambda t: ours(t, KeepKV(zip="mean")),
        ),
        differ(
            "our votes",
            "theirs adds votes up, ours stores fractional ones",
            lambda t: ours(t, KeepKV(order="evict-first")),
        ),
    ]
