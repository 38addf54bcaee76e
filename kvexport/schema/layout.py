"""The C structs that native kernels are called with, derived from the schema of the operators.

The header plugins/abi/kvexport.h is generated from these structs, and tests define the same structs in ctypes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvexport.schema.attribute import Attribute
from kvexport.schema.operators import MERGE_CACHE, STATISTIC_KINDS, VOTE_ATTENTION, Operand, Operator
from kvexport.schema.policy import FIT, POLICY
from kvexport.schema.state import DIMENSIONS, SCALES, SMALL, STATE

MAX_STATISTICS = 8
TYPES = ("float32", "float16", "bfloat16", *SMALL)  # of queries and caches, in the order of their numbers
_C_TYPES = {"query": "void", "cache": "void", "float32": "float", "int32": "int32_t", "int64": "int64_t"}


@dataclass(frozen=True)
class Field:
    type: str  # C type of the member, or of the elements of an array
    name: str
    meaning: str = ""  # A comment
    count: int = 0  # size of an array; 0 for a single value


def _heads_list(name: str, meaning: str) -> Field:
    return Field("const int*", name, f"[H] in the host's memory: {meaning}")


def enumerations() -> dict[str, tuple[str, ...]]:
    words = {a.name: a.words for a in (*POLICY, *FIT) if a.kind == "word"}
    return {"statistic": STATISTIC_KINDS, **words}


def number(attribute: str, word: str) -> int:
    return enumerations()[attribute].index(word)


def structs() -> dict[str, list[Field]]:
    """Return the members of every C struct that kernels are called with. Structs precede those that contain them."""
    return {
        "KvState": [Field(_C_TYPES[x.dtype] + "*", x.name, _dims(x.dims)) for x in STATE],
        "KvScales": [
            Field(_C_TYPES[x.dtype] + "*", x.name.removesuffix("_scale"), f"{_dims(x.dims)}, or nullptr")
            for x in SCALES
        ],
        "KvStatistic": [Field("int", "kind"), *_statistic()],
        "KvMergePolicy": [Field(_type(a), a.name, a.meaning) for a in POLICY],
        "KvFit": [Field(_type(a), a.name, a.meaning) for a in FIT],
        # Calls with reference queries pass these structs separately, on the CPU only. The structs that CUDA kernels
        # take as parameters do not contain them.
        "KvReferenceQueries": [Field("float*", "query", "[B,H,W,D]"), Field("int32_t*", "seen", "[B,H,W]")],
        "KvRing": [
            Field("int", "rows", "W"),
            Field("KvReferenceQueries", "past", "only read; may be the same buffers in `present`"),
            Field("KvReferenceQueries", "present"),
        ],
        "KvVoteAttention": [
            Field("int", "cache_type", "the type of the state's keys and values"),
            *_sizes(VOTE_ATTENTION),
            *_scalars(VOTE_ATTENTION),
            _heads_list("capacity", "the slots of each KV head; their sum is `slots`"),
            Field("KvStatistic", "statistic", "one for each statistic", MAX_STATISTICS),
            # This member fills padding. At another place it would move the parameters that CUDA kernels read, which
            # costs registers.
            Field("int", "query_type", "the type of query, key, value and output"),
            *(_pointer(x, const=True) for x in VOTE_ATTENTION.inputs if not x.name.startswith("past_")),
            *_STATES,
            *(_pointer(x, const=False) for x in VOTE_ATTENTION.outputs if not x.name.startswith("present_")),
            *_SCALES,
            _VALUE_PREFIX,
        ],
        "KvMergeCache": [
            Field("int", "cache_type", "the type of the state's keys and values"),
            *_sizes(MERGE_CACHE),
            Field("int", "heads", "H"),
            *_scalars(MERGE_CACHE),
            _heads_list("capacity", "the slots of each KV head; their sum is `slots`"),
            _heads_list("budget", "the slots that each KV head keeps"),
            _heads_list("recent", "the number of latest positions that each KV head never evicts"),
            Field("int", "statistic_kind", "one for each statistic", MAX_STATISTICS),
            Field("KvMergePolicy", "policy"),
            Field("int", "rotary_planes", "F of the layer's rotary embedding; 0: nothing is rotated"),
            Field("int", "rotary_interleaved", "whether planes are (2f, 2f + 1), not (f, f + F)"),
            Field(
                "int",
                "cache_positions",
                "whether keys are rotated by their slots' places; a merge rotates kept keys to their new places",
            ),
            Field("const float*", "inverse_frequencies", "[rotary_planes]"),
            *_STATES,
            *_SCALES,
            _VALUE_PREFIX,
        ],
    }


_STATES = (
    Field("KvState", "past", "read only; a tensor may be the same buffer in `present`, and is then updated in place"),
    Field("KvState", "present"),
)
_SCALES = (
    Field("KvScales", "past_scales", "the scales of a quantized cache's keys and values; buffers like the state's"),
    Field("KvScales", "present_scales"),
)
# The last member, for the same reason as `query_type`. Only the CPU's kernels read it.
_VALUE_PREFIX = Field(
    "int", "value_prefix", "value_size, if values are the first numbers of keys and are not stored; otherwise 0"
)


def scalars(operator: Operator) -> list[Attribute]:
    """Return the attributes of an ONNX operator that hold one number, bool or word each and always have a value.

    The attributes of the merge policy are left out.
    """
    attributes = [a for a in operator.attributes if a.name not in {p.name for p in POLICY}]
    return [a for a in attributes if a.kind in ("float", "int", "bool", "word") and not a.optional]


def _statistic() -> list[Field]:
    lists = [a for a in VOTE_ATTENTION.attributes if a.kind in ("floats", "ints") and a.name != "capacity"]
    return [Field(a.kind.removesuffix("s"), a.name, a.meaning) for a in lists]


def _scalars(operator: Operator) -> list[Field]:
    return [Field(_type(a), a.name, a.meaning) for a in scalars(operator)]


def _type(attribute: Attribute) -> str:
    return "float" if attribute.kind == "float" else "int"


def _sizes(operator: Operator) -> list[Field]:
    letters = {d for x in (*operator.inputs, *operator.outputs) for d in x.dims if isinstance(d, str)}
    return [Field("int", name, letter) for letter, (name, _) in DIMENSIONS.items() if letter in letters]


def _pointer(operand: Operand, *, const: bool) -> Field:
    missing = ", or nullptr" if operand.optional else ""
    return Field("const " * const + _C_TYPES[operand.role] + "*", operand.name, _dims(operand.dims) + missing)


def _dims(dims: tuple[str | int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
