"""Comparison of kvexport's methods with other projects' code for them, on the shipped tiny checkpoint.

    pip install --no-deps --target PEERS/kvpress kvpress
    git -C PEERS clone https://github.com/SusCom-Lab/ZeroMerge
    (and lianjunl13-sudo/KVSlimmer, the-scale-lab/Asymkv, kkvcache/KeepKV)
    python benchmarks/correctness/peers.py --kvpress PEERS/kvpress --authors PEERS [--prompts 8]

Kept slots and merged caches must be equal, or the row states the difference of the rules. A project that is missing is
reported and not compared. Writes benchmarks/results/peers.json. The exit code is 4 if equal rules gave different
results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import options_of, save
from benchmarks.correctness.peer_caches import Heads, Row, heads_of
from benchmarks.correctness.peer_codes import (
    Peer,
    load_asymkv,
    load_keepkv,
    load_kvpress,
    load_kvslimmer,
    load_zeromerge,
)
from benchmarks.correctness.peer_merges import LATER, STEPS, compare_keepkv, compare_zeromerge
from benchmarks.correctness.peer_pairs import compare_asymkv, compare_kvslimmer
from benchmarks.correctness.peer_presses import compare
from kvexport.evaluate import tiny_language as language
from kvexport.export.build import read_model
from kvexport.recipe.load import load_recipe
from kvexport.validate.reference import TorchReference

MISMATCH = 4
LENGTH, FACTS = 512, 16


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--kvpress", type=Path, help="the folder given to pip's --target")
    parser.add_argument("--authors", type=Path, help="the folder that holds the clones")
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # the tensors are small
    peers: dict[str, Any] = {}
    slots = _attempt(peers, "kvpress", options.kvpress, load_kvpress, lambda peer: _slots(peer, options.prompts))
    rows: list[Row] = []
    root = options.authors
    if root:
        texts = _texts(options.prompts)
        rows += _attempt(
            peers, "ZeroMerge", root / "ZeroMerge", load_zeromerge, lambda p: compare_zeromerge(p.code, texts, LENGTH)
        )
        rows += _attempt(peers, "AsymKV", root / "Asymkv", load_asymkv, lambda p: compare_asymkv(p.code, texts))
        slimmer = lambda folder: load_kvslimmer(folder, root / "Asymkv")  # noqa: E731
        rows += _attempt(
            peers, "KVSlimmer", root / "KVSlimmer", slimmer, lambda p: compare_kvslimmer(p.code, texts, LENGTH)
        )
        rows += _attempt(peers, "KeepKV", root / "KeepKV", load_keepkv, lambda p: compare_keepkv(p.code, texts, LENGTH))
    for line in slots:
        print(_slot_line(line))
    for line in rows:
        print(_merge_line(line))
    figures = {
        "prompts": options.prompts,
        "length": LENGTH,
        "peers": peers,
        "slots": slots,
        "merges": [_plain(r) for r in rows],
    }
    print(save("peers", figures))
    failed = [r for r in (*slots, *rows) if not r["holds"]]
    if failed:
        print(f"{len(failed)} rows do not hold", file=sys.stderr)
        raise SystemExit(MISMATCH)


def _attempt(
    peers: dict[str, Any],
    name: str,
    folder: Path | None,
    load: Callable[[Path], Peer],
    run: Callable[[Peer], list[Row]],
) -> list[Row]:
    """Return the rows of one peer, or none, with the reason recorded, if the peer is missing or cannot be imported."""
    if folder is None:
        return []
    try:
        peer = load(folder)
    except (ImportError, AttributeError, OSError) as error:
        peers[name] = {"not_compared": f"{type(error).__name__}: {error}"}
        print(f"{name} is not compared: {error}", file=sys.stderr)
        return []
    peers[name] = peer.to_json()
    return run(peer)


def _slots(peer: Peer, prompts: int) -> list[Row]:
    rng = np.random.default_rng(0)
    ids = [language.make_prompt(rng, LENGTH, FACTS)[0] for _ in range(prompts)]
    return compare(peer.code, Path(load_recipe("tiny-base", []).recipe.model.path), ids)


def _texts(prompts: int) -> list[list[Heads]]:
    """Return the tensors of texts that continue after `LENGTH` tokens."""
    rng = np.random.default_rng(1)
    recipe = load_recipe("tiny-base", ["cache.method=kvslimmer", "cache.recent=0.25"]).recipe
    shape = read_model(recipe)  # with rotary frequencies, for the methods that rotate keys
    assert shape.checkpoint is not None
    reference = TorchReference(shape.checkpoint, shape.plan, shape.geometry, recipe.cache.build_method(), recipe)
    rotary = [layer.rotary for layer in shape.geometry]
    ids = [language.make_prompt(rng, LENGTH + STEPS + LATER, FACTS)[0] for _ in range(prompts)]
    return [heads_of(reference.model, rotary, text) for text in ids]


def _slot_line(line: Row) -> str:
    theirs = f"{line['theirs']} {line['their_settings']}".strip()
    figures = f"mean {line['jaccard_mean']:.3f}, least {line['jaccard_least']:.3f}"
    why = line["difference"] or ("the same" if line["holds"] else "NOT THE SAME")
    return f"{line['ours']:10} {theirs:55} budget {line['budget']:>4}: Jaccard {figures}  {why}"


def _merge_line(line: Row) -> str:
    figures = [f"{k} {v:.3g}" for k, v in line.items() if isinstance(v, float)]
    why = line["difference"] or ("the same" if line["holds"] else "NOT THE SAME")
    reason = why if line["holds"] else f"DOES NOT HOLD: {why}"
    return f"{line['code']:10} {line['compared']}: {', '.join(figures)}  [{reason}]"


def _plain(line: Row) -> Row:
    """Return a row with infinite figures as text, since JSON has no infinity."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}


if __name__ == "__main__":
    main()
