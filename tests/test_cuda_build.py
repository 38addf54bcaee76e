"""nvcc compiles the CUDA kernels, none of them spills, and none takes more than plugins/cuda/resources.json records.

Compute capabilities 8.6 and 9.0 unless ``KVEXPORT_CUDA_ARCHITECTURES`` names others ("80,120") or is ``all``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("build_cuda", Path(__file__).parent.parent / "plugins" / "cuda" / "build_cuda.py")
assert SPEC and SPEC.loader
build_cuda = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build_cuda)

ASKED = os.environ.get("KVEXPORT_CUDA_ARCHITECTURES", "86,90")
RECORDED = json.loads(build_cuda.RESOURCES.read_text())
LOG = """
ptxas info    : Compiling entry function '_ZN2kv4cuda11run_programINS0_6DecodeINS0_4HalfELi8EEEEEvNT_4ArgsE' for 'sm_90'
ptxas info    : Function properties for _ZN2kv4cuda11run_programINS0_6DecodeINS0_4HalfELi8EEEEEvNT_4ArgsE
    24 bytes stack frame, 36 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 16 bytes smem
ptxas info    : Compiling entry function '_ZN2kv4cuda11run_programINS0_5PlaceEEEvNT_4ArgsE' for 'sm_90'
ptxas info    : Function properties for _ZN2kv4cuda11run_programINS0_5PlaceEEEvNT_4ArgsE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers
"""


def test_the_compilers_report_is_read() -> None:
    assert build_cuda.read_report(LOG) == {
        "Decode<Half, 8>": {"registers": 168, "spills": 36, "stack": 24, "shared": 16},
        "Place": {"registers": 72, "spills": 0, "stack": 0, "shared": 0},
    }


def test_every_supported_architecture_is_recorded_and_none_spills() -> None:
    assert {name for name in RECORDED if name.startswith("sm_")} == {f"sm_{x}" for x in build_cuda.ARCHITECTURES}
    spills = RECORDED["columns"].index("spills")
    assert not [(x, name) for x in build_cuda.ARCHITECTURES for name, row in RECORDED[f"sm_{x}"].items() if row[spills]]


@pytest.mark.parametrize("architecture", build_cuda.ARCHITECTURES if ASKED == "all" else ASKED.split(","))
def test_kernels_compile_within_their_recorded_resources(architecture: str) -> None:
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("nvcc was not found")
    objects, report = build_cuda.compile_device(architecture)
    for path in objects:
        path.unlink()
    assert not [name for name, numbers in report.items() if numbers["spills"]]
    recorded = RECORDED[f"sm_{architecture}"]
    anew = f"if that is meant: python plugins/cuda/build_cuda.py --record {architecture}"
    assert set(report) == set(recorded), f"other kernels than recorded; {anew}"
    if build_cuda.compiler_version() != RECORDED["compiler"]:
        return  # another compiler divides registers in its own way
    more = [name for name, numbers in report.items() if any(a > b for a, b in zip(numbers.values(), recorded[name], strict=True))]
    assert not more, f"more than recorded: {', '.join(more)}; {anew}"
