"""The main job in a minute: build two engines of the tiny trained model, prove one equal to PyTorch, ask both a question.

    python -m kvexport.demo [--out DIR]

One engine keeps a cache of fixed budget by merging (KeepKV), the other the full cache. The prompt is many times longer than the budget.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvexport.errors import KvexportError

# A story of about a thousand words in the tiny model's own language: facts "NAME THING ." among filler, then a question.
FACTS = {"anna": "lamp", "boris": "guitar", "carla": "compass", "david": "kettle", "emma": "violin", "felix": "ladder", "greta": "pearl", "hugo": "anchor"}
ASKED = ("anna", "carla", "hugo")
FILLER = "the old and quiet came then there under same long early again here many small slow across were often now once".split()
LENGTH = 1000


def story(words: int = LENGTH) -> str:
    """About `words` words without the question; the facts lie in its first half, far outside any recent window."""
    from kvexport.recipe_files import recipe_folder

    import numpy as np

    rng = np.random.default_rng(7)
    del recipe_folder
    facts = {int(at): f"{name} {thing} ." for (name, thing), at in zip(FACTS.items(), rng.choice(words // 2, len(FACTS), replace=False), strict=True)}
    parts: list[str] = []
    count = 0
    while count < words:
        due = [at for at in facts if at <= count]
        sentence = facts.pop(due[0]) if due else " ".join(rng.choice(FILLER, rng.integers(2, 6))) + " ."
        parts.append(sentence)
        count += len(sentence.split())
    return " ".join(parts)


def main() -> int:
    return 0
