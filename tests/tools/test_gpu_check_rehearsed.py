"""Tests of the code of `tools/gpu_check` that runs only on a GPU, over a fake GPU and a fake clock."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.building import make, resources
from tests.conformance.cuda_library import HOST, Caller, DeviceMemory, load
from tests.support.fake_gpu import Clock, fake_gpu
from tools.gpu_check import __main__ as gpu_check
from tools.gpu_check import goals, launches, model, parts, prebuilt, proof
from tools.gpu_check.target import Target

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="not reached: g++ was not found")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    make.build("cuda-host")
    with fake_gpu(monkeypatch) as clock:
        yield clock


def target(kept: list[Any], **more: Any) -> Target:
    """Return a target that PyTorch takes for a device, with the host's library and sizes."""
    device_target = Target(on_host=False, small=True, keep=lambda x: kept.append(json.loads(json.dumps(x))), **more)
    device_target._caller = Caller(load(HOST), DeviceMemory())
    return device_target


def test_every_measurement_runs_to_its_goals(clock: Clock) -> None:
    kept: list[Any] = []
    found = {
        name: {"status": "passed", "figures": function(target(kept))}
        for name, function in {
            "decode": parts.decode,
            "merge": parts.merge,
            "prefill": parts.prefill,
            "launches": launches.launches,
            "model": model.model,
            "repeat": proof.repeat,
        }.items()
    }
    assert clock.captured > 20 and clock.replayed > 10 * clock.captured
    held_goals = {row["figure"]: row["measured"] for row in goals.goals(found)}
    lacking = [figure for figure, number in held_goals.items() if number is None]
    assert lacking == [
        "Decode, layers of 64 MB and more: share of the copy bandwidth",
        "Decode: FlashInfer over ours",
        *(f"Largest error against the float64 oracle, {dtype}" for dtype in ("float32", "float16")),
    ]
    assert found["merge"]["figures"]["rows"][0]["slack"] == 512, "the recipes' slack"
    assert found["model"]["figures"]["harness"] == "torch.compile"
    assert len(kept) > 15, "rows are kept as they are measured"


def test_launches_that_make_other_bits_than_those_in_order_fail(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    device_target, bits = target([]), iter([b"a", b"b"])
    monkeypatch.setattr(launches.Layers, "outcome", lambda *_: next(bits))
    with pytest.raises(RuntimeError, match="launches that begin early make other bits than those in order"):
        launches.launches(device_target)


def test_rows_without_time_are_named_and_those_before_are_kept(clock: Clock) -> None:
    kept: list[Any] = []
    device_target = target(kept, until=0.0)
    figures = device_target.rows(["a", "b", "c"], {"of": 1}, lambda case: {"case": case})
    assert figures["rows"] == [] and figures["left out for want of time"] == ["a", "b", "c"]
    device_target = target(kept)
    assert len(device_target.rows(["a", "b"], {}, lambda case: [{"case": case}])["rows"]) == 2
    assert kept == [{"rows": [{"case": "a"}]}, {"rows": [{"case": "a"}, {"case": "b"}]}]


def test_a_library_compiled_ahead_is_known_by_its_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> None:
    report = {"Rank": {"registers": 40, "spills": 0, "stack": 0, "shared": 0}}
    monkeypatch.setattr(make, "compile_kernels", lambda capabilities: ([], report))
    monkeypatch.setattr(
        make, "link_device", lambda name, objects, capabilities, path: path.write_text("library") and path
    )
    monkeypatch.setattr(resources, "compiler_version", lambda: "13.0")
    (library_path,) = prebuilt.write(["90"], tmp_path)
    assert library_path.name == f"libkvexport_cuda-sm_90-{prebuilt.digest()}.so"
    monkeypatch.setattr(make, "compile_kernels", lambda _: pytest.fail("compiled what was there"))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(parts, "DEVICE", tmp_path / "there" / "library.so")
    monkeypatch.setattr(prebuilt.take, "__defaults__", (tmp_path,))
    figures = parts.build(target([]))
    assert figures["prebuilt"] == library_path.name and figures["kernels"] == report
    assert (tmp_path / "there" / "library.so").read_text() == "library"
    assert prebuilt.take("89", tmp_path / "other.so", tmp_path) is None
    monkeypatch.setattr(prebuilt, "DEVICE_FLAGS", ["-O0"])
    assert prebuilt.take("90", tmp_path / "other.so", tmp_path) is None, "compiled otherwise"


@pytest.mark.parametrize("compiler", ["13.0", "13.9"])
def test_a_spill_fails_with_the_recorded_compiler_and_warns_with_another(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, compiler: str
) -> None:
    report = {"Rank": {"registers": 40, "spills": 8, "stack": 8, "shared": 0}}
    monkeypatch.setattr(prebuilt, "take", lambda *_: {"compiler": compiler, "kernels": report})
    if compiler == json.loads(resources.RECORD.read_text())["compiler"]:
        with pytest.raises(AssertionError, match="registers spill in Rank"):
            parts.build(target([]))
    else:
        assert parts.build(target([]))["warning"] == "with nvcc 13.9 registers spill in Rank"


def test_kernels_are_proved_before_they_are_timed_and_limits_add_up() -> None:
    assert [*gpu_check.PARTS][:5] == ["build", "conformance", "repeat", "launches", "onnxruntime"]
    assert sum(gpu_check.PARTS.values()) <= gpu_check.MINUTES * 60
    assert not gpu_check.PARTS.keys() & gpu_check.FURTHER_PARTS.keys()


def test_results_are_written_to_the_output_folder_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PATH", "")
    assert gpu_check.folder_of(None, "NVIDIA H100") == tmp_path / "out"
    assert gpu_check.folder_of(tmp_path / "named", "NVIDIA H100") == tmp_path / "named"
    monkeypatch.delenv("OUT")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    own = gpu_check.folder_of(None, "NVIDIA H100 80GB")
    assert own == tmp_path / "benchmarks" / "results" / "nvidia-h100-80gb" and own.is_dir()
    assert gpu_check.sources()["commit"] == "unknown"


def test_sanitizers_run_the_command_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert gpu_check.under_tool("memcheck", ["python"], on_host=False) == "compute-sanitizer was not found"
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    command = gpu_check.under_tool("memcheck", ["python"], on_host=False)
    assert command[0] == "/bin/compute-sanitizer" and command[-1] == "python" and "memcheck" in command
