"""The native operators: the library that registers VoteAttention and MergeCache with ONNX Runtime, where it was built.

Without it, or for a method it does not know, a graph runs from the functions it carries.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvexport.errors import EnvironmentProblem

NAME = "libkvexport_onnxruntime.so"
VARIABLE = "KVEXPORT_OPERATORS"


@dataclass(frozen=True)
class Implementation:
    """What runs an operator on this machine. detail: the instruction set of the native one, or why it is the function."""

    native: bool
    detail: str

    def __str__(self) -> str:
        return f"native, {self.detail}" if self.native else f"function: {self.detail}"


def library() -> Path | None:
    """The library to register, None where there is none. The variable KVEXPORT_OPERATORS names another one, or is ``off``."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "off":
        return None
    path = Path(asked) if asked else Path(__file__).parent / "_native" / NAME
    return path if path.is_file() else None


def why_no_library() -> tuple[str, str]:
    """Why there is none to register, and the line that changes it."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        return f"switched off by {VARIABLE}" if asked == "off" else f"{VARIABLE}={asked} is no file", f"unset {VARIABLE}"
    in_checkout = (Path(__file__).parent.parent / "plugins" / "build.py").is_file()
    installs = "apt-get install libonnxruntime-dev cmake g++ && pip install --force-reinstall kvexport"
    return "the native operators are not built", "make native" if in_checkout else installs


def instruction_set(path: Path) -> str:
    """What of the machine the library uses: avx512, avx2, neon or portable."""
    return _ask(path, "kvexport_isa")


def why_function(path: Path | None, op: str, attributes: Mapping[str, Any]) -> str | None:
    """Why a node of `op` with these attributes would run from its function, None where the native operator runs it."""
    if path is None:
        return why_no_library()[0]
    if op != "MergeCache":
        return None
    method = attributes["method"]
    if method not in _ask(path, "kvexport_merge_methods").split(","):
        return f"the method {method} has no native kernel"
    return "share_pairs has no native kernel" if attributes.get("share_pairs") else None


def implementations(method: Mapping[str, Any]) -> dict[str, Implementation]:
    """What runs both operators of an artifact whose method has these attributes, its name under "method"."""
    path = library()
    found = {}
    for op in ("VoteAttention", "MergeCache"):
        why = why_function(path, op, method)
        found[op] = Implementation(True, instruction_set(path)) if path and why is None else Implementation(False, str(why))
    return found


@cache
def _ask(path: Path, question: str) -> str:
    try:
        function = getattr(ctypes.CDLL(str(path)), question)
    except (OSError, AttributeError) as error:
        raise EnvironmentProblem(f"the native operators cannot be loaded: {error}", f"build them again, or {VARIABLE}=off") from error
    function.restype = ctypes.c_char_p
    answer: bytes = function()
    return answer.decode()
