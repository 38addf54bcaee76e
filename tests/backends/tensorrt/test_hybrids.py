"""A hybrid decoder with experts (Qwen3-Next) on TensorRT, on fakes of TensorRT and CUDA.

It has every operator that has a plugin except products with packed weights, and convolutions, which no plugin computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends import gpu_limits
from kvexport.backends.tensorrt.graphs import for_tensorrt, plugin_refusal
from kvexport.backends.tensorrt.plugin import OPERATORS, STATEFUL
from kvexport.commands.app import app
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.build import build, read_model
from kvexport.validate.runner import validate_artifact
from tests.backends.tensorrt.test_build import Runner
from tests.support import fake_tensorrt, models
from tests.support.hybrids import CONFIGS
from tests.support.tensorrt_artifacts import engines
from tests.support.tensorrt_walk import attribute, graphs, problems

CACHE = {"method": "keepkv", "budget": 24, "sinks": 2, "recent": 4, "merge_every": 8}
PLUGINS = [name for name in OPERATORS if name != "Linear"]  # no weight is packed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_checkpoint(tmp_path_factory.mktemp("hybrid") / "checkpoint", CONFIGS["qwen3_next"]())


@pytest.fixture(scope="module")
def hybrid(checkpoint: Path) -> Path:
    export = {"logits": "all", "prefill_chunk": 8}
    recipe = models.make_recipe(checkpoint, cache=CACHE, export=export, limits={"max_length": 160})
    return build(recipe, checkpoint.parent / "artifact")


def test_every_node_is_one_that_tensorrt_takes(hybrid: Path) -> None:
    """A hybrid's graphs for TensorRT have only operators that TensorRT supports, and nodes of kvexport's plugins.

    Without plugins, TensorRT could run LinearAttention's function (a Scan), but not the function of Experts.
    """
    for kind, model in graphs(hybrid).items():
        seen, whys = for_tensorrt(model, lambda _: None)
        assert not list(problems(seen)) and not seen.functions
        own = [node for node in seen.graph.node if node.domain == "kvexport"]
        assert {node.op_type for node in own} == whys.keys() and set(whys.values()) <= {""}
        for node in own:
            assert (attribute(node, "alias_state") is not None) == (node.op_type in STATEFUL)
            assert "" not in node.input
        written, _ = for_tensorrt(model, plugin_refusal("off"))
        reasons = list(problems(written))
        assert all("ScatterND" in reason and "reduction" in reason for reason in reasons)
        assert bool(reasons) == (kind == "decoder")


def test_a_recurrent_state_goes_through_one_plugin_from_input_to_output(hybrid: Path) -> None:
    """Therefore its present may have the address of its past; that of a convolution is copied."""
    seen, _ = for_tensorrt(graphs(hybrid)["decoder"], lambda _: None)
    states = [value.name for value in seen.graph.input if value.name.endswith("recurrent_state")]
    for past in states:
        (reader,) = [node for node in seen.graph.node if past in node.input]
        assert reader.op_type == "LinearAttention" and past == reader.input[3]
        assert reader.output[1] == past.replace("past_key_values", "present")
    assert len(states) == 2


@pytest.mark.parametrize("function", ["", "LinearAttention"])
def test_engines_compute_what_onnx_runtime_does(
    hybrid: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Ragged prompts, steps, an idle lane and merges, where the plugin takes LinearAttention and where it does not."""
    monkeypatch.setattr(fake_tensorrt.IPluginCreatorV3One, "refused", function)
    artifact = engines(hybrid, tmp_path / "a")
    operators = {name: "function" if name == function else "plugin" for name in PLUGINS}
    assert load_manifest(artifact).operators == operators
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
    kept = {name.rsplit(".", 1)[1] for name, _ in states[0].names if name in states[0].spare._layout}
    assert kept == {"conv_state", *(["recurrent_state"] if function else [])}


def test_a_state_that_the_kernels_do_not_take_is_updated_by_the_function(
    hybrid: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_limits, "MOST_KEYS", 15)
    manifest = load_manifest(engines(hybrid, tmp_path / "a"))
    why = "layer 0 has keys of 16 numbers, and the kernels take 15"
    assert manifest.engines["tensorrt"]["functions"] == {"LinearAttention": why}


def test_a_lane_is_saved_and_restored(hybrid: Path, tmp_path: Path, plugins: Path) -> None:
    state = kvexport.load(engines(hybrid, tmp_path / "a")).new_state(2)
    ids = np.random.default_rng(1).integers(0, 100, (2, 8))
    state.decode(ids, np.array([[8], [5]]))
    saved = state.read(0)
    assert {name.rsplit(".", 1)[1] for name in saved} >= {"conv_state", "recurrent_state", "key"}
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
    assert result.operators == dict.fromkeys(PLUGINS, "plugin")


def test_experts_without_the_plugin_are_refused_by_name(hybrid: Path, tmp_path: Path, gpu: Any) -> None:
    with pytest.raises(EnvironmentProblem, match="switched off by KVEXPORT_TENSORRT_PLUGIN") as refused:
        engines(hybrid, tmp_path / "a")
    assert "mixture of experts, which TensorRT runs by kvexport's plugin alone" in refused.value.problem
    assert "plugins/build.py tensorrt" in refused.value.fix
    assert not (tmp_path / "a").exists() and not fake_tensorrt.IBuilderConfig.seen


def test_experts_that_the_plugin_does_not_take_are_refused_by_name(
    hybrid: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.IPluginCreatorV3One, "refused", "Experts")
    ran = CliRunner().invoke(
        app, ["build", "--from", str(hybrid), "--backend", "tensorrt", "--out", str(tmp_path / "a")]
    )
    assert ran.exit_code == EnvironmentProblem.exit_code
    assert "mixture of experts" in ran.stderr and "the plugin does not take node" in ran.stderr


def test_a_recipe_that_leaves_the_plugin_out_is_refused_before_a_weight_is_read(checkpoint: Path) -> None:
    recipe = models.make_recipe(checkpoint, cache=CACHE, limits={"max_length": 160})
    fields = recipe.model_dump() | {"backend": {"name": "tensorrt", "tensorrt": {"plugin": "never"}}}
    with pytest.raises(UsageError, match=r"backend\.tensorrt\.plugin is never") as refused:
        read_model(type(recipe).model_validate(fields))
    assert refused.value.fix == "--set backend.tensorrt.plugin=auto"
    fields["backend"]["tensorrt"]["plugin"] = "auto"
    assert read_model(type(recipe).model_validate(fields)).plan.states
