"""Decoders with layers that keep another state than a KV cache, on TensorRT, on fakes of TensorRT and CUDA.

TensorRT runs convolutions, which no plugin computes. Experts and recurrent states are refused by name.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.graphs import for_tensorrt
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.validate.runner import validate_artifact
from tests.backends.tensorrt.test_build import Runner
from tests.support import fake_tensorrt, models
from tests.support.hybrids import CONFIGS
from tests.support.tensorrt_artifacts import engines
from tests.support.tensorrt_walk import graphs, problems

CACHE = {"method": "keepkv", "budget": 24, "sinks": 2, "recent": 4, "merge_every": 8}
PLUGINS = {"VoteAttention": "plugin", "MergeCache": "plugin"}
REFUSED = [("qwen3_next", "a mixture of experts"), ("qwen3_5_text", "layers with recurrent states")]


def recipe_of(folder: Path, kind: str) -> Any:
    checkpoint = models.save_checkpoint(folder / "checkpoint", CONFIGS[kind]())
    export = {"logits": "all", "prefill_chunk": 8}
    return models.make_recipe(checkpoint, cache=CACHE, export=export, limits={"max_length": 160})


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    return build(recipe_of(folder, "lfm2"), folder / "artifact")


def test_every_node_is_one_that_tensorrt_takes(hybrid: Path) -> None:
    for model in graphs(hybrid).values():
        seen, whys = for_tensorrt(model, lambda _: None)
        assert not list(problems(seen)) and not seen.functions
        assert {node.op_type for node in seen.graph.node if node.domain == "kvexport"} == whys.keys()


def test_engines_compute_what_onnx_runtime_does(hybrid: Path, tmp_path: Path, plugins: Path) -> None:
    """Ragged prompts, steps, an idle lane and merges."""
    artifact = engines(hybrid, tmp_path / "a")
    assert load_manifest(artifact).operators == PLUGINS
    states = [kvexport.load(path).new_state(3) for path in (artifact, hybrid)]
    ids = np.random.default_rng(0).integers(0, 100, (3, 8))
    calls = [(ids, [8, 3, 0]), (ids[:, :1], [1, 0, 1]), *[(ids, [8, 8, 8])] * 2, (ids[:, :1], [1, 1, 1])]
    for width, lengths in calls:
        actual, expected = (state.decode(width, np.array(lengths)[:, None]) for state in states)
        for lane, length in enumerate(lengths):
            np.testing.assert_allclose(actual[lane, :length], expected[lane, :length], atol=2e-4)
        for state in states:
            state.merge(0, 3)
    actual_state, expected_state = (state.get_state() for state in states)
    for name, array in expected_state.items():
        np.testing.assert_allclose(actual_state[name], array, atol=1e-4, err_msg=name)
    # The present tensors that have memory of their own, from which they are copied after a call.
    assert {name.rsplit(".", 1)[1] for name, _ in states[0].names if name in states[0].spare._layout} == {"conv_state"}


def test_a_lane_is_saved_and_restored(hybrid: Path, tmp_path: Path, plugins: Path) -> None:
    state = kvexport.load(engines(hybrid, tmp_path / "a")).new_state(2)
    ids = np.random.default_rng(1).integers(0, 100, (2, 8))
    state.decode(ids, np.array([[8], [5]]))
    saved = state.read(0)
    assert {name.rsplit(".", 1)[1] for name in saved} >= {"conv_state", "key"}
    state.write(1, saved, 8)
    logits = state.decode(ids[[0, 0], :1], np.array([[1], [1]]))
    assert np.array_equal(logits[0], logits[1])


def test_engines_are_validated_as_sessions_are(
    hybrid: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polygraphy.backend import trt

    monkeypatch.setattr(trt, "TrtRunner", Runner)
    result = validate_artifact(engines(hybrid, tmp_path / "a"), length=30, batch=1)
    assert result.passed, result.problem
    assert result.operators == PLUGINS


@pytest.mark.parametrize(("kind", "what"), REFUSED)
def test_what_tensorrt_does_not_run_is_refused_before_a_weight_is_read(kind: str, what: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, kind)
    with pytest.raises(UsageError, match=f"the model has {what}, which TensorRT does not run") as refused:
        read_model(type(recipe).model_validate(recipe.model_dump() | {"backend": {"name": "tensorrt"}}))
    assert refused.value.fix == "--backend onnxruntime --device cuda"


@pytest.mark.parametrize(("kind", "what"), REFUSED)
def test_an_artifact_of_them_is_refused(kind: str, what: str, tmp_path: Path, plugins: Path) -> None:
    artifact = build(recipe_of(tmp_path, kind), tmp_path / "artifact")
    command = ["build", "--from", str(artifact), "--backend", "tensorrt", "--out", str(tmp_path / "a")]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == UsageError.exit_code and "which TensorRT does not run" in ran.stderr
    assert "--backend onnxruntime --device cuda" in ran.stderr
    assert not (tmp_path / "a").exists() and not fake_tensorrt.IBuilderConfig.seen
