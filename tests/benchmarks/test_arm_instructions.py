"""Tests of the count of instructions on Arm: it is exact, calls' parts add up, and the page shows the results."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.speed import arm_instructions
from benchmarks.speed.arm_instructions import COMPILER, OUTPUTS, Case
from tests.support.paths import ROOT

LOOP = """
#include <stdlib.h>
int main(int count, char** arguments) {
  for (long i = atol(arguments[count - 1]); i > 0;)
    asm volatile("1: nop; nop; nop; subs %0, %0, #1; b.ne 1b" : "+r"(i) : : "cc");
}
"""
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"not reached: there is no {COMPILER}")
needs_emulator = pytest.mark.skipif(
    not any(map(shutil.which, ("qemu-aarch64-static", "qemu-aarch64"))), reason="not reached: there is no qemu-aarch64"
)


@needs_compiler
@needs_emulator
def test_a_count_has_every_instruction_of_a_loop_once(tmp_path: Path) -> None:
    source = tmp_path / "loop.cpp"
    source.write_text(LOOP)
    program = arm_instructions.link([source], tmp_path / "loop")
    few, many = (arm_instructions.executed([str(program), turns])[0] for turns in ("2000", "5000"))
    assert many - few == 5 * 3000


@needs_compiler
@needs_emulator
def test_a_program_that_fails_gives_no_count(tmp_path: Path) -> None:
    source = tmp_path / "fails.cpp"
    source.write_text('#include <stdio.h>\nint main() { puts("no panels"); return 2; }')
    with pytest.raises(arm_instructions.Missing, match="no panels"):
        arm_instructions.executed([str(arm_instructions.link([source], tmp_path / "fails"))])


def test_a_block_counts_whenever_it_runs_with_the_size_that_it_was_last_translated_to() -> None:
    log = b"""IN:
0x00400ac0:  d503201f  nop
0x00400ac4:  d280001d  movz     x29, #0

Trace 0: 0x7f10 [0/400ac0/1/200]
Trace 0: 0x7f10 [0/400ac0/1/200]
IN:
0x00400ac8:  940cbcae  bl       #0x72fda4

Trace 0: 0x7f10 [0/400ac8/1/200]
"""
    assert arm_instructions.counted(log.splitlines()) == 2 + 2 + 1


@needs_compiler
def test_the_calls_of_linear_compile_for_arm() -> None:
    source = str(ROOT / "benchmarks" / "speed" / "arm_linear.cpp")
    command = [COMPILER, "-std=gnu++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_parts_of_a_call_add_up() -> None:
    rows, inputs, per_product, per_input = 8, 64, 0.75, 30.0
    few, many = (round(rows * inputs * (outputs * per_product + per_input)) for outputs in OUTPUTS)
    expected = {"per_product": per_product, "per_input": per_input}
    assert arm_instructions.parts(few, many, rows, inputs) == expected


def test_prompts_of_packed_weights_are_counted_with_low_bytes_too() -> None:
    counted = arm_instructions.cases(["neon"], [1, 64])
    assert {case for case in counted if case.spikes} == {
        Case("neon", weight, 64, True) for weight in ("int4", "int8", "int8, a scale per row")
    }


def test_the_page_shows_the_results() -> None:
    calls = json.loads((ROOT / "benchmarks" / "results" / "arm-instructions.json").read_text())["calls"]
    page = (ROOT / "docs" / "measurements" / "arm.md").read_text(encoding="utf-8")
    assert calls.keys() == {
        case.name for case in arm_instructions.cases([*arm_instructions.SETS], [*arm_instructions.ROWS])
    }
    for line in arm_instructions.lines(calls):
        assert line in page, "the page is old: write these lines\n" + "\n".join(arm_instructions.lines(calls))
