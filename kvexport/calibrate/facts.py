"""Calibration texts with facts and questions about them, and the language of a checkpoint's calibration texts."""

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from kvexport.errors import UsageError
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Ids, Language, Words, language_of
from kvexport.evaluate.tasks import Sample
from kvexport.language.tokenizer import FILE_NAME, Tokenizer

FACTS = 6  # facts in a passage; one question is asked about each
THINGS = [
    "library", "kitchen", "garden", "bank", "museum", "hospital", "school", "church", "theatre", "station", "airport",
    "factory",
]  # fmt: skip


def language_of_folder(checkpoint: Path) -> Language:
    if not (checkpoint / FILE_NAME).exists():
        raise UsageError(f"{checkpoint} has no {FILE_NAME}, without which no text can be read", "put it there")
    return language_of(Tokenizer.from_folder(checkpoint))


def fact_samples(checkpoint: Path, length: int, count: int) -> list[Sample]:
    """Return texts of about `length` tokens with FACTS inserted facts, such as codes of places, and their questions."""
    tokenizer, language = Tokenizer.from_folder(checkpoint), language_of_folder(checkpoint)
    results = []
    for i in range(count):
        rng, places = random.Random(f"0/{i}"), np.random.default_rng([0, i])
        if isinstance(language, Words):
            sentences = [tokenizer.decode(ids) for ids in language.filler(places, length)]
            pairs = zip(rng.sample(language.names, FACTS), rng.sample(language.things, FACTS), strict=True)
            facts = [(f"{name} {thing} .", f"? {name}", thing) for name, thing in pairs]
        else:
            sentences = re.split(r"(?<=[.:;]) ", " ".join(manual().split()))
            first = rng.randrange(max(1, len(sentences) // 2))
            sentences = sentences[first:] + sentences[:first]
            coded = [(f"The code of the {x} is", f"{rng.randrange(10_000):04}") for x in rng.sample(THINGS, FACTS)]
            facts = [(f"{statement} {number}.", statement, number) for statement, number in coded]
        encode = partial(tokenizer.encode, add_special_tokens=False)
        passage = passage_ids(encode, sentences, [statement for statement, _, _ in facts], length, places)
        if len(passage) < length // 2:
            raise UsageError(
                f"the text to insert facts into gives passages of {len(passage)} tokens, not of {length}",
                f"--length {len(passage)}",
            )
        questions = [question_and_answer(encode, question, answer) for _, question, answer in facts]
        results.append(asked_and_answered([*language.start, *passage], questions))
    return results


def passage_ids(
    encode: Callable[[str], Ids], sentences: Sequence[str], facts: Sequence[str], length: int, rng: np.random.Generator
) -> Ids:
    """Return a passage of about `length` tokens: sentences in order, with facts at random places between them."""
    room = length - sum(len(encode(f" {fact}")) for fact in facts) - len(encode("\n\n"))
    statements: list[str] = []
    for sentence in sentences:
        room -= len(encode(f" {sentence}"))
        if room < 0:
            break
        statements.append(sentence)
    for fact in facts:
        statements.insert(int(rng.integers(0, len(statements) + 1)), fact)
    return encode(" ".join(statements) + "\n\n")


def question_and_answer(encode: Callable[[str], Ids], question: str, answer: str) -> tuple[Ids, Ids]:
    """Return the token ids of a question and of its answer.

    The answer begins with the first token that differs from those of the question alone.
    """
    whole = encode(f"{question} {answer}")
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(encode(question), whole, strict=False)))
    return whole[:same], whole[same:]


def asked_and_answered(passage: Ids, questions: Sequence[tuple[Ids, Ids]]) -> Sample:
    ids, counted = list(passage), list[int]()
    for question, answer in questions:
        ids += question
        counted += range(len(ids) - 1, len(ids) - 1 + len(answer))
        ids += answer
    return Sample(ids, len(passage), counted)
