"""Writes what is derived from the schema: ``python -m kvexport.schema.generate``, with ``--check`` only saying what is
not current (exit code 1).

plugins/abi/kvexport.h: the structs of the calls. plugins/abi/attributes.h: reading a node's attributes into them, and
the attributes' names. docs/reference/contract.md: its tables, between ``<!-- schema: NAME -->`` and
``<!-- schema end -->``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from kvexport.schema.attribute import Attribute
from kvexport.schema.layout import MAX_STATISTICS, TYPES, Field, enumerations, scalars, structs
from kvexport.schema.operators import LINEAR_ATTRIBUTES, MERGE_CACHE, VOTE_ATTENTION, schema_digest
from kvexport.schema.policy import FIT, POLICY
from kvexport.schema.state import INT4, SCALES, STATE, StateTensor

ROOT = Path(__file__).parent.parent.parent
WIDTH = 120
WRITTEN = """// Written by `python -m kvexport.schema.generate` from kvexport/schema: change that, not this.
// clang-format off"""


def header() -> str:
    """plugins/abi/kvexport.h."""
    parts = [
        "// The operators of docs/reference/contract.md as plain structs: a call of an operator, its attributes, and",
        "// the addresses of its tensors. Shared by the kernels of the CPU (../cpu/kvexport_cpu.h) and of CUDA",
        "// (../cuda/kvexport_cuda.h).",
        WRITTEN,
        '#pragma once\n\n#include <stddef.h>\n#include <stdint.h>\n\n#ifdef __cplusplus\nextern "C" {\n#endif\n',
        "// Types of tensors; KV_BFLOAT16 on CUDA alone. Those after it are of small caches: keys and",
        "// values int8, both int4, and keys int8 with values int4. Scores, votes and arithmetic are float32 in all.",
        _enum("", TYPES),
        "// The int8 numbers that the codes of int4 stand for.",
        f"#define KV_INT4_NUMBERS {', '.join(map(str, INT4))}",
        *(_enum(prefix, words) for prefix, words in enumerations().items()),
        f"enum {{ KV_MAX_STATISTICS = {MAX_STATISTICS} }};",
    ]
    for name, fields in structs().items():
        parts += [
            "",
            f"typedef struct {name} {{",
            *(line for field in fields for line in _member(field)),
            f"}} {name};",
        ]
    parts += ['\n#ifdef __cplusplus\n}\n#endif\n\n#include "linear.h"']
    return "\n".join(parts) + "\n"


def _enum(prefix: str, words: Iterable[str]) -> str:
    names = [f"KV_{prefix}_{word}".replace("__", "_").upper() for word in words]
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
    """plugins/abi/attributes.h."""
    parts = [
        "// A node's attributes: their names, and how those of one value are read into the structs of a call. A Node",
        "// is as ../bindings/node/read.h says.",
        WRITTEN,
        '#pragma once\n\n#include "../bindings/node/read.h"\n#include "kvexport.h"\n\nnamespace kv {\n',
        "// What a library was compiled with, so that one of another version is refused before it reads a node.",
        f'inline constexpr const char* kSchema = "{schema_digest()}";\n',
    ]
    for name, attributes in (("VoteAttention", VOTE_ATTENTION.attributes), ("MergeCache", MERGE_CACHE.attributes)):
        parts.append(f"inline constexpr AttributeName k{name}Attributes[] = {{")
        parts += [f'    {{"{a.name}", {_KINDS[a.kind]}}},' for a in attributes] + ["};\n"]
    for name, given in (
        ("KvVoteAttention", scalars(VOTE_ATTENTION)),
        ("KvMergeCache", scalars(MERGE_CACHE)),
        ("KvMergePolicy", POLICY),
        ("KvFit", FIT),
    ):
        parts.append(f"template <class Node>\nvoid read_attributes(const Node& node, {name}& x) {{")
        parts += [line for a in given for line in _read(a)] + ["}\n"]
    return "\n".join(parts) + "\n}  // namespace kv\n"


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


def tables() -> dict[str, str]:
    """The tables of docs/reference/contract.md by their names."""
    return {
        "state": _state(STATE),
        "scales": _state(SCALES),
        "VoteAttention": _attributes(VOTE_ATTENTION.attributes),
        "MergeCache": _attributes(a for a in MERGE_CACHE.attributes if a.name not in {p.name for p in (*POLICY, *FIT)}),
        "MergePolicy": _attributes(POLICY),
        "Fit": _attributes(FIT),
        "Linear": _attributes(LINEAR_ATTRIBUTES),
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
    """docs/reference/contract.md with its tables as they should be."""
    for name, table in tables().items():
        mark = re.escape(f"<!-- schema: {name} -->")
        text, found = re.subn(
            rf"(?<={mark}\n).*?(?=\n<!-- schema end -->)", table.replace("\\", r"\\"), text, flags=re.DOTALL
        )
        if found != 1:
            raise ValueError(
                f"docs/reference/contract.md has {found} tables marked `<!-- schema: {name} -->`, and should have one"
            )
    return text


FILES: dict[str, Callable[[str], str]] = {
    "plugins/abi/kvexport.h": lambda _: header(),
    "plugins/abi/attributes.h": lambda _: reader(),
    "docs/reference/contract.md": contract,
}


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the files, or with ``--check`` name those that are not current."""
    stale = 0
    for name, write in FILES.items():
        path = root / name
        found = path.read_text() if path.exists() else ""
        wanted = write(found)
        if found == wanted:
            continue
        stale += 1
        if "--check" in arguments:
            print(f"{name} is not what kvexport/schema says: python -m kvexport.schema.generate", file=sys.stderr)
        else:
            path.write_text(wanted)
            print(name)
    return int(stale > 0 and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
