"""A tiny random Llama with a tokenizer of single characters, and an artifact of it, each made once per session;
processes to kill."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.artifacts import Forks
from tests.support.tiny_model import RECIPE, make_checkpoint

if TYPE_CHECKING:
    from tests.support.fake_cuda import FakeCuda

# Before anything imports torch: these tensors are so small that waking a second thread takes longer than the work, and
# a worker of pytest-xdist has no second core to itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# What traces most of the functions that others then take, and long tests in few files: at the end they would keep one
# worker alone.
FIRST = ("tests/conformance/test_merge_cache.py", "tests/validate/", "tests/plugins/", "tests/tools/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """FIRST in its order, then all else in its own."""
    items.sort(key=lambda item: next((i for i, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST)))


def pytest_collection_finish() -> None:
    """What is imported stays: no collection need look at it again. To trace makes few cycles of many objects."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def traces(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of traces, which workers that run side by side share, and processes that tests start."""
    own = tmp_path_factory.getbasetemp()
    if not hasattr(pytestconfig, "workerinput"):
        yield own / "traces"
        return
    from tests.support.shared_traces import shared_traces

    with shared_traces(own.parent / "traces") as folder:
        yield folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, hidden size 32, 4 query heads over 2 KV heads, vocabulary 64 (one id per character of ALPHABET), no
    eos."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def tiny_recipe(tiny_checkpoint: Path) -> Path:
    """The recipe's file, beside the checkpoint: KeepKV with a budget of 32 slots, chunks of 16, 512 positions."""
    path = tiny_checkpoint.parent / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="session")
def tiny_artifact(tiny_recipe: Path) -> Path:
    """The recipe, built. Tests must not change it."""
    import kvexport

    return kvexport.build(tiny_recipe, tiny_recipe.parent / "artifact")


@pytest.fixture
def recipe_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty recipe folder, which is also next to the current directory."""
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
    """Nothing here loses power; on a busy disk syncs would be much of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    """A GPU and TensorRT, neither real, without plugins."""
    from tests.support import fake_cuda, fake_tensorrt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", "off")
    cuda = fake_cuda.FakeCuda()
    fake_tensorrt.install(monkeypatch, cuda)
    return cuda


@pytest.fixture
def plugins(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A plugin library that takes what ONNX Runtime's native operators take."""
    from kvexport.backends.onnxruntime import operators as native

    if native.library() is None:
        pytest.skip(f"not reached: {native.why_no_library()[0]} (make native)")
    path = tmp_path / "libkvexport_tensorrt.so"
    path.write_text("plugins\nVoteAttention 1\nMergeCache 1\n")
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", str(path))
    return path
