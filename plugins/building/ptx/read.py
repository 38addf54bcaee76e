"""Parser of PTX: the kernels of a module, and the statements of a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "f16": 16, "f16x2": 32, "f32": 32, "f64": 64, "pred": 1,
}  # fmt: skip
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{", re.S)
PARAMETER = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?\s*$")
CONSTANT = re.compile(r"\.(?:global|const)\s+\.align\s+\d+\s+\.(\w+)\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}\s*;")
VARIABLE = re.compile(r"\.(shared|local)\s+\.align\s+\d+\s+\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")


class Kernel(NamedTuple):
    """A kernel of a PTX module.

    Attributes:
        name: The mangled name.
        parameters: The offset in bytes of every parameter.
        parameter_bytes: The bytes of all parameters.
        body: The text between the braces.
    """

    name: str
    parameters: dict[str, int]
    parameter_bytes: int
    body: str


class Module(NamedTuple):
    """A PTX file.

    Attributes:
        kernels: Its kernels.
        dynamic: The names of shared memory whose size a launch sets.
        constants: The C++ declaration of every constant.
        files: The names of source files by their numbers.
    """

    kernels: list[Kernel]
    dynamic: set[str]
    constants: dict[str, str]
    files: dict[int, str]


def module(text: str) -> Module:
    files = {int(n): path.rsplit("/", 1)[-1] for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.M)}
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    kernels = []
    for entry in ENTRY.finditer(text):
        parameters, size = _parameters(entry[2])
        kernels.append(Kernel(entry[1], parameters, size, _block(text, entry.end())))
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
        match = PARAMETER.search(one)
        if match is None:
            raise ValueError(f"a parameter has an unknown form: {one}")
        each = BITS[match[2]] // 8
        align = int(match[1] or each)
        end = (end + align - 1) // align * align
        offsets[match[3]] = end
        end += each * int(match[4] or 1)
    return offsets, end


def _block(text: str, start: int) -> str:
    depth, at = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1]


def split(text: str) -> list[str]:
    """Split a text at the commas outside all brackets; drop empty items."""
    items, depth = [""], 0
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            items.append("")
        else:
            items[-1] += c
    return [item.strip() for item in items if item.strip()]


def statements(body: str) -> Iterator[str]:
    """Yield the statements of a body: declarations, `.loc`, labels with their colon, instructions, and braces."""
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
