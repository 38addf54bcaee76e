"""Tests of LoRA adapters: a build adds the same matrices as PEFT, and refuses an adapter that does not fit."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvexport.errors import UsageError
from kvexport.export.build import read_model
from kvexport.export.model.adapter import Adapted, merge_adapter
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.tensors import dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_specs
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.validate.weights import load_model
from tests.support.adapters import CONFIG, MODULES, RANK, adapter
from tests.support.quantized_files import gptq, quantized
from tests.support.tiny_model import RECIPE


def product(folder: Path, module: str) -> torch.Tensor:
    factors = load_file(folder / "adapter_model.safetensors")
    first, second = (factors[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
    return second.double() @ first.double()


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 2.0, 2.0)),
        ({"use_rslora": True}, (6 / math.sqrt(3),) * 3),
        ({"alpha_pattern": {"v_proj": 9, "layers.1.mlp.down_proj": 3}}, (2.0, 3.0, 1.0)),
    ],
)
def test_every_changed_weight_is_the_base_plus_the_scaled_product(
    tmp_path: Path, tiny_checkpoint: Path, config: dict[str, Any], scales: tuple[float, ...]
) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint, **config)
    recipe = Recipe.model_validate(
        {
            **RECIPE,
            "model": {**RECIPE["model"], "path": str(tiny_checkpoint)},
            "weights": {"merge_adapter": str(folder)},
        }
    )
    shape = read_model(recipe)
    assert shape.checkpoint is not None
    base = load_file(tiny_checkpoint / "model.safetensors")
    changed = {
        spec.name: dense_values(spec.source)
        for spec in weight_specs(shape.checkpoint, shape.model, recipe)
        if isinstance(spec, ComputedSpec)
    }
    assert len(changed) == len(MODULES)
    parameters = dict(load_model(shape.checkpoint, recipe, "sdpa").named_parameters())
    for module, scale in zip(MODULES, scales, strict=True):
        expected = (base[f"{module}.weight"].double() + scale * product(folder, module)).float().numpy()
        [name] = [name for name in changed if name.endswith(f"{module.removeprefix('model.')}.weight")]
        np.testing.assert_allclose(changed[name], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(parameters[f"{module}.weight"].detach().numpy(), changed[name])
    unchanged = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(parameters[unchanged].detach().numpy(), base[unchanged].numpy())


def test_weights_stored_by_inputs_get_the_transposed_product(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base, first, second = (torch.randn(shape, generator=generator) for shape in ((6, 4), (2, 6), (4, 2)))
    save_file({"base": base, "A": first, "B": second}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    entries = read_checkpoint(tmp_path).tensors
    adapted = Adapted(entries["base"], entries["A"], entries["B"], 0.5, transposed=True)
    np.testing.assert_allclose(dense_values(adapted), (base + 0.5 * (second @ first).T).numpy(), rtol=1e-5, atol=1e-5)


def test_two_adapters_of_one_base_have_different_fingerprints(tmp_path: Path, tiny_checkpoint: Path) -> None:
    base = read_checkpoint(tiny_checkpoint)
    folders = [adapter(tmp_path / "a", tiny_checkpoint), adapter(tmp_path / "b", tiny_checkpoint, lora_alpha=7)]
    fingerprints = {merge_adapter(base, folder).fingerprint for folder in folders}
    assert len({base.fingerprint, *fingerprints}) == 3


def test_the_path_is_relative_to_the_recipe(recipe_dir: Path, tiny_recipe: Path) -> None:
    text = tiny_recipe.read_text() + "\nweights: {merge_adapter: lora}\n"
    (recipe_dir / "with.yaml").write_text(text)
    assert load_recipe("with").recipe.weights.merge_adapter == str(recipe_dir / "lora")


def lacking(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def large(folder: Path) -> None:
    os.truncate(folder / "adapter_config.json", 5 << 30)


def half(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[f"base_model.model.{MODULES[0]}.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")


def of_another_model(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{MODULES[0]}.lora_A.weight"] = torch.zeros(RANK, 5)
    save_file(tensors, folder / "adapter_model.safetensors")


def embedding(folder: Path) -> None:
    save_file(
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2)}, folder / "adapter_model.safetensors"
    )


def unknown_layer(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name.replace("layers.0.", "layers.7."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def with_config(**config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))

    return write


CHANGE_THE_BASE = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lacking, "is no folder with adapter_config.json"),
        (large, "adapter_config.json has more than 4194304 bytes"),
        (pickled, r"holds a pickle \(adapter_model.bin\)"),
        (half, "lacks lora_A or lora_B of 'model.layers.0.self_attn.q_proj'"),
        (of_another_model, r"has matrices \[3, 5\] and"),
        (embedding, "which is no matrix A or B of a linear layer"),
        (unknown_layer, "has no tensor 'model.layers.7.self_attn.q_proj.weight'"),
        (with_config(peft_type="IA3"), "peft_type 'IA3'; only adapters with peft_type 'LORA'"),
        (with_config(use_dora=True), "use_dora True"),
        (with_config(modules_to_save=["lm_head"]), "modules_to_save"),
        *((with_config(init_lora_weights=kind), f"init_lora_weights '{kind}'") for kind in CHANGE_THE_BASE),
        (with_config(layer_replication=[[0, 2], [0, 1]]), "layer_replication"),
        (with_config(use_qalora=True), "use_qalora"),
        (with_config(arrow_config={"arrow_top_k": 1}), "arrow_config"),
        (with_config(lora_alpha="6"), "lora_alpha 6, expected a number"),
        (with_config(lora_alpha=float("inf")), "lora_alpha inf, expected a number"),
        (with_config(lora_alpha=10**400), r"lora_alpha 10+, expected a number"),
        (with_config(alpha_pattern={"q_proj": float("nan")}), "lora_alpha nan, expected a number"),
        (with_config(alpha_pattern={"(a+)+$": 3}), "that is no plain name of a module"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, tiny_checkpoint: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint)
    damage(folder)
    with pytest.raises(UsageError, match=words):
        merge_adapter(read_checkpoint(tiny_checkpoint), folder)


@pytest.mark.parametrize("kind", [True, False, "gaussian", "eva", "orthogonal"])
def test_beginnings_that_leave_the_base_as_it_is_are_read(tmp_path: Path, tiny_checkpoint: Path, kind: Any) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint, init_lora_weights=kind)
    assert merge_adapter(read_checkpoint(tiny_checkpoint), folder).computed.keys() == {f"{m}.weight" for m in MODULES}


def test_an_adapter_in_the_cache_of_the_hub_is_read(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint)
    hub = tmp_path / "models--org--lora"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "0123abcd").mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(hub / "blobs" / str(i))
        (hub / "snapshots" / "0123abcd" / file.name).symlink_to(f"../../blobs/{i}")
    read = merge_adapter(read_checkpoint(tiny_checkpoint), hub / "snapshots" / "0123abcd")
    assert read.computed.keys() == {f"{module}.weight" for module in MODULES}


def test_an_adapter_of_packed_weights_is_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
    quantized(tiny_checkpoint, tmp_path / "quantized", config, gptq)
    with pytest.raises(UsageError, match="which the checkpoint stores packed as"):
        merge_adapter(read_checkpoint(tmp_path / "quantized"), folder)
