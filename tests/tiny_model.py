"""The tiny random Llama of `conftest.py`: its alphabet, one token a character, and its recipe."""

from __future__ import annotations

import string

ALPHABET = string.ascii_letters + string.digits + " ."
RECIPE = {
    "description": "A random Llama",
    "model": {"path": "./checkpoint"},
    "cache": {"method": "keepkv", "budget": 32, "merge_every": 4},
    "export": {"prefill_chunk": 16},
    "limits": {"max_length": 512, "max_batch": 4},
}
