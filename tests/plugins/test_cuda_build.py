"""nvcc compiles the CUDA kernels, none of them spills, and none takes more than plugins/cuda/resources.json records;
the binding for ONNX Runtime links with them into a library that needs no CUDA to be loaded and exports what is asked of
it alone.

Compute capabilities 8.6 and 9.0 unless ``KVEXPORT_CUDA_ARCHITECTURES`` names others ("80,120") or is ``all``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import onnxruntime
import pytest

from kvexport.backends.onnxruntime import operators as native
from kvexport.backends.onnxruntime.devices import driver_problem
from kvexport.errors import EnvironmentProblem
from tests.support.one_node import VOTE_ATTENTION, model, vote_attention_shapes
from tests.support.paths import ROOT

PLUGINS = ROOT / "plugins"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


build_cuda, build = module(PLUGINS / "cuda" / "build_cuda.py"), module(PLUGINS / "build.py")

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
def test_kernels_compile_within_their_recorded_resources(architecture: str, tmp_path: Path) -> None:
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("not reached: there is no nvcc on this machine")
    objects, report = build_cuda.compile_device(architecture)
    try:
        lacking = binding_links(objects, architecture, tmp_path / "libkvexport_onnxruntime_cuda.so")
        assert not [name for name, numbers in report.items() if numbers["spills"]]
        recorded = RECORDED[f"sm_{architecture}"]
        anew = f"if that is meant: python plugins/cuda/build_cuda.py --record {architecture}"
        assert set(report) == set(recorded), f"other kernels than recorded; {anew}"
        if build_cuda.compiler_version() == RECORDED["compiler"]:  # another compiler divides registers in its own way
            more = [
                name
                for name, numbers in report.items()
                if any(a > b for a, b in zip(numbers.values(), recorded[name], strict=True))
            ]
            assert not more, f"more than recorded: {', '.join(more)}; {anew}"
    finally:
        for path in objects:
            path.unlink(missing_ok=True)
    if lacking:
        pytest.skip(f"not reached: the binding for ONNX Runtime: {lacking}")


def binding_links(objects: list[Path], architecture: str, library: Path) -> str:
    """The binding with these kernels, which go, as one library, and what that says of itself on this machine; or what
    is lacking for it."""
    try:
        headers = build.find_headers()
    except build.Missing as missing:
        return str(missing)
    build_cuda.link_binding(build.cuda_binding(headers), objects, [architecture], library)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    questions = {"kvexport_isa", "kvexport_merge_methods", "kvexport_device_problem", "kvexport_layer_problem"}
    assert exported == {"RegisterCustomOps", *questions}
    dynamic = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert not [name for name in re.findall(r"NEEDED.*\[(.+)\]", dynamic) if re.search("onnx|cuda|nv", name)]
    assert native.instruction_set(library) == f"sm_{architecture}"
    assert native.why_function(library, "MergeCache", {"method": "keepkv"}) is None
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    options.log_severity_level = 4
    # Known to ONNX Runtime in every type, and to its CUDA provider alone.
    for bfloat in (False, True):
        with pytest.raises(Exception, match="Could not find an implementation for VoteAttention"):
            node = model("VoteAttention", VOTE_ATTENTION, vote_attention_shapes(), bfloat=bfloat)
            onnxruntime.InferenceSession(node, options, providers=["CPUExecutionProvider"])
    if driver_problem():
        with pytest.raises(EnvironmentProblem, match=f"{library.name} cannot be used: ") as caught:
            native.require_runnable(library)
        assert caught.value.fix.startswith("make native-cuda")
    return ""


def test_a_library_for_cuda_is_for_this_machines_gpus_unless_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\necho 12.0\necho 9.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.gpus_here() == ["90", "120", "90"]
    compiled: list[list[str]] = []
    kernels = build.cuda_kernels()
    monkeypatch.setattr(kernels, "compile_all", lambda wanted: compiled.append(list(wanted)) or [])
    monkeypatch.setattr(kernels, "link_binding", lambda binding, objects, wanted, library: library)
    assert build.build_cuda(tmp_path, out=tmp_path) == tmp_path / "libkvexport_onnxruntime_cuda.so"
    build.build_cuda(tmp_path, ["89", "86"], out=tmp_path)
    program.unlink()
    build.build_cuda(tmp_path, out=tmp_path)
    assert compiled == [["90", "120"], ["86", "89"], sorted(kernels.ARCHITECTURES, key=int)]


def test_without_nvcc_building_for_cuda_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = build.cuda_kernels()
    monkeypatch.setattr(kernels.shutil, "which", lambda name, path=None: None)
    with pytest.raises(build.Missing, match="nvcc was not found"):
        build.build_cuda(tmp_path, ["90"], out=tmp_path)
