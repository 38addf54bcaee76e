"""Registers, spills, stack and shared memory of the CUDA kernels, by the compiler's report; plugins/cuda/resources.json
holds them for every compute capability, and a test compares."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from .tools import PLUGINS, Missing, tool

RECORD = PLUGINS / "cuda" / "resources.json"
ENTRY = re.compile(r"Compiling entry function '([^']+)'")
NUMBERS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spills": re.compile(r"(\d+) bytes spill stores"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "shared": re.compile(r"(\d+) bytes smem"),
}
Report = dict[str, dict[str, int]]


def read_report(log: str) -> Report:
    """Of ptxas's own report, per kernel: registers, and bytes of spills, stack and static shared memory."""
    names = subprocess.run([tool("c++filt")], input=log, capture_output=True, text=True, check=True).stdout
    found: Report = {}
    for part in re.split(r"(?=Compiling entry function)", names)[1:]:
        entry = ENTRY.search(part)
        if entry is None:
            raise Missing(f"nvcc's report reads otherwise than expected: {part[:200]}")
        program = re.search(r"run_program<(.*)>\(", entry[1])
        name = (program[1] if program else entry[1]).replace("kv::cuda::", "").replace("(int)", "").strip()
        found[name] = {key: int(match[1]) if (match := number.search(part)) else 0 for key, number in NUMBERS.items()}
    return dict(sorted(found.items()))


def record(capability: str, report: Report) -> None:
    """Write into resources.json what the kernels take for this compute capability; others stay."""
    held: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    held |= {"compiler": compiler_version(), "columns": list(NUMBERS)}
    held[f"sm_{capability}"] = {kernel: list(numbers.values()) for kernel, numbers in report.items()}
    # A line per kernel.
    lines = re.sub(r"\[[^\[\]]*\]", lambda row: " ".join(row[0].split()), json.dumps(held, indent=1))
    RECORD.write_text(lines + "\n")


def compiler_version() -> str:
    """nvcc's release, as in "13.0"."""
    said = subprocess.run([tool("nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", said)
    return found[1] if found else "unknown"
