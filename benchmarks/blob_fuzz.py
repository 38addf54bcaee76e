"""Snapshots with changed bytes: whether all are refused and none crashes.

    python benchmarks/blob_fuzz.py [--mutations 20000]

Bits are flipped; pieces are cut out, inserted, swapped and zeroed. Headers and tensors are also changed under new
digests, which can give only other values of the same shapes. Such snapshots run beside a request whose answer must not
change.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from common import save

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import KvexportError, SnapshotError
from kvexport.state.snapshot import Snapshot
from tests.support.blobs import mutated
from tests.support.tiny_model import make_artifact

LONG = [3 * i % 60 for i in range(70)]


def answer(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()


def run_beside(engine: Engine, snapshot: Snapshot, expected: list[int]) -> str:
    """Continue a snapshot of arbitrary values and return the outcome; another request's answer must stay the same."""
    neighbour = Request(LONG[:20], engine.settings(max_new_tokens=3))
    other = Request([1, 2], engine.settings(max_new_tokens=3), start=snapshot)
    try:
        answer(engine, neighbour, other)
    except KvexportError as error:  # when the request is added
        answer(engine)
        return f"refused: {type(error).__name__}"
    assert [token.id for token in neighbour.tokens] == expected
    return "ran" if other.error is None else f"failed alone: {type(other.error).__name__}"


def main() -> None:
    """Change snapshots, load them, and count the outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutations", type=int, default=20000)
    arguments = parser.parse_args()
    rng, counts = np.random.default_rng(0), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        engine = load(make_artifact(Path(folder)), threads=1)
        blobs = []
        for settings in ({}, {"do_sample": True, "seed": 3}):
            request = Request(LONG, engine.settings(max_new_tokens=12, **settings), keep=True)
            answer(engine, request)
            assert request.snapshot is not None
            blobs.append(request.snapshot.to_bytes())
        alone = Request(LONG[:20], engine.settings(max_new_tokens=3))
        answer(engine, alone)
        expected = [token.id for token in alone.tokens]
        for number in range(arguments.mutations):
            data = blobs[number % len(blobs)]
            how, changed = mutated(data, rng)
            try:
                restored = Snapshot.from_bytes(changed, engine.manifest)
            except SnapshotError:
                counts[f"{how}: refused"] += 1
                continue
            if changed == data:
                counts[f"{how}: nothing changed"] += 1
                continue
            assert how.startswith("resigned"), f"mutation {number} ({how}) was taken for a snapshot"
            counts[f"{how}: {run_beside(engine, restored, expected)}"] += 1
    print(save("blob-fuzz", {"mutations": arguments.mutations, "outcomes": dict(sorted(counts.items()))}))
    print(dict(counts))


if __name__ == "__main__":
    main()
