"""The tasks of `kvexport eval`, one small function each: recall of facts from long prompts, and plain text.

A new task is a new function with the decorator `@task`. The task then appears in the tables and the report of `kvexport
eval`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvexport.evaluate.language import Ids, Language


@dataclass(frozen=True)
class Sample:
    """A token sequence of an evaluation task, with the positions at which predictions are evaluated.

    Attributes:
        ids: Token ids of prompt and answer.
        prompt: The number of ids that are read in chunks; the other ids are read one by one.
        counted: The evaluated positions p, in order. The logits at p are compared with the token ids[p + 1].
        cell: The parameters that vary between samples, for tables.
    """

    ids: Ids
    prompt: int
    counted: list[int]
    cell: dict[str, float] = field(default_factory=dict)


Make = Callable[[Language, np.random.Generator, int, float], Sample]


@dataclass(frozen=True)
class Task:
    """An evaluation task: a function that makes samples, and the range of its parameters.

    Attributes:
        make: A function: make(language, rng, length, depth) returns a sample of about `length` tokens.
        lengths: The lengths of prompts, as shares of the evaluation's length.
        depths: The places of the fact in the prompt (0 first, 1 last). Tasks that ignore the place have one value.
        exact: Whether a sample is right or wrong as a whole; False for tasks that predict a text.
    """

    name: str
    summary: str
    make: Make
    lengths: tuple[float, ...] = (1.0,)
    depths: tuple[float, ...] = (0.5,)
    exact: bool = True

    def samples(self, language: Language, count: int, length: int, seed: int) -> list[Sample]:
        """Return `count` samples per prompt length over all depths (places of the fact); equal for equal seeds."""
        samples = []
        for share in self.lengths:
            size = max(1, round(share * length))
            for i in range(count):
                rng = np.random.default_rng([seed, size, i])
                samples.append(self.make(language, rng, size, self.depths[i % len(self.depths)]))
        return samples


TASKS: dict[str, Task] = {}


def task(
    name: str, *, lengths: tuple[float, ...] = (1.0,), depths: tuple[float, ...] = (0.5,), exact: bool = True
) -> Callable[[Make], Make]:
    """Register the decorated function as an evaluation task; the first line of its docstring is the summary."""

    def register(make: Make) -> Make:
        TASKS[name] = Task(name, (make.__doc__ or "").strip().splitlines()[0], make, lengths, depths, exact)
        return make

    return register


def compose(
    language: Language,
    rng: np.random.Generator,
    length: int,
    statements: list[Ids],
    question_and_answer: tuple[Ids, Ids],
    depth: float | None = None,
) -> Sample:
    """Return a sample whose prompt has exactly `length` tokens: facts among filler text, then a question."""
    question, answer = question_and_answer
    room = length - len(language.start) - len(question) - sum(map(len, statements))
    if room < 0:
        raise ValueError(f"{len(statements)} statements do not fit {length} tokens")
    sentences = language.filler(rng, room) if room else []
    spots = np.sort(rng.integers(0, len(sentences) + 1, len(statements)))
    if depth is not None:
        spots[0] = round(depth * len(sentences))
    for spot, statement in sorted(zip(spots.tolist(), statements, strict=True), key=lambda pair: pair[0], reverse=True):
        sentences.insert(spot, statement)
    ids = [*language.start, *(token for sentence in sentences for token in sentence), *question]
    cell = {"length": float(length)} if depth is None else {"length": float(length), "depth": depth}
    return Sample([*ids, *answer], len(ids), list(range(len(ids) - 1, len(ids) + len(answer) - 1)), cell)


def _people(language: Language, rng: np.random.Generator, count: int) -> tuple[list[str], list[str]]:
    names = rng.permutation(len(language.names))[:count]
    things = rng.permutation(len(language.things))[:count]
    return [language.names[i] for i in names], [language.things[i] for i in things]


def _facts_that_fit(language: Language, length: int) -> int:
    """Return how many facts ("name has thing") fit into a prompt of `length` tokens, at most one for each name."""
    name, thing = language.names[0], language.things[0]
    room = length - len(language.start) - len(language.ask("one", name, thing)[0])
    # Words differ in their number of tokens, so a tenth of the room is left free.
    return max(1, min(len(language.names), len(language.things), int(0.9 * room / len(language.fact(name, thing)))))


@task("needle", lengths=(0.25, 0.5, 1.0), depths=(0.0, 0.25, 0.5, 0.75, 1.0))
def needle(language: Language, rng: np.random.Generator, length: int, depth: float) -> Sample:
    """Hide one fact at a given depth of filler text of a given length, and ask for the fact."""
    (name,), (thing,) = _people(language, rng, 1)
    return compose(language, rng, length, [language.fact(name, thing)], language.ask("one", name, thing), depth)


@task("multikey")
def multikey(language: Language, rng: np.random.Generator, length: int, depth: float) -> Sample:
    """Hide up to 16 facts in filler text, and ask for one of them."""
    names, things = _people(language, rng, min(16, _facts_that_fit(language, length)))
    facts = [language.fact(name, thing) for name, thing in zip(names, things, strict=True)]
    index = int(rng.integers(len(names)))
    return compose(language, rng, length, facts, language.ask("one", names[index], things[index]))


@task("associative")
def associative(language: Language, rng: np.random.Generator, length: int, depth: float) -> Sample:
    """Ask for one of many facts in a prompt that consists of facts only, at most 128."""
    names, things = _people(language, rng, _facts_that_fit(language, length))
    facts = [language.fact(name, thing) for name, thing in zip(names, things, strict=True)]
    index = int(rng.integers(len(names)))
    question = language.ask("one", names[index], things[index])
    # There is no filler, so the prompt is as long as its facts.
    exact = len(language.start) + sum(map(len, facts)) + len(question[0])
    return compose(language, rng, exact, facts, question)


@task("duplicates")
def duplicates(language: Language, rng: np.random.Generator, length: int, depth: float) -> Sample:
    """State one thing of a name 5 times and another thing 2 times, and ask for the more frequent thing."""
    names, things = _people(language, rng, 8)
    facts = [language.fact(names[0], things[0])] * 5 + [language.fact(names[0], things[1])] * 2
    facts += [language.fact(name, thing) for name, thing in zip(names[1:], things[2:], strict=False)]
    mixed = [facts[i] for i in rng.permutation(len(facts))]
    return compose(language, rng, length, mixed, language.ask("mostly", names[0], things[0]))


@task("text", exact=False)
def text(language: Language, rng: np.random.Generator, length: int, depth: float) -> Sample:
    """Predict a text that is read in chunks: perplexity, and KL divergence from the full cache."""
    ids, counted = language.text(rng, length)
    return Sample(ids, len(ids), counted, {"length": float(length)})


@task("decoded", exact=False)
def decoded(language: Language, rng: np.random.Generator, length: int, depth: float) -> Sample:
    """Predict the second half of a text, fed token by token, so that the cache is compressed as in decoding."""
    ids, counted = language.text(rng, length)
    return Sample(ids, length // 2, [p for p in counted if p >= length // 2 - 1], {"length": float(length)})
