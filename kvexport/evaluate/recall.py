"""What a real model still knows of what it read: a passage is read once, and every question about it is asked of a copy
of the cache. And which layers that knowledge hangs on (`cache.allocation.whole`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import CachePlan
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.state.lane import Saved

Ids = list[int]
TAIL = 64  # tokens; no method's window of last queries is longer


@dataclass(frozen=True)
class Question:
    """ids: of what is asked, which continue the passage. answer: the ids that follow. digits: how many of them, at the
    end, are the answer proper."""

    ids: Ids
    answer: Ids
    digits: int


@dataclass(frozen=True)
class Passage:
    """ids: of the text, its facts in it; questions: one about each fact."""

    ids: Ids
    questions: list[Question]


@dataclass(frozen=True)
class Answer:
    """exact: every token of the answer is the likeliest after those before it, so that greedy decoding gives it.
    digits: the share of the answer proper that is, each token after the true ones before it. nll: mean -ln p of all its
    tokens, nats."""

    exact: bool
    digits: float
    nll: float


def passage(
    encode: Callable[[str], Ids],
    sentences: Sequence[str],
    facts: Sequence[tuple[str, str, str]],
    length: int,
    rng: np.random.Generator,
    frame: tuple[str, str] = ("", "\n\n"),
) -> Passage:
    """About `length` tokens: sentences in order, and the facts at random places among them. facts: (statement,
    question, answer), the answer being digits, or words. frame: what stands before the text, and between it and a
    question."""
    room = length - sum(len(encode(f" {fact[0]}")) for fact in facts) - sum(len(encode(part)) for part in frame)
    chosen: list[str] = []
    for sentence in sentences:
        room -= len(encode(f" {sentence}"))
        if room < 0:
            break
        chosen.append(sentence)
    for statement, _, _ in facts:
        chosen.insert(int(rng.integers(0, len(chosen) + 1)), statement)
    questions = []
    for _, question, answer in facts:
        whole = encode(f"{question} {answer}")
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(encode(question), whole, strict=False)))
        digits = len(answer) if answer.isdigit() else len(whole) - same
        questions.append(Question(whole[:same], whole[same:], digits))
    return Passage(encode(frame[0] + " ".join(chosen) + frame[1]), questions)


def answers(engine: Engine, given: Passage, *, known: bool = False) -> list[Answer]:
    """The engine's answers to all questions. The passage is read in the artifact's chunks, as any prompt, and merged
    after each; the question follows in a call of its own. known: passage and question are one chunk instead, merged
    once, so that the question is known when the cache is compressed; needs the room in every layer's slack."""
    reader, asked = engine.lanes(1), engine.lanes(len(given.questions))
    if known:
        _read_unmerged(reader, given.ids[:-TAIL])
        # All of it: what the lanes count says nothing of the merge to come.
        saved = Saved(reader.read(0), reader.counters(0)._replace(length=len(given.ids) - TAIL))
    else:
        reader.prefill([np.array(given.ids, dtype=np.int64)])
        saved = reader.save(0)
    if not known:
        return _asked_of(saved, asked, given.questions)
    for lane in range(asked.count):
        asked.restore(lane, saved)
    # The last TAIL tokens of the prompt come in one call, whose queries alone a window may count.
    parts = [(given.ids + question.ids)[len(given.ids) - TAIL :] for question in given.questions]
    cut = [len(part) - TAIL for part in parts]
    _read_unmerged(asked, *[part[:n] for part, n in zip(parts, cut, strict=True)])
    if any(s.window for s in engine.manifest.recipe.cache.build_method().statistics):
        for lane in range(asked.count):
            scores = {name: x * 0 for name, x in asked.read(lane).items() if name.endswith(".score")}
            asked.write(lane, scores)
    tails = [part[n:] for part, n in zip(parts, cut, strict=True)]
    rows = _appended(asked, tails)
    if any(layer.merges for layer in engine.plan.caches):
        asked.state.merge(0, asked.count)
    return _judged(rows, asked, given.questions)


def _asked_of(saved: Saved, asked: Lanes, questions: Sequence[Question]) -> list[Answer]:
    """Answers of copies of a lane."""
    for lane in range(asked.count):
        asked.restore(lane, saved)
    return continued(asked, questions)


def continued(lanes: Lanes, questions: Sequence[Question]) -> list[Answer]:
    """Answers of lanes that have read what each question is about, one each."""
    width = lanes.prefill_chunk
    rows = lanes.prefill([np.array(q.ids, dtype=np.int64) for q in questions])
    assert all(len(q.ids) <= width for q in questions)
    return _judged(rows, lanes, questions)


def retrieval_layers(
    engine: Engine, passages: Sequence[Passage], *, kept: float = 0.125, advance: Callable[[int], None] = lambda _: None
) -> tuple[list[Answer], NDArray[np.float64]]:
    """The engine's answers to all questions, and [questions, layers] by how many nats a token of an answer gets less
    likely where that layer alone keeps no more than its sinks and the latest `kept` of the passage. The engine is one
    of a full cache; a layer with a sliding window, which keeps no more anyway, costs nothing. advance: is told of every
    time that a passage's questions were asked."""
    sinks = engine.manifest.recipe.cache.sinks
    found: list[Answer] = []
    costs = []
    for given in passages:
        reader, asked = engine.lanes(1), engine.lanes(len(given.questions))
        reader.prefill([np.array(given.ids, dtype=np.int64)])
        saved = reader.save(0)
        late = round(kept * len(given.ids))
        whole = _asked_of(saved, asked, given.questions)
        advance(1)
        cost = np.zeros((len(whole), len(engine.plan.caches)))
        for i, layer in enumerate(engine.plan.caches):
            if not layer.merges:
                state = {**saved.state, **_cut(engine.plan, saved.state, i, sinks, late)}
                cut = _asked_of(saved._replace(state=state), asked, given.questions)
                cost[:, i] = [a.nll - b.nll for a, b in zip(cut, whole, strict=True)]
            advance(1)
        found += whole
        costs.append(cost)
    return found, np.concatenate(costs)


def _cut(
    plan: CachePlan, state: Mapping[str, NDArray[Any]], layer: int, sinks: int, late: int
) -> dict[str, NDArray[Any]]:
    """The layer's state without what lies between its sinks and the latest slots."""
    found: dict[str, NDArray[Any]] = {}
    for tensor in plan.caches[layer].state:
        array = state[tensor.past(layer)]
        axis = 2 if tensor.name == "score" else 1  # without the batch's dimension
        slots = array.shape[axis]
        found[tensor.past(layer)] = array.take([*range(sinks), *range(max(sinks, slots - late), slots)], axis)
    return found


def _read_unmerged(lanes: Lanes, *tokens: Ids) -> None:
    """Append tokens to each lane and merge nothing."""
    longest = max(map(len, tokens))
    for start in range(0, longest, lanes.prefill_chunk):
        _appended(lanes, [part[start : start + lanes.prefill_chunk] for part in tokens])


def _appended(lanes: Lanes, tokens: Sequence[Ids]) -> NDArray[np.float32]:
    """Append to each lane in one call; the logits [lanes, vocabulary] after each one's last token."""
    lengths = np.array([[len(part)] for part in tokens], dtype=np.int64)
    ids = np.zeros((len(tokens), max(int(lengths.max()), 1)), dtype=np.int64)
    for row, part in zip(ids, tokens, strict=True):
        row[: len(part)] = part
    logits = lanes.state.decode(ids, lengths, 0)
    last = lengths[:, 0] - 1 if logits.shape[1] > 1 else np.zeros(len(tokens), dtype=np.int64)
    return np.array(logits[np.arange(len(tokens)), last])


def _judged(rows: NDArray[np.float32], lanes: Lanes, questions: Sequence[Question]) -> list[Answer]:
    """rows: what each lane expects first. The true answers are then appended token by token."""
    right: list[list[bool]] = [[] for _ in questions]
    nll: list[list[float]] = [[] for _ in questions]
    for step in range(max(len(q.answer) for q in questions)):
        tokens: list[Ids] = []
        for i, question in enumerate(questions):
            token = question.answer[step] if step < len(question.answer) else None
            if token is not None:
                row = rows[i].astype(np.float64)
                right[i].append(int(row.argmax()) == token)
                nll[i].append(float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[token]))
            tokens.append([] if token is None else [token])
        rows = _appended(lanes, tokens)
    return [
        Answer(all(r), float(np.mean(r[-q.digits :])), float(np.mean(n)))
        for r, n, q in zip(right, nll, questions, strict=True)
    ]
