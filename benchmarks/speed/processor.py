"""Runs a benchmark as on a processor with fewer instruction sets, for kvexport and for its peers alike.

    python benchmarks/speed/processor.py avx512vnni|avxvnni|avx2 SCRIPT [ARGUMENTS ...]

    python benchmarks/speed/processor.py avx2 benchmarks/speed/packed_kernel.py --rows 1,512

KVEXPORT_CPU_ISA restricts kvexport alone: ONNX Runtime, ONNX Runtime GenAI and llama.cpp then still use every
instruction set of the machine. This program hides sets from all of them. It preloads hide_instructions.c into SCRIPT,
which lets the instruction CPUID fault and answers in its place (Linux, on an Intel processor from 2012 on or an AMD
Zen 4). A processor without these sets differs in more than them: in ports, caches and clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The bits of CPUID's leaf 7: EBX, ECX and EDX of subleaf 0; EAX, ECX and EDX of subleaf 1.
AMX = (0, 0, 1 << 22 | 1 << 24 | 1 << 25, 1 << 21, 0, 1 << 8)
AVX512 = (
    1 << 16 | 1 << 17 | 1 << 21 | 1 << 28 | 1 << 30 | 1 << 31,  # F, DQ, IFMA, CD, BW, VL
    1 << 1 | 1 << 6 | 1 << 11 | 1 << 12 | 1 << 14,  # VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
    1 << 8 | 1 << 23,  # VP2INTERSECT, FP16
    1 << 5,  # BF16
    0,
    1 << 19,  # AVX10
)
AVX_VNNI = (0, 0, 0, 1 << 4 | 1 << 23, 0, 1 << 4 | 1 << 5 | 1 << 10)  # VNNI, IFMA; INT8, NE-CONVERT, INT16
HIDDEN = {"avx512vnni": (AMX,), "avxvnni": (AMX, AVX512), "avx2": (AMX, AVX512, AVX_VNNI)}


def environment(processor: str, library: Path) -> dict[str, str]:
    """Return the environment of a process from which `library` hides the sets that `processor` lacks."""
    bits = [0] * 6
    for one in HIDDEN[processor]:
        bits = [a | b for a, b in zip(bits, one, strict=True)]
    hidden = " ".join(f"{x:x}" for x in bits)
    return os.environ | {"LD_PRELOAD": str(library), "HIDDEN_SETS": hidden, "AS_PROCESSOR": processor}


def compile_library(folder: Path) -> Path:
    """Compile hide_instructions.c in `folder` and return the library."""
    library = folder / "hide_instructions.so"
    source = Path(__file__).with_name("hide_instructions.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in HIDDEN:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        command = [sys.executable, *sys.argv[2:]]
        sys.exit(subprocess.run(command, env=environment(sys.argv[1], library), check=False).returncode)


if __name__ == "__main__":
    main()
