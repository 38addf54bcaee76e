"""Loss over one text of many times the trained length, read in a fixed budget.

    python long_session.py TEXT [--tokens 100000] [--sides "ballot cache" ...]

Sides have absolute positions or positions in the cache; another side is a window of as many slots that is prefilled
again for each loss. TEXT is a file of English prose, or a folder of HTML pages (Debian's package debian-handbook has
one in /usr/share/doc/debian-handbook/html/en-US). SmolLM2-135M-Instruct was trained on 8,192 positions. A side that the
result already holds for the same text and tokens is not run again. The window sees 512 to 527 tokens, never fewer than
the cache has slots. It is measured on the first tokens of some windows in every block, the other sides on the same
tokens as well.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.evaluate.settings import longer_checkpoint
from kvexport.export.build import build
from kvexport.export.model.checkpoint import resolve_checkpoint
from kvexport.recipe.load import load_recipe

NAME = "long-session"
RECIPE = "smollm2-135m-base"
BLOCK, SLOTS, CHUNK = 4096, 512, 256
WINDOWS, COUNTED = 8, 16  # windows of a block, and counted tokens of each
WINDOW = "window"
SIDES = ("ballot cache", "ballot absolute", WINDOW, "streaming cache", "streaming absolute", "keepkv cache")


def main() -> None:
    options = arguments()
    text = read_text(options.text)
    figures = earlier(options.tokens, hashlib.sha256(text.encode()).hexdigest())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for side in options.sides:
            if side in figures["at_windows"]:
                continue
            place = Path(folder) / side.replace(" ", "-")
            engine = engine_of("streaming cache" if side == WINDOW else side, place, options.threads)
            ids = token_ids(engine, text, options.tokens)
            if side == WINDOW:
                losses = windows(engine, ids)
            else:
                whole = read_through(engine, ids)
                figures["loss"][side] = by_block(whole)
                losses = [whole[at] for at in counted(len(ids))]
            figures["at_windows"][side] = [float(x.mean()) for x in losses]
            figures["summary"] = summary(figures)
            save(NAME, figures)
    print(json.dumps({**figures["loss"], **figures["summary"]}, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="the folder for artifacts, on a file system that can link the checkpoint"
    )
    return parser.parse_args()


def read_text(path: Path) -> str:
    """Return the text of a file, or the paragraphs of a folder's HTML pages in order of their names."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    results = []
    for page in sorted(path.glob("*.html")):
        source = page.read_text(encoding="utf-8")
        for paragraph in re.findall(r'<(?:p|div class="para")>(.*?)</(?:p|div)>', source, re.DOTALL):
            plain = " ".join(html.unescape(re.sub(r"<[^>]+>", "", paragraph)).split())
            if len(plain) > 80:
                results.append(plain)
    return "\n\n".join(results)


def earlier(tokens: int, text: str) -> dict[str, Any]:
    """Return the figures of an earlier run on the same tokens, or empty figures."""
    path = RESULTS / f"{NAME}.json"
    setting = {"model": "SmolLM2-135M-Instruct", "slots": SLOTS, "chunk": CHUNK, "tokens": tokens, "text": text}
    if path.exists():
        held = json.loads(path.read_text())
        if all(held.get(name) == value for name, value in setting.items()):
            return {name: held[name] for name in (*setting, "block", "loss", "at_windows", "summary")}
    return {**setting, "block": BLOCK, "loss": {}, "at_windows": {}, "summary": {}}


def engine_of(side: str, folder: Path, threads: int) -> Engine:
    """Return the engine of a side, "METHOD POSITIONS".

    Beyond the trained length, absolute positions need a checkpoint whose config states a longer trained length.
    """
    method, positions = side.split()
    overrides = [f"cache.method={method}", f"cache.positions={positions}", f"cache.budget={SLOTS}"]
    overrides += [f"export.prefill_chunk={CHUNK}", "export.logits=all", f"backend.threads={threads}"]
    overrides += ["limits.max_batch=1", "limits.max_length=1000000"]
    if positions == "absolute":
        base = resolve_checkpoint(load_recipe(RECIPE).recipe.model.path, None)
        overrides.append(f"model.path={longer_checkpoint(base, folder.with_suffix('.checkpoint'), 1_000_000)}")
    return load(build(load_recipe(RECIPE, overrides).recipe, folder))


def token_ids(engine: Engine, text: str, count: int) -> np.ndarray:
    assert engine.tokenizer is not None
    ids = np.array(engine.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    if len(ids) <= count:
        raise SystemExit(f"the text has {len(ids)} tokens, {count + 1} are needed")
    return ids[: count + 1]


def read_through(engine: Engine, ids: np.ndarray) -> np.ndarray:
    """Return the loss in nats of every token but the first, all read as one sequence."""
    lanes, losses = engine.lanes(1), []
    for start in range(0, len(ids) - 1, CHUNK):
        chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
        losses.append(loss_of(lanes.append([chunk], prefill=True)[0], ids[start + 1 : start + 1 + len(chunk)]))
        if start % BLOCK == BLOCK - CHUNK:
            print(f"{start + CHUNK} tokens: {np.concatenate(losses)[-BLOCK:].mean():.3f}", file=sys.stderr, flush=True)
    return np.concatenate(losses)


def loss_of(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return -ln p of targets [T] by logits [T, V]."""
    top = logits.max(-1)
    total = np.log(np.exp(logits - top[:, None]).sum(-1, dtype=np.float64)) + top
    return np.asarray(total - logits[np.arange(len(targets)), targets])


def counted(tokens: int) -> list[slice]:
    """Return the slices of losses on which windows are measured: evenly spread, and with a whole window before each."""
    count = max(1, WINDOWS * tokens // BLOCK)
    starts = np.linspace(SLOTS, tokens - 1 - COUNTED, count).astype(int)
    return [slice(int(start), int(start) + COUNTED) for start in starts]


def windows(engine: Engine, ids: np.ndarray) -> list[np.ndarray]:
    """Return losses after prefilling the last tokens alone; nothing is evicted before they exceed the budget."""
    results, lanes = [], engine.lanes(1)
    for at in counted(len(ids)):
        lanes.clear()
        tokens = ids[at.start + 1 - SLOTS : at.stop]
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            logits = lanes.append([chunk], prefill=True)[0]
            if start + len(chunk) >= SLOTS:
                position = at.start + 1 - SLOTS + start + np.arange(len(chunk))  # loss i belongs to token i + 1
                keep = (position >= at.start) & (position < at.stop)
                results.append(loss_of(logits[keep], ids[position[keep] + 1]))
    return joined(results)


def joined(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Join pieces of windows to whole windows."""
    return list(np.concatenate(parts).reshape(-1, COUNTED))


def by_block(losses: np.ndarray) -> list[float]:
    return [float(losses[i : i + BLOCK].mean()) for i in range(0, len(losses), BLOCK)]


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of every side.

    It has the loss at 4,000 to 8,000 tokens and over the last 10,000 of whole blocks. It also has the paired difference
    to the window, with its 95 % interval over windows beyond 8,192 tokens.
    """
    results: dict[str, Any] = {}
    beyond = np.array([at.start >= 8192 for at in counted(figures["tokens"] + 1)])
    for side, blocks in figures["loss"].items():
        results[side] = {
            "from_4096_to_8192": blocks[1] if len(blocks) > 1 else None,
            "last_blocks": float(np.mean(blocks[-3:-1])) if len(blocks) > 4 else None,
        }
        at = figures["at_windows"]
        if WINDOW in at and side in at and beyond.sum() > 1:
            difference = (np.array(at[side]) - np.array(at[WINDOW]))[beyond]
            results[side]["minus_window"] = float(difference.mean())
            results[side]["interval"] = 1.96 * float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return results


if __name__ == "__main__":
    main()
