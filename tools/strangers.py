"""Draw docstrings and sentences at random for readers who know nothing else of the project.

Every reader writes down the meaning of each text. An engineer of the project then compares the answers with the code,
and rewrites each text that was not understood at first reading:

    python -m tools.strangers --seed 7 --count 60 --key key.json > texts.txt

The texts go to the readers. The key, which names the place of every text, does not.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# A sentence ends before white space and a capital, a quotation mark, a code span or an opening bracket.
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bet al\.)\s+(?=[A-Z`\"(*])")
LIST_ITEM = re.compile(r"(?:[-*+]|\d+\.)\s+")
DEFINITION = re.compile(r":\s+")
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Text(NamedTuple):
    """A docstring or a sentence, and its place: the qualified name of the object, or the file and line."""

    place: str
    text: str


def docstrings(package: Path) -> list[Text]:
    """Return every docstring of a package's modules, classes, functions and methods."""
    texts = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        texts += [Text(name, text) for name, text in _docstrings(ast.parse(path.read_text(encoding="utf-8")), module)]
    return texts


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _docstrings(child, f"{name}.{child.name}" if named else name)  # type: ignore[attr-defined]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a Markdown page without headings, tables, images, code blocks, comments and link targets.

    A link stays as its text in brackets, since a reader of the page sees that it is one.
    """
    fence, comment, start, lines = "", False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        opening = FENCE.match(line)
        prose = not fence and not opening and not comment and "<!--" not in line
        if fence:
            fence = "" if line.strip().startswith(fence) else fence
        elif opening:
            fence = opening[1]
        comment = (comment or "<!--" in line) and "-->" not in line
        stripped = line.strip()
        skipped = not prose or not stripped or stripped[0] in "#|<!" or set(stripped) <= set("-=")
        marker = LIST_ITEM.match(stripped) or DEFINITION.match(stripped)
        if lines and (skipped or marker):
            yield start, LINK.sub(r"[\1]", " ".join(lines))
            lines = []
        if not skipped:
            start = start if lines else number
            lines.append(stripped[marker.end() :] if marker else stripped)


def sentences(paths: list[Path], root: Path) -> list[Text]:
    """Return the sentences of Markdown pages."""
    return [
        Text(f"{path.relative_to(root)}:{line}", sentence.strip())
        for path in paths
        for line, paragraph in paragraphs(path.read_text(encoding="utf-8"))
        for sentence in SENTENCE_END.split(paragraph)
        if len(sentence.split()) >= 4
    ]


def draw(texts: list[Text], count: int, seed: int) -> list[Text]:
    """Return `count` texts chosen at random without repetition, the same ones for the same seed and texts."""
    if count > len(texts):
        raise ValueError(f"{count} texts were requested, but there are only {len(texts)}: lower --count")
    return random.Random(seed).sample(texts, count)


def main() -> None:
    """Print the numbered texts, and write their places to the key file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True, help="The seed of the draw.")
    parser.add_argument("--count", type=int, default=60, help="How many docstrings, and how many sentences, to draw.")
    parser.add_argument("--key", type=Path, required=True, help="The JSON file to write the places of the texts to.")
    arguments = parser.parse_args()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!_]*/*.md"))]
    kinds = {"docstrings": docstrings(ROOT / "kvexport"), "sentences of the documentation": sentences(pages, ROOT)}
    try:
        drawn = {kind: draw(texts, arguments.count, arguments.seed) for kind, texts in kinds.items()}
    except ValueError as error:
        sys.exit(str(error))
    key: dict[str, str] = {}
    for kind, texts in drawn.items():
        print(f"# {len(texts)} {kind}\n")
        for place, text in texts:
            key[str(len(key) + 1)] = place
            print(f"{len(key)}. {text.replace(chr(10), chr(10) + '   ')}\n")
    arguments.key.write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
