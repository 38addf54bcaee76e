"""Artifacts with TensorRT engines, built and run on the fakes of CUDA and TensorRT."""

from pathlib import Path
from typing import Any

import kvexport
from kvexport.export.rebuild import rebuild

PROMPTS = [
    "the quick brown fox jumps over the lazy dog. " * 3,
    "abc",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
]
NEW = 40  # tokens: several merges beyond the budget of 32 slots


def engines(artifact: Path, out: Path, *settings: str) -> Path:
    changes = ["backend.name=tensorrt", *(f"backend.tensorrt.{setting}" for setting in settings)]
    return rebuild(artifact, out, changes)


def generated(artifact: Path, **options: Any) -> list[list[int]]:
    return [
        c.token_ids for c in kvexport.load(artifact, **options).generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    ]
