"""Stability of every method and of the full cache over 20 times the training length.

    python benchmarks/quality/stability.py [--recipe tiny-base] [--training-length 1152] [--slots 64]

The figures are the loss, whether all values are finite, and the norms of cached keys. One text is read in chunks, and
its last tokens one by one. Writes benchmarks/results/stability-RECIPE.json, method by method; the tables are in
docs/measurements/long-texts.md.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import earlier, options_of, save
from benchmarks.quality.sweep import GROUPS
from kvexport.engine.engine import Engine
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Ids, Language
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.result import Options
from kvexport.evaluate.runner import Run
from kvexport.evaluate.settings import FULL, load_setting
from kvexport.export.model.checkpoint import resolve_checkpoint
from kvexport.plan.cache import stored_rows
from kvexport.recipe.load import load_recipe
from kvexport.terminal import silent

TIMES = 20  # tokens of a run, as a multiple of the training length


@dataclass(frozen=True)
class Window:
    """The figures of one interval of a very long sequence, in a test of stability."""

    end: int  # number of tokens of the sequence at the end of the interval
    nll: float  # mean -ln p over the interval's evaluated positions, in nats
    key_norm: float  # largest norm of a cached key at the end of the interval
    finite: bool  # whether every logit and the whole state were finite


def run_long(
    engine: Engine, ids: Sequence[int], counted: Sequence[int], window: int, decoded: int = 64
) -> list[Window]:
    """Run one very long sequence on an engine in chunks, its last `decoded` tokens one by one, to test stability."""
    lanes = engine.lanes(1)
    tokens = np.array(ids, dtype=np.int64)
    predicted = np.zeros(len(tokens), dtype=bool)
    predicted[list(counted)] = True
    windows: list[Window] = []
    losses: list[float] = []
    finite, start = True, 0
    while start < len(tokens) - 1:
        left = len(tokens) - decoded - start
        # A chunk must not cross the end of a window.
        size = min(lanes.prefill_chunk, left, window - start % window) if left > 0 else 1
        logits = lanes.append([tokens[start : start + size]], prefill=left > 0)[0]
        finite &= bool(np.isfinite(logits).all())
        rows = np.flatnonzero(predicted[start : start + size])
        losses += (-log_softmax(logits[rows])[np.arange(len(rows)), tokens[start + rows + 1]]).tolist()
        start += size
        if start % window == 0 or start >= len(tokens) - 1:
            norm, whole = _state_of(lanes.state.get_state())  # type: ignore[attr-defined]
            windows.append(Window(start, float(np.mean(losses)) if losses else float("nan"), norm, finite and whole))
            losses.clear()
    return windows


def _state_of(state: dict[str, NDArray[np.float32]]) -> tuple[float, bool]:
    """Return the largest norm of a key in the KV cache, and whether all numbers in occupied slots are finite."""
    largest, finite = 0.0, True
    for name, votes in state.items():
        if not name.endswith(".votes"):
            continue
        used = votes > 0
        rows = []
        for kind in (".key", ".value"):
            scale = state.get(name.replace(".votes", f"{kind}_scale"))  # int8 and int4 caches have scales
            stored = state[name.replace(".votes", kind)][used]
            rows.append(stored_rows(stored, None if scale is None else scale[used]).astype(np.float64))
        keys, values = rows
        largest = max(largest, float(np.linalg.norm(keys, axis=-1).max(initial=0.0)))
        finite &= bool(np.isfinite(keys).all() and np.isfinite(values).all() and np.isfinite(votes).all())
    return largest, finite


def longer_checkpoint(checkpoint: Path, folder: Path, positions: int) -> Path:
    """Write a copy of a checkpoint whose config allows `positions` positions.

    Files other than config.json are hard links if the file system allows it.
    """
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in ("default", "linear", "llama3"):
        raise SystemExit(f"the rotary embedding of {checkpoint} is {kind}, which depends on the length")
    folder.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        target = folder / path.name
        if path.is_file() and path.name != "config.json" and not target.exists():
            try:
                os.link(path.resolve(), target)
            except OSError:
                target.write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return folder


def long_text(language: Language, count: int, seed: int, piece: int = 1024) -> tuple[Ids, list[int]]:
    """Return a sequence of `count` tokens from several texts, and the positions to evaluate.

    The sequence measures the stability of a KV cache far beyond the model's training length.
    """
    ids: Ids = []
    counted: list[int] = []
    while len(ids) < count:
        piece_ids, positions = language.text(np.random.default_rng([seed, len(ids)]), piece)
        skip = len(language.start) if ids else 0
        counted += [len(ids) - skip + p for p in positions if p >= skip]
        ids += piece_ids[skip:]
    return ids[:count], [p for p in counted if p < count - 1]


def stability(run: Run, checkpoint: Path, label: str, slots: int | None, training_length: int) -> list[Window]:
    """Run a method over a text of `TIMES` times the training length, and return its figures by interval."""
    length = TIMES * training_length
    longer = longer_checkpoint(checkpoint, run.folder / "longer", length)
    ids, counted = long_text(run.language, length, run.options.seed)
    common = [*run.common, f"model.path={longer}", f"limits.max_length={length}", "limits.max_batch=1"]
    engine = run._engine(f"{label}-long", load_setting(run.recipe, label, slots, common))
    return run_long(engine, ids, counted, training_length)


def row(label: str, slots: int, windows: Sequence[Window]) -> dict[str, Any]:
    """Return the figures of one run.

    `nll` holds the loss in nats of the first and the last window that had a token to predict. `key_norm` holds the
    largest norm of a cached key at the end of the first window, and at the end of any window.
    """
    losses = [w.nll for w in windows if w.nll == w.nll]
    norms = [w.key_norm for w in windows]
    return {
        "label": label,
        "slots": slots,
        "tokens": windows[-1].end,
        "finite": all(w.finite for w in windows),
        "nll": [losses[0], losses[-1]],
        "key_norm": [norms[0], max(norms)],
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--recipe", default="tiny-base")
    parser.add_argument(
        "--training-length", type=int, default=1152, help="the longest row that the model was trained on"
    )
    parser.add_argument("--slots", type=float, default=64)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe of every run, such as backend.threads=1",
    )
    parser.add_argument("--again", metavar="PREFIX", help="measure methods again whose labels begin with it")
    parser.add_argument("--manual", action="store_true", help="read Python's manual, not the source of its library")
    arguments = parser.parse_args()
    name = f"stability-{Path(arguments.recipe).stem}"
    figures: dict[str, Any] = {
        "recipe": arguments.recipe,
        "training_length": arguments.training_length,
        "slots": arguments.slots,
        "rows": [],
    }
    before = earlier(name)
    if all(before.get(key) == figures[key] for key in ("training_length", "slots")):
        figures["rows"] = [
            r for r in before["rows"] if not (arguments.again and r["label"].startswith(arguments.again))
        ]
    labels, source = tuple(GROUPS["methods"]), manual() if arguments.manual else None
    options = Options(labels, (arguments.slots,), (), source=source)
    trained = arguments.training_length
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments.recipe, arguments.set, options, Path(folder), silent)
        model = load_recipe(arguments.recipe, arguments.set).recipe.model
        checkpoint = resolve_checkpoint(model.path, model.revision)
        for label, slots in [(FULL, None), *((c.label, c.slots) for c in run.settings)]:
            if label not in [r["label"] for r in figures["rows"]]:
                windows = stability(run, checkpoint, label, slots, trained)
                new_row = row(label, slots or TIMES * trained, windows)
                print(new_row, flush=True)
                figures["rows"].append(new_row)
                save(name, figures)


if __name__ == "__main__":
    main()
