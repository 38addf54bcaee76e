"""A YAML reader for recipes that records where every value is written, and reports unreadable text with its lines.

Values are those of `yaml.safe_load` without merge keys, because a recipe has `extends`: there are no tags of Python or
other applications. In addition every key is text and appears once, numbers are finite and fit 64 bits, and the size of
a text is bounded, so that neither aliases nor nesting can make reading expensive.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

MAX_BYTES = 256 * 1024
MAX_VALUES = 10_000
MAX_DEPTH = 16
CORE = "tag:yaml.org,2002:"
SCALARS = tuple(CORE + kind for kind in ("null", "bool", "int", "float", "str", "timestamp"))


@dataclass
class Findings:
    """The problems found in a recipe while it is read and checked."""

    problems: list[str] = field(default_factory=list)
    lost: bool = False  # whether a part could not be read, in which a missing value may be

    def lose(self, problem: str) -> None:
        self.problems.append(problem)
        self.lost = True


@dataclass(frozen=True)
class Origin:
    """The place where an entry of a recipe is written: a file and line, or a command-line option."""

    place: str  # of the value: "recipes/x.yaml:7" or "--set key=value"
    key_place: str
    folder: Path  # of the file, to which paths in the value are relative


@dataclass(frozen=True)
class Leaf:
    """A value of a recipe, a scalar or a list with all of its items, and the place where it is written."""

    value: Any
    origin: Origin


@dataclass(frozen=True)
class Tree:
    """A mapping in a recipe, and the place (file and line, or option) of the key whose value the mapping is."""

    entries: dict[str, Entry]
    origin: Origin


Entry: TypeAlias = "Leaf | Tree"


def merge(below: Tree, above: Tree) -> Tree:
    """Return the recipe contents `above` merged over `below`: mappings merge key by key, other values are replaced."""
    entries = dict(below.entries)
    for key, entry in above.entries.items():
        old = entries.get(key)
        entries[key] = merge(old, entry) if isinstance(old, Tree) and isinstance(entry, Tree) else entry
    return Tree(entries, above.origin)


def nest(key: tuple[str, ...], entry: Entry) -> Tree:
    for name in reversed(key):
        entry = Tree({name: entry}, entry.origin)
    assert isinstance(entry, Tree)
    return entry


def plain(entry: Entry) -> Any:
    return entry.value if isinstance(entry, Leaf) else {key: plain(value) for key, value in entry.entries.items()}


def shown_key(dotted: str) -> str:
    text = dotted if dotted.isprintable() else repr(dotted)
    return text if len(text) <= 120 else f"{text[:117]}..."


def read_file(path: Path, label: str, extended_at: str, findings: Findings) -> Tree:
    empty = Tree({}, Origin(label, label, path.parent))
    by = f" (extended at {extended_at})" if extended_at else ""
    try:
        # A pipe without a writer would block `open`, and reading a device might not end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no regular file")
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        findings.lose(f"{label}: there is no such file{by}")
    except UnicodeDecodeError as error:
        findings.lose(f"{label}:{raw[: error.start].count(10) + 1}: not UTF-8 text{by}")
    except (OSError, ValueError) as error:
        findings.lose(f"{label}: cannot be read: {getattr(error, 'strerror', None) or error}{by}")
    else:
        if len(raw) > MAX_BYTES:
            findings.lose(f"{label}: larger than {MAX_BYTES} bytes, which no recipe is{by}")
            return empty
        entry = Source(label, path.parent, True, findings).read(text)
        if isinstance(entry, Tree):
            return entry
        if entry is not None:
            kind = "empty" if entry.value is None else f"a {type(entry.value).__name__}"
            findings.lose(f"{entry.origin.place}: a recipe is a mapping of keys, this is {kind}{by}")
    return empty


@dataclass
class Source:
    """A YAML text that is read into a recipe: a file, or the value of an override on the command line."""

    label: str  # name of the file or override in messages
    folder: Path
    is_file: bool
    findings: Findings
    values: int = 0  # number of values read so far

    def read(self, text: str) -> Entry | None:
        try:
            loader = yaml.SafeLoader(text)
            try:
                node = loader.get_single_node()
                if node is None:
                    return Leaf(None, Origin(self._place(None), self._place(None), self.folder))
                return self._entry(loader, node, "", self._place(node), ())
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            reason = ", ".join(text for text in (error.context, error.problem) if text)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            reason = "it holds a character that YAML does not allow"
        except RecursionError:
            line, reason = 1, "it is nested too deep"
        self.findings.lose(
            f"{self.label}{f':{line}' if self.is_file else ''}: not YAML that can be read: {' '.join(reason.split())}"
        )
        return None

    def _place(self, node: yaml.Node | None) -> str:
        line = node.start_mark.line + 1 if node else 1
        return f"{self.label}:{line}" if self.is_file else self.label

    def _entry(
        self, loader: yaml.SafeLoader, node: yaml.Node, key: str, key_place: str, above: tuple[int, ...]
    ) -> Entry | None:
        self.values += 1
        if id(node) in above or len(above) > MAX_DEPTH or self.values > MAX_VALUES:
            reason = "it contains itself, is nested too deep, or has too many values"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        above = (*above, id(node))
        origin = Origin(self._place(node), key_place, self.folder)
        if isinstance(node, yaml.MappingNode) and node.tag == CORE + "map":
            return Tree(self._entries(loader, node, key, above), Origin(key_place, key_place, self.folder))
        if isinstance(node, yaml.SequenceNode) and node.tag == CORE + "seq":
            items = [self._entry(loader, item, key, key_place, above) for item in node.value]
            return Leaf([plain(item) for item in items if item is not None], origin)
        if isinstance(node, yaml.ScalarNode) and node.tag in SCALARS:
            return self._scalar(loader, node, key, origin)
        self.findings.lose(
            f"{shown_key(key or 'recipe')}: the tag {node.tag.removeprefix(CORE)!r} is not allowed ({origin.place})"
        )
        return None

    def _entries(
        self, loader: yaml.SafeLoader, node: yaml.MappingNode, above_key: str, above: tuple[int, ...]
    ) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if key_node.tag == CORE + "merge":
                self.findings.lose(f"merge keys (<<) are not read; use extends ({place})")
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in SCALARS:
                self.findings.lose(f"a key is text, this is something else ({place})")
                continue
            name = str(key_node.value)
            key = f"{above_key}.{name}" if above_key else name
            if name in entries:
                self.findings.problems.append(
                    f"{shown_key(key)} is written twice ({entries[name].origin.key_place} and {place})"
                )
            entry = self._entry(loader, value_node, key, place, above)
            if entry is not None:
                entries[name] = entry
        return entries

    def _scalar(self, loader: yaml.SafeLoader, node: yaml.ScalarNode, key: str, origin: Origin) -> Leaf | None:
        try:
            value = loader.construct_object(node)
        except (ValueError, LookupError, AttributeError, OverflowError, yaml.YAMLError):
            # PyYAML's own conversions: a 13th month, !!bool of another word, !!int of nothing, 5000 digits.
            reason = f"is no {node.tag.removeprefix(CORE)}"
        else:
            if isinstance(value, float) and not math.isfinite(value):
                reason = "is not finite"
            elif isinstance(value, int) and abs(value) >= 2**63:
                reason = "does not fit 64 bits"
            elif isinstance(value, str) and "\0" in value:
                reason = "holds a NUL character"
            else:
                return Leaf(value, origin)
        self.findings.lose(f"{shown_key(key or 'value')}: {node.value[:40]!r} {reason} ({origin.place})")
        return None


def read_overrides(overrides: Sequence[str], findings: Findings) -> Tree:
    layer = Tree({}, Origin("", "", Path.cwd()))
    for text in overrides:
        label = f"--set {text}" if text.isprintable() else f"--set {text!r}"
        dotted, equals, value = text.partition("=")
        key = tuple(name.strip() for name in dotted.split("."))
        if not equals or not all(key) or len(key) > 8:
            findings.lose(f"{label}: should be --set KEY=VALUE with a dotted key, such as --set cache.budget=512")
        elif key[0] == "extends":
            findings.problems.append(f"{label}: extends is written in a file, not set")
        else:
            entry = Source(label, Path.cwd(), False, findings).read(value)
            if entry is not None:
                layer = merge(layer, nest(key, entry))
    return layer
