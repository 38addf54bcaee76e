"""Tests of work that runs beside the trace of a build: weights are written meanwhile, and nothing stays if it fails."""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvexport.artifact.reading import load_manifest
from kvexport.errors import UsageError
from kvexport.export import build as builder
from kvexport.export import forked, stages
from kvexport.export.graph import tracer
from kvexport.methods import all_methods
from kvexport.ops import onnx_function
from kvexport.schema.operators import VOTE_ATTENTION
from tests.support import models


def fails(advance: Callable[[int], None]) -> None:
    raise OSError("full")


def test_a_failing_trace_leaves_nothing_and_the_collector_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untraceable(*args: object, **kwargs: object) -> None:
        assert not gc.isenabled()
        raise UsageError("llama cannot be traced")

    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    monkeypatch.setattr(tracer, "trace_decoder", untraceable)
    target = tmp_path / "artifacts" / "one"
    target.parent.mkdir()
    with pytest.raises(UsageError, match="cannot be traced"):
        builder.build(models.make_recipe(checkpoint, limits={"max_length": 512}), target)
    assert list(target.parent.iterdir()) == [] and gc.isenabled()


@pytest.mark.parametrize("gone", [False, True])
def test_a_checkpoint_that_is_rewritten_during_its_build_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    write_graphs, weights = stages.write_graphs, checkpoint / "model.safetensors"

    def rewritten(*arguments: Any) -> Any:
        graphs = write_graphs(*arguments)
        if gone:
            weights.unlink()
        else:
            os.utime(weights, ns=(1, 1))
        return graphs

    monkeypatch.setattr(stages, "write_graphs", rewritten)
    target = tmp_path / "artifacts" / "one"
    target.parent.mkdir()
    with pytest.raises(UsageError, match="was rewritten while it was built"):
        builder.build(models.make_recipe(checkpoint, limits={"max_length": 512}), target)
    assert list(target.parent.iterdir()) == []


def test_the_manifest_has_the_digest_of_every_file(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama(), shard="60KB")
    recipe = models.make_recipe(checkpoint, cache={"method": "full"}, limits={"max_length": 512})
    files = load_manifest(builder.build(recipe, tmp_path / "artifact"), verify=True).files
    assert [name for name in files if name.endswith(".weights")] == ["decoder.weights"]


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow forks beside the threads of pytest, which hold no resource that the forked work needs."""
    if sys.platform != "linux":
        pytest.skip("not reached: work is forked on Linux alone")
    monkeypatch.setattr(forked, "can_fork", lambda: True)


def test_forked_work_returns_its_bytes_from_another_process(forks: None, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as stream:
        number = stream.fileno()

        def work() -> bytes:
            try:
                os.fstat(number)
            except OSError:
                return b"%d" % os.getpid()
            return b"has the parent's files"

        with forked.forked(work) as result:
            pid = int(result())
    assert pid != os.getpid() and not Path(f"/proc/{pid}").exists()


def test_failed_forked_work_is_repeated_with_a_reason(forks: None) -> None:
    parent = os.getpid()

    def dies() -> bytes:
        if os.getpid() != parent:
            os._exit(9)
        return b"here"

    with forked.forked(dies) as result:
        assert result() == b"here"
    with forked.forked(lambda: fails([].append)) as result, pytest.raises(OSError, match="full"):  # type: ignore[arg-type, return-value]
        result()


def test_forked_work_ends_with_the_block(forks: None) -> None:
    start = time.monotonic()
    with forked.forked(lambda: time.sleep(60) or b""):
        pass
    assert time.monotonic() - start < 30


def test_forked_work_that_does_not_answer_is_done_here(forks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "PATIENCE_SECONDS", 0.1)
    parent = os.getpid()
    with forked.forked(lambda: b"here" if os.getpid() == parent else time.sleep(60) or b"") as result:
        assert result() == b"here"


def test_nothing_is_forked_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked.threading, "active_count", lambda: 2)
    with forked.forked(lambda: b"%d" % os.getpid()) as result:
        assert int(result()) == os.getpid()


def test_a_merge_traced_in_another_process_is_not_traced_again(
    forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traces(*args: object) -> None:
        raise AssertionError("traced in this process")

    monkeypatch.setattr(onnx_function, "_merge_functions", {})
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    recipe = models.make_recipe(checkpoint, cache={"method": "streaming", "budget": 64}, limits={"max_length": 512})
    first = builder.build(recipe, tmp_path / "first")
    monkeypatch.setattr(forked, "can_fork", lambda: False)
    monkeypatch.setattr(onnx_function, "_trace_merge_cache", traces)
    second = builder.build(recipe, tmp_path / "second")
    assert (first / "merge.onnx").read_bytes() == (second / "merge.onnx").read_bytes()


@pytest.mark.parametrize("dies", [False, True])
def test_weights_are_written_by_another_process(
    forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    parent, write, writers = os.getpid(), stages.write_weights, tmp_path / "writers"

    def written(specs: Any, folder: Path, progress: Any) -> Any:
        with writers.open("a") as stream:
            stream.write("here " if os.getpid() == parent else "there ")
        if dies and os.getpid() != parent:
            (folder / stages.DATA_FILE).write_bytes(b"half")
            os._exit(9)
        return write(specs, folder, progress)

    monkeypatch.setattr(stages, "write_weights", written)
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    recipe = models.make_recipe(checkpoint, cache={"method": "full"}, limits={"max_length": 512})
    first = builder.build(recipe, tmp_path / "first")
    assert writers.read_text().split() == (["there", "here"] if dies else ["there"])
    monkeypatch.setattr(forked, "can_fork", lambda: False)
    second = builder.build(recipe, tmp_path / "second")
    assert load_manifest(first, verify=True).files == load_manifest(second, verify=True).files


def test_the_wait_for_long_work_has_no_limit(forks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(forked, "WATCH_SECONDS", 0.01)
    calls: list[None] = []
    with forked.forked(lambda: time.sleep(0.3) or b"%d" % os.getpid(), lambda: calls.append(None)) as result:
        assert result() != b"%d" % os.getpid() and len(calls) > 3


def test_rings_of_two_sizes_are_traced_in_one_process() -> None:
    fits = [all_methods()["attention_matching"](queries=n) for n in (4, 6)]
    operators = [VOTE_ATTENTION.with_state(fit.extra_state) for fit in fits]
    assert operators[0] != operators[1]
    first, second = map(tracer._attention_placeholder, operators)  # PyTorch refuses to define a name twice
    assert first is second
