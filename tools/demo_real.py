"""The demo on a real model: SmolLM2-135M-Instruct reads Python's documentation with a full and a compressed KV cache.

It reads four chapters, 4,300 tokens, with the full cache and with KeepKV's 512 slots, and answers questions about them.
After every sixth of the text both engines decode the same given tokens, a few in turn, so that other load on the
machine slows both. This measures the time of a token. The share of tokens that a model predicts rightly shows how much
its cache kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.plan.cache import CachePlan
from kvexport.report import Paragraph, Section, Table
from kvexport.terminal import show
from kvexport.units import format_bytes

ENGINES = {"KeepKV": "smollm2-135m-keepkv", "full cache": "smollm2-135m-full"}
TOKENS = 4500  # the most tokens to read
POINTS = 5
ONE_BY_ONE = 32  # the recipes' merge_every, so that each measurement holds one merge
IN_TURN = 4
ANSWER = 48
# Chapters of Python's reference in the order in which they are read; the second question is about the last of them.
CHAPTERS = ("execmodel", "class", "exceptions", "with")
QUESTIONS = (
    "What is the text above about? Answer in one sentence.",
    'What is the "with" statement used for?',
    "What is the capital of France?",
)


@dataclass
class Reading:
    """An engine that reads a long text, with the measurements at each length.

    Attributes:
        lengths: Tokens read so far.
        milliseconds: Time of one token.
        cached: Bytes of the cache.
        guesses: The number of predicted tokens.
        right: The number of right predictions.
    """

    lanes: Lanes
    plan: CachePlan
    lengths: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    right: int = 0
    guesses: int = 0
    read_seconds: float = 0.0
    answers: list[str] = field(default_factory=list)

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens to the engine's sequence, chunk by chunk, and return the logits after the last token."""
        start = time.perf_counter()
        chunk = self.lanes.prefill_chunk
        for first in range(0, len(ids), chunk):
            logits = self.lanes.append([ids[first : first + chunk]], prefill=True)
        self.read_seconds += time.perf_counter() - start
        row: NDArray[np.float32] = logits[0, -1].copy()
        return row

    def guess(self, ids: NDArray[np.int64]) -> float:
        """Decode given tokens one by one, count how often the model predicts the next one, and return the seconds."""
        start = time.perf_counter()
        guessed = [int(self.lanes.append([ids[i : i + 1]])[0, -1].argmax()) for i in range(len(ids) - 1)]
        seconds = time.perf_counter() - start
        self.right += int((np.array(guessed) == ids[1:]).sum())
        self.guesses += len(guessed)
        return seconds


def bytes_in_use(plan: CachePlan, length: int) -> int:
    """Return the bytes of the KV-cache slots that a sequence of `length` tokens occupies in all layers."""
    used = (sum(min(length, capacity) for capacity in layer.capacity) for layer in plan.caches)
    return sum(layer.bytes(1) * slots // layer.slots for layer, slots in zip(plan.caches, used, strict=True))


def documentation() -> str:
    """Return the chapters of Python's documentation as one text. Raise ImportError if Python lacks them."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in CHAPTERS)


def conversation(engine: Engine) -> NDArray[np.int64]:
    """Return the token ids of a message with the documentation, cut to TOKENS, and the first question."""
    assert engine.tokenizer is not None
    text = engine.tokenizer.encode(documentation(), add_special_tokens=False)
    short = len(engine.encode_chat([_message("", QUESTIONS[0])]))
    return engine.encode_chat([_message(engine.tokenizer.decode(text[: TOKENS - short]), QUESTIONS[0])])


def _message(text: str, question: str) -> dict[str, str]:
    return {"role": "user", "content": f"{text}\n\n{question}"}


def answer(engine: Engine, reading: Reading, logits: NDArray[np.float32]) -> None:
    """Let an engine answer the first question greedily, then all others in the same conversation."""
    assert engine.tokenizer is not None and engine.chat_template is not None
    reply: list[int] = []
    ends, tokens = engine.settings().eos_token_ids, engine.chat_template.tokens
    for i, question in enumerate(QUESTIONS):
        if i:
            turn = engine.chat_template.render([{"role": "user", "content": question}])
            # Without the system's message, which the conversation has, and after the end of the answer.
            turn = turn[turn.rindex(tokens["bos_token"], 0, turn.rindex(question)) :]
            turn = f"\n{turn}" if reply[-1] in ends else f"{tokens['eos_token']}\n{turn}"
            ids = engine.tokenizer.encode(turn, add_special_tokens=False)
            logits = reading.read(np.array(ids, dtype=np.int64))
        reply = []
        while len(reply) < ANSWER and not (reply and reply[-1] in ends):
            reply.append(int(logits.argmax()))
            logits = reading.lanes.append([np.array(reply[-1:], dtype=np.int64)])[0, -1]
        text = " ".join(engine.tokenizer.decode(reply).split())
        reading.answers.append(text if reply[-1] in ends else f"{text} ...")


def compare(engines: dict[str, Engine]) -> dict[str, Reading]:
    """Let every engine read the documentation and answer questions, and return the measurements."""
    readings = {label: Reading(engine.lanes(1), engine.plan) for label, engine in engines.items()}
    ids = conversation(next(iter(engines.values())))
    ends = [len(ids) * (i + 1) // (POINTS + 1) for i in range(POINTS)]
    logits: dict[str, NDArray[np.float32]] = {}
    with show(f"{' and '.join(engines)} read {len(ids)} tokens", len(ids)) as bar:
        first = 0
        for end in ends:
            for reading in readings.values():
                reading.read(ids[first : end - ONE_BY_ONE])
            one_by_one(readings, ids[end - ONE_BY_ONE : end + 1])
            bar.advance(end - first)
            first = end
        for label, reading in readings.items():
            logits[label] = reading.read(ids[first:])
        bar.advance(len(ids) - first)
    with show("both answer"):
        for label, engine in engines.items():
            answer(engine, readings[label], logits[label])
    return readings


def one_by_one(readings: dict[str, Reading], ids: NDArray[np.int64]) -> None:
    """Let every engine read the same ONE_BY_ONE tokens one by one; measure the time per token and the right guesses."""
    seconds = dict.fromkeys(readings, 0.0)
    for first in range(0, ONE_BY_ONE, IN_TURN):
        for label, reading in readings.items():
            seconds[label] += reading.guess(ids[first : first + IN_TURN + 1])
    for label, reading in readings.items():
        reading.lengths.append(reading.lanes.length[0])
        reading.milliseconds.append(1e3 * seconds[label] / ONE_BY_ONE)
        reading.cached.append(bytes_in_use(reading.plan, reading.lanes.length[0]))


def sections(readings: dict[str, Reading]) -> list[Section]:
    small, full = readings.values()
    budget, tokens = small.plan.caches[0].budget[0], full.lengths[-1]
    faster, smaller = full.milliseconds[-1] / small.milliseconds[-1], full.cached[-1] / small.cached[-1]
    rows = [
        (
            label,
            format_bytes(reading.cached[-1]),
            round(1e3 / reading.milliseconds[-1], 1),
            round(1e3 / reading.milliseconds[0], 1),
            f"{reading.right} of {reading.guesses}",
            round(reading.read_seconds, 1),
        )
        for label, reading in readings.items()
    ]
    columns = (
        "cache", f"bytes at {tokens} tokens", f"tokens/s at {tokens}", f"tokens/s at {full.lengths[0]}",
        "next tokens guessed", "seconds to read",
    )  # fmt: skip
    answers = [
        "\n\n".join([question, *(f"{label}: {reading.answers[i]}" for label, reading in readings.items())])
        for i, question in enumerate(QUESTIONS)
    ]
    return [
        Paragraph(
            f"SmolLM2-135M-Instruct reads {tokens} tokens of Python's documentation in a cache of {budget} slots, "
            f"{tokens / budget:.0f} times fewer. There the full cache takes {faster:.1f} times as long for a token and "
            f"{smaller:.0f} times the memory, and both grow with every token; KeepKV's do not."
        ),
        Table("A real model", columns, rows),
        Paragraph("Asked afterwards, in one conversation (a model of 135M parameters; the likeliest token each time):"),
        *map(Paragraph, answers),
    ]


def run(build_engine: Callable[[str], Engine]) -> list[Section]:
    """Build the engines with full and compressed cache, let them read and answer, and return the report."""
    return sections(compare({label: build_engine(name) for label, name in ENGINES.items()}))
