"""How tasks are put to a model: facts, questions and filler as token ids of its tokenizer.

Two languages: `Text`, comment lines among lines of source (or of a given text), for every tokenizer of text, and
`Words`, the tiny checkpoint's own. A task asks for statements and questions by what they mean and never sees a
tokenizer.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from types import ModuleType
from typing import Protocol

import numpy as np

from kvexport.errors import UsageError
from kvexport.evaluate.corpus import library_sources
from kvexport.language.text import Tokenizer
from kvexport.recipe.inherit import recipe_folder

Ids = list[int]


@cache
def tiny_language() -> ModuleType:
    """The tiny checkpoint's train.py, which defines its words and sentences."""
    path = recipe_folder() / "checkpoints" / "tiny" / "train.py"
    spec = importlib.util.spec_from_file_location("kvexport_tiny_language", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Language(Protocol):
    """What a task may say. names and things: words a fact can be about, all different. Methods return token ids;
    questions and answers follow one another without a gap."""

    names: tuple[str, ...]
    things: tuple[str, ...]
    lacks: frozenset[str]  # names of tasks that cannot be put in this language
    start: Ids  # the beginning of a sequence

    def fact(self, name: str, thing: str) -> Ids:
        """States that name has thing."""
        ...

    def alias(self, name: str, other: str) -> Ids:
        """States that name has what other has."""
        ...

    def ask(self, kind: str, name: str, answer: str) -> tuple[Ids, Ids]:
        """A question about name and its answer. kind: "one" (its thing), "every" (its things in order,
        comma-separated), "mostly" (the thing stated most often), "count" (the number of statements), "chain" (the
        aliases, one after another, and the last one's thing)."""
        ...

    def filler(self, rng: np.random.Generator, count: int) -> list[Ids]:
        """Sentences or lines of exactly count tokens in all, in order, which state nothing."""
        ...

    def text(self, rng: np.random.Generator, count: int) -> tuple[Ids, list[int]]:
        """A text of count tokens, `start` included, and the positions whose next token the model was trained to
        predict."""
        ...


class Words:
    """The tiny checkpoint's language: `NAME THING .`, asked by `? NAME`."""

    lacks = frozenset({"multivalue", "tracking", "counting"})

    def __init__(self) -> None:
        self._tiny = tiny_language()
        self.names, self.things = self._tiny.NAMES, self._tiny.THINGS
        self.start = [self._tiny.BOS]

    def fact(self, name: str, thing: str) -> Ids:
        """See `Language`."""
        return [self._tiny.IDS[name], self._tiny.IDS[thing], self._tiny.STOP]

    def alias(self, name: str, other: str) -> Ids:
        """See `Language`."""
        raise ValueError("the tiny checkpoint knows no aliases")

    def ask(self, kind: str, name: str, answer: str) -> tuple[Ids, Ids]:
        """See `Language`; "one" and "mostly" are the same question here."""
        if kind not in ("one", "mostly"):
            raise ValueError(f"the tiny checkpoint cannot be asked {kind!r}")
        return [self._tiny.ASK, self._tiny.IDS[name]], [self._tiny.IDS[answer]]

    def filler(self, rng: np.random.Generator, count: int) -> list[Ids]:
        """See `Language`."""
        sentences: list[Ids] = self._tiny.filler_sentences(rng, count)
        return sentences

    def text(self, rng: np.random.Generator, count: int) -> tuple[Ids, list[int]]:
        """A story and questions about it, of which only the answers are predictable."""
        ids, labels = self._tiny.recall_row(rng, count)
        tiny = self._tiny
        return ids, [i - 1 for i, label in enumerate(labels) if label not in (tiny.IGNORE, tiny.EOS)]


_ASKED = {"one": "# {}", "chain": "# {}", "every": "# every {}", "mostly": "# mostly {}", "count": "# count {}"}


class Text:
    """`# NAME THING` and `# NAME OTHER` on lines of their own among lines of source."""

    lacks: frozenset[str] = frozenset()

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        """source: the text that filler and `text` are cut from; None takes the held-out modules of
        `kvexport.evaluate.corpus`."""
        self._tokenizer = tokenizer
        self.names, self.things = tiny_language().NAMES, tiny_language().THINGS
        self.start = tokenizer.encode("")
        text = "\n".join(library_sources(held_out=True).values()) if source is None else source
        self._lines = text.splitlines()
        self._ids: dict[int, Ids] = {}  # line number -> ids, as they are needed
        if not text.strip():
            raise UsageError("the text to measure on is empty", "--text FILE with some pages of text, or leave it out")

    def _continue(self, text: str) -> Ids:
        """Ids of text where a new line has begun: some tokenizers mark the very beginning of a text."""
        before = self._tokenizer.encode("\n", add_special_tokens=False)
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        return (
            ids[len(before) :]
            if ids[: len(before)] == before
            else self._tokenizer.encode(text, add_special_tokens=False)
        )

    def fact(self, name: str, thing: str) -> Ids:
        """See `Language`."""
        return self._continue(f"# {name} {thing}\n")

    def alias(self, name: str, other: str) -> Ids:
        """See `Language`."""
        return self._continue(f"# {name} {other}\n")

    def ask(self, kind: str, name: str, answer: str) -> tuple[Ids, Ids]:
        """See `Language`."""
        asked = _ASKED[kind].format(name)
        whole, question = self._continue(f"{asked} {answer}"), self._continue(asked)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, question, strict=False)))
        return whole[:same], whole[same:]

    def filler(self, rng: np.random.Generator, count: int) -> list[Ids]:
        """See `Language`: consecutive lines from a random place on; the last one may be cut, but ends."""
        lines: list[Ids] = []
        end = self._continue("\n")
        place = int(rng.integers(len(self._lines)))
        while count > 0:
            line = self._line(place)
            if len(line) > count:
                line = [*line[: max(0, count - len(end))], *end][:count]
            lines.append(line)
            count -= len(line)
            place += 1
        return lines

    def text(self, rng: np.random.Generator, count: int) -> tuple[Ids, list[int]]:
        """Consecutive lines, of which every token from the middle on counts: by then every budget of half the text is
        full."""
        ids = [*self.start, *(token for line in self.filler(rng, count - len(self.start)) for token in line)]
        return ids, list(range(count // 2, count - 1))

    def _line(self, number: int) -> Ids:
        number %= len(self._lines)
        if number not in self._ids:
            self._ids[number] = self._continue(self._lines[number] + "\n")
        return self._ids[number]


def language_of(tokenizer: Tokenizer | None, source: str | None = None) -> Language:
    """The language a model of this tokenizer is asked in. Raises UsageError where there is no tokenizer."""
    if tokenizer is None:
        raise UsageError(
            "the checkpoint has no tokenizer.json, so no task can be written for it", "put its tokenizer.json beside it"
        )
    words: Sequence[str] = tiny_language().WORDS
    if tokenizer.vocab_size == len(words) and all(tokenizer.token_id(word) == i for i, word in enumerate(words)):
        if source is not None:
            raise UsageError("the tiny checkpoint knows the words of its own language alone", "leave --text out")
        return Words()
    return Text(tokenizer, source)
