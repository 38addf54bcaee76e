"""Do the tests find a wrong kernel of packed weights or of a small cache? Bugs are planted in a copy of the CPU
kernels, one at a time; each has to fail the random calls that the tests make (plugins/tests/fuzz.cpp, the same seed and
as many cases), and the kernels as they are have to pass them.

    python benchmarks/kernel_mutants.py [--only NAME ...]

Takes g++ and ONNX Runtime's headers, some minutes, and of `amx` a machine that has it. Writes
benchmarks/results/kernel-mutants.json: of every mutant its instruction set, and the call that gave it away.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save
from mutants import ISA, ISA_FLAGS, Library, Mutant

SEED, CASES = "10000", "300"  # tests/backends/onnxruntime/test_operators.py
OTHERS = (("20000", "60"), ("30000", "30"), ("40000", "30"))  # the calls that it makes besides
FUZZ = "tests/fuzz.cpp"
INT8, PACKED, AMX, LINEAR = (f"cpu/linear/{name}" for name in ("int8.h", "packed.h", "amx.h", "linear.cpp"))
SMALL, ROWS, ATTENTION, DECODE, PREFILL, MERGE = (
    f"cpu/{name}"
    for name in (
        "core/small.h",
        "attention/small.h",
        "attention/attention.h",
        "attention/decode.h",
        "attention/prefill.h",
        "merge/merge_cache.cpp",
    )
)
MUTANTS = (
    Mutant(
        "the last group has the scale of another",
        INT8,
        "i / lanes < last ? i / lanes : last",
        "i / lanes < last ? i / lanes : 0",
    ),
    Mutant(
        "a lane has the scale of the next one", INT8, "(s * load(x.scale + lane))", "(s * load(x.scale + lane + 1))"
    ),
    Mutant(
        "a lane's sum has the scale of another",
        INT8,
        "steps[i] * static_cast<float>(total)",
        "steps[0] * static_cast<float>(total)",
    ),
    Mutant(
        "halves of a byte in the other order, rounded inputs",
        INT8,
        "part[0] = all & 15, part[1] = all >> 4;",
        "part[1] = all & 15, part[0] = all >> 4;",
    ),
    Mutant(
        "the last column of an odd number", INT8, "for (; j < columns; ++j) tile(", "for (; j + 1 < columns; ++j) tile("
    ),
    Mutant(
        "8-bit inputs are read without their sign",
        INT8,
        "_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8)) +",
        "_mm256_and_si256(v, _mm256_set1_epi16(255))) +",
    ),
    Mutant(
        "inputs are read without their sign, portable",
        INT8,
        "((vi)(v << (24 - 8 * i)) >> 24)",
        "(vi)(v >> 8 * i & 255)",
        isa="portable",
    ),
    Mutant(
        "half of the excess, VNNI", INT8, "-total * (1 << (bits - 1))", "-total * (1 << (bits - 2))", isa="avx512vnni"
    ),
    Mutant(
        "halves of a byte in the other order, inputs as they are",
        PACKED,
        "out[i] = static_cast<float>(byte & 15) * s + o, out[i + 1] = static_cast<float>(byte >> 4) * s + o;",
        "out[i] = static_cast<float>(byte >> 4) * s + o, out[i + 1] = static_cast<float>(byte & 15) * s + o;",
    ),
    Mutant("the zero point is dropped", PACKED, "offset[i] *= -scale[i];", "offset[i] *= 0.0f;"),
    Mutant(
        "signed numbers with a minimum keep their excess",
        PACKED,
        "offset[i] -= static_cast<float>(excess) * scale[i];",
        "offset[i] -= 0.0f;",
    ),
    Mutant(
        "the gate has the weight's numbers",
        LINEAR,
        "few_products(a.gate, column, count, g)",
        "few_products(p.weight, column, count, g)",
    ),
    Mutant(
        "inputs are rounded that should not be",
        LINEAR,
        "return !a.float_input && !tiled.values",
        "return !tiled.values",
    ),
    Mutant(
        "every block of inputs is the first",
        LINEAR,
        "dequantize(weight, a.inputs, column + i, first, depth,",
        "dequantize(weight, a.inputs, column + i, 0, depth,",
    ),
    Mutant(
        "tiles: groups of the first block of inputs",
        AMX,
        "splat(groups[first / group - begin])",
        "splat(groups[first / group - begin + (begin > 0)])",
        isa="amx",
    ),
    Mutant(
        "tiles: the second half of a byte has no offset",
        AMX,
        "((both >> weight.bits) ^ turned, vf) * s + o;",
        "((both >> weight.bits) ^ turned, vf) * s;",
        isa="amx",
    ),
    Mutant("new tokens have the scales of the first head", ATTENTION, "new_scales.key + index * t,", "new_scales.key,"),
    Mutant("new rows are not rotated", ROWS, "hadamard(wide, size);", ""),
    Mutant("the output is not rotated back", ROWS, "hadamard(from, a.value_size);", ""),
    Mutant(
        "numbers are cut off, not rounded",
        SMALL,
        "static_cast<int>(x + 12582912.0f - 12582912.0f)",
        "static_cast<int>(x)",
    ),
    Mutant(
        "keys have the values' scales, decode",
        DECODE,
        "this->scales_of(x, x.key_scale, from",
        "this->scales_of(x, x.value_scale, from",
    ),
    Mutant("values have the keys' scales, prefill", PREFILL, "value_scale[c], dv,", "key_scale[c], dv,"),
    Mutant("a slot that moves leaves its scale behind", MERGE, "x.out_key_scale, from, to", "x.out_key_scale, to, to"),
)


def said(program: Path, isa: str, *, linear: bool, seed: str = SEED, cases: str = CASES) -> str:
    """What the random calls, of Linear alone or of every operator, find wrong on an instruction set; empty where they
    find nothing."""
    command = [str(program), seed, cases, *["linear"] * linear]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "KVEXPORT_CPU_ISA": isa}
    )
    if done.returncode == 0 and not done.stdout.startswith(f"{isa}:"):
        sys.exit(f"this machine has no {isa}")
    return "" if done.returncode == 0 else done.stderr.strip()[:300] or f"ended by signal {-done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="mutants whose names begin so")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if not asked.only or any(m.name.startswith(name) for name in asked.only)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        program = Library(Path(temporary), list(ISA_FLAGS), FUZZ)
        unchanged = dict.fromkeys((*ISA_FLAGS, "amx"), "")
        for isa in unchanged:
            for seed, cases in (*OTHERS, (SEED, CASES)):
                unchanged[isa] += said(program.path, isa, linear=isa != ISA, seed=seed, cases=cases)
        print("unchanged", unchanged, flush=True)
        for mutant in chosen:
            program.change(mutant)
            gave_away = said(program.path, mutant.isa, linear=mutant.file.startswith("cpu/linear"))
            found[mutant.name] = {"file": mutant.file, "isa": mutant.isa, "found": gave_away}
            program.restore()
            print(mutant.name, "|", gave_away or "MISSED", flush=True)
    missed = [name for name, of in found.items() if not of["found"]]
    if not asked.only:
        count = f"{len(chosen) - len(missed)} of {len(chosen)}"
        save("kernel-mutants", {"seed": SEED, "cases": CASES, "unchanged": unchanged, "mutants": found, "found": count})
    if missed or any(unchanged.values()):
        sys.exit(f"missed: {missed}; unchanged and yet found: {unchanged}")


if __name__ == "__main__":
    main()
