"""A PTX module's kernels, and a kernel's statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64, "pred": 1,
}  # fmt: skip
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{", re.S)
PARAMETER = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?\s*$")
CONSTANT = re.compile(r"\.(?:global|const)\s+\.align\s+\d+\s+\.(\w+)\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}\s*;")
VARIABLE = re.compile(r"\.(shared|local)\s+\.align\s+\d+\s+\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")
LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")


class Kernel(NamedTuple):
    """name: mangled. parameters: of every one its offset; their bytes in all. body: the text between the braces."""

    name: str
    parameters: dict[str, int]
    parameter_bytes: int
    body: str


class Module(NamedTuple):
    """dynamic: names of shared memory whose size a launch gives. constants: C declarations. files: by number."""

    kernels: list[Kernel]
    dynamic: set[str]
    constants: dict[str, str]
    files: dict[int, str]


def module(text: str) -> Module:
    """What a PTX file holds."""
    files = {int(n): path.rsplit("/", 1)[-1] for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.M)}
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    kernels = []
    for found in ENTRY.finditer(text):
        parameters, size = _parameters(found[2])
        kernels.append(Kernel(found[1], parameters, size, _block(text, found.end())))
    dynamic = set(re.findall(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.\w+\s+([\w$]+)\[\]", text))
    constants = {
        name: f"alignas(16) const uint{BITS[kind]}_t constant_{name}[] = {{{values}}};"
        for kind, name, values in CONSTANT.findall(text)
    }
    return Module(kernels, dynamic, constants, files)


def _parameters(text: str) -> tuple[dict[str, int], int]:
    offsets: dict[str, int] = {}
    end = 0
    for one in split(text):
        found = PARAMETER.search(one)
        if found is None:
            raise ValueError(f"a parameter reads otherwise than expected: {one}")
        each = BITS[found[2]] // 8
        align = int(found[1] or each)
        end = (end + align - 1) // align * align
        offsets[found[3]] = end
        end += each * int(found[4] or 1)
    return offsets, end


def _block(text: str, start: int) -> str:
    depth, at = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1]


def split(text: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def statements(body: str) -> Iterator[str]:
    """One after another: declarations, `.loc`, labels with their colon, instructions, and the braces of a scope."""
    for line in body.splitlines():
        rest = line.strip()
        if re.match(r"\.loc\s", rest):
            yield " ".join(rest.split())
            continue
        while rest:
            if rest[0] in "{}":
                yield rest[0]
                rest = rest[1:].strip()
                continue
            label = re.match(r"([\w$]+):", rest)
            if label:
                yield label[0]
                rest = rest[label.end() :].strip()
                continue
            one, _, rest = rest.partition(";")
            if one.strip():
                yield " ".join(one.split())
            rest = rest.strip()
