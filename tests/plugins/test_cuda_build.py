"""nvcc compiles the CUDA kernels, none spills, and none exceeds the resources of plugins/cuda/resources.json.

The binding for ONNX Runtime links with them into a library that loads without CUDA and exports only its interface.
Compute capabilities are 8.6 and 9.0 unless ``KVEXPORT_CUDA_ARCHITECTURES`` names others ("80,120") or is ``all``.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import onnxruntime
import pytest

from kvexport.backends.onnxruntime import operators as native
from kvexport.backends.onnxruntime.devices import driver_problem
from kvexport.errors import EnvironmentProblem
from kvexport.methods.keepkv import KeepKV
from plugins.building import make, resources, tools
from plugins.building.ptx import library as ptx
from plugins.building.targets import CAPABILITIES, KERNELS
from tests.support.one_node import VOTE_ATTENTION, model, vote_attention_shapes

BY_DEFAULT = "86,90"
ASKED = os.environ.get("KVEXPORT_CUDA_ARCHITECTURES", BY_DEFAULT)
RECORDED = json.loads(resources.RECORD.read_text())
# nvcc's own PTX for 8.6 gives this kernel 92 registers, and that for 9.0 gives it more.
ASSEMBLED = {"PrefillScores<float>": [102, 0, 0, 0]}
LOG = """
ptxas info    : Compiling entry function '_ZN2kv4cuda10run_kernelINS0_6DecodeINS0_4HalfELi8EEEEEvNT_4ArgsE' for 'sm_90'
ptxas info    : Function properties for _ZN2kv4cuda10run_kernelINS0_6DecodeINS0_4HalfELi8EEEEEvNT_4ArgsE
    24 bytes stack frame, 36 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 16 bytes smem
ptxas info    : Compiling entry function '_ZN2kv4cuda10run_kernelINS0_5PlaceEEEvNT_4ArgsE' for 'sm_90'
ptxas info    : Function properties for _ZN2kv4cuda10run_kernelINS0_5PlaceEEEvNT_4ArgsE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers
"""


def test_the_compilers_report_is_read() -> None:
    assert resources.read_report(LOG) == {
        "Decode<Half, 8>": {"registers": 168, "spills": 36, "stack": 24, "shared": 16},
        "Place": {"registers": 72, "spills": 0, "stack": 0, "shared": 0},
    }


def test_every_supported_architecture_is_recorded_and_none_spills() -> None:
    assert {name for name in RECORDED if name.startswith("sm_")} == {f"sm_{x}" for x in CAPABILITIES}
    spills = RECORDED["columns"].index("spills")
    assert not [(x, name) for x in CAPABILITIES for name, row in RECORDED[f"sm_{x}"].items() if row[spills]]


@pytest.mark.parametrize("architecture", CAPABILITIES if ASKED == "all" else ASKED.split(","))
def test_kernels_compile_within_their_recorded_resources(architecture: str, tmp_path: Path) -> None:
    """Kernels compile within their recorded resources.

    They are compiled again only after a change of their sources. `make test-kernels` has compiled them for one
    capability, because other tests run their PTX on the host (tests/conformance/test_ptx.py). By default the same PTX
    is assembled for the other one.
    """
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("not reached: there is no nvcc on this machine")
    if architecture != ptx.CAPABILITY and ASKED == BY_DEFAULT:
        hold_to_record(architecture, make.assembled(architecture), ASSEMBLED)
        return
    objects, report = make.compile_kernels([architecture])
    lacking = binding_links(objects, architecture, tmp_path / "libkvexport_onnxruntime_cuda.so")
    hold_to_record(architecture, report)
    if lacking:
        pytest.skip(f"not reached: the binding for ONNX Runtime: {lacking}")


def hold_to_record(
    architecture: str, report: resources.Report, others: Mapping[str, list[int]] = MappingProxyType({})
) -> None:
    """Check that no kernel spills or exceeds its resources, which are those of `others` or otherwise recorded."""
    assert not [name for name, numbers in report.items() if numbers["spills"]]
    recorded = {**RECORDED[f"sm_{architecture}"], **others}
    anew = f"if that is meant: python plugins/build.py cuda --record --capabilities {architecture}"
    assert set(report) == set(recorded), f"other kernels than recorded; {anew}"
    if resources.compiler_version() == RECORDED["compiler"]:  # another compiler divides registers differently
        more = [
            name
            for name, numbers in report.items()
            if any(a > b for a, b in zip(numbers.values(), recorded[name], strict=True))
        ]
        assert not more, f"more than recorded: {', '.join(more)}; {anew}"


def binding_links(objects: list[Path], architecture: str, library: Path) -> str:
    """Link the binding with these kernels into one library, check it, and return why that is impossible, or ""."""
    if lacking := make.missing("onnxruntime-cuda"):
        return lacking
    make.link_device("onnxruntime-cuda", objects, [architecture], library)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    questions = {"kvexport_isa", "kvexport_schema", "kvexport_device_problem"}
    questions |= {"kvexport_attention_problem", "kvexport_merge_problem"}
    assert exported == {"RegisterCustomOps", *questions}
    dynamic = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert not [name for name in re.findall(r"NEEDED.*\[(.+)\]", dynamic) if re.search("onnx|cuda|nv", name)]
    assert native.instruction_set(library) == f"sm_{architecture}"
    assert native.why_function(library, "MergeCache", KeepKV()) is None
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    options.log_severity_level = 4
    # ONNX Runtime knows the operators in every type, but only for its CUDA provider.
    for half in (False, True):
        with pytest.raises(Exception, match=r"(implementation for |kernel for kvexport\.)VoteAttention"):
            node = model("VoteAttention", VOTE_ATTENTION, vote_attention_shapes(), half=half)
            onnxruntime.InferenceSession(node, options, providers=["CPUExecutionProvider"])
    if driver_problem():
        with pytest.raises(EnvironmentProblem, match=f"{library.name} cannot be used: ") as caught:
            native.require_runnable(library, "cuda")
        assert caught.value.fix.startswith("make native-cuda")
    return ""


def test_a_library_for_cuda_is_for_this_machines_gpus_unless_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\necho 12.0\necho 9.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert make.gpus_here() == ["90", "120", "90"]
    assert make.chosen_capabilities([]) == ["90", "120"]
    assert make.chosen_capabilities(["89", "86"]) == ["86", "89"]
    program.unlink()
    assert make.chosen_capabilities([]) == sorted(CAPABILITIES, key=int)


def test_kernels_and_binding_are_compiled_for_the_chosen_capabilities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[Sequence[str]] = []

    def compile_nothing(command: Sequence[str], what: str) -> str:
        commands.append(command)
        Path(command[-1]).touch()
        return ""

    monkeypatch.setattr(make, "tool", lambda name: name)
    monkeypatch.setattr(make, "run", lambda command, what: commands.append(command) or "")
    monkeypatch.setattr(make, "link", lambda command, objects, library, _: commands.append(command) or library)
    monkeypatch.setattr(ptx, "CACHED", tmp_path / "cached")
    monkeypatch.setattr(ptx, "tool", lambda name: name)
    monkeypatch.setattr(ptx, "version", lambda program: "Cuda compilation tools, release 13.0")
    monkeypatch.setattr(tools, "run", compile_nothing)
    built = make.build("onnxruntime-cuda", capabilities=["90", "86"], out=tmp_path)
    assert built == tmp_path / "libkvexport_onnxruntime_cuda.so"
    *compiled, linked = [" ".join(command) for command in commands]
    make.compile_kernels(["90", "86"])
    assert len(commands) == len(compiled) + 1, "kernels were compiled again"
    next((tmp_path / "cached").glob("*.log")).unlink()
    make.compile_kernels(["90", "86"])
    assert len(commands) == len(compiled) + 2, "without its report a source is compiled again"
    kernels = [command for command in compiled if ".cu " in command]
    assert len(kernels) == len(KERNELS)
    for command in kernels:
        codes = ["code=sm_86", "code=sm_90", "code=compute_90"]
        assert re.findall(r"code=\w+", command) == codes, "for both capabilities, and as PTX for newer GPUs"
    assert [command for command in compiled if "-DKV_CUDA_ARCHITECTURES=86_90" in command and "_library.cpp" in command]
    assert "cuda_exports.map" in linked


def test_a_cuda_build_without_nvcc_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(make.Missing, match="nvcc was not found"):
        make.build("cuda", capabilities=["90"], out=tmp_path)
