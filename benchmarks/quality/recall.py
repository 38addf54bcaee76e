"""Answers about facts in a passage: it is read once, and each question starts from a copy of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.evaluate.recall import Ids, Passage, Question
from kvexport.state.lane import Saved

TAIL = 64  # tokens; more than the last queries that any compression method looks at


@dataclass(frozen=True)
class Answer:
    # Whether greedy decoding gives the answer: every token is the most likely one after the tokens before it
    exact: bool
    digits: float  # share of the fact's tokens that are most likely, each after the true tokens before it
    nll: float  # mean -ln p of all tokens of the answer, in nats


def answers(engine: Engine, source: Passage, *, known: bool = False) -> list[Answer]:
    """Let an engine read a passage, and return the figures of its answers to all questions about the passage.

    With `known`, each question is part of the prompt: nothing is evicted before the question was read.
    """
    reader, lanes = engine.lanes(1), engine.lanes(len(source.questions))
    if known:
        _read_unmerged(reader, source.ids[:-TAIL])
        # `read`, not `save`: a lane's counters do not show that a merge follows.
        saved = Saved(reader.read(0), reader.counters(0)._replace(length=len(source.ids) - TAIL))
    else:
        reader.prefill([np.array(source.ids, dtype=np.int64)])
        saved = reader.save(0)
    if not known:
        return _answers_from(saved, lanes, source.questions)
    for lane in range(lanes.count):
        lanes.restore(lane, saved)
    # The last TAIL tokens of the prompt come in one call, because a method may count only the queries of one call.
    continuations = [(source.ids + question.ids)[len(source.ids) - TAIL :] for question in source.questions]
    cut = [len(ids) - TAIL for ids in continuations]
    _read_unmerged(lanes, *[ids[:n] for ids, n in zip(continuations, cut, strict=True)])
    if any(s.window for s in engine.manifest.recipe.cache.build_method().statistics):
        for lane in range(lanes.count):
            scores = {name: x * 0 for name, x in lanes.read(lane).items() if name.endswith(".score")}
            lanes.write(lane, scores)
    tails = [ids[n:] for ids, n in zip(continuations, cut, strict=True)]
    rows = _appended(lanes, tails)
    if any(layer.merges for layer in engine.plan.caches):
        lanes.state.merge(0, lanes.count)
    return _judged(rows, lanes, source.questions)


def _answers_from(saved: Saved, lanes: Lanes, questions: Sequence[Question]) -> list[Answer]:
    for lane in range(lanes.count):
        lanes.restore(lane, saved)
    return continued(lanes, questions)


def continued(lanes: Lanes, questions: Sequence[Question]) -> list[Answer]:
    """Answer a question in each batch lane, which has read the passage of the question; return the figures."""
    width = lanes.prefill_chunk
    rows = lanes.prefill([np.array(q.ids, dtype=np.int64) for q in questions])
    assert all(len(q.ids) <= width for q in questions)
    return _judged(rows, lanes, questions)


def _read_unmerged(lanes: Lanes, *tokens: Ids) -> None:
    """Append tokens to each lane chunk by chunk, without any merge of the KV caches."""
    longest = max(map(len, tokens))
    for start in range(0, longest, lanes.prefill_chunk):
        _appended(lanes, [ids[start : start + lanes.prefill_chunk] for ids in tokens])


def _appended(lanes: Lanes, tokens: Sequence[Ids]) -> NDArray[np.float32]:
    lengths = np.array([[len(ids)] for ids in tokens], dtype=np.int64)
    ids = np.zeros((len(tokens), max(int(lengths.max()), 1)), dtype=np.int64)
    for row, lane_ids in zip(ids, tokens, strict=True):
        row[: len(lane_ids)] = lane_ids
    logits = lanes.state.decode(ids, lengths, 0)
    last = lengths[:, 0] - 1 if logits.shape[1] > 1 else np.zeros(len(tokens), dtype=np.int64)
    return np.array(logits[np.arange(len(tokens)), last])


def _judged(rows: NDArray[np.float32], lanes: Lanes, questions: Sequence[Question]) -> list[Answer]:
    """Compare each lane's predictions with the true tokens of its answer, which are appended one by one.

    `rows` are the logits that predict the first token of each answer.
    """
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
