"""Tests of `validate --layers N`: only the first layers of a model, as the artifact has them, on every backend."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from kvexport.artifact.reading import load_manifest
from kvexport.commands.app import app
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.recipe.load import load_recipe
from kvexport.validate.layers import first_layers, shorten_config
from kvexport.validate.runner import validate_artifact


@pytest.fixture(scope="module")
def artifact(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of two layers whose heads all have different budgets."""
    shares = ["cache.allocation.kind=listed", "cache.allocation.shares=[[1.6, 1.2], [0.5, 0.7]]"]
    recipe = load_recipe(str(tiny_recipe), shares).recipe
    return build(recipe, tmp_path_factory.mktemp("layers") / "artifact")


@pytest.fixture(scope="module")
def one_layer(artifact: Path) -> Iterator[Path]:
    with first_layers(artifact, 1) as held:
        yield held
    assert not held.exists()
    assert not held.parent.exists()


def test_the_compared_layers_equal_the_artifacts(artifact: Path, one_layer: Path) -> None:
    whole, held = load_manifest(artifact), load_manifest(one_layer)
    assert len({*whole.cache.heads("budget")}) == 4
    assert held.cache.caches == whole.cache.caches[:1]
    assert held.model.layers == 1
    assert held.limits == whole.limits
    weights = sum(entry.bytes for name, entry in held.files.items() if "weights" in name)
    assert weights < sum(entry.bytes for name, entry in whole.files.items() if "weights" in name)


def test_the_layer_holds_and_another_layers_weights_do_not(one_layer: Path, tmp_path: Path) -> None:
    assert validate_artifact(one_layer, length=100, batch=2).passed
    # The layout is the same, so only the comparison shows the difference.
    checkpoint = Path(load_manifest(one_layer).recipe.model.path)
    other = tmp_path / "checkpoint"
    other.mkdir()
    (other / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(
        {**tensors, name: (tensors[name] * np.float32(1.5)).copy()},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    result = validate_artifact(one_layer, length=100, batch=2, checkpoint=str(other))
    assert result.mismatch.layer in (0, None)


def test_the_command_prints_how_many_layers_were_compared(artifact: Path) -> None:
    ran = CliRunner().invoke(
        app, ["validate", str(artifact), "--layers", "1", "--length", "60", "--batch", "2", "--backend", "onnxruntime"]
    )
    assert ran.exit_code == 0, ran.output
    assert "the first 1 of 2" in ran.stdout
    assert "the other layers were not compared" in ran.stdout
    assert str(artifact) in ran.stdout


@pytest.mark.parametrize("count", [0, 3, -1])
def test_layers_that_the_model_does_not_have(artifact: Path, count: int) -> None:
    ran = CliRunner().invoke(app, ["validate", str(artifact), f"--layers={count}"])
    assert ran.exit_code == 2
    assert f"--layers {count}, but the model of" in ran.stderr
    assert "--layers 1 to 2" in ran.stderr


def test_another_checkpoint_is_refused(artifact: Path) -> None:
    from kvexport.recipe.inherit import recipe_folder

    with (
        pytest.raises(UsageError, match="is not the checkpoint"),
        first_layers(artifact, 1, str(recipe_folder() / "checkpoints" / "tiny")),
    ):
        pass


def test_a_config_is_cut_where_it_speaks_of_layers() -> None:
    config = {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "a"],
        "eos_token_id": [1, 2, 3],
        "sizes": [1, 2],
        "hidden_size": 3,
    }
    cut = shorten_config(config, "num_hidden_layers", 3, 2)
    assert cut == {**config, "num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert shorten_config({"text_config": config, "vision": [1, 2, 3]}, "num_hidden_layers", 3, 2) == {
        "text_config": cut,
        "vision": [1, 2, 3],
    }
    assert shorten_config({"n_layer": 3}, "n_layer", 3, 1) == {"n_layer": 1}
