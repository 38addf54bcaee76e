"""The main job in a minute: two engines of the tiny trained model, one proved equal to PyTorch, both asked about a long
story.

    python -m kvexport.commands.demo [--out DIR]

One engine keeps a cache of fixed budget by merging (KeepKV), the other the full cache; the story is many times longer
than the budget.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvexport.errors import KvexportError, MismatchError
from kvexport.report.page import Paragraph, Section, Table, render_html, render_text
from kvexport.runtime.engine import Engine
from kvexport.terminal import show
from kvexport.units import format_bytes

FACTS = {
    "anna": "lamp", "boris": "guitar", "carla": "compass", "david": "kettle",
    "emma": "banjo", "felix": "ladder", "greta": "pearl", "hugo": "anchor",
}  # fmt: skip
FILLER = [
    "the",
    "old",
    "and",
    "quiet",
    "came",
    "then",
    "there",
    "under",
    "long",
    "early",
    "again",
    "many",
    "small",
    "across",
    "often",
    "once",
]
WORDS = 990
ENGINES = {"KeepKV": "tiny-keepkv", "full cache": "tiny-full"}


@dataclass
class Answers:
    """What an engine said to every question, and what it took."""

    words: list[str]
    cache_bytes: int
    milliseconds_per_token: float


def story(words: int = WORDS, seed: int = 7) -> str:
    """A story of about `words` words in the tiny model's language: the facts, "NAME THING .", lie among filler in its
    first half."""
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(words // 2, len(FACTS), replace=False))
    pending = list(zip(places, FACTS.items(), strict=True))
    text: list[str] = []
    while len(text) < words:
        if pending and pending[0][0] <= len(text):
            text += [*pending.pop(0)[1], "."]
        else:
            text += [*rng.choice(FILLER, rng.integers(2, 6)), "."]
    return " ".join(text)


def ask(engine: Engine, text: str) -> Answers:
    """Ask for every fact's thing. Time per token is the median over decode steps after the story, each engine on its
    own."""
    words = [engine.generate(f"{text} ? {name}", max_new_tokens=2)[0].text.split()[:1] for name in FACTS]
    engine.generate(text, max_new_tokens=30)  # warm
    rates = []
    for _ in range(5):
        engine.generate(text, max_new_tokens=30, min_new_tokens=30)
        rates.append(engine.timing.decode_seconds / engine.timing.steps)
    return Answers([w[0] if w else "" for w in words], engine.plan.bytes(1), 1e3 * float(np.median(rates)))


def run(out: Path) -> list[Section]:
    """Build, prove, ask. Raises MismatchError where the engine and PyTorch differ."""
    import kvexport
    from kvexport.export.build import build
    from kvexport.recipe.load import load_recipe
    from kvexport.validate.runner import validate_artifact

    out.mkdir(parents=True, exist_ok=True)
    engines: dict[str, Engine] = {}
    for label, name in ENGINES.items():
        print(f"\n== kvexport build --recipe {name}", file=sys.stderr)
        loaded = load_recipe(name)
        engines[label] = kvexport.load(build(loaded.recipe, out / name, name=name, progress=show))
    print(f"\n== kvexport validate {out / 'tiny-keepkv'}", file=sys.stderr)
    result = validate_artifact(out / "tiny-keepkv", progress=show)
    if not result.passed:
        raise MismatchError(result.problem)

    text = story()
    with show("asking both engines"):
        answers = {label: ask(engine, text) for label, engine in engines.items()}
    merged = engines["KeepKV"]
    tokens, budget = len(merged.encode(text)), merged.plan.layers[0].budget
    rows = [
        (
            label,
            sum(a == b for a, b in zip(got.words, FACTS.values(), strict=True)),
            format_bytes(got.cache_bytes),
            got.milliseconds_per_token,
        )
        for label, got in answers.items()
    ]
    shown = [
        (f"? {name}", thing, *(got.words[i] for got in answers.values()))
        for i, (name, thing) in enumerate(FACTS.items())
    ]
    return [
        *result.sections(),
        Paragraph(
            f"A story of {tokens} tokens, a cache of {budget} slots: {tokens / budget:.1f} times its size. It "
            f"begins: {text[:150]} ..."
        ),
        Table("Questions", ("question", "truth", *ENGINES), shown),
        Table("Both engines", ("cache", f"right of {len(FACTS)}", "bytes per sequence", "ms per token"), rows),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvexport.commands.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the artifacts and the report go")
    out = parser.parse_args(arguments).out
    try:
        sections = run(out)
        (out / "report.html").write_text(
            render_html("kvexport demo", "The tiny trained model, merged and full", sections), encoding="utf-8"
        )
    except KvexportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(render_text(sections))
    print(
        f"The same with plots: {out / 'report.html'}. Next: kvexport generate {out / 'tiny-keepkv'} 'anna lamp . "
        "then many came . ? anna'"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
