"""Instructions of Linear for each weight on Arm, counted under emulation, without an Arm machine. No time is measured.

    python benchmarks/speed/arm_instructions.py [--inputs 2048] [--rows 1,8,64] [--sets dotprod,i8mm,neon]

The kernels are cross-compiled as for a release and run under qemu-aarch64, whose log tells which instructions it
executes. Two runs that differ in the number of calls differ by the instructions of one call. Calls of 64 and of 128
outputs tell apart `per_product`, the instructions of one weight times one row, and `per_input`, those of a row's input
whatever the outputs are: rounding it. A call executes

    rows x inputs x (outputs x per_product + per_input)

`all blocks with low bytes` are rows of a prompt that are nowhere rounded to 8 bits: the most that a prompt costs.
Writes benchmarks/results/arm-instructions.json; docs/measurements/arm.md has the table. Needs cmake,
aarch64-linux-gnu-g++ and qemu-aarch64-static (`make cross-tools`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import options_of, save
from plugins.building.tools import PLUGINS, ROOT, Missing, run, tool

COMPILER, TOOLS = "aarch64-linux-gnu-g++", "make cross-tools"
WEIGHTS = {"int4": "int4", "int8": "int8", "int8, a scale per row": "int8-rows", "float16": "float16"}
SETS = ("i8mm", "dotprod", "neon")
OUTPUTS = (64, 128)
ROWS = (1, 8, 64)


class Case(NamedTuple):
    """A call whose instructions are counted."""

    isa: str  # instruction set
    weight: str  # type of the weight, a key of WEIGHTS
    rows: int
    spikes: bool = False  # whether every block of a row keeps its low bytes

    @property
    def name(self) -> str:
        """Return the case in words."""
        return f"{self.isa}, {self.weight}, {self.rows} rows" + (", all blocks with low bytes" if self.spikes else "")


def compiled() -> Path:
    """Cross-compile the kernels as for a release, and return the program that calls them."""
    build = ROOT / "build-cache" / "arm-instructions"
    compiler, cmake = tool(COMPILER, get=TOOLS), tool("cmake")
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}")
    run([cmake, "-S", str(PLUGINS), "-B", str(build), "-DKV_ALONE=", "-DCMAKE_BUILD_TYPE=Release", *system], "build")
    jobs = str(os.cpu_count() or 1)
    run([cmake, "--build", str(build), "--target", "kvexport_cpu", "--parallel", jobs], "build")
    return link([Path(__file__).with_name("arm_linear.cpp"), build / "libkvexport_cpu.a"], build / "arm_linear")


def link(sources: list[Path], program: Path) -> Path:
    """Compile a program for Arm and return its path. It has no symbols, with which lines of the log would be longer."""
    options = ["-std=gnu++17", "-O2", "-Wall", "-Wextra", "-static", "-s"]
    run([tool(COMPILER, get=TOOLS), *options, *map(str, sources), "-o", str(program)], "compiler")
    return program


def emulator() -> str:
    """Return the emulator of Arm programs."""
    try:
        return tool("qemu-aarch64-static", get=TOOLS)
    except Missing:
        return tool("qemu-aarch64", get=TOOLS)


def counted(log: Iterable[bytes]) -> int:
    """Return how many instructions a log of QEMU has.

    The log lists the instructions of a block when the block is translated, and names the block whenever it runs.
    """
    count = new = 0
    sizes: dict[bytes, int] = {}  # by the address of a block, the second number of "Trace 0: 0x7f... [...]"
    for line in log:
        if line.startswith(b"0x"):
            new += 1
        elif line.startswith(b"Trace"):
            block = line.split(maxsplit=3)[2]
            if new:
                sizes[block], new = new, 0
            count += sizes[block]
    return count


def executed(command: list[str], **environment: str) -> tuple[int, str]:
    """Run a program under emulation. Return how many instructions it executed, and its output."""
    log, end = os.pipe()
    options = ["-cpu", "max", "-d", "in_asm,exec,nochain", "-D", f"/dev/fd/{end}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [emulator(), *options, *command], stdout=output, stderr=output, pass_fds=[end], env={**environment}
        )
        os.close(end)
        with os.fdopen(log, "rb") as lines:
            count = counted(lines)
        failed = process.wait()
        output.seek(0)
        text = output.read()
    if failed:
        raise Missing(f"{command[0]} failed under emulation: {text}")
    return count, text


def one_call(program: Path, case: Case, outputs: int, inputs: int) -> int:
    """Return the instructions of one call."""
    rows = [str(case.rows), str(outputs), str(inputs)]
    counts = []
    for calls in ("1", "2"):
        command = [str(program), WEIGHTS[case.weight], *rows, calls, "spikes" if case.spikes else "plain"]
        count, text = executed(command, KVEXPORT_CPU_ISA=case.isa)
        if text.split()[0] != case.isa:
            raise Missing(f"the emulator has no {case.isa}; the program ran on {text.split()[0]}")
        counts.append(count)
    return counts[1] - counts[0]


def parts(few: int, many: int, rows: int, inputs: int) -> dict[str, float]:
    """Return the instructions of a product and of a row's input, from those of calls with both numbers of OUTPUTS."""
    each = (many - few) / (OUTPUTS[1] - OUTPUTS[0])
    return {
        "per_product": round(each / (rows * inputs), 4),
        "per_input": round((few - each * OUTPUTS[0]) / (rows * inputs), 2),
    }


def cases(sets: list[str], rows: list[int]) -> list[Case]:
    """Return the calls to count. Prompts with int4 and int8 weights are counted with low bytes too."""
    plain = [Case(isa, weight, count) for isa in sets for weight in WEIGHTS for count in rows]
    spikes = [case._replace(spikes=True) for case in plain if case.rows >= 48 and case.weight != "float16"]
    return plain + spikes


def lines(calls: dict[str, dict[str, float]]) -> list[str]:
    """Return the rows of kvexport in the table of docs/measurements/arm.md: per product, then per input."""
    rows = []
    for weight in WEIGHTS:
        for isa in SETS:
            counts = [calls[Case(isa, weight, count).name] for count in ROWS]
            cells = [f"{count['per_product']:.2f}" for count in counts]
            spikes = calls.get(Case(isa, weight, ROWS[-1], True).name)
            if spikes:
                cells[-1] += f" to {spikes['per_product']:.2f}"
            inputs = [f"{count['per_input']:.0f}" for count in (counts[0], counts[-1])]
            rows.append("| " + " | ".join([weight, isa, "kvexport", *cells, *inputs]) + " |")
    return rows


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sets", default=",".join(SETS))
    options = parser.parse_args()
    program = compiled()
    figures: dict[str, dict[str, float]] = {}
    for case in cases(options.sets.split(","), [int(rows) for rows in options.rows.split(",")]):
        few, many = (one_call(program, case, outputs, options.inputs) for outputs in OUTPUTS)
        figures[case.name] = parts(few, many, case.rows, options.inputs)
        print(case.name, json.dumps(figures[case.name]), flush=True)
    sizes = {"inputs": options.inputs, "outputs": list(OUTPUTS)}
    save("arm-instructions", {"tools": versions(), **sizes, "calls": figures})


def versions() -> dict[str, Any]:
    """Return the versions of the compiler and of the emulator."""
    first = {name: run([name, "--version"], name).splitlines()[0] for name in (tool(COMPILER), emulator())}
    return {Path(name).name: re.sub(r"^\S+ (version )?", "", line) for name, line in first.items()}


if __name__ == "__main__":
    main()
