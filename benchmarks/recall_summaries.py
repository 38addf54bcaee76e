"""Facts of a report that a summary repeats after the text was compressed.

    python benchmarks/recall_summaries.py [--methods full,streaming,...] [--part 3] [--length 1000] [--work DIR]

A report stands in a text of licences. SmolLM2-135M-Instruct is asked to summarize it after the text was compressed, and
the report's eight facts are looked for in the summary. Summaries are greedy and have at most 160 tokens. A fact counts
if its words stand in the summary. Methods are written as in recall_real.py, and have the same number of slots in all.
Intervals are the bootstrap's over reports, and differences to the full cache are over the same reports. Writes
benchmarks/results/recall-summaries.json, with the summaries.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from common import save
from recall_real import engine_of, sentences

import kvexport
from kvexport.evaluate.statistics import mean

NAME = "recall-summaries"
METHODS = "full,streaming,h2o,snapkv,keepkv,h2o+whole,keepkv+whole"
TOKENS = 160
# Of each report: its subject, its text, and the words of its facts.
REPORTS: list[tuple[str, str, list[str]]] = [
    (
        "the new bridge",
        "The town council of Marlow met on Tuesday evening to decide on the new bridge over the river Wye. The "
        "mayor, Helen Carter, opened the meeting. The engineer explained that the old bridge, built in 1923, can "
        "no longer carry lorries. A new bridge would cost 11 million pounds. A speaker of the Wildlife Trust "
        "warned that kingfishers nest under the old bridge. After two hours the council voted nine to four for "
        "the new bridge. Work is to begin in September and to last eighteen months.",
        ["Marlow", "Carter", "1923", "11 million", "kingfisher", "nine to four", "September", "eighteen months"],
    ),
    (
        "the fire at the bakery",
        "On Sunday morning a fire destroyed the bakery of the Novak family in Mill Lane. A postman, Peter "
        "Lindgren, saw the smoke at five o'clock and woke the family of six. Thirty firemen came from Alton and "
        "fought the fire for three hours. Nobody was hurt, but a cat was missed until noon, when it was found on "
        "the roof of the church. An electric oven is thought to have caused the fire. The neighbours have "
        "collected 2,000 euros for the family.",
        ["Novak", "Mill Lane", "Lindgren", "Alton", "three hours", "cat", "oven", "2,000"],
    ),
    (
        "the ship Aurora",
        "The research ship Aurora returned to Bergen on Friday after seven months in the Antarctic. Its captain, "
        "Ingrid Solheim, said that the ice had held them for nineteen days in June. The scientists counted 40,000 "
        "penguins on an island that was thought to be empty, and brought home a core of ice that is 600,000 years "
        "old. One engine failed near Cape Town, where it was repaired. The next journey is planned for November.",
        ["Bergen", "seven months", "Solheim", "nineteen days", "40,000", "600,000", "Cape Town", "November"],
    ),
    (
        "the school garden",
        "The pupils of Ashford School have opened a garden behind the gymnasium. Their teacher, Maria Lopez, had "
        "the idea two years ago, when the old car park was given up. They grow potatoes, beans and pumpkins, and "
        "sell them on Thursdays. The first harvest brought 350 dollars, which the pupils spent on a greenhouse. A "
        "farmer, Tom Baker, lends them his tractor. Next spring they want to keep bees.",
        ["Ashford", "Lopez", "two years", "pumpkin", "Thursday", "350", "greenhouse", "bees"],
    ),
    (
        "the chess tournament",
        "The chess tournament of Riga ended on Saturday with a surprise. Nadia Petrova, who is fourteen years "
        "old, beat the champion Viktor Orlov in the last round in 62 moves. She had lost only one game in nine "
        "rounds. The prize is 5,000 euros, and she says that she will buy a telescope with it. Orlov came second "
        "and praised her endgame. The next tournament will be held in Lisbon.",
        ["Riga", "Petrova", "fourteen", "Orlov", "62", "5,000", "telescope", "Lisbon"],
    ),
    (
        "the new train",
        "A new night train will run between Vienna and Copenhagen from March on. The journey takes sixteen hours, "
        "and a bed costs 89 euros. The railway company Nordbahn has bought forty carriages from a factory in "
        "Poland. Its director, Karl Weber, expects 200,000 passengers in the first year. Bicycles may be taken "
        "along, dogs may not. Breakfast is served from six o'clock.",
        ["Vienna", "Copenhagen", "March", "sixteen hours", "89", "Poland", "200,000", "bicycle"],
    ),
]


def document(engine: kvexport.Engine, number: int, length: int) -> str:
    """Return a text of about `length` tokens with report `number` in the middle of prose."""
    assert engine.tokenizer is not None
    _, report, _ = REPORTS[number]
    lines = sentences("codes", random.Random(number), length)
    left = length - len(engine.tokenizer.encode(report))
    around: list[str] = []
    while left > 0:
        around.append(lines[len(around)])
        left -= len(engine.tokenizer.encode(around[-1]))
    half = len(around) // 2
    return " ".join([*around[:half], report, *around[half:]])


def summary(engine: kvexport.Engine, number: int, length: int) -> str:
    """Return the model's summary of a report."""
    about = REPORTS[number][0]
    ask = f"{document(engine, number, length)}\n\nSummarize what the text says about {about}, in four sentences."
    return engine.chat([{"role": "user", "content": ask}], max_new_tokens=TOKENS, temperature=0.0).text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--part", type=int, default=3)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the built engines in this folder")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for method in options.methods.split(","):
            label = {"method": method, "divisor": options.part, "length": options.length, "known": False}
            settings = [f"limits.max_length={options.length + 512}"]  # the question, and the answer
            engine = engine_of(options.work or Path(folder), {**label, "set": settings}, options.threads)
            summaries = [summary(engine, i, options.length) for i in range(len(REPORTS))]
            facts = [sum(f.lower() in text.lower() for f in REPORTS[i][2]) for i, text in enumerate(summaries)]
            rows.append({**label, "facts": facts, "share": vars(mean([n / 8 for n in facts])), "summaries": summaries})
            if rows[0]["method"] == "full":
                pairs = zip(facts, rows[0]["facts"], strict=True)
                rows[-1]["difference"] = vars(mean([(a - b) / 8 for a, b in pairs]))
            print(f"{method:14} {facts} {sum(facts)} of {8 * len(facts)}", flush=True)
    save(NAME, {"rows": rows})


if __name__ == "__main__":
    main()
