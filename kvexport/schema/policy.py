"""The merge policy: what the merge kernels can be asked to do, as data.

A method whose rule recombines these primitives gives a `MergePolicy` and has no code of its own: PyTorch interprets the
fields (kvexport/methods/primitives), the MergeCache node carries them, and the native kernels read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvexport.schema.attribute import Attribute

NO_GATE = -1e38  # below every cosine, dot product and distance


def _word(default: Any, meaning: str, *words: str) -> Any:
    return field(default=default, metadata={"kind": "word", "meaning": meaning, "words": words})


def _number(default: float, meaning: str, **bounds: float) -> Any:
    return field(default=default, metadata={"kind": "float", "meaning": meaning, **bounds})


def _count(default: int, meaning: str, least: int = 1) -> Any:
    return field(default=default, metadata={"kind": "int", "meaning": meaning, "least": least})


def _switch(meaning: str) -> Any:
    return field(default=False, metadata={"kind": "bool", "meaning": meaning})


@dataclass(frozen=True)
class Fit:
    """A least-squares fit of kept slots to reference queries, after the merge. It needs the ring of queries
    (kvexport/methods/fitting.py)."""

    fit: Literal["values", "votes_and_values"] = _word(
        "values",
        "what is fitted, of the slots that may receive: values, or votes and then values",
        *("values", "votes_and_values"),
    )
    ridge: float = _number(0.05, "of the regression of values: the larger it is, the less they change", above=0.0)
    change_max: float = _number(0.1, "a head's values change by at most this share of their norm", above=0.0)
    read_exponent: float = _number(0.0, "alpha of the bias `alpha ln(votes)` that reference queries read with")
    vote_steps: int = _count(8, "multiplicative updates of the votes", least=0)
    bias_max: float = _number(3.0, "fitted votes stay within exp(+-this)", above=0.0)


@dataclass(frozen=True)
class MergePolicy:
    """Which slots are evicted, and what becomes of them; the fields say it one by one. Raises ValueError where a field
    is out of its range or two of them contradict each other."""

    select: Literal["position", "score", "average", "pooled", "mean", "attended"] = _word(
        "position",
        "the importance of a slot: its position, its first statistic, the bias-corrected average of that (kept as a "
        "logarithm), its sum over neighbouring positions, its mean per observation, or the sum of the squares of the "
        "reference queries' probabilities",
        *("position", "score", "average", "pooled", "mean", "attended"),
    )
    select_decay: float = _number(0.9, "`a` of the average in `select = average`", above=0.0, below=1.0)
    pooled: int = _count(1, "neighbouring positions that `select = pooled` adds up, the slot's own in the middle")
    order: Literal["lowest", "nearest", "least_error"] = _word(
        "lowest",
        "which slots are evicted first: those of lowest importance; or those that have a target of higher importance "
        "nearer than `threshold`; or those whose merge into such a target costs least; then the rest, lowest first",
        *("lowest", "nearest", "least_error"),
    )
    eviction_pool: int = _count(
        1, "`nearest` and `least_error` choose among this many times as many slots as have to be evicted"
    )
    error_exponent: float = _number(
        0.0, "b of the cost of a merge, `importance^b |key - key|^2 |value - value|^2`", least=0.0
    )
    merged_last: bool = _switch("whether slots of more than one vote are evicted last")
    merge: Literal["drop", "zip", "running_mean", "pair"] = _word(
        "drop",
        "what becomes of evicted slots: dropped; zipped into the nearest target by KeepKV's rule; added to the running "
        "mean of the nearest residual slot; or merged with the younger neighbour",
        *("drop", "zip", "running_mean", "pair"),
    )
    measure: Literal["cosine", "dot", "distance"] = _word(
        "cosine", "how near two keys are; the distance counts as minus its square", *("cosine", "dot", "distance")
    )
    threshold: float = _number(NO_GATE, "a slot merges iff its nearest target is nearer than this")
    weigh_decay: float = _number(0.9, "`a` of the average that weighs a zip, the last statistic", above=0.0, below=1.0)
    zip: Literal["key", "vote", "mean"] = _word(
        "mean",
        "what absorbs the error of a zip: the key's length, fractional votes, or nothing (votes add up)",
        *("key", "vote", "mean"),
    )
    key_factor_max: float = _number(math.inf, "a key factor outside [1/x, x] falls back to fractional votes", least=1.0)
    votes_max: float = _number(math.inf, "the most votes of a merged slot", least=1.0)
    residual: float = _number(
        1.0,
        "the share of the targets that `running_mean` merges into: merged ones, then the lowest",
        above=0.0,
        most=1.0,
    )
    mean_adds: bool = _switch("whether of the first statistic the mean per observation adds up, instead of the sum")
    weigh: Literal["score", "hessian"] = _word(
        "score", "what weighs a pair's keys: the last statistic, or KVSlimmer's Hessian", *("score", "hessian")
    )
    tau: float = _number(0.0, "where the Hessian's brackets are below this share, the statistic weighs", least=0.0)
    share_pairs: bool = _switch("whether all heads of a layer merge the same pairs")
    fit: Fit | None = None  # what follows the merge

    def __post_init__(self) -> None:
        for attribute in POLICY:
            if problem := attribute.problem(getattr(self, attribute.name)):
                raise ValueError(problem)
        if self.order != "lowest" and self.merge not in ("zip", "running_mean"):
            raise ValueError(f"order is {self.order}, which needs a merge by nearness; merge is {self.merge}")
        if self.order == "least_error" and self.measure != "distance":
            raise ValueError(f"order is least_error, which needs the measure distance; it is {self.measure}")
        if self.merge == "pair" and self.merged_last:
            raise ValueError("merged_last has no meaning when merge is pair")
        if self.fit is None:
            if self.select == "attended":
                raise ValueError("select is attended, which needs the reference queries of a fit")
            return
        for attribute in FIT:
            if problem := attribute.problem(getattr(self.fit, attribute.name)):
                raise ValueError(problem)

    @property
    def why_not_native(self) -> str:
        """Why no native kernel runs it; empty where they do."""
        if self.fit and self.merge not in ("drop", "zip"):
            return f"a fit after merge = {self.merge} has no native kernel"
        return "share_pairs has no native kernel" if self.share_pairs else ""

    def node_attributes(self) -> dict[str, Any]:
        """Every field by its name, as a node carries it; those of the fit where there is one."""
        return {
            a.name: a.node_value(getattr(whose, a.name))
            for whose, attributes in ((self, POLICY), (self.fit, FIT))
            if whose is not None
            for a in attributes
        }


def _attributes(kind: type) -> tuple[Attribute, ...]:
    return tuple(Attribute(name=f.name, default=f.default, **f.metadata) for f in fields(kind) if f.metadata)


POLICY, FIT = _attributes(MergePolicy), _attributes(Fit)
