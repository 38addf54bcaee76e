"""Fixtures for all tests: a tiny random Llama and an artifact of it, fake GPUs, and processes to kill."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

import kvexport
from tests.support.artifacts import Forks
from tests.support.tiny_model import RECIPE, make_checkpoint

if TYPE_CHECKING:
    from tests.support.fake_cuda import FakeCuda

# This precedes every import of torch. The tensors are so small that waking a second thread takes longer than the work,
# and each worker of pytest-xdist has only one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# The second part of the tests, `make test-kernels`: kernels that take a compiler of their own (CUDA's on the host, PTX,
# TensorRT's plugins, other processors under emulation, sanitizers), and planted bugs. `make test` is the first part.
KERNELS = (
    "tests/backends/onnxruntime/test_cuda_provider.py", "tests/backends/onnxruntime/test_operators.py",
    "tests/backends/tensorrt/test_lean.py", "tests/backends/tensorrt/test_library.py",
    "tests/backends/tensorrt/test_*plugins.py", "tests/conformance/test_*_on_host.py",
    "tests/conformance/test_cuda_*.py", "tests/conformance/test_garbage.py", "tests/conformance/test_ptx.py",
    "tests/plugins/*", "tests/tools/test_gpu_check*.py", "tests/tools/test_release.py",
    "tests/validate/test_mutants.py",
)  # fmt: skip
KERNEL_BACKENDS = {"cuda-on-host", "onnxruntime-cuda-on-host", "cuda-ptx", "tensorrt-plugin"}
# These tests run first: they are long and in few files, and at the end they would occupy one worker while the others
# are idle; or they trace most of the functions that other tests reuse.
FIRST = ("tests/conformance/test_merge_cache.py", "tests/validate/", "tests/plugins/", "tests/tools/")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are all of kernels where none is to run: collection takes a millisecond for each."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    return (config.option.markexpr == "not kernels" and any(fnmatch(path, x) for x in KERNELS)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of KERNELS and of its backends, and move those of FIRST to the front, in its order."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        if any(fnmatch(path, pattern) for pattern in KERNELS) or _backends(item) & KERNEL_BACKENDS:
            item.add_marker("kernels")
    items.sort(key=lambda item: next((i for i, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST)))


def _backends(item: pytest.Item) -> set[str]:
    call = getattr(item, "callspec", None)
    names = [getattr(value, "name", value) for value in call.params.values()] if call else []
    return {name for name in names if isinstance(name, str)}


def pytest_collection_finish() -> None:
    """Exempt all imported objects from garbage collection, and collect less often: tracing makes few cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def traces(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of traced functions, shared by parallel workers and by processes that tests start."""
    own = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):
        own = own.parent
    elif "torch" not in sys.modules:  # no collected test traces, and importing takes seconds
        yield own / "traces"
        return
    from tests.support.shared_traces import shared_traces

    with shared_traces(own / "traces") as folder:
        yield folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def tiny_recipe(tiny_checkpoint: Path) -> Path:
    """The recipe's file, beside the tiny checkpoint: KeepKV with a budget of 32 slots, chunks of 16, 512 positions."""
    path = tiny_checkpoint.parent / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="session")
def tiny_artifact(tiny_recipe: Path) -> Path:
    """The artifact that the tiny recipe gives. Tests must not change it."""
    return kvexport.build(tiny_recipe, tiny_recipe.parent / "artifact")


@pytest.fixture(scope="session")
def adapters(tiny_checkpoint: Path) -> dict[str, Path]:
    """The folders of two LoRA adapters of the tiny model by name, of different rank, scale and projections."""
    from tests.support.adapters import MODULES, adapter

    folder = tiny_checkpoint.parent
    wide = ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate_proj", *MODULES)
    return {
        "one": adapter(folder / "one", tiny_checkpoint, lora_alpha=1),
        "two": adapter(folder / "two", tiny_checkpoint, wide, rank=4, seed=2, lora_alpha=2, use_rslora=True),
    }


@pytest.fixture(scope="session")
def adapted_artifact(tiny_checkpoint: Path) -> Path:
    """The artifact of the tiny recipe that takes two adapters of rank 4. Tests must not change it."""
    from kvexport.recipe.fields import Recipe

    recipe = {**RECIPE, "model": {"path": str(tiny_checkpoint)}, "adapters": {"count": 2, "rank": 4}}
    return kvexport.build(Recipe.model_validate(recipe), tiny_checkpoint.parent / "adapted")


@pytest.fixture
def recipe_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of that of shipped recipes. The current directory is another empty folder beside it."""
    from kvexport.recipe import inherit

    folder = tmp_path / "recipes"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(inherit, "recipe_folder", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="session", autouse=True)
def no_sync() -> Iterator[None]:
    """Replace `os.fsync` by nothing, because syncs on a busy disk would take much of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[Callable[[], int]]:
    """Give engines one thread: a second one, woken for every operator, would take the core of another worker."""
    from kvexport.backends.onnxruntime import backend

    threads = backend._threads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_threads", lambda: 1)
        yield threads


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    """A fake GPU with a fake TensorRT that has no plugins."""
    from tests.support import fake_cuda, fake_tensorrt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", "off")
    cuda = fake_cuda.FakeCuda()
    fake_tensorrt.install(monkeypatch, cuda)
    return cuda


@pytest.fixture
def plugins(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of a fake plugin library that has the operators of ONNX Runtime's native library."""
    from kvexport.backends.onnxruntime import operators as native
    from tests.support.fake_tensorrt_plugins import LIBRARY

    if native.library() is None:
        pytest.skip(f"not reached: {native.why_no_library()[0]} (make native)")
    path = tmp_path / "libkvexport_tensorrt.so"
    path.write_text(LIBRARY)
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", str(path))
    return path
