"""The two operators in float64 numpy with plain loops.

They are written only from docs/reference/contract.md and the methods' definitions, and share no code with
`kvexport.ops` or the methods' rules: the oracle only reads attributes of `kvexport`. Where the contract stores a score
S as ln S, the oracle does too, but it takes every sum in the linear domain, where float64 represents logits beyond
+-200. `oracle_rules` defines which slots each method evicts and where they merge.
"""

import math
from functools import partial

import numpy as np

from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.schema.state import STATE_NAMES
from tests.conformance.oracle_rules import GRKV, RULES, Head, Joint, Rule, Slot
from tests.conformance.oracle_vectors import turned

Arrays = dict[str, np.ndarray]


def vote_attention(inputs: Arrays, attributes: VoteAttentionAttributes) -> Arrays:
    """Return output [B, Hq, T, Dv] and the five present tensors, floats in float64."""
    query = inputs["query"].astype(np.float64)
    state = {name: inputs[f"past_{name}"].copy() for name in STATE_NAMES}
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
                    past = present["score"][b, h, k, : used + length]
                    past[:] = _updated(past, np.arange(used + length) >= used, logits, probability, statistic)
    return {"output": output, **{f"present_{name}": x for name, x in present.items()}}


def _attend(
    query: np.ndarray,
    present: Arrays,
    b: int,
    h: int,
    used: int,
    now: int,
    sink: float | None,
    attributes: VoteAttentionAttributes,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the raw logits (nan if a slot is not visible), probabilities and output of one query of one head."""
    position = present["position"][b, h, :used]
    visible = position <= now
    if attributes.sliding_window:
        visible &= position > now - attributes.sliding_window
    logits = present["key"][b, h, :used] @ query * attributes.scale
    if attributes.softcap:
        logits = attributes.softcap * np.tanh(logits / attributes.softcap)
    logits = np.where(visible, logits, np.nan)
    top = np.nanmax(logits) if sink is None else max(np.nanmax(logits), sink)
    mass = np.nan_to_num(present["votes"][b, h, :used] ** attributes.vote_exponent * np.exp(logits - top), nan=0.0)
    total = mass.sum() + (0.0 if sink is None else math.exp(sink - top))
    probability = mass / total
    return logits, probability, probability @ present["value"][b, h, :used]


def _updated(
    past: np.ndarray, fresh: np.ndarray, logits: np.ndarray, probability: np.ndarray, statistic: Statistic
) -> np.ndarray:
    """Return the statistic of every slot [C] after a call; logits and probability are [T, G, C]."""
    length, decay = len(logits), statistic.decay
    n = min(length, statistic.window) if statistic.window else length
    visible = ~np.isnan(logits[:, 0])
    seen, counted = np.zeros(len(past)), np.zeros(len(past))
    for i in range(n):
        t = length - n + i
        weight = decay ** (n - 1 - i)
        weight *= 1.0 + (statistic.recency_weight - 1.0) * (i / (n - 1) if n > 1 else 1.0)
        per_head = np.exp(logits[t]) if statistic.kind == "log_ema" else probability[t]
        seen += weight * np.nan_to_num(per_head, nan=0.0).mean(axis=0)
        counted += weight * visible[t]
    if statistic.kind == "probability":
        return np.where(fresh, 0.0, past) * decay**n + seen
    # The mean over the queries that count represents all queries of the call that see the slot.
    standing = sum(decay ** (length - 1 - t) * visible[t] for t in range(length))
    fresh_average = (1.0 - decay) * standing * seen / np.where(counted > 0, counted, 1.0)
    average = np.exp(np.where(fresh, -np.inf, past)) * decay**length + fresh_average
    return np.log(average, where=average > 0, out=np.full(len(past), -np.inf))


def merge_cache(state: Arrays, attributes: MergeCacheAttributes) -> Arrays:
    """Return the five tensors `present_*`, floats in float64. Each slot is in its row, and later rows are 0."""
    result = {
        name: np.zeros(state[name].shape, state[name].dtype if name == "position" else np.float64)
        for name in STATE_NAMES
    }
    batch, heads, _ = state["votes"].shape
    for b in range(batch):
        queries = [_queries(state, b, h) for h in range(heads)]
        for h, kept in enumerate(_merge_sequence([_slots(state, b, h) for h in range(heads)], attributes, queries)):
            for c, slot in enumerate(_rows(kept)):
                result["key"][b, h, c] = slot.key
                result["value"][b, h, c] = slot.value
                result["votes"][b, h, c] = slot.votes
                result["score"][b, h, :, c] = slot.score
                result["position"][b, h, c] = slot.position
    return {f"present_{name}": x for name, x in result.items()}


def _rows(kept: list[Slot]) -> list[Slot]:
    """Return the slots in the order of their rows. A slot keeps its row, and the last slot moves to the lowest hole."""
    at = {slot.row: slot for slot in kept}
    return [at[row] if row in at else at.pop(max(at)) for row in range(len(kept))]


def _slots(state: Arrays, b: int, h: int) -> list[Slot]:
    """Return the used slots of a head in order of position."""
    used = [
        Slot(
            state["key"][b, h, c].astype(np.float64),
            state["value"][b, h, c].astype(np.float64),
            float(state["votes"][b, h, c]),
            state["score"][b, h, :, c].astype(np.float64),
            int(state["position"][b, h, c]),
            c,
        )
        for c in range(state["votes"].shape[2])
        if state["votes"][b, h, c] > 0
    ]
    return sorted(used, key=lambda slot: slot.position)


def _queries(state: Arrays, b: int, h: int) -> list[tuple[np.ndarray, int]]:
    """Return the reference queries of a head, if it has any, each with the number of tokens that it has seen."""
    if "query" not in state:
        return []
    return list(zip(state["query"][b, h].astype(np.float64), state["query_seen"][b, h].tolist(), strict=True))


def _merge_sequence(
    heads: list[list[Slot]], attributes: MergeCacheAttributes, queries: list[list[tuple[np.ndarray, int]]]
) -> list[list[Slot]]:
    """Return the remaining slots of every head in order of position."""
    heads_before = []
    for slots, references in zip(heads, queries, strict=True):
        now = slots[-1].position if slots else -1
        if attributes.sliding_window:
            slots = [slot for slot in slots if slot.position > now - attributes.sliding_window]
        free = [slot for slot in slots if attributes.sinks <= slot.position <= now - attributes.recent]
        count = max(len(slots) - attributes.budget, 0)
        heads_before.append(
            Head(slots, free, count, now, attributes.sinks, attributes.method, attributes.rotary, references)
        )
    if attributes.method.name == "full":
        return [head.slots for head in heads_before]
    rule = RULES[attributes.method.name]()
    # In a window evicted slots are dropped, the least important first; a fit changes the kept ones all the same.
    windowed = attributes.sliding_window > 0
    leaving_of = partial(Rule.leaving, rule) if windowed and isinstance(rule, Joint) else rule.leaving
    orders = [leaving_of(head, heads_before) for head in heads_before]  # before anything merges
    kept = []
    for head, order in zip(heads_before, orders, strict=True):
        leaving = order[: head.count]
        stays = [slot for slot in head.slots if not any(slot is other for other in leaving)]
        places = [slot.position for slot in head.slots]
        if not windowed or isinstance(rule, GRKV):
            rule.merge(head, leaving, stays)
        kept.append(sorted(stays, key=lambda slot: slot.position))
        if attributes.rotary.cache_positions:
            for place, slot in enumerate(kept[-1]):  # a merged slot was at the place of its latest member
                slot.key = turned(slot.key, place - places.index(slot.position), attributes.rotary)
    return kept
