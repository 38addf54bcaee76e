"""Passages of a text with inserted facts, and a question about each fact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

Ids = list[int]


@dataclass(frozen=True)
class Question:
    ids: Ids  # token ids of the question, which continue the passage
    answer: Ids  # token ids of the answer
    digits: int  # number of tokens of the fact itself, which are at the end of `answer`


@dataclass(frozen=True)
class Passage:
    ids: Ids  # token ids of the text
    questions: list[Question]  # one question about each fact


def passage(
    encode: Callable[[str], Ids],
    sentences: Sequence[str],
    facts: Sequence[tuple[str, str, str]],
    length: int,
    rng: np.random.Generator,
    frame: tuple[str, str] = ("", "\n\n"),
) -> Passage:
    """Compose a passage of about `length` tokens: sentences in order, with facts at random places between them."""
    room = length - sum(len(encode(f" {fact[0]}")) for fact in facts) - sum(len(encode(ids)) for ids in frame)
    statements: list[str] = []
    for sentence in sentences:
        room -= len(encode(f" {sentence}"))
        if room < 0:
            break
        statements.append(sentence)
    for statement, _, _ in facts:
        statements.insert(int(rng.integers(0, len(statements) + 1)), statement)
    questions = []
    for _, question, answer in facts:
        whole = encode(f"{question} {answer}")
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(encode(question), whole, strict=False)))
        digits = len(answer) if answer.isdigit() else len(whole) - same
        questions.append(Question(whole[:same], whole[same:], digits))
    return Passage(encode(frame[0] + " ".join(statements) + frame[1]), questions)
