"""The training documents of the small checkpoint: source with statements and questions, their rows and their tokenizer.

`train.py` describes what they look like.  Importing this module needs numpy alone.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvexport.evaluate.tiny_language import BOS, IGNORE, NAMES, PAD, SPECIALS, THINGS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[2] / "recipes" / "checkpoints" / "tiny"
VOCABULARY = 4096
MAX_LENGTH = 1024
MAX_PEOPLE = 48


def _tiny() -> ModuleType:
    """Import the tiny checkpoint's train.py, for its copied rows and for saving."""
    spec = importlib.util.spec_from_file_location("tiny_checkpoint", TINY / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tiny = _tiny()


def statements(
    rng: np.random.Generator,
    people: int,
    names: tuple[str, ...],
    things: tuple[str, ...],
    mark: str = "",
    link: str = "",
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return statements about `people` persons as lines in order of appearance, and the questions about them.

    A question is the (asked, answer) halves of one line.
    """
    who = [names[i] for i in rng.permutation(len(names))[:people]]
    what = iter([things[i] for i in rng.permutation(len(things))])
    lines: list[tuple[float, str]] = []  # (place in [0, 1), line)
    questions: list[tuple[str, str]] = []
    chains: list[tuple[int, str, str]] = []  # (number of aliases, name, the text that follows the name)
    for name in who:
        kind = rng.choice(["one", "alias", "many", "mostly"], p=[0.5, 0.2, 0.1, 0.2])
        if kind == "alias" and chains:
            aliases, target, tail = chains.pop(int(rng.integers(len(chains))))
            lines.append((rng.random(), f"# {name}{link} {target}"))
            questions.append((f"# {name}{link}", f" {target}{tail}"))
            if aliases < 2:
                chains.append((aliases + 1, name, f"{link} {target}{tail}"))
            continue
        if kind == "many":
            values = [next(what, things[0]) for _ in range(int(rng.integers(2, 5)))]
            lines += zip(np.sort(rng.random(len(values))), [f"# {name}{mark} {value}" for value in values], strict=True)
            questions.append((f"# every {name}{mark}", " " + ", ".join(values)))
            continue
        value = next(what, things[0])
        copies = int(rng.integers(2, 7)) if kind == "mostly" else 1
        lines += [(rng.random(), f"# {name}{mark} {value}") for _ in range(copies)]
        if kind == "mostly":
            others = int(rng.integers(0, copies))
            other = next(what, things[0])
            lines += [(rng.random(), f"# {name}{mark} {other}") for _ in range(others)]
            questions += [(f"# mostly {name}{mark}", f" {value}"), (f"# count {name}{mark}", f" {copies + others}")]
        else:
            questions.append((f"# {name}{mark}", f" {value}"))
            chains.append((0, name, f"{mark} {value}"))
            if rng.random() < 0.2:
                questions.append((f"# count {name}{mark}", " 1"))
    return [line for _, line in sorted(lines)], questions


@dataclass
class Data:
    """The tokens of the corpus: every line of the training modules and of the held-out modules, file after file."""

    tokenizer: Tokenizer
    names: tuple[str, ...]
    things: tuple[str, ...]
    train: list[list[int]]
    held_out: list[list[int]]

    @property
    def words(self) -> NDArray[np.int64]:
        """Return the token ids of all names and things."""
        return np.array([token for word in (*self.names, *self.things) for token in self.encode(f" {word}")])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without the beginning of sequence."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def source(self, rng: np.random.Generator, count: int, lines: list[list[int]]) -> list[list[int]]:
        """Return consecutive lines of the source from a random place on, with `count` tokens in all.

        The last line may be cut.
        """
        taken: list[list[int]] = []
        place = int(rng.integers(len(lines)))
        while count > 0:
            taken.append(lines[place % len(lines)][:count])
            count -= len(taken[-1])
            place += 1
        return taken


def code_row(data: Data, rng: np.random.Generator, length: int, lines: list[list[int]]) -> tuple[list[int], list[int]]:
    """Return `length` ids of source after <bos>, and their labels. All tokens after <bos> count towards the loss."""
    ids = [BOS, *(token for line in data.source(rng, length - 1, lines) for token in line)]
    return ids, [IGNORE, *ids[1:]]


def recall_row(
    data: Data,
    rng: np.random.Generator,
    length: int,
    lines: list[list[int]],
    dense: float,
    marks: tuple[str, str] = ("", ""),
) -> tuple[list[int], list[int]]:
    """Return a document of `length` ids and its labels.

    The labels of answers are the ids plus VOCABULARY, which distinguishes them from the labels of source.
    """
    full = dense > 0 and rng.random() < dense
    most = min(MAX_PEOPLE, length // 24)
    people = most if full else round(math.exp(rng.uniform(0, math.log(most))))
    stated, questions = statements(rng, people, data.names, data.things, *marks)
    stated_ids = [data.encode(line + "\n") for line in stated]
    rng.shuffle(questions)  # type: ignore[arg-type]
    room = length - 1 - sum(map(len, stated_ids))
    queries: list[int] = []
    labels: list[int] = []
    for question, answer in questions:
        q, a = data.encode(question), data.encode(answer + "\n")
        if queries and len(queries) + len(q) + len(a) > (room if full else room // 2):
            break
        queries += [*q, *a]
        labels += [*[IGNORE] * len(q), *[token + VOCABULARY for token in a]]
    haystack = data.source(rng, max(0, room - len(queries)), lines) if not full and rng.random() > 0.1 else []
    if haystack:
        haystack[-1] = [*haystack[-1][:-1], *data.encode("\n")]
    ids: list[int] = []
    for i in np.sort(rng.integers(0, len(haystack) + 1, len(stated_ids)))[::-1]:
        haystack.insert(int(i), stated_ids.pop())
    ids = [BOS, *(token for line in haystack for token in line)]
    story = [IGNORE, *ids[1:]]
    ids, labels = [*ids, *queries][:length], [*story, *labels][:length]
    return ids + [PAD] * (length - len(ids)), labels + [IGNORE] * (length - len(labels))


def copy_row(rng: np.random.Generator, length: int, tokens: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return a row of distinct `tokens` that repeats with a random period, and its labels.

    From the second token of the first repetition on, every token counts as an answer.
    """
    ids, labels = tiny.copy_row(rng, length, tokens)
    return ids, [label if label == IGNORE else label + VOCABULARY for label in labels]


def build_tokenizer(sources: list[str], words: tuple[str, ...]) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the sources.

    Digits and newlines are tokens of their own, so that lines can be tokenized one by one. Every word of the statements
    is one token.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    parts = [Split(Regex("\n"), "isolated"), Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = Sequence(parts)
    tokenizer.decoder = ByteDecoder()
    specials = list(SPECIALS)
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=specials, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    often = [" " + " ".join(words)] * 3000
    tokenizer.train_from_iterator([*sources, *often], trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def load_data() -> Data:
    """Tokenize the corpus of the running interpreter.

    The tokenizer comes from this folder. If the folder has none, it is trained and saved.
    """
    from tokenizers import Tokenizer

    from kvexport.evaluate.corpus import library_sources

    sources = {held: list(library_sources(held).values()) for held in (False, True)}
    path = HERE / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else build_tokenizer(sources[False], (*NAMES, *THINGS))
    if not path.exists():
        tokenizer.save(str(path), pretty=False)

    def lines(texts: list[str]) -> list[list[int]]:
        split = [line + "\n" for text in texts for line in text.splitlines()]
        return [e.ids for e in tokenizer.encode_batch_fast(split, add_special_tokens=False)]

    return Data(tokenizer, NAMES, THINGS, lines(sources[False]), lines(sources[True]))
