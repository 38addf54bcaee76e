"""The merge policy: the rules by which native kernels evict and merge cache slots, as data.

A compression method whose rule combines these primitives (rules) returns a `MergePolicy` and has no code of its own.
PyTorch interprets the policy's fields (kvexport/methods/primitives), the MergeCache node contains them as attributes,
and native kernels read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

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


class Requirement(NamedTuple):
    """A constraint between settings of a merge policy: if `field` is `value`, `other` must be one of `allowed`."""

    field: str
    value: str
    other: str
    allowed: tuple[Any, ...]

    @property
    def problem(self) -> str:
        allowed = " or ".join(str(value).lower() for value in self.allowed)
        return f"{self.field} is {self.value}, which needs {self.other} to be {allowed}"


REQUIREMENTS = (
    Requirement("order", "nearest", "merge", ("zip", "running_mean")),
    Requirement("order", "least_error", "merge", ("zip", "running_mean")),
    Requirement("order", "least_error", "measure", ("distance",)),
    Requirement("merge", "pair", "merged_last", (False,)),
)
NEEDS_FIT = "select is attended, which needs the reference queries of a fit"


@dataclass(frozen=True)
class Fit:
    """A least-squares fit of kept cache slots to recent queries that a method stores, after the merge.

    After the fit the stored queries get nearly the same attention outputs from the kept slots as from all slots before.
    kvexport/methods/fitting.py stores the queries.
    """

    fit: Literal["values", "votes_and_values"] = _word(
        "values",
        "the tensors of receiving slots that are fitted: values, or votes (token counts) and then values",
        *("values", "votes_and_values"),
    )
    ridge: float = _number(
        0.05, "the regularization of the fit of values: the larger it is, the less they change", above=0.0
    )
    change_max: float = _number(0.1, "a head's values change by at most this share of their norm", above=0.0)
    read_exponent: float = _number(0.0, "alpha of the logit bias `alpha ln(votes)` of the queries of a fit")
    vote_steps: int = _count(8, "multiplicative updates of the votes (token counts)", least=0)
    bias_max: float = _number(3.0, "fitted votes (token counts) stay within exp(+-this)", above=0.0)


@dataclass(frozen=True)
class MergePolicy:
    """The rules by which cache slots are evicted and merged, as data for native kernels."""

    select: Literal["position", "score", "average", "pooled", "mean", "attended"] = _word(
        "position",
        "the importance of a slot: its position, its first statistic, that statistic's bias-corrected average (stored "
        "as a logarithm), its sum over neighbouring positions, its mean per observation, or the sum of the squared "
        "probabilities of stored recent queries",
        *("position", "score", "average", "pooled", "mean", "attended"),
    )
    select_decay: float = _number(0.9, "`a` of the average in `select = average`", above=0.0, below=1.0)
    pooled: int = _count(1, "neighbouring positions that `select = pooled` adds up, the slot's own in the middle")
    order: Literal["lowest", "nearest", "least_error"] = _word(
        "lowest",
        "the slots that are evicted first: those of lowest importance; those that have a target of higher importance "
        "nearer than `threshold`; or those whose merge into such a target costs least; then all others, lowest first",
        *("lowest", "nearest", "least_error"),
    )
    eviction_pool: int = _count(
        1, "`nearest` and `least_error` choose among so many times as many slots as have to be evicted"
    )
    error_exponent: float = _number(
        0.0, "b of the cost of a merge, `importance^b |key - key|^2 |value - value|^2`", least=0.0
    )
    merged_last: bool = _switch("whether slots that stand for several tokens are evicted last")
    merge: Literal["drop", "zip", "running_mean", "pair"] = _word(
        "drop",
        "the merge of evicted slots: none; a zip (KeepKV's rule) into the nearest target; a running mean in the "
        "nearest residual slot; or a pair with the younger neighbour",
        *("drop", "zip", "running_mean", "pair"),
    )
    measure: Literal["cosine", "dot", "distance"] = _word(
        "cosine", "the nearness of two keys; for distance, minus its square", *("cosine", "dot", "distance")
    )
    threshold: float = _number(NO_GATE, "a slot merges only if its nearest target is nearer than this")
    weigh_decay: float = _number(0.9, "`a` of the last statistic, the average that weights a zip", above=0.0, below=1.0)
    zip: Literal["key", "vote", "mean"] = _word(
        "mean",
        "what cancels the error of KeepKV's merge: the key's length, a fractional token count, or nothing",
        *("key", "vote", "mean"),
    )
    key_factor_max: float = _number(math.inf, "if a key's factor is outside [1/x, x], `zip: vote` applies", least=1.0)
    votes_max: float = _number(math.inf, "the most tokens that a merged slot stands for", least=1.0)
    residual: float = _number(
        1.0,
        "the share of the targets that `running_mean` merges into: slots that have merged before, then the lowest",
        above=0.0,
        most=1.0,
    )
    mean_adds: bool = _switch("whether the first statistic adds up as means per observation instead of sums")
    weigh: Literal["score", "hessian"] = _word(
        "score", "the weights of a pair's keys: the last statistic, or KVSlimmer's Hessian", *("score", "hessian")
    )
    tau: float = _number(
        0.0, "the last statistic replaces Hessian weights that are below this share of the diagonal terms", least=0.0
    )
    share_pairs: bool = _switch("whether all heads of a layer merge the same pairs")
    fit: Fit | None = None  # the fit after the merge

    def __post_init__(self) -> None:
        for attribute in POLICY:
            if problem := attribute.problem(getattr(self, attribute.name)):
                raise ValueError(problem)
        for rule in REQUIREMENTS:
            if getattr(self, rule.field) == rule.value and getattr(self, rule.other) not in rule.allowed:
                raise ValueError(rule.problem)
        if self.fit is None:
            if self.select == "attended":
                raise ValueError(NEEDS_FIT)
            return
        for attribute in FIT:
            if problem := attribute.problem(getattr(self.fit, attribute.name)):
                raise ValueError(problem)

    @property
    def why_not_native(self) -> str:
        """The reason why no native kernel supports this merge policy; empty if the kernels support it."""
        if self.fit and self.merge not in ("drop", "zip"):
            return f"a fit after merge = {self.merge} has no native kernel"
        return "share_pairs has no native kernel" if self.share_pairs else ""

    def node_attributes(self) -> dict[str, Any]:
        return {
            a.name: a.node_value(getattr(source, a.name))
            for source, attributes in ((self, POLICY), (self.fit, FIT))
            if source is not None
            for a in attributes
        }


def _attributes(kind: type) -> tuple[Attribute, ...]:
    return tuple(Attribute(name=f.name, default=f.default, **f.metadata) for f in fields(kind) if f.metadata)


POLICY, FIT = _attributes(MergePolicy), _attributes(Fit)
