"""Tests of the doctor: it finds missing, outdated and broken parts, names the affected verbs, and prints the fix."""

import importlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import onnxruntime
import pytest
from typer.testing import CliRunner

from kvexport import paths
from kvexport.backends import packages
from kvexport.backends.onnxruntime import devices
from kvexport.backends.onnxruntime.backend import Native, _pages_row
from kvexport.backends.tensorrt import plugin
from kvexport.commands.app import app
from kvexport.commands.doctor import diagnose
from kvexport.errors import EnvironmentProblem
from kvexport.packages import VERBS, Package, missing_package, package_state, require
from tests.support.paths import ROOT


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    distributions = {p.name for p in packages() if p.module in modules}
    version = metadata.version

    def lookup(name: str) -> str:
        if name in distributions:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", lookup)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(("modules", "verdict"), [
    ((), "Artifacts can be run, served, built and validated here."),
    (("torch",), "Artifacts can be run and served here. For more: pip install 'kvexport[export]'"),
    (("uvicorn",), "Artifacts can be run, built and validated here. For more: pip install 'kvexport[serve]'"),
    (("uvicorn", "torch"), "Artifacts can be run here. For more: pip install 'kvexport[serve,export]'"),
])  # fmt: skip
def test_the_verdict_names_the_extras_of_the_commands_that_lack_packages(
    modules: tuple[str, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *modules)
    assert diagnose().verdict == verdict


def without_gpu_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the package onnxruntime-gpu from importlib.metadata. Its module `onnxruntime` stays importable."""
    version = metadata.version

    def lookup(name: str) -> str:
        if name == "onnxruntime-gpu":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", lookup)


def test_the_packages_are_those_of_the_project_with_the_same_oldest_versions() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared: dict[str, dict[str, str]] = {}
    for extra in ("dependencies", "export", "gpu", "serve", "tensorrt"):
        extras = re.search(rf"^{extra} = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
        pairs = re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)[";]', extras[1])
        declared["run" if extra == "dependencies" else extra] = dict(pairs)
    known: dict[str, dict[str, str]] = {}
    for package in packages():
        known.setdefault(package.extra, {})[package.name] = package.minimum
    assert known == declared


def test_every_verb_of_the_command_line_is_judged() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert set(re.findall(r"^  ([a-z]+)  ", shown[shown.index("Commands:") :], re.MULTILINE)) == {
        *VERBS,
        "docs",
        "doctor",
        "list",
        "rm",
    }


def test_this_machine_can_do_everything() -> None:
    diagnosis = diagnose()
    assert diagnosis.runs
    assert not any(diagnosis.verbs.values())
    assert "CPUExecutionProvider" in diagnosis.to_json()["providers"]
    assert diagnosis.system["cores"] >= 1
    assert diagnosis.system["disk_free"] > 0
    assert {s.package.name for s in diagnosis.packages if s.problem} <= {"onnxruntime-gpu", "tensorrt", "cuda-bindings"}


def test_running_tensorrt_engines_takes_no_torch() -> None:
    (line,) = re.findall(r"^tensorrt = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.findall(r'"([\w-]+)', line) == ["cuda-bindings", "tensorrt"]


def test_without_the_export_packages_artifacts_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "onnx")
    ran = CliRunner().invoke(app, ["doctor", "--json"])
    assert ran.exit_code == 0
    data = json.loads(ran.stdout)
    assert data["runs"]
    assert data["verbs"]["build"] == {"works": False, "lacks": ["torch", "onnx"]}
    assert data["verbs"]["generate"] == {"works": True, "lacks": []}
    torch = next(p for p in data["packages"] if p["name"] == "torch")
    assert (torch["version"], torch["problem"], torch["install"]) == (None, "missing", "pip install 'kvexport[export]'")


def test_only_validate_needs_polygraphy(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "polygraphy")
    assert {verb for verb, lacks in diagnose().verbs.items() if lacks} == {"validate"}
    require("build")
    with pytest.raises(EnvironmentProblem, match="validate needs polygraphy, which is not installed") as caught:
        require("validate")
    assert caught.value.fix == "pip install 'kvexport[export]'"


@pytest.mark.parametrize("module", ["onnxruntime", "tokenizers"])
def test_the_doctor_exits_with_3_if_no_backend_can_run(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    without(monkeypatch, module)
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 3
    assert f"pip install '{module}>=" in ran.stdout
    assert "cannot be run here" in ran.stdout


def test_an_installed_package_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found_by = importlib.import_module

    def broken(name: str) -> object:
        if name.startswith("kvexport."):
            return found_by(name)
        raise ImportError(f"lib{name}.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    diagnosis = diagnose()
    assert not diagnosis.runs
    assert sorted(diagnosis.verbs["generate"]) == ["onnxruntime", "tokenizers"]
    problems = {s.package.name: s.problem for s in diagnosis.packages}
    assert "libtokenizers.so.1" in problems["tokenizers"]


def test_an_old_version_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package("torch", "torch", "2.9", "export", "")
    for version, good in {
        "2.9": True,
        "2.10.0+cpu": True,
        "2.9.0rc1": True,
        "2.8.9": False,
        "1.99": False,
        "3": True,
    }.items():
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert (not package_state(package).problem) is good, version


def test_onnxruntime_may_come_from_the_gpu_package(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def lookup(name: str) -> str:
        if name == "onnxruntime":
            raise metadata.PackageNotFoundError(name)
        return "1.25" if name == "onnxruntime-gpu" else version(name)

    monkeypatch.setattr(metadata, "version", lookup)
    assert diagnose().runs


def test_a_failed_import_names_the_line_that_installs() -> None:
    known = packages()
    problem = missing_package(ModuleNotFoundError("No module named 'transformers'", name="transformers.models"), known)
    assert problem.exit_code == 3
    assert problem.fix == "pip install 'kvexport[export]'"
    own_error = ModuleNotFoundError("No module named 'kvexport.nothing'", name="kvexport.nothing")
    assert missing_package(own_error, known) is None
    unknown = missing_package(ImportError("libcuda.so.1: cannot open shared object file"), known)
    assert "libcuda.so.1" in unknown.problem
    assert (
        missing_package(ModuleNotFoundError("gone", name="tensorrt"), known).fix == "pip install 'kvexport[tensorrt]'"
    )


def test_without_a_driver_nothing_for_gpus_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "driver_problem", lambda: "there is no NVIDIA driver")
    monkeypatch.setattr("kvexport.commands.doctor.shutil.which", lambda program: None)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    without_gpu_package(monkeypatch)
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout
    assert "there is no NVIDIA driver" in shown and "--device cpu" in shown
    assert "onnxruntime-gpu" in shown and "kvexport[gpu]" not in shown and "install --force-reinstall" not in shown


def test_with_a_driver_the_packages_for_gpus_are_advised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    without_gpu_package(monkeypatch)
    assert "pip install 'kvexport[gpu]'" in CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout


def test_nvidia_smi_is_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert diagnose().gpus == ["NVIDIA H200, 143771 MiB, 570.1"]
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    diagnosis = diagnose()
    assert diagnosis.gpus == []
    assert "No devices were found" in diagnosis.gpu_problem


def test_small_pages_are_reported_with_a_fix() -> None:
    assert _pages_row(Native("avx2")) == "yes, where memory allows"
    assert _pages_row(Native("", "not built", "make native")) == "no: this needs the native operators"
    assert _pages_row(Native("avx2", small_pages="switched off by KVEXPORT_HUGE_PAGES")) == (
        "no: switched off by KVEXPORT_HUGE_PAGES"
    )
    assert _pages_row(Native("avx2", small_pages="the kernel has none")) == "no: the kernel has none"
    assert "madvise > /sys/kernel" in _pages_row(Native("avx2", small_pages="switched off in the kernel"))


def test_the_module_itself_needs_the_standard_library_only() -> None:
    heavy = ("numpy", "pydantic", "typer", "rich", "yaml", "torch")
    code = f"import sys, kvexport.backends as b; b.packages(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tensorrt_plugins_are_listed_or_reported_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", "off")
    diagnosis = diagnose().to_json()["tensorrt_plugins"]
    assert diagnosis == {"problem": "switched off by KVEXPORT_TENSORRT_PLUGIN", "fix": "unset KVEXPORT_TENSORRT_PLUGIN"}
    library = tmp_path / "plugins.so"
    library.touch()
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", str(library))
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert re.search(r"TensorRT plugins\s+\S", shown)
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["tensorrt_plugins"] == {
        "library": str(library)
    }


def test_missing_headers_of_tensorrt_are_reported_with_the_line_that_gets_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KVEXPORT_TENSORRT_PLUGIN", raising=False)
    monkeypatch.setattr(plugin, "NAME", "not-built.so")
    monkeypatch.setenv("TENSORRT_INCLUDE_DIR", str(tmp_path))
    diagnosis = diagnose().to_json()["tensorrt_plugins"]
    assert diagnosis["problem"] == (
        f"the TensorRT plugins are not built; to build them here, first: TENSORRT_INCLUDE_DIR={tmp_path} holds no "
        "NvInferRuntime.h"
    )
    assert diagnosis["fix"] == plugin.BUILD
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR")
    lacks = plugin.what_building_lacks()
    assert lacks is None or re.search(r"https://github.com/NVIDIA/TensorRT|CUDA's headers|nvcc was not found", lacks)
    # Without a checkout there is no build script, so nothing can be missing for it.
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "kvexport")
    assert diagnose().to_json()["tensorrt_plugins"]["problem"] == "the TensorRT plugins are not built"
