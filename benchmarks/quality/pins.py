"""Facts of a pinned system prompt: SmolLM2 is asked for them after long turns, with the system prompt pinned or not.

    python benchmarks/quality/pins.py [--methods full,ballot,h2o] [--parts 4,8] [--length 2000] [--conversations 6]

A conversation begins with a system prompt of eight facts. Turns follow in which the user gives a text and the assistant
says that it has read it, until the conversation has `length` tokens. Four more facts stand in these turns. Then each
fact is asked for, from a copy of the cache. The facts of the turns show what pins cost the rest of the conversation. An
artifact has 1/4 or 1/8 as many slots as the conversation has tokens, 160 of them as room for pins. The same artifact
reads the same conversations with pins and without them, where the room holds other tokens. Results go to
benchmarks/results/pins.json as they are measured. What the file holds is not measured again. Intervals are Wilson's at
95 %.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kvexport
from benchmarks.common import earlier, head, options_of, save
from benchmarks.quality.recall import continued
from benchmarks.quality.recall_real import CITIES, SYSTEM, sentences
from kvexport.evaluate.recall import Passage, Question
from kvexport.evaluate.statistics import share
from kvexport.recipe.load import load_recipe

NAME = "pins"
FACTS, OTHERS = 8, 4  # in the system prompt, and in the turns
ROOM = 160  # pinned tokens, which the system prompt takes nearly all of
TURN = 300  # tokens of a turn's text
READ = "<|im_end|>\n<|im_start|>assistant\nI have read it.<|im_end|>\n<|im_start|>user\n"
STATED = "The secret number of {} is"
ASKED = "What is the secret number of {}?<|im_end|>\n<|im_start|>assistant\n"


def conversation(engine: kvexport.Engine, number: int, length: int) -> tuple[Passage, int]:
    """Return a conversation with its questions, and how many tokens its system prompt has."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    rng = random.Random(f"pins/{number}")
    facts = [(city, f"{rng.randrange(10_000):04}") for city in rng.sample(CITIES, FACTS + OTHERS)]
    statements = [f"{STATED.format(city)} {answer}." for city, answer in facts]
    system = SYSTEM.replace("<|im_end|>", f". Remember: {' '.join(statements[:FACTS])}<|im_end|>")
    front = encode(f"{system}<|im_start|>user\n")
    ids, turn, left = list(front), list[int](), statements[FACTS:]
    for sentence in sentences("codes", rng, length):
        turn += encode(f" {sentence}")
        if len(turn) > TURN / 2 and left and len(left) > OTHERS - len(ids) // TURN - 1:
            turn += encode(f" {left.pop(0)}")
        if len(turn) >= TURN:
            ids, turn = [*ids, *turn, *encode(READ)], []
        if len(ids) >= length - len(encode(READ)):
            break
    assert not left and len(front) <= ROOM, (left, len(front))
    questions = []
    for city, answer in facts:
        asked = encode(ASKED.format(city) + STATED.format(city))
        whole = encode(f"{ASKED.format(city)}{STATED.format(city)} {answer}")
        assert whole[: len(asked)] == asked
        questions.append(Question(asked, whole[len(asked) :], len(answer)))
    return Passage(ids, questions), len(front)


def engine_of(folder: Path, method: str, slots: int, length: int, threads: int) -> kvexport.Engine:
    room = 0 if method == "full" else ROOM
    settings = [
        f"cache.method={method}",
        f"cache.budget={slots - room}",
        f"cache.pinned={room}",
        f"limits.max_length={2 * length}",
        f"limits.max_batch={FACTS + OTHERS}",
    ]
    kvexport.build(load_recipe("smollm2-135m-base", settings).recipe, folder)
    return kvexport.load(folder, threads=threads, verify=False)


def measure(engine: kvexport.Engine, label: dict[str, Any], conversations: int) -> dict[str, Any]:
    """Return the figures of one engine over all conversations, with pins or without."""
    system: list[bool] = []
    turns: list[bool] = []
    reader, lanes = engine.lanes(1), engine.lanes(FACTS + OTHERS)
    for number in range(conversations):
        talk, front = conversation(engine, number, label["length"])
        reader.clear()
        if label["pinned"]:
            reader.pin(0, ((0, front),))
        reader.prefill([np.array(talk.ids, np.int64)])
        saved = reader.save(0)
        for lane in range(lanes.count):
            lanes.restore(lane, saved)
        exact = [answer.exact for answer in continued(lanes, talk.questions)]
        system += exact[:FACTS]
        turns += exact[FACTS:]
    figures = {"system": share(sum(system), len(system)), "turns": share(sum(turns), len(turns))}
    return {
        **label,
        "provenance": {key: value for key, value in head().items() if key != "machine"},
        "conversations": conversations,
        "mib": round(engine.plan.bytes() / 2**20, 2),
        **{name: [right.value, right.low, right.high] for name, right in figures.items()},
    }


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("--methods", default="full,ballot,h2o")
    options.add_argument("--parts", default="4,8")
    options.add_argument("--length", type=int, default=2000)
    options.add_argument("--conversations", type=int, default=6)
    options.add_argument("--threads", type=int, default=2)
    chosen = options.parse_args()
    for method in chosen.methods.split(","):
        for part in ["1"] if method == "full" else chosen.parts.split(","):
            sides = [
                {"method": method, "parts": int(part), "pinned": pinned, "length": chosen.length}
                for pinned in ([False] if method == "full" else [True, False])
            ]
            rows = earlier(NAME).get("rows", [])
            left = [side for side in sides if not any(all(r[k] == v for k, v in side.items()) for r in rows)]
            if not left:
                continue
            with tempfile.TemporaryDirectory() as folder:
                slots = chosen.length // int(part)
                engine = engine_of(Path(folder) / "artifact", method, slots, chosen.length, chosen.threads)
                for side in left:
                    row = measure(engine, side, chosen.conversations)
                    rows = [*rows, row]
                    save(NAME, {"rows": rows})
                    shown = ("method", "parts", "pinned", "mib", "system", "turns")
                    print({key: row[key] for key in shown}, flush=True)
                engine.close()


if __name__ == "__main__":
    main()
