"""What is asked of a server: conversations that arrive at random, whether or not others are being answered."""

from __future__ import annotations

import random
from dataclasses import dataclass

SYLLABLES = ("ba", "do", "fen", "gar", "hel", "ki", "lum", "mor", "ne", "pas", "ril", "so", "tam", "ul", "ver", "wi")


@dataclass(frozen=True)
class Workload:
    """conversations: so many. turns: of each. rate: conversations a second that begin, at random times (Poisson); 0:
    all at once. words: of a user's message. first_words: of the first one; 0: as the others. answer: tokens of an
    answer, at most. think: seconds from an answer to the next message. ignore_eos: answers have exactly that length,
    where the server knows the field."""

    conversations: int = 16
    turns: int = 1
    rate: float = 1.0
    words: int = 100
    first_words: int = 0
    answer: int = 64
    think: float = 0.0
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Conversation:
    """start: seconds after the beginning. messages: the user's."""

    start: float
    messages: tuple[str, ...]


def conversations(workload: Workload) -> list[Conversation]:
    """The same for the same seed. No two messages begin alike, so that a server finds no prefix of another's."""
    drawn, start, made = random.Random(workload.seed), 0.0, []
    for _ in range(workload.conversations):
        if workload.rate > 0:
            start += drawn.expovariate(workload.rate)
        counts = [workload.first_words or workload.words, *[workload.words] * (workload.turns - 1)]
        made.append(Conversation(start, tuple(_text(drawn, count) for count in counts)))
    return made


def _text(drawn: random.Random, count: int) -> str:
    words = ("".join(drawn.choices(SYLLABLES, k=drawn.randint(1, 3))) for _ in range(count))
    return " ".join(words) + "."
