"""Tests of the device of ONNX Runtime without a GPU."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from typer.testing import CliRunner

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime import backend, devices, model, model_sessions, streams
from kvexport.backends.onnxruntime import operators as native
from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.backends.onnxruntime.model import LoadedModel
from kvexport.backends.onnxruntime.model_sessions import DECODER, MERGE, TOP_LOGITS
from kvexport.backends.onnxruntime.session import FUSED_PRODUCTS
from kvexport.backends.onnxruntime.streams import HostStream
from kvexport.commands.app import app
from kvexport.engine.load import load
from kvexport.errors import EnvironmentProblem, UsageError
from tests.support.tiny_model import generated


@pytest.fixture
def cuda_artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    path = tmp_path / "artifact"
    shutil.copytree(tiny_artifact, path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["recipe"]["backend"]["device"] = "cuda"
    (path / "manifest.json").unlink()
    write_manifest(path, {key: value for key, value in manifest.items() if key not in ("files", "manifest_sha256")})
    return path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "driver_problem", lambda: "there is no NVIDIA driver (libcuda.so.1 cannot be loaded)")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], list[Any]]:
    """A function that pretends that there is a GPU and ONNX Runtime's CUDA provider."""
    monkeypatch.setattr(devices, "driver_problem", lambda: "")
    monkeypatch.setattr(devices, "gpu_memory", lambda: (8 << 30, 8 << 30))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*devices.PROVIDERS.values()])
    real, requested = onnxruntime.InferenceSession, []

    class OnCpu(DeviceArray):
        def __init__(self, device: str, shape: tuple[int, ...], dtype: Any) -> None:
            assert device == "cuda"
            super().__init__("cpu", shape, dtype)

    def sessions_get(reported: list[str]) -> list[Any]:
        class Session(real):  # type: ignore[misc, valid-type]
            def __init__(self, path: str, options: Any, providers: Any, **rest: Any) -> None:
                super().__init__(path, options, providers=["CPUExecutionProvider"], **rest)
                requested.append((Path(path).name, providers))

            def get_providers(self) -> list[str]:
                return reported

        monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
        return requested

    class Stream(HostStream):
        address = 4711

    for module in (model, model_sessions):
        monkeypatch.setattr(module, "DeviceArray", OnCpu)
    monkeypatch.setattr(streams, "CudaStream", Stream)
    return sessions_get


def test_without_a_provider_and_a_driver_both_are_named_and_the_code_is_3(cuda_artifact: Path, no_gpu: None) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        load(cuda_artifact)
    version = onnxruntime.__version__
    assert caught.value.problem == (
        f"nothing can run on cuda here: onnxruntime {version} has no CUDA provider, only CPUExecutionProvider; "
        "there is no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    )
    assert caught.value.fix.startswith("--device cpu, or a machine with an NVIDIA GPU")
    done = CliRunner().invoke(app, ["generate", str(cuda_artifact), "abc"])
    assert done.exit_code == 3
    assert generated(load(cuda_artifact, device="cpu"), 2), "the graphs are the same"
    with pytest.raises(UsageError, match="there is no device tpu"):
        load(cuda_artifact, device="tpu")


def test_inspect_and_the_doctor_show_the_operators_on_cuda(cuda_artifact: Path, no_gpu: None) -> None:
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(cuda_artifact)]).stdout.split())
    assert "device cuda, where nothing runs here: onnxruntime" in shown
    diagnosis = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["native_cuda"]
    assert diagnosis["instruction_set"] == ""
    assert diagnosis["problem"].endswith("there is no NVIDIA driver (libcuda.so.1 cannot be loaded)")
    assert diagnosis["fix"].startswith("--device cpu")  # no package helps without a driver


BOTH = "onnxruntime 1.31 and onnxruntime-gpu 1.30 are both installed"


@pytest.fixture
def both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that both packages of ONNX Runtime are installed. The module stays the installed one."""
    monkeypatch.setattr(devices, "installed_version", {"onnxruntime": "1.31", "onnxruntime-gpu": "1.30"}.get)


def test_a_package_for_gpus_that_was_overwritten_is_named(
    monkeypatch: pytest.MonkeyPatch, no_gpu: None, both_packages: None
) -> None:
    (problem, fix), _ = devices.problems("cuda")
    assert f"no CUDA provider, only CPUExecutionProvider: {BOTH}, and onnxruntime, installed last," in problem
    assert fix == "pip install --force-reinstall --no-deps onnxruntime-gpu"
    shown = " ".join(CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout.split())
    assert f"ONNX Runtime packages {BOTH}" in shown and fix in shown
    monkeypatch.setattr(devices, "module_owner", lambda: "onnxruntime-gpu")  # installed last, as the guides advise
    assert devices.package_clash() is None
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["packages_clash"] is None


@pytest.mark.parametrize(("device", "package"), [("cpu", "onnxruntime"), ("cuda", "onnxruntime-gpu")])
def test_both_packages_are_named_where_their_module_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, both_packages: None, device: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    ((problem, fix),) = devices.problems(device)
    assert problem.startswith("onnxruntime cannot be imported: ") and BOTH in problem
    assert fix == f"pip install --force-reinstall --no-deps {package}"


def test_one_package_of_onnx_runtime_is_no_clash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "installed_version", {"onnxruntime": "1.31"}.get)
    assert devices.package_clash() is None and devices.module_owner() == "onnxruntime"


def test_a_provider_that_comes_as_a_library_is_not_missed_where_only_the_gpu_is(
    monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.setattr(onnxruntime, "get_build_info", lambda: "ORT Build Info: x, cuda-plugin-ep=ON", raising=False)
    assert [problem for problem, _ in devices.problems("cuda")] == [
        "there is no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    ]


def test_a_provider_that_does_not_start_is_not_passed_over(
    cuda_artifact: Path, gpu: Callable[[list[str]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(["CPUExecutionProvider"])  # ONNX Runtime itself would continue without the provider
    with pytest.raises(EnvironmentProblem, match="cannot start its provider for cuda") as caught:
        load(cuda_artifact)
    assert caught.value.fix == "pip install 'onnxruntime-gpu[cuda,cudnn]'"

    def nobody(path: str, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for VoteAttention(1) node"
        )

    monkeypatch.setattr(
        onnxruntime, "InferenceSession", nobody
    )  # ONNX Runtime's error if operators are registered for a provider that does not start
    with pytest.raises(EnvironmentProblem, match="cannot start its provider for cuda"):
        load(cuda_artifact)


def test_the_native_operators_for_another_gpu_are_refused(
    cuda_artifact: Path, gpu: Callable[[list[str]], list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu([*devices.PROVIDERS.values()])
    library = tmp_path / "libkvexport_onnxruntime_cuda.so"
    library.touch()
    monkeypatch.setenv(native.VARIABLE, str(library))
    says = "the native operators are compiled for sm_80, sm_90, and this GPU is sm_75"
    monkeypatch.setattr(native, "_has", lambda path, question: True)
    monkeypatch.setattr(native, "_ask", lambda path, question: says if question == "kvexport_device_problem" else "")
    with pytest.raises(EnvironmentProblem, match=f"libkvexport_onnxruntime_cuda.so cannot be used: {says}") as caught:
        load(cuda_artifact)
    assert caught.value.fix == "make native-cuda, or KVEXPORT_OPERATORS=off"


def test_without_native_operators_for_cuda_the_functions_run_there(
    cuda_artifact: Path, gpu: Callable[[list[str]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = gpu([*devices.PROVIDERS.values()])
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setitem(native.NAMES, "cuda", "libnone.so")
    engine = load(cuda_artifact)
    assert {str(how) for how in native.implementations(engine.manifest).values()} == {
        "function: the native operators for CUDA are not built"
    }
    assert native.why_no_library("cuda")[1] == "make native-cuda"
    options = {"device_id": "0", "use_tf32": "0", "user_compute_stream": "4711"}
    options["arena_extend_strategy"] = "kSameAsRequested"
    assert requested == [
        (name, [("CUDAExecutionProvider", {**options, "enable_cuda_graph": graph}), "CPUExecutionProvider"])
        for name, graph in (("decoder.onnx", "1"), ("merge.onnx", "0"), ("top_logits.onnx", "1"))
    ]
    tokens = generated(engine, 3)
    assert engine.model.graphs == {DECODER, TOP_LOGITS}  # type: ignore[attr-defined]
    assert not load(cuda_artifact, cuda_graph=False).model.graphs  # type: ignore[attr-defined]
    monkeypatch.setenv(native.VARIABLE, "off")
    assert tokens == generated(load(cuda_artifact, device="cpu"), 3)


@pytest.mark.parametrize("variable", [None, "0"])
def test_products_of_many_rows_read_packed_weights_once(
    cuda_artifact: Path, gpu: Callable[[list[str]], list[Any]], monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """ONNX Runtime's own variable decides, where it is set."""
    gpu([*devices.PROVIDERS.values()])
    monkeypatch.delenv(FUSED_PRODUCTS, raising=False)
    if variable is not None:
        monkeypatch.setenv(FUSED_PRODUCTS, variable)
    real, found = onnxruntime.InferenceSession, []

    def opened(path: str, options: Any, **rest: Any) -> Any:
        try:
            found.append(options.get_session_config_entry("ep.cuda.fpa_intb_gemm"))
        except RuntimeError:  # ONNX Runtime has no such entry
            found.append(None)
        return real(path, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    load(cuda_artifact)
    assert found and {*found} == {"1" if variable is None else None}


def test_cuda_libraries_are_loaded_before_adapters_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def array(*_: Any) -> Any:
        calls.append("memory")
        raise InterruptedError

    monkeypatch.setattr(devices, "load_cuda_libraries", lambda _: calls.append("libraries"))
    monkeypatch.setattr(model_sessions, "DeviceArray", array)
    adapters: Any = SimpleNamespace(tensors={"adapter_first0": np.zeros((2, 2), np.float16)})
    with pytest.raises(InterruptedError):
        model_sessions.Sessions(
            Path("decoder.onnx"), None, threads=1, vocabulary=2, all_logits=False, operators={}, device="cuda",
            top_logits=(Path("top_logits.onnx"), 2), adapters=adapters,
        )  # fmt: skip
    assert calls == ["libraries", "memory"]


def test_where_the_provider_takes_no_graph_the_decoder_is_loaded_without(
    cuda_artifact: Path, gpu: Callable[[list[str]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = gpu([*devices.PROVIDERS.values()])
    monkeypatch.setenv(native.VARIABLE, "off")
    willing = onnxruntime.InferenceSession

    def refuses(path: str, options: Any, providers: Any, **rest: Any) -> Any:
        if providers[0][1]["enable_cuda_graph"] == "1":
            raise RuntimeError("This session cannot use the graph capture feature\nas requested")
        return willing(path, options, providers, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuses)
    model: Any = load(cuda_artifact).model
    assert not model.graphs
    why = "ONNX Runtime cannot load {0}.onnx on cuda: This session cannot use the graph capture feature"
    assert model.graph_problem == "; ".join(f"{name}: {why.format(name)}" for name in (DECODER, TOP_LOGITS))
    assert [name for name, _ in requested] == ["decoder.onnx", "merge.onnx", "top_logits.onnx"]


@pytest.mark.parametrize(
    ("version", "graphs"), [("1.28.2", True), ("1.29.1", False), ("1.30.0", False), ("1.31", True)]
)
def test_releases_that_reuse_the_memory_of_graphs_run_without_them(
    cuda_artifact: Path,
    gpu: Callable[[list[str]], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    graphs: bool,
) -> None:
    gpu([*devices.PROVIDERS.values()])
    monkeypatch.setenv(native.VARIABLE, "off")
    monkeypatch.setattr(onnxruntime, "__version__", version)
    warnings: list[str] = []
    monkeypatch.setattr(model_sessions.log, "warning", lambda _, why: warnings.append(why))
    model: Any = load(cuda_artifact).model
    assert model.graphs == ({DECODER, TOP_LOGITS} if graphs else set())
    why = f"onnxruntime {version} reuses the memory of CUDA graphs; pip install 'onnxruntime-gpu>=1.31'"
    assert warnings == ([] if graphs else [why]) and model.graph_problem == "".join(warnings)


def test_merges_are_graphs_where_kernels_run_them(cuda_artifact: Path, gpu: Callable[[list[str]], list[Any]]) -> None:
    """Shapes in its function depend on the votes, which a CUDA graph would keep from its capture."""
    kernels = native.library("cpu")
    requested = gpu([*devices.PROVIDERS.values()])
    for merging in {kernels, None}:
        requested.clear()
        model = LoadedModel(
            cuda_artifact / "decoder.onnx",
            cuda_artifact / "merge.onnx",
            threads=1,
            vocabulary=64,
            all_logits=False,
            operators={"VoteAttention": kernels, "MergeCache": merging},
            top_logits=(cuda_artifact / "top_logits.onnx", 64),
            device="cuda",
            graphs=True,
        )
        captures = {name: providers[0][1]["enable_cuda_graph"] for name, providers in requested}
        assert captures.pop("top_logits.onnx") == "1"
        assert captures == {"decoder.onnx": "1", "merge.onnx": "0" if merging is None else "1"}
        assert (MERGE in model.graphs) == (merging is not None)


def test_a_gpu_without_room_and_float32_weights_are_named_before_anything_is_loaded(
    cuda_artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def drive(name: str, *arguments: Any) -> None:
        calls.append(name)
        arguments[0]._obj.value, arguments[1]._obj.value = 1000, 24 << 30

    monkeypatch.setattr(devices, "problems", lambda device: [])
    monkeypatch.setattr(devices, "use_first_gpu", lambda: None)
    monkeypatch.setattr(devices, "drive", drive)
    with pytest.raises(EnvironmentProblem, match=r"take 150 kB, and 1 kB of the GPU's 25.8 GB are free") as caught:
        load(cuda_artifact)
    assert "--set weights.bits=4 --out ARTIFACT, or fewer" in caught.value.fix and calls == ["cuMemGetInfo_v2"]
    warning = capsys.readouterr().err
    assert "float32 weights" in warning and "--set model.dtype=float16" in warning
    manifest = load_manifest(cuda_artifact)
    packed = replace(manifest, model=replace(manifest.model, packed={"int4": 1}))
    with pytest.raises(EnvironmentProblem) as caught:
        backend._require_room(cuda_artifact, packed)
    assert caught.value.fix == "fewer programs on this GPU (nvidia-smi)"


@pytest.mark.parametrize(
    ("driver", "built", "problem", "fix"),
    [
        (12040, "13.0", "runs CUDA up to 12.4, and onnxruntime 9 is built for CUDA 13", "NVIDIA's driver 580 or newer"),
        (13000, "14.1", "runs CUDA up to 13.0, and onnxruntime 9 is built for CUDA 14", "a driver of CUDA 14 or newer"),
        (13010, "13.0", "", ""),
        (13010, "12.8", "", ""),
        (13010, None, "", ""),
    ],
)
def test_a_driver_that_is_older_than_the_cuda_of_onnxruntime_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: int, built: str | None, problem: str, fix: str
) -> None:
    def drive(name: str, version: Any) -> None:
        version._obj.value = driver

    monkeypatch.setattr(devices, "drive", drive)
    found = devices.old_driver(SimpleNamespace(__version__="9", **({"cuda_version": built} if built else {})))
    assert found is None if not problem else found == (f"the NVIDIA driver {problem}", f"{fix}, or --device cpu")


@pytest.mark.parametrize(
    ("machine", "begins"), [("x86_64", "pip install 'kvexport[gpu]'"), ("aarch64", "ONNX Runtime")]
)
def test_on_arm_no_wheel_is_advised(monkeypatch: pytest.MonkeyPatch, no_gpu: None, machine: str, begins: str) -> None:
    monkeypatch.setattr(devices.platform, "machine", lambda: machine)
    monkeypatch.setattr(devices.sys, "platform", "linux")
    assert devices.problems("cuda")[0][1].startswith(begins)
    assert devices.install_gpu().endswith("for linux on aarch64") is (machine == "aarch64")


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuInit(self, flags: int) -> int:
            return 100

        def cuGetErrorName(self, code: int, name: Any) -> int:
            name._obj.value = b"CUDA_ERROR_NO_DEVICE"
            return 0

    monkeypatch.setattr(devices.ctypes, "CDLL", Driver)
    assert devices.driver_problem.__wrapped__() == "the NVIDIA driver cannot be used: CUDA_ERROR_NO_DEVICE"
