"""The tiny random Llama of `conftest.py`: its alphabet, one token a character, its recipe, and prompts for it."""

from __future__ import annotations

import string
from typing import Any

ALPHABET = string.ascii_letters + string.digits + " ."
RECIPE = {
    "description": "A random Llama",
    "model": {"path": "./checkpoint"},
    "cache": {"method": "keepkv", "budget": 32, "merge_every": 4},
    "export": {"prefill_chunk": 16},
    "limits": {"max_length": 512, "max_batch": 4},
}
PROMPTS = [list(range(1, 46)), list(range(5, 12)), [3]]


def generated(engine: Any, count: int = 40) -> list[list[int]]:
    """What an engine of it makes of the prompts: far past the budget of 32 slots, in a ragged batch."""
    return [completion.token_ids for completion in engine.generate(PROMPTS, max_new_tokens=count)]
