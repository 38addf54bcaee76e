"""Calibration texts with facts and questions about them, and the language of a checkpoint's calibration texts."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvexport.errors import UsageError
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Ids, Language, Words, language_of
from kvexport.evaluate.recall import Passage, passage
from kvexport.language.tokenizer import FILE_NAME, Tokenizer

FACTS = 6  # facts in a passage; one question is asked about each
THINGS = [
    "library",
    "kitchen",
    "garden",
    "bank",
    "museum",
    "hospital",
    "school",
    "church",
    "theatre",
    "station",
    "airport",
    "factory",
]


def language_of_folder(checkpoint: Path) -> Language:
    if not (checkpoint / FILE_NAME).exists():
        raise UsageError(f"{checkpoint} has no {FILE_NAME}, without which no text can be read", "put it there")
    return language_of(Tokenizer.from_folder(checkpoint))


def fact_passages(checkpoint: Path, length: int, count: int) -> list[Passage]:
    """Return passages of about `length` tokens, each with FACTS inserted facts to recall, such as codes of places."""
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
            facts = [_code(thing, f"{rng.randrange(10_000):04}") for thing in rng.sample(THINGS, FACTS)]
        source = passage(lambda text: _encode(tokenizer, text), sentences, facts, length, places)
        if len(source.ids) < length // 2:
            raise UsageError(
                f"the text to insert facts into gives passages of {len(source.ids)} tokens, not of {length}",
                f"--length {len(source.ids)}",
            )
        results.append(replace(source, ids=[*language.start, *source.ids]))
    return results


def _code(thing: str, number: str) -> tuple[str, str, str]:
    statement = f"The code of the {thing} is"
    return f"{statement} {number}.", statement, number


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    return tokenizer.encode(text, add_special_tokens=False)
