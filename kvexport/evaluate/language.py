"""The texts of evaluation tasks, as token ids of a model's tokenizer.

`Text` takes lines of source code or of another text, and works with every text tokenizer. `Words` writes stories in the
language of the tiny checkpoint, a small model that is trained for tests.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvexport.errors import UsageError
from kvexport.evaluate import tiny_language as tiny
from kvexport.evaluate.corpus import library_sources
from kvexport.language.tokenizer import Tokenizer

Ids = list[int]


class Language(Protocol):
    """Interface of the texts of evaluation tasks."""

    start: Ids  # the beginning of a sequence

    def text(self, rng: np.random.Generator, count: int) -> tuple[Ids, list[int]]:
        """Return a text of `count` tokens, its start token included, and the positions of evaluated predictions.

        At the evaluated positions the next token can be predicted from the text, as the model was trained to do.
        """
        ...


class Words:
    """Stories in the language of the tiny checkpoint."""

    names, things, start = tiny.NAMES, tiny.THINGS, [tiny.BOS]

    def filler(self, rng: np.random.Generator, count: int) -> list[Ids]:
        return tiny.filler_sentences(rng, count)

    def text(self, rng: np.random.Generator, count: int) -> tuple[Ids, list[int]]:
        """Return a story and questions about it as token ids, and the positions of the answers, which are evaluated."""
        ids, labels = tiny.recall_row(rng, count)
        return ids, [i - 1 for i, label in enumerate(labels) if label not in (tiny.IGNORE, tiny.EOS)]


class Text:
    """Lines of source code, or of another text."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.start = tokenizer.encode("")
        text = "\n".join(library_sources(held_out=True).values()) if source is None else source
        self._lines = text.splitlines()
        self._ids: dict[int, Ids] = {}  # by line number: token ids, filled on demand
        if not text.strip():
            raise UsageError("the text to measure on is empty", "--text FILE with some pages of text, or leave it out")

    def _continue(self, text: str) -> Ids:
        """Return the token ids of `text` as the continuation of a newline.

        Some tokenizers encode the beginning of a whole text differently.
        """
        before = self._tokenizer.encode("\n", add_special_tokens=False)
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        return (
            ids[len(before) :]
            if ids[: len(before)] == before
            else self._tokenizer.encode(text, add_special_tokens=False)
        )

    def text(self, rng: np.random.Generator, count: int) -> tuple[Ids, list[int]]:
        """Return consecutive lines of the source text as token ids, and all positions in the second half of the text.

        The last line may be cut to fit the number of tokens. Only the second half is evaluated, because by then even a
        cache for half of the text is full.
        """
        ids, end = [*self.start], self._continue("\n")
        place = int(rng.integers(len(self._lines)))
        while (left := count - len(ids)) > 0:
            line = self._line(place)
            ids += line if len(line) <= left else [*line[: max(0, left - len(end))], *end][:left]
            place += 1
        return ids, list(range(count // 2, count - 1))

    def _line(self, number: int) -> Ids:
        number %= len(self._lines)
        if number not in self._ids:
            self._ids[number] = self._continue(self._lines[number] + "\n")
        return self._ids[number]


def language_of(tokenizer: Tokenizer | None, source: str | None = None) -> Language:
    if tokenizer is None:
        raise UsageError(
            "the checkpoint has no tokenizer.json, so no task can be written for it", "put its tokenizer.json beside it"
        )
    words = tiny.WORDS
    if tokenizer.vocab_size == len(words) and all(tokenizer.token_id(word) == i for i, word in enumerate(words)):
        if source is not None:
            raise UsageError("the tiny checkpoint knows the words of its own language alone", "leave --text out")
        return Words()
    return Text(tokenizer, source)
