"""Search for undetected bugs of the CPU kernels for packed weights, quantized caches and LoRA adapters.

    python benchmarks/kernel_mutants.py [--only NAME ...]

Bugs are planted in a copy of the kernels, one at a time. Each must fail the random calls of the tests
(plugins/tests/fuzz.cpp, with the same seed and number of cases), and the unchanged kernels must pass them. This needs
g++, ONNX Runtime's headers, a machine with AVX-512 VNNI and some minutes. On a machine without AMX its instructions run
in software (plugins/tests/tiles_in_software.h). Writes benchmarks/results/kernel-mutants.json: for every mutant its
instruction set and the failing call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, head, save
from mutants import ISA, ISA_FLAGS, REPACK, Library, Mutant

NAME = "kernel-mutants"
SEED, CASES = "10000", "300"  # as in tests/backends/onnxruntime/test_operators.py
OTHERS = (("20000", "60"), ("30000", "30"), ("40000", "30"))  # further calls of that test
FUZZ = "tests/fuzz.cpp"
GROUPS, FLOATS, ROUNDING, DOT, PACKED, AMX = (
    f"cpu/linear/{name}.h" for name in ("panel_groups", "panel_floats", "rounding", "dot", "packed", "amx")
)
LINEAR, PRODUCTS = "cpu/linear/linear.cpp", "cpu/linear/panel_products.cpp"
LOW_RANK = "cpu/linear/low_rank.h"
QUANTIZED, ROWS, ATTENTION, DECODE, PREFILL, MERGE = (
    f"cpu/{name}"
    for name in (
        "core/quantized.h",
        "attention/quantized.h",
        "attention/attention.h",
        "attention/decode.h",
        "attention/prefill.h",
        "merge/merge_cache.cpp",
    )
)
MUTANTS = (
    Mutant(
        "a group has the scale of the one before", PRODUCTS, "groups.scales(g, s)", "groups.scales(g ? g - 1 : 0, s)"
    ),
    Mutant("a row has the step of another", PRODUCTS, "(unit * b.step[kFrom + i])", "(unit * b.step[kFrom])"),
    Mutant(
        "the low byte of an input is dropped",
        PRODUCTS,
        "vi total = total_of(i, kBytes - 1);",
        "vi total = total_of(i, kBytes - 1) & (kBytes == 2 ? -256 : -1);",
    ),
    Mutant("the low bytes of other rows are added", PRODUCTS, "fine & 1 << kGroup", "fine & 2 << kGroup"),
    Mutant("a zero point is added", GROUPS, "* -scale_of_group", "* scale_of_group"),
    Mutant(
        "unsigned numbers with a minimum lack their center",
        GROUPS,
        " + static_cast<float>(center) * scale_of_group;",
        ";",
    ),
    Mutant(
        "a block's sum has no step",
        ROUNDING,
        "= size * static_cast<float>(256 * high + low)",
        "= static_cast<float>(256 * high + low)",
    ),
    Mutant("half of the center, VNNI", ROUNDING, "= -8 * high,", "= -4 * high,", isa="avx512vnni"),
    Mutant(
        "halves of a byte in the other order, panels",
        REPACK,
        "spread(nibbles & 0xffffu) | spread(nibbles >> 16) << 4",
        "spread(nibbles >> 16) | spread(nibbles & 0xffffu) << 4",
    ),
    Mutant(
        "the last column of an odd number",
        REPACK,
        "rest < kPanelColumns ? rest : kPanelColumns",
        "rest < kPanelColumns ? rest - 1 : kPanelColumns",
    ),
    Mutant("8-bit weights are read without their sign", DOT, "with_sign(spread_bytes(x), w)", "spread_bytes(x)"),
    Mutant(
        "inputs are read without their sign, portable",
        DOT,
        "static_cast<int32_t>(x[i])",
        "static_cast<int32_t>(static_cast<uint8_t>(x[i]))",
        isa="portable",
    ),
    Mutant(
        "the high half of a byte is the low one, inputs as they are",
        FLOATS,
        "(((all >> 4) & 15) - middle, vf)",
        "((all & 15) - middle, vf)",
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
        "every block of inputs is the first",
        LINEAR,
        "unpack_panel(weight, l, (column + j) / kPanelColumns, first,",
        "unpack_panel(weight, l, (column + j) / kPanelColumns, 0,",
    ),
    Mutant(
        "an adapter's factor is dropped",
        LOW_RANK,
        "tile[k * kColumns + j] * static_cast<float>(factor[j])",
        "tile[k * kColumns + j]",
    ),
    Mutant(
        "an adapter's products go to the first one's outputs", LOW_RANK, "+ range.from * outputs + column", "+ column"
    ),
    Mutant("every sequence has the first one's adapter", LOW_RANK, "ranges_[row / a_.tokens]", "ranges_[0]"),
    Mutant("an adapter's last rows are lost", LOW_RANK, "(rank_ + kColumns - 1) / kColumns", "rank_ / kColumns"),
    Mutant(
        "an adapter's first row is lost", LOW_RANK, "++range.from, --range.rows;", "range.from += 2, range.rows -= 2;"
    ),
    Mutant(
        "a few columns have the change of the first row",
        LOW_RANK,
        "sum[j] += n[r] * static_cast",
        "sum[j] += n[0] * static_cast",
    ),
    Mutant(
        "the gate has the product's adapter",
        LINEAR,
        "adapted.add(a.count, row,",
        "adapted.add(0, row,",
    ),
    Mutant("tiles: inputs of the first block", AMX, "panel.unit(first + k, 0, v)", "panel.unit(k, 0, v)", isa="amx"),
    Mutant(
        "tiles: inputs of a pair in the other order",
        AMX,
        "_mm512_cvtne2ps_pbh((__m512)v[j + 1], (__m512)v[j])",
        "_mm512_cvtne2ps_pbh((__m512)v[j], (__m512)v[j + 1])",
        isa="amx",
    ),
    Mutant("new tokens have the scales of the first head", ATTENTION, "new_scales.key + index * t,", "new_scales.key,"),
    Mutant("new rows are not rotated", ROWS, "hadamard(wide, size);", ""),
    Mutant("the output is not rotated back", ROWS, "hadamard(from, call.value_size);", ""),
    Mutant(
        "numbers are cut off, not rounded",
        QUANTIZED,
        "static_cast<int>(x + 12582912.0f - 12582912.0f)",
        "static_cast<int>(x)",
    ),
    Mutant(
        "keys have the values' scales, decode",
        DECODE,
        "this->scales_of(head, head.key_scale, from",
        "this->scales_of(head, head.value_scale, from",
    ),
    Mutant("values have the keys' scales, prefill", PREFILL, "value_scale[c], dv,", "key_scale[c], dv,"),
    Mutant(
        "a slot that moves leaves its scale behind", MERGE, "head.out_key_scale, from, to", "head.out_key_scale, to, to"
    ),
)


def failures(program: Path, isa: str, *, linear: bool, seed: str = SEED, cases: str = CASES) -> str:
    """Return the message of the random calls on an instruction set, "" if they pass.

    They call Linear alone if `linear` is set, else every operator.
    """
    command = [str(program), seed, cases, *["linear"] * linear]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "KVEXPORT_CPU_ISA": isa}
    )
    if done.returncode == 0 and not done.stdout.startswith(f"{isa}:"):
        sys.exit(f"this machine has no {isa}")
    return "" if done.returncode == 0 else done.stderr.strip()[:300] or f"ended by signal {-done.returncode}"


def keep(results: dict[str, Any]) -> None:
    """Put mutants of a run with --only into the committed results, each with the head of this run."""
    run = json.loads((RESULTS / f"{NAME}.json").read_text())
    known = run["mutants"] | {name: {**of, "run": head()} for name, of in results.items()}
    run["mutants"] = {mutant.name: known[mutant.name] for mutant in MUTANTS if mutant.name in known}
    run["detected"] = f"{sum(bool(of['detected']) for of in run['mutants'].values())} of {len(run['mutants'])}"
    save(NAME, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="run only mutants whose names begin with it")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.only or any(m.name.startswith(name) for name in options.only)]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        program = Library(Path(temporary), list(ISA_FLAGS), FUZZ)
        unchanged = dict.fromkeys((*ISA_FLAGS, "amx"), "")
        for isa in unchanged:
            for seed, cases in (*OTHERS, (SEED, CASES)):
                unchanged[isa] += failures(program.path, isa, linear=isa != ISA, seed=seed, cases=cases)
        print("unchanged", unchanged, flush=True)
        for mutant in mutants:
            program.change(mutant)
            gave_away = failures(program.path, mutant.isa, linear=mutant.file.startswith("cpu/linear"))
            results[mutant.name] = {"file": mutant.file, "isa": mutant.isa, "detected": gave_away}
            program.restore()
            print(mutant.name, "|", gave_away or "MISSED", flush=True)
    missed = [name for name, of in results.items() if not of["detected"]]
    if options.only:
        keep(results)
    else:
        count = f"{len(mutants) - len(missed)} of {len(mutants)}"
        save(NAME, {"seed": SEED, "cases": CASES, "unchanged": unchanged, "mutants": results, "detected": count})
    if missed or any(unchanged.values()):
        sys.exit(f"missed: {missed}; unchanged and yet found: {unchanged}")


if __name__ == "__main__":
    main()
