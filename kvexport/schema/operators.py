"""The operators of ONNX domain `kvexport`: inputs, outputs and attributes (docs/reference/contract.md, section 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvexport.schema.attribute import Attribute
from kvexport.schema.policy import FIT, POLICY
from kvexport.schema.state import CONTRACT_VERSION, INT4, STATE, TYPES, StateTensor

Role = Literal["query", "cache", "float32", "float16", "int32", "int64"]


@dataclass(frozen=True)
class Operand:
    name: str
    dims: tuple[str | int, ...]  # dimensions, like those of `StateTensor`
    role: Role  # type; ``query`` is the type of the new tokens, and ``cache`` that of the cache
    optional: bool = False  # whether a node may omit the tensor


@dataclass(frozen=True)
class Operator:
    name: str
    inputs: tuple[Operand, ...]  # input tensors in order
    outputs: tuple[Operand, ...]  # output tensors in order
    attributes: tuple[Attribute, ...]

    @property
    def input_names(self) -> list[str]:
        return [operand.name for operand in self.inputs]

    @property
    def output_names(self) -> list[str]:
        return [operand.name for operand in self.outputs]

    def with_state(self, extra: Iterable[StateTensor]) -> Operator:
        past, present = _past_and_present(self.name, extra)
        return replace(self, inputs=(*self.inputs, *past), outputs=(*self.outputs, *present))

    def node_attributes(self, values: Mapping[str, Any]) -> dict[str, Any]:
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
    "statistics",
    "words",
    "the kinds of the K statistics; the first ranks slots for eviction, the last weights merges",
    words=STATISTIC_KINDS,
)
_SLIDING_WINDOW = Attribute(
    "sliding_window", "int", "the number of latest positions that are visible; 0: all", 0, least=0
)
_VALUE_PREFIX = Attribute(
    "value_prefix",
    "int",
    "r, the size of a value, if values are the first r elements of their keys and the state tensor `value` has size 0",
    least=1,
    optional=True,
)
_CAPACITY = Attribute(
    "capacity",
    "ints",
    "the slots of each KV head, one after another in the state tensors; omitted: every head has S / H",
    least=1,
    optional=True,
)
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
        _CAPACITY,
        Attribute("vote_exponent", "float", "alpha of the bias `alpha ln(votes)`; 0: no bias", 0.0),
        Attribute("softcap", "float", "logits l become `softcap tanh(l / softcap)`; 0: no bound", 0.0, least=0.0),
        _SLIDING_WINDOW,
        _STATISTICS,
        Attribute("decay", "floats", "the factor a for each query; below 1 for a log_ema", (1.0,), above=0.0, most=1.0),
        Attribute("window", "ints", "the number of last queries of a call that count; 0: all", (0,), least=0),
        Attribute(
            "recency_weight",
            "floats",
            "the weight of the newest counted query, relative to 1 for the oldest and linear between them",
            (1.0,),
            above=0.0,
        ),
        Attribute(
            "reference_queries",
            "int",
            "W, the number of latest queries of every KV head that the state `query` and `query_seen` keeps",
            least=1,
            optional=True,
        ),
        _VALUE_PREFIX,
    ),
)
_past, _present = _past_and_present("MergeCache", STATE)
MERGE_CACHE = Operator(
    "MergeCache",
    tuple(_past),
    tuple(_present),
    (
        _CAPACITY,
        Attribute("budget", "ints", "for each KV head, the slots that are kept", least=1),
        Attribute(
            "sinks", "int", "the number of first positions that are never evicted and never merged into", 0, least=0
        ),
        Attribute("recent", "ints", "for each KV head, the number of latest positions that are never evicted", least=0),
        _SLIDING_WINDOW,
        Attribute("compresses", "bool", "0: only slots that the sliding window has passed are evicted", True),
        Attribute("recent_receives", "bool", "whether evicted slots may merge into recent ones", False),
        _STATISTICS,
        *(replace(attribute, optional=True) for attribute in (*POLICY, *FIT)),
        Attribute(
            "inverse_frequencies",
            "floats",
            "the inverse frequencies of the layer's rotary embedding, if the merge rotates keys",
            optional=True,
        ),
        Attribute(
            "rotary_interleaved",
            "bool",
            "whether planes are the dimensions (2f, 2f + 1) instead of (f, f + F)",
            optional=True,
        ),
        Attribute(
            "cache_positions",
            "bool",
            "whether keys are rotated by their slots' places in the cache; a merge rotates kept keys to their new "
            "places",
            optional=True,
        ),
        _VALUE_PREFIX,
    ),
)
LINEAR_ATTRIBUTES = (
    Attribute("input_heads", "int", "n: input is [B, n, T, inputs / n]; 0: it is [..., inputs]", 0, least=0),
    Attribute(
        "norm", "bool", "whether the input vectors of tokens are normalised first; the input norm follows", False
    ),
    Attribute("epsilon", "float", "the epsilon of that norm", 0.0, least=0.0),
    Attribute("output_heads", "ints", "for each product, the heads of its output, like input_heads", (0,), least=0),
    Attribute("bias", "ints", "for each product, whether it has a bias", (0,), least=0, most=1),
    Attribute("rotated", "ints", "for each product, whether its heads are rotated", (0,), least=0, most=1),
    Attribute("gate", "bool", "whether the only product is multiplied with silu(x gate^T)", False),
    Attribute("residual", "bool", "whether the input residual is added to the only product, last", False),
    Attribute(
        "packed",
        "ints",
        "for each weight, the gate's last, the inputs that follow it: 0 none, the weight has the input's type; 1 a "
        "scale, 2 a scale and a zero point, 3 a scale and a minimum, 4 a scale and a table, 5 an exponent and a table; "
        "8 more: super-scales of the scale and of the minimum; 16 more: the upper bit of 5-bit codes; 32 more: the "
        "upper bits of 6-bit codes; 75: 64 more than 11, for 2-bit codes; 89: 64 more than 25, for 3-bit codes",
        least=0,
        most=89,
        optional=True,
    ),
    Attribute("group", "ints", "for each weight, the consecutive inputs that share a scale", least=0, optional=True),
    Attribute(
        "float_input",
        "bool",
        "whether packed weights are multiplied with the unrounded input; 0: a kernel may round it to int8 in blocks",
        optional=True,
    ),
)

EXPERTS_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
EXPERTS_ATTRIBUTES = (
    Attribute(
        "activation",
        "word",
        "the function of the gate, or of the first product where experts have no gate",
        "silu",
        words=EXPERTS_ACTIVATIONS,
    ),
    Attribute(
        "gate", "bool", "whether `first` has the gate's outputs and then the ups', instead of `inner` outputs", True
    ),
    Attribute("slope", "float", "the factor s of `silu(x) = x sigmoid(s x)`", 1.0),
    Attribute(
        "limit", "float", "gates are clamped to at most this, ups to [-limit, limit]; 0: to nothing", 0.0, least=0.0
    ),
    Attribute("up_offset", "float", "a constant that is added to the clamped ups", 0.0),
    Attribute("bias", "bool", "whether both products have biases", False),
    Attribute("packed", "ints", "for `first` and `down`, as in `Linear`", least=0, most=89, optional=True),
    Attribute("group", "ints", "for `first` and `down`, as in `Linear`", least=0, optional=True),
    Attribute("float_input", "bool", "as in `Linear`", optional=True),
)


def schema_digest() -> str:
    """Return a hash of everything in the operators' schema that a compiled kernel depends on.

    The hash covers the version of docs/reference/contract.md, the names, types and allowed words of the operators'
    attributes, the state tensors, and the types of caches. A compiled library contains the hash of its schema, so that
    a mismatch is found.
    """
    known = [
        [(a.name, a.kind, a.words) for a in attributes]
        for attributes in (VOTE_ATTENTION.attributes, MERGE_CACHE.attributes, LINEAR_ATTRIBUTES, EXPERTS_ATTRIBUTES)
    ]
    state = [(tensor.name, tensor.dims, tensor.dtype) for tensor in STATE]
    return hashlib.sha256(repr((CONTRACT_VERSION, known, state, TYPES, INT4)).encode()).hexdigest()[:12]
