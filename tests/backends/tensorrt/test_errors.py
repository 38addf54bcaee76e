"""Without a part of TensorRT, or with another machine's plan, the error tells what is wrong and gives a fix."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvexport
from kvexport import machine, paths
from kvexport.artifact import digests
from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt import engines, environment, plugin
from kvexport.backends.tensorrt.environment import Gpu, version_of
from kvexport.backends.tensorrt.record import EngineRecord, check_plan
from kvexport.commands.app import app
from kvexport.errors import ArtifactError, EnvironmentProblem
from kvexport.export.rebuild import rebuild
from tests.support import fake_cuda, fake_tensorrt
from tests.support.fake_tensorrt_plugins import LIBRARY

ERRORS = fake_cuda.cudaError_t
TENSORRT = ["backend.name=tensorrt"]


def problem(artifact: Path, out: Path, *settings: str) -> EnvironmentProblem:
    with pytest.raises(EnvironmentProblem) as caught:
        rebuild(artifact, out, [*TENSORRT, *settings])
    assert not out.exists()
    assert caught.value.fix
    return caught.value


# The machine.


def test_without_cuda_bindings(tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    refusal = problem(tiny_artifact, tmp_path / "a")
    assert "cuda-bindings cannot be used" in refusal.problem
    assert "pip install 'kvexport[tensorrt]'" in refusal.fix


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ERRORS.cudaErrorInsufficientDriver, "the NVIDIA driver is missing, or older than this CUDA needs"),
        (ERRORS.cudaErrorNoDevice, "there is no NVIDIA GPU"),
    ],
)
def test_without_a_driver_or_a_gpu(tiny_artifact: Path, tmp_path: Path, gpu: Any, error: Any, message: str) -> None:
    gpu.errors["cudaGetDeviceCount"] = error
    assert message in problem(tiny_artifact, tmp_path / "a").problem


def test_without_the_drivers_library(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> int:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(gpu, "cudaGetDeviceCount", missing)
    refusal = problem(tiny_artifact, tmp_path / "a")
    assert "libcuda.so.1" in refusal.problem
    assert "driver" in refusal.fix


def test_a_missing_or_too_old_gpu_is_named(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    gpu.devices = 0
    assert "there is no NVIDIA GPU" in problem(tiny_artifact, tmp_path / "a").problem
    gpu.devices, gpu.name, gpu.capability = 1, "Tesla V100", (7, 0)
    assert "does not support Tesla V100 (compute capability 7.0)" in problem(tiny_artifact, tmp_path / "a").problem


def test_exhausted_gpu_memory_is_an_error_with_a_fix(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = rebuild(tiny_artifact, tmp_path / "a", TENSORRT)
    gpu.errors["cudaMalloc"] = ERRORS.cudaErrorMemoryAllocation
    with pytest.raises(EnvironmentProblem, match="memory is used up") as caught:
        kvexport.load(artifact).generate("abc")
    assert "limits.max_batch" in caught.value.fix


def test_without_tensorrt(tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert "tensorrt is not installed" in problem(tiny_artifact, tmp_path / "a").problem


def test_without_tensorrts_library(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_by = importlib.import_module

    def broken(name: str) -> Any:
        if name.startswith("kvexport."):
            return found_by(name)
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "libnvinfer.so.11" in problem(tiny_artifact, tmp_path / "a").problem


def test_with_an_old_tensorrt(tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt.install(monkeypatch, gpu, version="10.9.0.34")
    assert "tensorrt is 10.9.0.34, which is too old: 11 is the oldest" in problem(tiny_artifact, tmp_path / "a").problem
    monkeypatch.setattr(environment, "JETSON", tmp_path)
    assert "JetPack 7.2.2" in problem(tiny_artifact, tmp_path / "a").fix


def test_a_cache_that_tensorrt_cannot_sort_is_refused_before_engines_are_built(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "MOST_SORTED", 8)
    refusal = problem(tiny_artifact, tmp_path / "a", "backend.tensorrt.plugin=never")
    assert re.search("cache 0 has [0-9]+ slots, and TensorRT sorts at most 8 without .* switched off", refusal.problem)
    assert "plugins/build.py tensorrt" in refusal.fix


def test_a_jetson_with_less_memory_than_an_engine_and_its_plan_is_refused(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (tiny_artifact / "decoder.weights").stat().st_size
    monkeypatch.setattr(machine, "machine_memory", lambda: (2 * weights - 1, 0))
    monkeypatch.setattr(environment, "JETSON", tmp_path)
    refusal = problem(tiny_artifact, tmp_path / "a")
    assert "an engine with its plan takes" in refusal.problem
    assert "weights.bits=4" in refusal.fix


# The plugins.


@pytest.mark.parametrize(("library", "message"), [
    (None, "is no file"), ("no library at all", "TensorRT refused it"),
    ("plugins\nVoteAttention 1\n", "it has no MergeCache"),
    ("plugins\nVoteAttention 2\nMergeCache 2\n", "it has MergeCache 2, VoteAttention 2, this kvexport needs"),
])  # fmt: skip
def test_a_plugin_library_that_cannot_be_used(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch, library: str | None, message: str
) -> None:
    path = tmp_path / "libkvexport_tensorrt.so"
    if library is not None:
        path.write_text(library)
    monkeypatch.setenv(plugin.VARIABLE, str(path))
    assert message in problem(tiny_artifact, tmp_path / "a", "backend.tensorrt.plugin=always").problem


def test_where_the_library_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    package = Path(kvexport.__file__).parent
    assert plugin.library() in (None, package / "_native" / plugin.NAME)
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "kvexport")
    assert plugin.library() is None
    assert plugin.why_no_library() == ("the TensorRT plugins are not built", plugin.BUILD)
    native = tmp_path / "kvexport" / "_native"
    native.mkdir(parents=True)
    (native / plugin.NAME).write_text("")
    assert plugin.library() == native / plugin.NAME
    monkeypatch.setenv(plugin.VARIABLE, "off")
    assert plugin.library() is None


def test_engines_of_plugins_without_the_plugins(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plugins.so"
    path.write_text(LIBRARY)
    monkeypatch.setenv(plugin.VARIABLE, str(path))
    artifact = rebuild(tiny_artifact, tmp_path / "a", TENSORRT)
    fake_tensorrt.install(monkeypatch, gpu)  # a fresh process: nothing is registered
    monkeypatch.setenv(plugin.VARIABLE, "off")
    with pytest.raises(EnvironmentProblem, match="switched off by KVEXPORT_TENSORRT_PLUGIN"):
        kvexport.load(artifact)
    assert not fake_tensorrt.Runtime.opened


# The plans.

H100, H200, A10 = Gpu("H100", (9, 0)), Gpu("H200", (9, 0)), Gpu("A10", (8, 6))


@pytest.mark.parametrize(("version", "gpu", "message"), [
    ("11.4.1.5", H200, None), ("11.4.1.6", H100, "built by TensorRT 11.4.1.5 and runs on no other, this is 11.4.1.6"),
    ("11.4.1.5", A10, "on H100 and runs on compute capability 9.0, this is A10 .compute capability 8.6"),
])  # fmt: skip
def test_a_plan_of_another_machine(version: str, gpu: Gpu, message: str | None) -> None:
    about = EngineRecord(
        decoder="decoder.plan",
        merge=None,
        top_logits="top_logits.plan",
        tensorrt="11.4.1.5",
        gpu=H100,
        plugin_version=None,
        functions={},
    )
    if message is None:
        check_plan(about, version, gpu)
        return
    with pytest.raises(EnvironmentProblem, match=message) as caught:
        check_plan(about, version, gpu)
    assert "kvexport build --from" in caught.value.fix


def test_versions_are_compared_as_numbers() -> None:
    assert version_of("11.4.1.5.post1") == version_of("11.4.1.5+cuda13") == (11, 4, 1, 5)
    assert version_of("unknown") == ()
    assert version_of("11.10") > version_of("11.9.3")


def test_a_plan_of_another_gpu_is_not_opened(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = rebuild(tiny_artifact, tmp_path / "a", TENSORRT)
    gpu.name, gpu.capability = "A10", (8, 6)
    ran = CliRunner().invoke(app, ["generate", str(artifact), "abc"])
    assert ran.exit_code == 3
    assert "built on Fake GPU and runs on compute capability 9.0, this is A10" in ran.stderr
    assert not fake_tensorrt.Runtime.opened


@pytest.mark.parametrize("verify", [True, False])
def test_a_plan_is_opened_only_after_its_digest_is_checked(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, verify: bool
) -> None:
    artifact = rebuild(tiny_artifact, tmp_path / "a", TENSORRT)
    plan = artifact / "decoder.plan"
    data = bytearray(plan.read_bytes())
    data[len(data) // 2] ^= 1
    plan.unlink()
    plan.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"'decoder.plan' has SHA-256 .*, the manifest says"):
        kvexport.load(artifact, verify=verify)
    assert not fake_tensorrt.Runtime.opened
    ran = CliRunner().invoke(app, ["generate", str(artifact), "abc"])
    assert ran.exit_code == 5


def test_a_plan_is_hashed_once(tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading hashes each plan as it is opened, and not also with the other files: a plan may have gigabytes."""
    artifact = rebuild(tiny_artifact, tmp_path / "a", TENSORRT)
    hashed, file_digests = [], digests.file_digests

    def recorded(root: Path, names: Any) -> Any:
        hashed.extend(names)
        return file_digests(root, names)

    monkeypatch.setattr(digests, "file_digests", recorded)
    kvexport.load(artifact)
    files = set(load_manifest(artifact, verify=False).files)
    assert len(hashed) == len(set(hashed))
    assert set(hashed) == files - {"decoder.plan", "merge.plan", "top_logits.plan"}
    assert "decoder.plan" in files


def test_a_plan_that_tensorrt_does_not_open(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.Builder, "build_serialized_network", lambda self, network, config: b"bad plan")
    artifact = rebuild(tiny_artifact, tmp_path / "a", TENSORRT)
    with pytest.raises(EnvironmentProblem, match=r"does not open decoder.plan .*magic tag does not match"):
        kvexport.load(artifact)


def test_importing_kvexport_imports_neither() -> None:
    code = """
import sys, kvexport.export.rebuild, kvexport.backends.tensorrt.model, kvexport.commands.doctor
print([m for m in ("tensorrt", "cuda", "torch", "onnx") if m in sys.modules])
"""
    root = Path(kvexport.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"
