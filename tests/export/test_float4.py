"""Checkpoints in 4-bit floats have the values that their authors' code computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvexport
from kvexport.errors import UsageError
from kvexport.export.model.tensors import dense_values
from kvexport.recipe.fields import Recipe
from kvexport.validate.runner import validate_artifact
from tests.export.test_quantized import checkpoint_of
from tests.support.tiny_model import RECIPE

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
N, K = 24, 128


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_compressed_tensors_agree_with_their_library(tmp_path: Path, form: str) -> None:
    pytest.importorskip("compressed_tensors", reason="not reached: pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    group = 16 if form == "nvfp4" else 32
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="float", symmetric=True, group_size=group)
    )
    packed = {"weight_packed": torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)}
    if form == "nvfp4":
        packed["weight_scale"] = (torch.rand(N, K // group) * 400 + 1).to(torch.float8_e4m3fn)
        packed["weight_global_scale"] = torch.tensor([731.25])
    else:
        packed["weight_scale"] = torch.randint(100, 130, (N, K // group), dtype=torch.uint8)
    library: Any = BaseCompressor.get_value_from_registry(f"{form}-pack-quantized")
    expected = library.decompress(dict(packed), scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": f"{form}-pack-quantized"}
    checkpoint = checkpoint_of(tmp_path / "c", config, {f"w.{name}": x for name, x in packed.items()})
    source = checkpoint.computed["w.weight"]
    assert torch.equal(torch.from_numpy(dense_values(source)).to(expected.dtype), expected)
    assert source.packing is not None and (source.packing.bits, source.packing.group) == (4, group)
    assert not checkpoint.tensors


def nvfp4(n: int = N, k: int = K) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "w.weight": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        "w.weight_scale": (torch.rand(n, k // 16) * 100 + 1).to(torch.float8_e4m3fn),
        "w.weight_scale_2": torch.tensor(0.00037),
        "w.input_scale": torch.tensor(0.5),
    }


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def test_nvfp4_of_modelopt_is_the_product_of_number_and_both_scales(tmp_path: Path) -> None:
    tensors = nvfp4()
    source = checkpoint_of(tmp_path / "c", MODELOPT, tensors).computed["w.weight"]
    bytes_ = tensors["w.weight"].long()
    numbers = E2M1[torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).reshape(N, K)]
    scale = tensors["w.weight_scale"].float() * tensors["w.weight_scale_2"]
    np.testing.assert_array_equal(dense_values(source), (numbers * scale.repeat_interleave(16, 1)).numpy())


def test_an_artifact_of_4_bit_floats_computes_with_the_dequantized_weights(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(tiny_checkpoint, folder)
    actual = load_file(folder / "model.safetensors")
    for name in [name for name in actual if name.endswith("_proj.weight")]:
        n, k = actual.pop(name).shape
        actual |= {part.replace("w.", name.removesuffix("weight"), 1): x for part, x in nvfp4(n, k).items()}
    save_file(actual, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = MODELOPT
    (folder / "config.json").write_text(json.dumps(config))
    changes = {"model": {**RECIPE["model"], "path": str(folder)}}
    artifact = kvexport.build(Recipe.model_validate(RECIPE | changes), tmp_path / "artifact")
    assert set(kvexport.load(artifact).manifest.model.packed) == {"float4 e2m1 (4 bits), groups of 16"}
    assert validate_artifact(artifact).passed


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (MODELOPT, nvfp4() | {"w.weight_scale_2": torch.ones(2)}, r"F32 \[2\], expected one F32"),
        (MODELOPT, nvfp4() | {"w.weight_scale": torch.ones(N, 8)}, r"F32 \[24, 8\], expected F8_E4M3"),
        (MODELOPT, nvfp4() | {"w.weight": torch.zeros(N, 60, dtype=torch.uint8)}, "groups of 16 inputs do not divide"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_from_their_headers(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        checkpoint_of(tmp_path / "c", config, tensors)
