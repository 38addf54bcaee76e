"""Registers, spills, stack and shared memory of the CUDA kernels, from the compiler's report.

plugins/cuda/resources.json records them for every compute capability, and a test compares them.
"""

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
    """Parse the report of ptxas.

    Returns:
        By kernel its registers, and its bytes of spills, stack and static shared memory.
    """
    names = subprocess.run([tool("c++filt")], input=log, capture_output=True, text=True, check=True).stdout
    report: Report = {}
    for section in re.split(r"(?=Compiling entry function)", names)[1:]:
        entry = ENTRY.search(section)
        if entry is None:
            raise Missing(f"nvcc's report has an unknown form: {section[:200]}")
        program = re.search(r"run_kernel<(.*)>\(", entry[1])
        name = (program[1] if program else entry[1]).replace("kv::cuda::", "").replace("(int)", "").strip()
        report[name] = {
            key: int(match[1]) if (match := number.search(section)) else 0 for key, number in NUMBERS.items()
        }
    return dict(sorted(report.items()))


def record(capability: str, report: Report) -> None:
    """Write the resources of this compute capability to resources.json; other capabilities are unchanged."""
    recorded: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    recorded |= {"compiler": compiler_version(), "columns": list(NUMBERS)}
    recorded[f"sm_{capability}"] = {kernel: list(numbers.values()) for kernel, numbers in report.items()}
    # One line per kernel.
    lines = re.sub(r"\[[^\[\]]*\]", lambda row: " ".join(row[0].split()), json.dumps(recorded, indent=1))
    RECORD.write_text(lines + "\n")


def compiler_version() -> str:
    """Return nvcc's release, for instance "13.0"."""
    output = subprocess.run([tool("nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release ([\d.]+)", output)
    return release[1] if release else "unknown"
