"""validate passes a sound artifact, and names the first layer, step and tensor that differ on an altered one."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.commands.app import app
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.report import render_text
from kvexport.schema.state import STATE_NAMES
from kvexport.validate import merges
from kvexport.validate.images import make_picture
from kvexport.validate.layers import first_layers
from kvexport.validate.runner import validate_artifact
from kvexport.validate.sections import sections
from tests.support import vision
from tests.support.models import make_recipe


@pytest.fixture(scope="module")
def result(tiny_artifact: Path):
    return validate_artifact(tiny_artifact, length=160)


def altered(artifact: Path, folder: Path, graph: str, change) -> Path:
    copy = folder / "altered"
    shutil.copytree(artifact, copy)
    manifest = load_manifest(copy)
    model = onnx.load(copy / graph, load_external_data=False)
    change(model)
    (copy / graph).write_bytes(model.SerializeToString())
    write_manifest(copy, manifest.to_json())
    return copy


@pytest.fixture(params=["native", "off"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "off":
        monkeypatch.setenv("KVEXPORT_OPERATORS", "off")


def scale_meaning(model: onnx.ModelProto, op: str, attribute_name: str, factor: float) -> None:
    """Multiply the attribute of the nodes of `op`, and a constant of its function."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == op and attribute.name == attribute_name:
                attribute.f *= factor
    function = next(f for f in model.functions if f.name.startswith(f"Heads{op}_"))
    for node in function.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.t.data_type == onnx.TensorProto.FLOAT:
                value = onnx.numpy_helper.to_array(attribute.t)
                if value.size == 1 and 1e-3 < abs(float(value)) < 100 and float(value) != 1.0:
                    attribute.t.CopyFrom(
                        onnx.numpy_helper.from_array((value * np.float32(factor)).astype(np.float32), attribute.t.name)
                    )
                    return
    raise AssertionError("no constant to change")


def test_a_model_without_images_needs_no_pillow(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert make_picture(load(tiny_artifact), 0) is None


def test_a_sound_artifact_passes(result) -> None:
    assert result.passed and result.in_place_identical
    assert max(result.tokens) > 3 * max(result.budgets)
    assert {s["phase"] for s in result.steps} == {"prefill", "decode", "merge"}
    kinds = {kind for s in result.steps for kind in s["largest"]}
    assert kinds >= {"logits", *STATE_NAMES}
    assert result.own_kl < 1e-6
    assert result.head_merges > 50
    assert {r.tensor for r in result.rounding} == {"key", "value", "logits"}
    assert {"hidden", "logits"} <= kinds
    assert all(0 <= v < 20 for row in result.kl for v in row) and sum(map(len, result.kl)) > 10


def test_the_report_has_a_verdict_and_figures(result) -> None:
    text = render_text(sections(result))
    assert "passed" in text and "score" in text
    assert re.search(r"KL\(full cache \|\| engine\), random +\d.* nats.*no criterion", text)
    assert json.loads(json.dumps(result.to_json()))["passed"] is True


@pytest.mark.usefixtures("operators")
def test_a_difference_in_attention_is_named(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = altered(tiny_artifact, tmp_path, "decoder.onnx", lambda m: scale_meaning(m, "VoteAttention", "scale", 1.05))
    result = validate_artifact(copy, length=160)
    assert not result.passed and result.mismatch is not None
    assert result.mismatch.step == 0 and result.mismatch.phase == "prefill"
    assert re.search(r"layer 0, step 0 \(prefill\), tensor \w+, lane \d, head \d, slot \d+: differs by", result.problem)
    # Validation continued to the end, and the layer after the first starts with PyTorch's hidden state.
    assert result.steps[-1]["phase"] in ("decode", "merge")
    assert {m.layer for m in result.mismatches} >= {0, 1}
    assert math.isfinite(result.mean_kl())


@pytest.mark.usefixtures("operators")
def test_a_difference_in_merging_is_named(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MOST_EXAMINED", 3)  # nearly every head differs, and each takes 40 ms

    def other_threshold(model: onnx.ModelProto) -> None:
        scale_meaning(model, "MergeCache", "threshold", 0.1)

    result = validate_artifact(altered(tiny_artifact, tmp_path, "merge.onnx", other_threshold), length=160)
    assert not result.passed and result.mismatch is not None
    assert result.mismatch.phase == "merge" and result.mismatch.layer == 0


@pytest.mark.usefixtures("operators")
def test_the_verb_exits_with_4(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = altered(tiny_artifact, tmp_path, "decoder.onnx", lambda m: scale_meaning(m, "VoteAttention", "scale", 1.05))
    ran = CliRunner().invoke(app, ["validate", str(copy), "--length", "60"])
    assert ran.exit_code == 4
    assert "differs from PyTorch" in ran.output + (ran.stderr or "") and "Traceback" not in ran.output
    assert "FAILED" in ran.output


@pytest.fixture(scope="module", params=["llava_next", "smolvlm"])
def with_images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that reads images, each of which takes more tokens than its budget has slots."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = vision.save_checkpoint(request.param, folder / "checkpoint")
    settings = {"cache": {"budget": 16, "sinks": 2, "merge_every": 4}, "export": {"prefill_chunk": 8}}
    return build(make_recipe(checkpoint, **settings, limits={"max_length": 200}), folder / "artifact")


def test_a_picture_and_text_after_it_are_compared_past_the_budget(with_images: Path) -> None:
    result = validate_artifact(with_images)
    assert result.passed and result.texts[0] == "an image, then text" and result.head_merges > 10
    (encoded,) = [r for r in result.rounding if r.tensor == "image"]
    assert encoded.count > max(result.budgets) and result.first_compared > 0
    with first_layers(with_images, 1) as one_layer:
        assert validate_artifact(one_layer).texts[0] == "an image, then text"
    short = validate_artifact(with_images, length=20)
    assert short.passed and short.texts[0] == "text" and "images  " in render_text(sections(short))


def test_a_picture_with_rotary_positions_of_its_own_is_compared(tmp_path: Path) -> None:
    """Rows of this model have parts that are added behind the first layers, too."""
    checkpoint = vision.save_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    settings = {"cache": {"budget": 16, "sinks": 2, "merge_every": 4}, "export": {"prefill_chunk": 8}}
    artifact = build(make_recipe(checkpoint, **settings, limits={"max_length": 200}), tmp_path / "artifact")
    result = validate_artifact(artifact)
    assert result.passed and result.texts[0] == "an image, then text" and result.first_compared > 0
    assert any(r.tensor == "image" for r in result.rounding)


def test_a_picture_whose_tokens_see_each_other_is_compared(tmp_path: Path) -> None:
    """The picture lies in one call. The caches have more slots than the sequences, so those of the graph are cut."""
    checkpoint = vision.save_checkpoint("gemma3", tmp_path / "checkpoint")
    settings = {"cache": {"budget": 400, "sinks": 2, "merge_every": 4}, "export": {"prefill_chunk": 16}}
    artifact = build(make_recipe(checkpoint, **settings, limits={"max_length": 500}), tmp_path / "artifact")
    result = validate_artifact(artifact, length=100, batch=2)
    assert result.passed and result.texts[0] == "an image, then text" and result.first_compared > 0
    assert any(r.tensor == "image" for r in result.rounding)


def test_a_damaged_image_encoder_is_named(with_images: Path, tmp_path: Path) -> None:
    def damage(model: onnx.ModelProto) -> None:
        """Let a layer of the encoder read another layer's weight of the same shape."""
        first, second = (x for x in model.graph.initializer if re.search(r"layers?\.[01]\.mlp\.fc1\.weight", x.name))
        del first.external_data[:]
        first.external_data.extend(second.external_data)

    result = validate_artifact(altered(with_images, tmp_path, "vision.onnx", damage))
    assert "rounding errors of images (encode" in result.problem


def test_another_checkpoint_is_refused(tiny_artifact: Path) -> None:
    from kvexport.recipe.inherit import recipe_folder

    with pytest.raises(UsageError, match="is not the checkpoint"):
        validate_artifact(tiny_artifact, checkpoint=str(recipe_folder() / "checkpoints" / "tiny"))
