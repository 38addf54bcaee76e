"""The native operators: the library that registers VoteAttention and MergeCache with ONNX Runtime, where it was built.

Without it, or for a method it does not know, a graph runs from the functions it carries.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

NAME = "libkvexport_onnxruntime.so"
VARIABLE = "KVEXPORT_OPERATORS"


def library() -> Path | None:
    """The library to register, None where there is none. The variable KVEXPORT_OPERATORS names another one, or is ``off``."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "off":
        return None
    path = Path(asked) if asked else Path(__file__).parent / "_native" / NAME
    return path if path.is_file() else None


def instruction_set(path: Path) -> str:
    """What of the machine the library uses: avx512, avx2, neon or portable."""
    return _ask(path, "kvexport_isa")


def why_function(path: Path | None, op: str, attributes: Mapping[str, Any]) -> str | None:
    """Why a node of `op` with these attributes would run from its function, None where the native operator runs it."""
    if path is None:
        return f"switched off by {VARIABLE}" if os.environ.get(VARIABLE) == "off" else "the native operators are not built"
    if op != "MergeCache":
        return None
    method = attributes["method"]
    if method not in _ask(path, "kvexport_merge_methods").split(","):
        return f"the method {method} has no native kernel"
    return "share_pairs has no native kernel" if attributes.get("share_pairs") else None


@cache
def _ask(path: Path, question: str) -> str:
    function = getattr(ctypes.CDLL(str(path)), question)
    function.restype = ctypes.c_char_p
    answer: bytes = function()
    return answer.decode()
