"""Generate the files that are derived from the operators' schema (kvexport/schema): ``python -m tools.schema``.

With ``--check`` no file is written, and the exit code is 1 if a file is not current. The files are:

- plugins/abi/kvexport.h: the structs of the calls of kernels. Tests define the same structs in ctypes.
- plugins/abi/attributes.h: the names of a node's attributes, and functions that read them into the structs.
- plugins/math/policy.h: the merge policies that the kernels support.
- docs/reference/contract.md: its tables, between ``<!-- schema: NAME -->`` and ``<!-- schema end -->``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvexport.schema.attribute import Attribute
from kvexport.schema.operators import (
    EXPERTS_ATTRIBUTES,
    LINEAR_ATTRIBUTES,
    MERGE_CACHE,
    STATISTIC_KINDS,
    VOTE_ATTENTION,
    Operand,
    Operator,
    schema_digest,
)
from kvexport.schema.policy import FIT, NEEDS_FIT, POLICY, REQUIREMENTS, MergePolicy
from kvexport.schema.state import DIMENSIONS, INT4, SCALES, STATE, TYPES, StateTensor

ROOT = Path(__file__).parent.parent
WIDTH = 120
WRITTEN = """// Written by `python -m tools.schema` from kvexport/schema: change that, not this.
// clang-format off"""
MAX_STATISTICS = 8
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
        "KvMergePolicy": _members(POLICY),
        "KvFit": _members(FIT),
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
    return _members(scalars(operator))


def _members(attributes: Iterable[Attribute]) -> list[Field]:
    return [Field("float" if a.kind == "float" else "int", a.name, a.meaning) for a in attributes]


def _sizes(operator: Operator) -> list[Field]:
    letters = {d for x in (*operator.inputs, *operator.outputs) for d in x.dims if isinstance(d, str)}
    return [Field("int", name, letter) for letter, (name, _) in DIMENSIONS.items() if letter in letters]


def _pointer(operand: Operand, *, const: bool) -> Field:
    missing = ", or nullptr" if operand.optional else ""
    return Field("const " * const + _C_TYPES[operand.role] + "*", operand.name, _dims(operand.dims) + missing)


def _dims(dims: tuple[str | int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"


def header() -> str:
    lines = [
        "// The operators of docs/reference/contract.md as plain structs: one struct for a call of each operator,",
        "// with its attributes and the addresses of its tensors. The kernels of the CPU (../cpu/kvexport_cpu.h)",
        "// and of CUDA (../cuda/kvexport_cuda.h) share them.",
        WRITTEN,
        '#pragma once\n\n#include <stddef.h>\n#include <stdint.h>\n\n#ifdef __cplusplus\nextern "C" {\n#endif\n',
        "// Types of tensors. The last three are those of quantized caches: keys and values in int8, both in int4,",
        "// and keys in int8 with values in int4. Scores, votes and arithmetic are always float32.",
        _enum("", TYPES),
        "// The int8 numbers that the codes of int4 stand for.",
        f"#define KV_INT4_NUMBERS {', '.join(map(str, INT4))}",
        *(_enum(prefix, words) for prefix, words in enumerations().items()),
        f"enum {{ KV_MAX_STATISTICS = {MAX_STATISTICS} }};",
    ]
    for name, fields in structs().items():
        lines += [
            "",
            f"typedef struct {name} {{",
            *(line for field in fields for line in _member(field)),
            f"}} {name};",
        ]
    lines += ['\n#ifdef __cplusplus\n}\n#endif\n\n#include "experts.h"\n#include "linear.h"']
    return "\n".join(lines) + "\n"


def _constant(prefix: str, word: str) -> str:
    return f"KV_{prefix}_{word}".replace("__", "_").upper()


def _enum(prefix: str, words: Iterable[str]) -> str:
    names = [_constant(prefix, word) for word in words]
    text = "enum { " + ", ".join(f"{name} = {i}" for i, name in enumerate(names)) + " };"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def _member(field: Field) -> list[str]:
    declared = f"  {field.type} {field.name}{f'[{field.count}]' if field.count else ''};".replace(
        f"[{MAX_STATISTICS}]", "[KV_MAX_STATISTICS]"
    )
    if not field.meaning or len(declared) + len(field.meaning) + 5 <= WIDTH:
        return [declared + (f"  // {field.meaning}" if field.meaning else "")]
    return [*textwrap.wrap(field.meaning, WIDTH, initial_indent="  // ", subsequent_indent="  // "), declared]


def reader() -> str:
    lines = [
        "// A node's attributes: their names, and functions that read those of one value into the structs of a call.",
        "// ../bindings/node/read.h defines the interface of Node.",
        WRITTEN,
        '#pragma once\n\n#include "../bindings/node/read.h"\n#include "kvexport.h"\n\nnamespace kv {\n',
        "// The digest of the schema that the library is compiled with. A library of another version is refused before",
        "// it reads a node.",
        f'inline constexpr const char* kSchema = "{schema_digest()}";\n',
    ]
    for name, attributes in (
        ("VoteAttention", VOTE_ATTENTION.attributes),
        ("MergeCache", MERGE_CACHE.attributes),
        ("Linear", LINEAR_ATTRIBUTES),
        ("Experts", EXPERTS_ATTRIBUTES),
    ):
        lines.append(f"inline constexpr AttributeName k{name}Attributes[] = {{")
        lines += [f'    {{"{a.name}", {_KINDS[a.kind]}}},' for a in attributes] + ["};\n"]
    for name, fields in (
        ("KvVoteAttention", scalars(VOTE_ATTENTION)),
        ("KvMergeCache", scalars(MERGE_CACHE)),
        ("KvMergePolicy", POLICY),
        ("KvFit", FIT),
    ):
        lines.append(f"template <class Node>\nvoid read_attributes(const Node& node, {name}& x) {{")
        lines += [line for a in fields for line in _read(a)] + ["}\n"]
    return "\n".join(lines) + "\n}  // namespace kv\n"


_KINDS = {
    "float": "kFloat",
    "int": "kInt",
    "bool": "kInt",
    "word": "kWord",
    "words": "kWord",
    "floats": "kFloats",
    "ints": "kInts",
}


def _read(a: Attribute) -> list[str]:
    if a.kind == "word":
        return [
            f'  x.{a.name} = read_word(node, "{a.name}", {{{", ".join(f"{chr(34)}{w}{chr(34)}" for w in a.words)}}});'
        ]
    if a.kind == "bool":
        return [f'  x.{a.name} = read_switch(node, "{a.name}");']
    suffix = "f" if a.kind == "float" else ""
    bounds = [("least", ">="), ("above", ">"), ("most", "<="), ("below", "<")]
    tests = []
    for bound, sign in bounds:
        limit = getattr(a, bound)
        if limit is not None:
            tests.append(f"x.{a.name} {sign} {float(limit) if suffix else int(limit)}{suffix}")
    read = f'  x.{a.name} = node.{"number" if suffix else "integer"}("{a.name}");'
    if not tests and not suffix:
        return [read]
    test = " && ".join(tests) or f"x.{a.name} == x.{a.name}"
    return [read, f'  check(node, {test}, "{a.name}", x.{a.name}, "{a.bounds or "a number"}");']


def policy_check() -> str:
    lines = [
        "// Which combinations of merge policy fields the native kernels support (kvexport/schema/policy.py).",
        WRITTEN,
        '#pragma once\n\n#include "../abi/kvexport.h"\n\nnamespace kv {\n',
        "// Returns why the kernels do not support this policy, or nullptr if they do. has_queries: whether the call",
        "// has reference queries.",
        "inline const char* policy_problem(const KvMergePolicy& p, bool has_queries = false) {",
        '  if (!(p.votes_max >= 1.0f)) return "votes_max is below 1";',
        f'  if (p.share_pairs) return "{MergePolicy(share_pairs=True).why_not_native}";',
    ]
    for rule in REQUIREMENTS:
        broken = " && ".join(_differs(rule.other, value) for value in rule.allowed)
        lines += [f"  if (p.{rule.field} == {_constant(rule.field, rule.value)} && {broken})"]
        lines += [f'    return "{rule.problem}";']
    lines += [
        f'  if (p.select == KV_SELECT_ATTENDED && !has_queries)\n    return "{NEEDS_FIT}";',
        "  return nullptr;",
        "}\n",
    ]
    return "\n".join(lines) + "\n}  // namespace kv\n"


def _differs(field: str, value: str | bool) -> str:
    if isinstance(value, bool):
        return f"{'!' * value}p.{field}"
    return f"p.{field} != {_constant(field, value)}"


def tables() -> dict[str, str]:
    return {
        "state": _state(STATE),
        "scales": _state(SCALES),
        "VoteAttention": _attributes(VOTE_ATTENTION.attributes),
        "MergeCache": _attributes(a for a in MERGE_CACHE.attributes if a.name not in {p.name for p in (*POLICY, *FIT)}),
        "MergePolicy": _attributes(POLICY),
        "Fit": _attributes(FIT),
        "Linear": _attributes(LINEAR_ATTRIBUTES),
        "Experts": _attributes(EXPERTS_ATTRIBUTES),
    }


def _state(tensors: Iterable[StateTensor]) -> str:
    return _table(
        ("tensor (`past_key_values.{i}.` in, `present.{i}.` out)", "shape", "type", "meaning"),
        [(f"`{x.name}`", ",".join(map(str, x.dims)), x.dtype, x.meaning) for x in tensors],
    )


def _attributes(attributes: Iterable[Attribute]) -> str:
    rows = []
    for a in attributes:
        values = ", ".join(f"`{word}`" for word in a.words) or a.bounds
        default = "" if a.default is None else f"`{a.node_value(a.default)}`"
        rows.append(
            (f"`{a.name}`", {"words": "string", "word": "string"}.get(a.kind, a.kind), values, default, a.meaning)
        )
    return _table(("attribute", "type", "values", "default", "meaning"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def contract(text: str) -> str:
    for name, table in tables().items():
        mark = re.escape(f"<!-- schema: {name} -->")
        text, count = re.subn(
            rf"(?<={mark}\n).*?(?=\n<!-- schema end -->)", table.replace("\\", r"\\"), text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(
                f"docs/reference/contract.md has {count} tables marked `<!-- schema: {name} -->`, and should have one"
            )
    return text


FILES: dict[str, Callable[[str], str]] = {
    "plugins/abi/kvexport.h": lambda _: header(),
    "plugins/abi/attributes.h": lambda _: reader(),
    "plugins/math/policy.h": lambda _: policy_check(),
    "docs/reference/contract.md": contract,
}


def main(arguments: list[str], root: Path = ROOT) -> int:
    stale = 0
    for name, write in FILES.items():
        path = root / name
        present = path.read_text() if path.exists() else ""
        current = write(present)
        if present == current:
            continue
        stale += 1
        if "--check" in arguments:
            print(f"{name} is not current: run python -m tools.schema", file=sys.stderr)
        else:
            path.write_text(current)
            print(name)
    return int(stale > 0 and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
