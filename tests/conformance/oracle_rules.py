"""Every method's rule in float64 over plain lists of slots: which slots are evicted, in which order, how they merge.

The rules are written from the methods' definitions (docs/reference/methods.md and their papers). They read parameters
of `kvexport.methods` but none of its code.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvexport.methods.ballot import Ballot as BallotMethod
from tests.conformance.oracle_vectors import attention, cosine, mean, ridge_regression, turned


@dataclass
class Slot:
    """A slot of one head, with its contents and its row."""

    key: np.ndarray
    value: np.ndarray
    votes: float
    score: np.ndarray
    position: int
    row: int  # the slot's row in the cache


@dataclass
class Head:
    """One head before a merge, with its slots in order of position."""

    slots: list[Slot]
    free: list[Slot]  # slots that are neither sinks nor recent
    count: int  # how many slots are evicted
    now: int  # position of the latest token
    sinks: int
    method: Any
    rotary: Any
    queries: list[tuple[np.ndarray, int]]  # reference queries, each with the number of tokens that it has seen

    def seen(self, slot: Slot) -> int:
        """Return how many queries have seen a slot since its latest token, including the query of that token."""
        return self.now - slot.position + 1


class Rule:
    """A method that drops slots by importance, lowest first, ties by the lowest position."""

    def importance(self, head: Head, slot: Slot) -> float:
        return float(slot.score[0])

    def selecting(self, head: Head, slot: Slot) -> float:
        """Return the importance by the method's own statistic or by its selector's."""
        selector = getattr(head.method, "selector", "own")
        if selector == "own":
            return self.importance(head, slot)
        return RULES[selector]().importance(head, slot)

    def leaving(self, head: Head, heads: list[Head]) -> list[Slot]:
        return sorted(head.free, key=lambda slot: self.selecting(head, slot))

    def merge(self, head: Head, leaving: list[Slot], stays: list[Slot]) -> None:
        """Merge the evicted slots into the remaining ones."""


class Streaming(Rule):
    def importance(self, head: Head, slot: Slot) -> float:
        return float(slot.position)


class SnapKV(Rule):
    def importance(self, head: Head, slot: Slot) -> float:
        pool = getattr(head.method, "pool", 5) if head.method.name in ("snapkv", "pyramidkv") else 5
        return float(sum(other.score[0] for other in head.free if abs(other.position - slot.position) <= pool // 2))


class Joint(Rule):
    """A method in which all slots with the same target merge with it at once.

    `target` returns a slot's target, and `weights` returns the weights of the members of a merge set.
    """

    def target(self, head: Head, slot: Slot, targets: list[Slot]) -> Slot | None:
        raise NotImplementedError

    def targets(self, head: Head, stays: list[Slot]) -> list[Slot]:
        return [slot for slot in stays if any(slot is other for other in head.free)]

    def weights(self, head: Head, members: list[Slot]) -> list[float]:
        """Return the members' weights in the mean of keys and values; the target comes first."""
        return [slot.votes for slot in members]

    def votes(self, head: Head, members: list[Slot], weights: list[float]) -> float:
        return sum(slot.votes for slot in members)

    def score(self, head: Head, members: list[Slot]) -> np.ndarray:
        """Return a merge set's score: the sum of probabilities, or the mean exp(logit) average, weighted by votes."""
        rows = []
        for k, statistic in enumerate(head.method.statistics):
            if statistic.kind == "probability":
                rows.append(sum(m.score[k] for m in members))
            elif statistic.kind == "log_ema":
                rows.append(
                    math.log(sum(m.votes * math.exp(m.score[k]) for m in members) / sum(m.votes for m in members))
                )
            else:
                rows.append(members[0].score[k])
        return np.asarray(rows)

    def key(self, head: Head, members: list[Slot], weights: list[float]) -> np.ndarray:
        return mean([m.key for m in members], weights)

    def value(self, head: Head, members: list[Slot], weights: list[float]) -> np.ndarray:
        return mean([m.value for m in members], weights)

    def merge(self, head: Head, leaving: list[Slot], stays: list[Slot]) -> None:
        targets = self.targets(head, stays)
        joins: list[tuple[Slot, list[Slot]]] = [(target, []) for target in targets]
        for slot in leaving:
            to = self.target(head, slot, targets)
            for target, joined in joins:
                if target is to:
                    joined.append(slot)
        merged = []
        for target, joined in joins:
            if joined:
                members = [target, *joined]
                w = self.weights(head, members)
                new = (
                    self.key(head, members, w),
                    self.value(head, members, w),
                    self.votes(head, members, w),
                    self.score(head, members),
                )
                merged.append((target, *new, max(m.position for m in members)))
        for target, key, value, votes, score, position in merged:
            target.key, target.value, target.votes, target.score, target.position = key, value, votes, score, position


class KeepKV(Joint):
    """KeepKV's rule.

    With the order merge-first, the slots of the `pool` times `count` lowest scores are searched first: those that have
    a neighbour of higher score above the threshold precede the others.
    """

    def importance(self, head: Head, slot: Slot) -> float:
        return self.corrected(head, slot, 0)

    def corrected(self, head: Head, slot: Slot, k: int) -> float:
        return float(slot.score[k]) - math.log1p(-(head.method.decay ** head.seen(slot)))

    def leaving(self, head: Head, heads: list[Head]) -> list[Slot]:
        by_score = super().leaving(head, heads)
        if head.method.order == "evict-first":
            return by_score

        def mergeable(slot: Slot) -> bool:
            mine = self.selecting(head, slot)
            return any(
                self.selecting(head, o) > mine and cosine(slot.key, o.key) > head.method.threshold for o in head.free
            )

        first = [place < head.method.pool * head.count and mergeable(slot) for place, slot in enumerate(by_score)]
        return [s for s, m in zip(by_score, first, strict=True) if m] + [
            s for s, m in zip(by_score, first, strict=True) if not m
        ]

    def target(self, head: Head, slot: Slot, targets: list[Slot]) -> Slot | None:
        best = highest(targets, lambda target: cosine(slot.key, target.key))
        return best if best is not None and cosine(slot.key, best.key) > head.method.threshold else None

    def weights(self, head: Head, members: list[Slot]) -> list[float]:
        return [m.votes * math.exp(self.corrected(head, m, -1)) for m in members]

    def votes(self, head: Head, members: list[Slot], weights: list[float]) -> float:
        count = super().votes(head, members, weights)
        factor = self.factor(head, members, weights)
        return count if factor is not None else self.fractional(head, members, weights)

    def key(self, head: Head, members: list[Slot], weights: list[float]) -> np.ndarray:
        return super().key(head, members, weights) * (self.factor(head, members, weights) or 1.0)

    def mean_logit(self, head: Head, members: list[Slot], weights: list[float]) -> float:
        return sum(w * self.corrected(head, m, -1) for w, m in zip(weights, members, strict=True)) / sum(weights)

    def fractional(self, head: Head, members: list[Slot], weights: list[float]) -> float:
        return math.exp(math.log(sum(weights)) - self.mean_logit(head, members, weights))

    def factor(self, head: Head, members: list[Slot], weights: list[float]) -> float | None:
        """Return the factor of the key, or None if fractional votes are stored instead."""
        if head.method.zip in ("mean", "count"):
            return 1.0
        if head.method.zip == "vote":
            return None
        log_mean = math.log(sum(weights) / sum(m.votes for m in members))
        mean_logit = self.mean_logit(head, members, weights)
        agree = abs(log_mean - mean_logit) <= 1e-6 * max(abs(mean_logit), 1.0)
        factor = 1.0 if agree else log_mean / mean_logit if mean_logit else math.inf
        limit = head.method.key_factor_max
        return factor if factor != math.inf and 1.0 / limit <= factor <= limit else None


class Ballot(KeepKV):
    def votes(self, head: Head, members: list[Slot], weights: list[float]) -> float:
        return min(super().votes(head, members, weights), head.method.votes_max)

    def importance(self, head: Head, slot: Slot) -> float:
        return float(slot.score[0]) / head.seen(slot)

    def leaving(self, head: Head, heads: list[Head]) -> list[Slot]:
        """With the order least-error, sort the `pool` times `count` least attended slots by the merge's error."""
        by_importance = Rule.leaving(self, head, heads)
        if head.method.order == "least-attended":
            return by_importance
        joins = [s for s in by_importance[: head.method.pool * head.count] if self.error(head, s) < math.inf]
        return sorted(joins, key=lambda s: (self.error(head, s), s.position)) + [
            s for s in by_importance if not any(s is j for j in joins)
        ]

    def error(self, head: Head, slot: Slot) -> float:
        mine = self.selecting(head, slot)
        apart = [
            float(np.sum((slot.key - o.key) ** 2) * np.sum((slot.value - o.value) ** 2))
            for o in head.free
            if self.selecting(head, o) > mine
        ]
        return mine**head.method.attention * min(apart, default=math.inf)

    def targets(self, head: Head, stays: list[Slot]) -> list[Slot]:
        return [slot for slot in stays if slot.position >= head.sinks]

    def target(self, head: Head, slot: Slot, targets: list[Slot]) -> Slot | None:
        return highest(targets, lambda target: -float(np.linalg.norm(slot.key - target.key)))

    def score(self, head: Head, members: list[Slot]) -> np.ndarray:
        rows = super().score(head, members)
        if head.method.selector == "own":
            latest = max(members, key=lambda m: m.position)
            rows[0] = head.seen(latest) * sum(m.score[0] / head.seen(m) for m in members)
        return rows


class ZeroMerge(Joint):
    def leaving(self, head: Head, heads: list[Head]) -> list[Slot]:
        order = super().leaving(head, heads)
        return [s for s in order if s.votes <= 1] + [s for s in head.free if s.votes > 1]

    def targets(self, head: Head, stays: list[Slot]) -> list[Slot]:
        held = super().targets(head, stays)
        size = max(int(np.float32(head.method.residual) * np.float32(len(held))), 1)
        rest = sorted((s for s in held if s.votes <= 1), key=lambda s: self.selecting(head, s))
        residual = ([s for s in held if s.votes > 1] + rest)[:size]
        return [s for s in held if any(s is r for r in residual)]

    def target(self, head: Head, slot: Slot, targets: list[Slot]) -> Slot | None:
        return highest(targets, lambda target: float(slot.key @ target.key))


class NeighbourPairs(Joint):
    def pairs(self, head: Head) -> list[tuple[Slot, Slot]]:
        return list(zip(head.free[::2], head.free[1::2], strict=False))

    def leaving(self, head: Head, heads: list[Head]) -> list[Slot]:
        def attention(place: int) -> float:
            if not head.method.share_pairs:
                return sum(self.selecting(head, s) for s in self.pairs(head)[place])
            # Pairs of different heads correspond if their older slots have the same place among all slots of their
            # heads.
            at = index_of(head.slots, self.pairs(head)[place][0])
            total = 0.0
            for other in heads:
                for pair in self.pairs(other):
                    if index_of(other.slots, pair[0]) == at:
                        total += sum(self.selecting(other, s) for s in pair)
            return total

        order = sorted(range(len(self.pairs(head))), key=attention)
        older = [self.pairs(head)[place][0] for place in order]
        return older + [s for s in super().leaving(head, heads) if not any(s is o for o in older)]

    def target(self, head: Head, slot: Slot, targets: list[Slot]) -> Slot | None:
        partner = next((b for a, b in self.pairs(head) if a is slot), None)
        return partner if any(partner is t for t in targets) else None

    def key_weights(self, head: Head, younger: Slot, older: Slot) -> tuple[float, float]:
        raise NotImplementedError

    def key(self, head: Head, members: list[Slot], weights: list[float]) -> np.ndarray:
        younger, older = members
        a, b = self.key_weights(head, younger, older)
        share = a / (a + b) if a + b > 0 else 0.5
        steps = younger.position - older.position
        if head.rotary.cache_positions:
            steps = index_of(head.slots, younger) - index_of(head.slots, older)
        return share * younger.key + (1 - share) * turned(older.key, steps, head.rotary)


class AsymKV(NeighbourPairs):
    def key_weights(self, head: Head, younger: Slot, older: Slot) -> tuple[float, float]:
        return float(younger.score[-1]), float(older.score[-1])


class KVSlimmer(NeighbourPairs):
    def key_weights(self, head: Head, younger: Slot, older: Slot) -> tuple[float, float]:
        total = sum(s.score[-1] for s in head.slots)
        output = sum(s.score[-1] / total * s.value for s in head.slots)
        a1, a2 = younger.score[-1] / total, older.score[-1] / total
        c11 = float(np.linalg.norm(a1 * (1 - 2 * a1) * (younger.value - output)))
        c22 = float(np.linalg.norm(a2 * (1 - 2 * a2) * (older.value - output)))
        c12 = float(np.linalg.norm(-a1 * a2 * (younger.value + older.value - 2 * output)))
        first, second = max(c11 - c12, 0.0), max(c22 - c12, 0.0)
        return (a1, a2) if first + second <= head.method.tau * (c11 + c22) else (first, second)


class Random(Rule):
    def importance(self, head: Head, slot: Slot) -> float:
        x = slot.position
        for _ in range(3):
            x = (x * 1103515245 + head.method.seed + 12345) % 2**32
            x = ((x & 0xFFFF) << 16) | (x >> 16)
        return float(x >> 8)


class CaM(Rule):
    def merge(self, head: Head, leaving: list[Slot], stays: list[Slot]) -> None:
        receivers = [slot for slot in stays if slot.position >= head.sinks]
        mean_mass = sum(slot.score[-1] for slot in stays) / len(stays) if stays else 0.0
        means = [(r, np.zeros_like(r.value)) for r in receivers]
        for slot in leaving:
            m = min(max(slot.score[-1] / mean_mass, 0.0), 1.0)
            following = [add for r, add in means if r.position > slot.position]
            for add in following[: head.method.receivers]:
                add += m * slot.value / head.method.receivers
        for receiver, add in means:
            receiver.value = receiver.value + add


class D2O(Joint):
    def merge(self, head: Head, leaving: list[Slot], stays: list[Slot]) -> None:
        targets = self.targets(head, stays)
        best = [max(cosine(slot.key, target.key) for target in targets) for slot in leaving] if targets else []
        self.threshold = sum(best) / len(best) if best else math.inf
        super().merge(head, leaving, stays)

    def target(self, head: Head, slot: Slot, targets: list[Slot]) -> Slot | None:
        best = highest(targets, lambda target: cosine(slot.key, target.key))
        return best if best is not None and cosine(slot.key, best.key) >= self.threshold else None

    def weights(self, head: Head, members: list[Slot]) -> list[float]:
        return [math.e, *(math.exp(cosine(m.key, members[0].key)) for m in members[1:])]


class KVMerger(Joint):
    def runs(self, head: Head) -> list[list[Slot]]:
        """Return the runs of joined neighbours.

        The `count` pairs with the highest cosine above the threshold join. Heavy hitters are left out.
        """
        heavy = int(np.float32(head.method.heavy) * np.float32(len(head.free)))
        by_mass = sorted(head.free, key=lambda s: -self.selecting(head, s))
        light = [not any(s is h for h in by_mass[:heavy]) for s in head.free]
        pairs = [i for i in range(1, len(head.free)) if light[i] and light[i - 1]]
        similar = [i for i in pairs if self.near(head, i) > head.method.threshold]
        joins = sorted(similar, key=lambda i: -self.near(head, i))[: head.count]
        runs: list[list[Slot]] = []
        for i, slot in enumerate(head.free):
            if i in joins:
                runs[-1].append(slot)
            else:
                runs.append([slot])
        return runs

    def near(self, head: Head, i: int) -> float:
        return cosine(head.free[i].key, head.free[i - 1].key)

    def pivot(self, head: Head, run: list[Slot]) -> Slot:
        return max(run, key=lambda s: self.selecting(head, s))

    def leaving(self, head: Head, heads: list[Head]) -> list[Slot]:
        joined = [s for run in self.runs(head) for s in run if s is not self.pivot(head, run)]
        return joined + [s for s in super().leaving(head, heads) if not any(s is j for j in joined)]

    def target(self, head: Head, slot: Slot, targets: list[Slot]) -> Slot | None:
        run = next(run for run in self.runs(head) if any(slot is s for s in run))
        pivot = self.pivot(head, run)
        return pivot if pivot is not slot and any(pivot is t for t in targets) else None

    def weights(self, head: Head, members: list[Slot]) -> list[float]:
        distances = [float(np.linalg.norm(members[0].key - m.key)) for m in members]
        sigma = head.method.sigma or sum(distances) / (math.sqrt(2) * len(members))
        return [math.exp(-(d**2) / (2 * sigma**2)) if sigma else 1.0 for d in distances]

    def value(self, head: Head, members: list[Slot], weights: list[float]) -> np.ndarray:
        if head.method.value_scale == "mean":
            return super().value(head, members, weights)
        return mean([m.value / m.votes for m in members], weights) * sum(m.votes for m in members)


class GRKV(SnapKV):
    def merge(self, head: Head, leaving: list[Slot], stays: list[Slot]) -> None:
        if leaving:
            self.fit(head, stays, self.read(head, head.slots) @ np.array([s.value for s in head.slots]))

    def read(self, head: Head, slots: list[Slot]) -> np.ndarray:
        logits, visible = self.logits(head, slots)
        return attention(logits, visible, np.array([s.votes for s in slots]) ** head.method.vote_exponent)

    def logits(self, head: Head, slots: list[Slot]) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits [W, slots], and for each whether the query has seen the slot."""
        visible = np.array([[s.position < seen for s in slots] for _, seen in head.queries])
        return np.array([[query @ s.key for s in slots] for query, _ in head.queries]), visible

    def receives(self, head: Head, slot: Slot) -> bool:
        return any(slot is other for other in head.free)

    def fit(self, head: Head, stays: list[Slot], output: np.ndarray) -> None:
        free = [i for i, slot in enumerate(stays) if self.receives(head, slot)]
        read, value = self.read(head, stays), np.array([slot.value for slot in stays])
        change = ridge_regression(read[:, free], output - read @ value, head.method.ridge)
        most = head.method.change_max * np.linalg.norm(value[free])
        change *= min(1.0, most / max(float(np.linalg.norm(change)), 1e-30))
        for i, row in zip(free, change, strict=True):
            stays[i].value = stays[i].value + row


class AttentionMatching(GRKV):
    """Attention Matching's rule. With after: ballot the fit follows the merge of Ballot's rule."""

    def importance(self, head: Head, slot: Slot) -> float:
        read = self.read(head, head.slots)[:, index_of(head.slots, slot)]
        return float((np.where(read > 1e-6, read, 0.0) ** 2).sum())

    def masses(self, head: Head, slots: list[Slot], top: np.ndarray) -> np.ndarray:
        """Return votes exp(logit - top) [W, slots], 0 if a query has not seen the slot."""
        logits, visible = self.logits(head, slots)
        return np.where(visible, np.array([s.votes for s in slots]) * np.exp(np.where(visible, logits - top, 0.0)), 0.0)

    def ballots(self, head: Head) -> Head:
        return replace(head, method=BallotMethod(selector=head.method.selector))

    def leaving(self, head: Head, heads: list[Head]) -> list[Slot]:
        if head.method.after == "ballot":
            return Ballot().leaving(self.ballots(head), heads)
        return super().leaving(head, heads)

    def receives(self, head: Head, slot: Slot) -> bool:
        return slot.position >= head.sinks if head.method.after == "ballot" else super().receives(head, slot)

    def merge(self, head: Head, leaving: list[Slot], stays: list[Slot]) -> None:
        if not leaving:
            return
        read, (logits, visible) = self.read(head, head.slots), self.logits(head, head.slots)
        top = np.where(visible, logits, -1e30).max(1, keepdims=True)
        whole = self.masses(head, head.slots, top).sum(1, keepdims=True)
        output = read @ np.array([s.value for s in head.slots])
        free = [s for s in stays if self.receives(head, s)]
        fixed = [i for i, s in enumerate(head.slots) if any(s is o for o in stays) and not any(s is o for o in free)]
        mass = np.delete(read, fixed, axis=1).sum(1)
        before = sum(s.votes for s in head.slots) - sum(head.slots[i].votes for i in fixed)
        if head.method.after == "ballot":
            Ballot().merge(self.ballots(head), leaving, stays)
        share = self.masses(head, free, top) / np.maximum(whole, 1e-300)
        factor, target_mass = np.ones(len(free)), mass @ share
        for _ in range(head.method.steps):
            held = share.T @ (share @ factor)
            factor = np.where(
                (target_mass > 1e-20) & (held > 1e-20), factor * target_mass / np.maximum(held, 1e-300), factor
            )
        bound = math.exp(head.method.bias_max)
        votes = np.clip([s.votes * f for s, f in zip(free, factor, strict=True)], 1 / bound, bound)
        for slot, v in zip(free, votes * min(1.0, before / max(votes.sum(), 1e-30)), strict=True):
            slot.votes = float(v)
        self.fit(head, stays, output)


def index_of(slots: list[Slot], slot: Slot) -> int:
    return next(i for i, other in enumerate(slots) if other is slot)


def highest(slots: list[Slot], value: Any) -> Slot | None:
    """Return the slot of the highest value, the first one (of the lowest position) if several are equal."""
    return max(slots, key=value) if slots else None


RULES: dict[str, type[Rule]] = {
    "streaming": Streaming, "h2o": Rule, "snapkv": SnapKV, "pyramidkv": SnapKV, "pyramidinfer": Rule, "keepkv": KeepKV,
    "ballot": Ballot, "zeromerge": ZeroMerge, "asymkv": AsymKV, "kvslimmer": KVSlimmer, "random": Random, "cam": CaM,
    "d2o": D2O, "kvmerger": KVMerger, "grkv": GRKV, "attention_matching": AttentionMatching,
}  # fmt: skip
