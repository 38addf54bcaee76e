"""The two operators once more, in float64 numpy with plain loops, written from docs/contract.md and the methods' definitions alone.

It shares no code with `kvexport.ops` or the methods' rules: of `kvexport` it reads the attributes only. Scores are kept as ln S where
the contract says so, but every sum is taken in the linear domain, which float64 holds for logits beyond +-200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvexport.methods.base import Method, Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes

Arrays = dict[str, np.ndarray]


def vote_attention(inputs: Arrays, attributes: VoteAttentionAttributes) -> Arrays:
    """output [B, Hq, T, Dv] and the five present tensors, floats in float64."""
    query = inputs["query"].astype(np.float64)
    state = {name: inputs[f"past_{name}"].copy() for name in ("key", "value", "votes", "score", "position")}
    present = {name: x if name == "position" else x.astype(np.float64) for name, x in state.items()}
    batch, query_heads, tokens, _ = query.shape
    heads = present["key"].shape[1]
    group = query_heads // heads
    output = np.zeros((batch, query_heads, tokens, present["value"].shape[3]))
    for b in range(batch):
        length = int(inputs["query_length"][b, 0])
        for h in range(heads):
            used = int((present["votes"][b, h] > 0).sum())
            for t in range(length):
                present["key"][b, h, used + t] = inputs["key"][b, h, t]
                present["value"][b, h, used + t] = inputs["value"][b, h, t]
                present["votes"][b, h, used + t] = 1.0
                present["position"][b, h, used + t] = inputs["position"][b, t]
            logits = np.full((length, group, used + length), np.nan)  # nan: not visible
            probability = np.zeros((length, group, used + length))
            for t in range(length):
                for g in range(group):
                    sink = float(inputs["sink_logits"][h * group + g]) if "sink_logits" in inputs else None
                    now = int(inputs["position"][b, t])
                    row = _attend(query[b, h * group + g, t], present, b, h, used + length, now, sink, attributes)
                    logits[t, g], probability[t, g], output[b, h * group + g, t] = row
            for k, statistic in enumerate(attributes.statistics):
                if length and statistic.kind != "none":
                    past = present["score"][b, h, k]
                    for c in range(used + length):
                        past[c] = _updated(past[c], c >= used, logits[:, :, c], probability[:, :, c], statistic)
    return {"output": output, **{f"present_{name}": x for name, x in present.items()}}


def _attend(
    query: np.ndarray, present: Arrays, b: int, h: int, used: int, now: int, sink: float | None, attributes: VoteAttentionAttributes
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query of one head: raw logits (nan where a slot is not visible), probabilities, output."""
    logits = np.full(used, np.nan)
    for c in range(used):
        position = int(present["position"][b, h, c])
        if position > now or (attributes.sliding_window and position <= now - attributes.sliding_window):
            continue
        logit = float(query @ present["key"][b, h, c]) * attributes.scale
        logits[c] = attributes.softcap * math.tanh(logit / attributes.softcap) if attributes.softcap else logit
    top = np.nanmax(logits) if sink is None else max(np.nanmax(logits), sink)
    mass = np.nan_to_num(present["votes"][b, h, :used] ** attributes.vote_exponent * np.exp(logits - top), nan=0.0)
    total = mass.sum() + (0.0 if sink is None else math.exp(sink - top))
    probability = mass / total
    return logits, probability, probability @ present["value"][b, h, :used]


def _updated(past: float, fresh: bool, logits: np.ndarray, probability: np.ndarray, statistic: Statistic) -> float:
    """The statistic of one slot after a call; logits and probability are [T, G]."""
    length = len(logits)
    n = min(length, statistic.window) if statistic.window else length
    seen = 0.0
    for i in range(n):
        t = length - n + i
        weight = statistic.decay ** (n - 1 - i)
        weight *= 1.0 + (statistic.recency_weight - 1.0) * (i / (n - 1) if n > 1 else 1.0)
        per_head = np.exp(logits[t]) if statistic.kind == "log_ema" else probability[t]
        seen += weight * float(np.nan_to_num(per_head, nan=0.0).mean())
    if statistic.kind == "probability":
        return (0.0 if fresh else past * statistic.decay**n) + seen
    average = (0.0 if fresh else math.exp(past) * statistic.decay**n) + (1.0 - statistic.decay) * seen
    return math.log(average) if average > 0.0 else -math.inf


@dataclass
class Slot:
    """One slot of one head."""

    key: np.ndarray
    value: np.ndarray
    votes: float
    score: np.ndarray
    position: int


def merge_cache(state: Arrays, attributes: MergeCacheAttributes) -> Arrays:
    """The five tensors `present_*`, floats in float64: used slots in order of position, zeros after them."""
    result = {name: np.zeros(x.shape, x.dtype if name == "position" else np.float64) for name, x in state.items()}
    batch, heads, _ = state["votes"].shape
    for b in range(batch):
        for h in range(heads):
            for c, slot in enumerate(_merge_head(_slots(state, b, h), attributes)):
                result["key"][b, h, c] = slot.key
                result["value"][b, h, c] = slot.value
                result["votes"][b, h, c] = slot.votes
                result["score"][b, h, :, c] = slot.score
                result["position"][b, h, c] = slot.position
    return {f"present_{name}": x for name, x in result.items()}


def _slots(state: Arrays, b: int, h: int) -> list[Slot]:
    """The used slots of a head in order of position."""
    used = [
        Slot(
            state["key"][b, h, c].astype(np.float64),
            state["value"][b, h, c].astype(np.float64),
            float(state["votes"][b, h, c]),
            state["score"][b, h, :, c].astype(np.float64),
            int(state["position"][b, h, c]),
        )
        for c in range(state["votes"].shape[2])
        if state["votes"][b, h, c] > 0
    ]
    return sorted(used, key=lambda slot: slot.position)


def _merge_head(slots: list[Slot], attributes: MergeCacheAttributes) -> list[Slot]:
    if not slots:
        return []
    now = slots[-1].position
    if attributes.sliding_window:
        slots = [slot for slot in slots if slot.position > now - attributes.sliding_window]
    if attributes.method.name == "full":
        return slots
    free = [slot for slot in slots if attributes.sinks <= slot.position <= now - attributes.recent]
    count = max(len(slots) - attributes.budget, 0)
    leaving = _leaving_order(free, now, count, attributes.method)[:count]
    stays = [slot for slot in slots if not any(slot is other for other in leaving)]
    if attributes.method.name == "keepkv":
        targets = [slot for slot in free if any(slot is other for other in stays)]
        _keepkv_merge(leaving, targets, now, attributes.method)
    return sorted(stays, key=lambda slot: slot.position)


def _leaving_order(free: list[Slot], now: int, count: int, method: Any) -> list[Slot]:
    """Unprotected slots, those that leave first coming first; `free` is in order of position, so ties go to the lowest.

    merge-first: of the `pool` times `count` lowest scores, those with a neighbour of higher score above the threshold come first.
    """
    if method.name == "streaming":
        return free
    if method.name == "h2o":
        return sorted(free, key=lambda slot: slot.score[0])
    if method.name != "keepkv":
        raise NotImplementedError(f"the oracle does not know the method {method.name!r}")
    by_score = sorted(free, key=lambda slot: _corrected(slot, now, method))
    if method.order == "evict-first":
        return by_score

    def mergeable(slot: Slot) -> bool:
        return any(
            _corrected(other, now, method) > _corrected(slot, now, method) and _cosine(slot.key, other.key) > method.threshold
            for other in free
        )

    first = [place < method.pool * count and mergeable(slot) for place, slot in enumerate(by_score)]
    return [s for s, m in zip(by_score, first, strict=True) if m] + [s for s, m in zip(by_score, first, strict=True) if not m]


def _keepkv_merge(leaving: list[Slot], targets: list[Slot], now: int, method: Any) -> None:
    """Every leaving slot joins its most similar target above the threshold; a target takes all of its own in at once."""
    joins: list[list[Slot]] = [[] for _ in targets]
    for slot in leaving:
        cosines = [_cosine(slot.key, target.key) for target in targets]
        if cosines and max(cosines) > method.threshold:
            joins[cosines.index(max(cosines))].append(slot)
    for target, joined in zip(targets, joins, strict=True):
        if not joined:
            continue
        members = [target, *joined]
        logit = [_corrected(m, now, method) for m in members]
        weight = [m.votes * math.exp(x) for m, x in zip(members, logit, strict=True)]
        total, votes = sum(weight), sum(m.votes for m in members)
        key = sum(w * m.key for w, m in zip(weight, members, strict=True)) / total
        value = sum(w * m.value for w, m in zip(weight, members, strict=True)) / total
        score = math.log(sum(m.votes * math.exp(m.score[-1]) for m in members) / votes)
        mean_logit = sum(w * x for w, x in zip(weight, logit, strict=True)) / total
        fractional = math.exp(math.log(total) - mean_logit)
        if method.zip == "vote":
            votes = fractional
        elif method.zip == "key":
            log_mean = math.log(total / votes)
            factor = 1.0 if log_mean == mean_logit else log_mean / mean_logit if mean_logit else math.inf
            if factor != math.inf and 1.0 / method.key_factor_max <= factor <= method.key_factor_max:
                key = factor * key
            else:
                votes = fractional
        target.key, target.value, target.votes = np.asarray(key), np.asarray(value), votes
        target.score[-1] = score
        target.position = max(m.position for m in members)


def _corrected(slot: Slot, now: int, method: Method) -> float:
    """ln(S / (1 - a^n)), n = now - position + 1."""
    return float(slot.score[0]) - math.log1p(-(method.statistics[0].decay ** (now - slot.position + 1)))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-24)
