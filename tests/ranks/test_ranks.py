"""An engine of two processes answers like one of one process.

If a rank ends, an error names it, and no process or memory remains.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime.operators import library
from kvexport.commands.app import app
from kvexport.engine.engine import Engine
from kvexport.engine.request import Request
from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError, UsageError
from kvexport.ranks import processes
from kvexport.recipe.fields import Recipe
from kvexport.validate.runner import validate_artifact
from tests.support.artifacts import rewrite
from tests.support.models import build_shared
from tests.support.native_alone import native_alone
from tests.support.tiny_model import PROMPTS, RECIPE, generated

pytestmark = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)
MOST_SECONDS = 20_000  # the milliseconds that a test may wait for the end of a process


def recipe(checkpoint: Path, ranks: int, method: str = "keepkv") -> Recipe:
    cache = {**RECIPE["cache"], "method": method}
    backend = {"tensor_parallel": ranks, "threads": 1}
    return Recipe.model_validate({**RECIPE, "model": {"path": str(checkpoint)}, "cache": cache, "backend": backend})


def built(recipe: Recipe, out: Path) -> Path:
    with native_alone():
        return build_shared(recipe, out)


@pytest.fixture(scope="module", params=["keepkv", "ballot", "streaming"])
def pair(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: Any) -> Iterator[tuple[Engine, ...]]:
    """Engines of the same recipe with one process and with two."""
    folder = tmp_path_factory.mktemp("ranks")
    yield tuple(kvexport.load(built(recipe(tiny_checkpoint, n, request.param), folder / str(n))) for n in (1, 2))


def test_tokens_are_those_of_one_process(pair: tuple[Engine, Engine]) -> None:
    one, two = map(generated, pair)
    assert two == one
    assert all(len(tokens) == 40 for tokens in two)


def test_every_state_equals_that_of_one_process(pair: tuple[Engine, Engine]) -> None:
    """Every state of two processes is complete and equals that of one process.

    The steps are chunks, merges, ragged steps, growing, copying, rolling back, clearing, reading and writing.
    """
    ids = np.random.default_rng(0).integers(0, 64, (2, 16))
    states = []
    for engine in pair:
        state = engine.new_state(1)
        for chunk in range(6):
            state.decode(ids[:1] + chunk & 63, np.array([[16]]))
            state.merge(0, 1)
        state = state.grown(3)
        state.copy(0, 2)
        logits = state.decode(ids[:, :4], np.array([[3], [4]]), 1).copy()
        state.rollback(1, 2)
        saved = state.read(2)
        state.clear(0, 1)
        state.write(0, saved, 99)
        state.set_state(whole := state.get_state(), np.array([[99], [1], [100]]))
        states.append({"logits": logits, **{f"read {k}": v for k, v in saved.items()}, **whole})
    one, two = states
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_preempted_request_continues_on_ranks(pair: tuple[Engine, Engine]) -> None:
    engine = pair[1]
    expected = engine.generate(PROMPTS[0], max_new_tokens=12)[0].token_ids
    request = Request(engine.encode(PROMPTS[0]), engine.settings(max_new_tokens=12))
    engine.add(request)
    while len(request.tokens) < 5:
        engine.step()
    snapshot = engine.preempt(request.id)
    again = Request((), start=snapshot)
    engine.add(again)
    while engine.busy:
        engine.step()
    assert [token.id for token in (*request.tokens, *again.tokens)] == expected


def test_a_killed_rank_is_named_and_nothing_is_left(artifact: Path) -> None:
    engine = kvexport.load(artifact)
    ranks: Any = engine.model
    process = ranks.ranks._processes[0]
    stream = engine.stream(PROMPTS[0], max_new_tokens=400)
    next(stream)
    process.send_signal(signal.SIGKILL)
    message = rf"rank 1, the process {process.pid}, was ended by SIGKILL"
    with pytest.raises(KvexportError, match=message):
        list(stream)
    with pytest.raises(KvexportError, match=message) as again:
        engine.generate([1, 2], max_new_tokens=2)
    assert again.value.fix == "load the artifact again"
    assert process.poll() == -signal.SIGKILL
    assert not [path for path in Path("/dev/shm").iterdir() if "kvexport" in path.name]


def test_ranks_end_with_their_engine_and_with_rank_0(artifact: Path) -> None:
    """Ranks end when their engine is freed, and when the process of rank 0 is killed."""
    engine = kvexport.load(artifact)
    ranks: Any = engine.model
    process = ranks.ranks._processes[0]
    del engine, ranks
    gc.collect()
    assert process.poll() == 0

    program = (
        "import kvexport, sys; engine = kvexport.load(sys.argv[1]); "
        "print(engine.model.ranks._processes[0].pid, flush=True); engine.generate([1, 2, 3], max_new_tokens=450)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(artifact)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    worker = os.pidfd_open(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    assert poll.poll(MOST_SECONDS), "rank 1 runs on without rank 0"
    os.close(worker)


def test_an_error_of_a_rank_is_raised(artifact: Path) -> None:
    engine = kvexport.load(artifact)
    ranks: Any = engine.model
    state: Any = engine.new_state(1)
    with pytest.raises(KvexportError, match="rank 1 failed: ValueError: rank 0 sent 'nonsense'"):
        ranks.ranks.ask(lambda: None, ranks.message("nonsense", {"state": state._number}))


def test_an_error_of_rank_0_is_raised_and_ends_the_others(artifact: Path) -> None:
    engine = kvexport.load(artifact)
    ranks: Any = engine.model

    def fails() -> None:
        raise RuntimeError("no more")

    with pytest.raises(KvexportError, match="rank 0 failed: RuntimeError: no more"):
        ranks.ranks.call(fails)
    with pytest.raises(KvexportError, match="rank 0 failed: RuntimeError: no more"):
        engine.generate([1], max_new_tokens=1)


def test_no_memory_to_share(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(EnvironmentProblem, match=r"the ranks cannot share .* of memory: Too many open files"):
        kvexport.load(artifact)


def test_a_process_that_cannot_be_started(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EnvironmentProblem, match=r"rank 1 cannot be started: .*No such file"):
        kvexport.load(artifact)


def test_the_error_of_a_rank_that_cannot_load_is_raised(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROGRAM", "raise SystemExit(7)")
    with pytest.raises(KvexportError, match=r"rank 1, the process \d+, ended with status 7"):
        kvexport.load(artifact)


def test_without_native_operators_there_are_no_ranks(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEXPORT_OPERATORS", "off")
    with pytest.raises(
        EnvironmentProblem, match="sums over ranks need the native operators, but switched off"
    ) as error:
        kvexport.load(artifact)
    assert error.value.fix == "unset KVEXPORT_OPERATORS"


def test_features_without_ranks_are_refused_by_name(artifact: Path) -> None:
    with pytest.raises(UsageError, match=r"backend.tensor_parallel is 2, but tensorrt runs a model in one process"):
        kvexport.load(artifact, backend="tensorrt")
    with pytest.raises(UsageError, match="there is no device tpu"):
        kvexport.load(artifact, device="tpu")


def test_the_manifest_has_the_number_of_ranks(artifact: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(artifact)]).output
    assert "2 processes of 1 KV heads each" in " ".join(shown.split())
    manifest = load_manifest(artifact)
    assert manifest.graphs.ranks == ("decoder.rank1.onnx",)
    assert [layer.kv_heads for layer in manifest.cache.caches] == [2, 2]
    refused = CliRunner().invoke(app, ["deploy", "triton", str(artifact), "--out", "x", "--kind", "state"])
    assert refused.exit_code == 2


def test_validate_holds_all_ranks_to_pytorch_as_one_model(artifact: Path) -> None:
    result = validate_artifact(artifact, length=70, batch=2)
    assert result.passed and result.in_place_identical
    assert len(result.steps) > 12


def test_a_manifest_that_names_too_few_decoders(artifact: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    rewrite(copy, lambda manifest: manifest["graphs"].update(ranks=[]))
    with pytest.raises(ArtifactError, match=r"graphs\.ranks should name 1 files, found 0"):
        load_manifest(copy)
