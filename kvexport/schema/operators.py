"""The operators of domain `kvexport`: their inputs, outputs and attributes (docs/reference/contract.md, section 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvexport.schema.attribute import Attribute
from kvexport.schema.policy import FIT, POLICY
from kvexport.schema.state import CONTRACT_VERSION, INT4, SMALL, STATE, StateTensor

Role = Literal["query", "cache", "float32", "int32", "int64"]


@dataclass(frozen=True)
class Operand:
    """A tensor that a node reads or writes. dims: as of `StateTensor`. role: its type; ``query`` that of the new
    tokens, ``cache`` that of the cache."""

    name: str
    dims: tuple[str | int, ...]
    role: Role
    optional: bool = False


@dataclass(frozen=True)
class Operator:
    """An operator: its tensors in their order, its attributes by their names."""

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]

    @property
    def input_names(self) -> list[str]:
        """In their order."""
        return [operand.name for operand in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """In their order."""
        return [operand.name for operand in self.outputs]

    def with_state(self, extra: Iterable[StateTensor]) -> Operator:
        """The operator of a method that keeps `extra` state: its tensors come last."""
        past, present = _past_and_present(self.name, extra)
        return replace(self, inputs=(*self.inputs, *past), outputs=(*self.outputs, *present))

    def node_attributes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` as a node carries them. Raises ValueError for a name that the operator does not have, one that is
        missing, and a value out of its range."""
        known = {attribute.name: attribute for attribute in self.attributes}
        if unknown := sorted(values.keys() - known.keys()):
            raise ValueError(f"{self.name} has no attribute {unknown[0]}; it has {', '.join(known)}")
        if missing := [name for name, attribute in known.items() if name not in values and not attribute.optional]:
            raise ValueError(f"{self.name} needs the attribute {missing[0]}")
        for name, value in values.items():
            if problem := known[name].problem(value):
                raise ValueError(f"{self.name}: {problem}")
        return {name: known[name].node_value(values[name]) for name in known if name in values}


def _past_and_present(operator: str, state: Iterable[StateTensor]) -> tuple[list[Operand], list[Operand]]:
    past = "past_" if operator == "VoteAttention" else ""
    tensors = list(state)
    return tuple(  # type: ignore[return-value]
        [Operand(prefix + x.name, x.dims, x.dtype) for x in tensors] for prefix in (past, "present_")
    )


STATISTIC_KINDS = ("none", "log_ema", "probability")
_STATISTICS = Attribute(
    "statistics", "words", "the kinds of the K statistics; the first selects, the last weighs", words=STATISTIC_KINDS
)
_SLIDING_WINDOW = Attribute("sliding_window", "int", "only so many latest positions are visible; 0: all", 0, least=0)
_past, _present = _past_and_present("VoteAttention", STATE)
VOTE_ATTENTION = Operator(
    "VoteAttention",
    (
        Operand("query", ("B", "Hq", "T", "D"), "query"),
        Operand("key", ("B", "H", "T", "D"), "query"),
        Operand("value", ("B", "H", "T", "Dv"), "query"),
        Operand("position", ("B", "T"), "int64"),
        Operand("query_length", ("B", 1), "int64"),
        *_past,
        Operand("sink_logits", ("Hq",), "float32", optional=True),
    ),
    (Operand("output", ("B", "Hq", "T", "Dv"), "query"), *_present),
    (
        Attribute("scale", "float", "factor of the products of queries and keys"),
        Attribute("vote_exponent", "float", "alpha of the bias `alpha ln(votes)`; 0: no bias", 0.0),
        Attribute("softcap", "float", "logits l become `softcap tanh(l / softcap)`; 0: they stay", 0.0, least=0.0),
        _SLIDING_WINDOW,
        _STATISTICS,
        Attribute(
            "decay", "floats", "a of every statistic, per query; below 1 for a log_ema", (1.0,), above=0.0, most=1.0
        ),
        Attribute("window", "ints", "only so many last queries of a call count; 0: all", (0,), least=0),
        Attribute(
            "recency_weight",
            "floats",
            "weight of the newest counted query against 1 for the oldest, linearly between",
            (1.0,),
            above=0.0,
        ),
        Attribute(
            "reference_queries",
            "int",
            "W: so many latest queries of every KV head are kept, in the state `query` and `query_seen`",
            least=1,
            optional=True,
        ),
    ),
)
_past, _present = _past_and_present("MergeCache", STATE)
MERGE_CACHE = Operator(
    "MergeCache",
    tuple(_past),
    tuple(_present),
    (
        Attribute("budget", "int", "slots that are kept", least=1),
        Attribute("sinks", "int", "the first positions, which are never evicted and receive nothing", 0, least=0),
        Attribute("recent", "int", "the latest positions, which are never evicted", 0, least=0),
        _SLIDING_WINDOW,
        Attribute("compresses", "bool", "0: only slots that the sliding window has passed are evicted", True),
        Attribute("recent_receives", "bool", "whether evicted slots may merge into recent ones", False),
        _STATISTICS,
        *(replace(attribute, optional=True) for attribute in (*POLICY, *FIT)),
        Attribute(
            "inverse_frequencies", "floats", "of the layer's rotary embedding, where keys are rotated", optional=True
        ),
        Attribute("rotary_interleaved", "bool", "whether planes are (2f, 2f + 1), not (f, f + F)", optional=True),
        Attribute(
            "cache_positions",
            "bool",
            "whether keys are rotated by their slots' places in the cache; kept ones are turned to their new places",
            optional=True,
        ),
    ),
)
LINEAR_ATTRIBUTES = (
    Attribute("input_heads", "int", "n: input is [B, n, T, inputs / n]; 0: it is [..., inputs]", 0, least=0),
    Attribute("norm", "bool", "whether rows are normalised first; the input norm follows", False),
    Attribute("epsilon", "float", "of that norm", 0.0, least=0.0),
    Attribute("output_heads", "ints", "of each product as input_heads, of its output", (0,), least=0),
    Attribute("bias", "ints", "of each product whether it has a bias", (0,), least=0, most=1),
    Attribute("rotated", "ints", "of each product whether its heads are rotated", (0,), least=0, most=1),
    Attribute("gate", "bool", "whether the only product is multiplied with silu(x gate^T)", False),
    Attribute("residual", "bool", "whether the input residual is added to the only product, last", False),
    Attribute(
        "packed",
        "ints",
        "of each weight, the gate's last, what follows it: 0 nothing, it is of the input's type; 1 a scale, 2 a scale "
        "and a zero point, 3 a scale and a minimum",
        least=0,
        most=3,
        optional=True,
    ),
    Attribute("group", "ints", "of each of these, inputs in a row that share a scale", least=0, optional=True),
    Attribute(
        "float_input",
        "bool",
        "whether packed weights are multiplied with the input as it is; 0: a kernel may round it to int8 by blocks",
        optional=True,
    ),
)


def schema_digest() -> str:
    """Of what a compiled kernel knows of the operators: the version of their contract, attributes, their kinds and
    words, state tensors, and types of caches. Libraries carry the digest that they were compiled with."""
    known = [
        [(a.name, a.kind, a.words) for a in attributes]
        for attributes in (VOTE_ATTENTION.attributes, MERGE_CACHE.attributes, LINEAR_ATTRIBUTES)
    ]
    state = [(tensor.name, tensor.dims, tensor.dtype) for tensor in STATE]
    return hashlib.sha256(repr((CONTRACT_VERSION, known, state, SMALL, INT4)).encode()).hexdigest()[:12]
