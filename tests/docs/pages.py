"""Functions that read the pages of the documentation: their headings, links and blocks of code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("[!_]*.md"))]
PAGES = [path for path in PAGES if "_generated" not in path.parts]
FENCE = re.compile(r"^(\s*)(`{3,})(.*)$")
RUN_MARK = "<!-- test: run -->"


class Block(NamedTuple):
    """A fenced block of code, and the numbers of its first and last line, which are fences."""

    line: int
    end: int
    language: str
    text: str
    run: bool


def blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    start, fence, language, indent = 0, "", "", 0
    for number, line in enumerate(lines, 1):
        opening = FENCE.match(line)
        if not fence and opening:
            start, fence, language, indent = number, opening[2], opening[3].strip(), len(opening[1])
        elif fence and line.strip() == fence:
            body = "\n".join(inner[indent:] for inner in lines[start : number - 1])
            before = next((above for above in reversed(lines[: start - 1]) if above.strip()), "")
            yield Block(start, number, language, body, before.strip() == RUN_MARK)
            fence = ""


def prose(text: str) -> str:
    """Return a page with blank lines in place of its blocks of code."""
    lines = text.splitlines()
    for block in blocks(text):
        lines[block.line - 1 : block.end] = [""] * (block.end - block.line + 1)
    return "\n".join(lines)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, named as GitHub and MyST name them."""
    names: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", prose(path.read_text(encoding="utf-8")), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        copies = sum(1 for known in names if re.fullmatch(rf"{re.escape(name)}(-\d+)?", known))
        names.add(f"{name}-{copies}" if copies else name)
    return names


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the target and the anchor of each link to another file or heading. An absent one is ""."""
    text = re.sub(r"`[^`\n]+`", "", prose(path.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target.partition("#")[0], target.partition("#")[2]
