"""Checkpoints in 4-bit floats have the values that their authors' code computes."""

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


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_looks_numbers_up_in_a_table(tmp_path: Path, kind: str, nested: bool) -> None:
    tensors = bitsandbytes(kind, nested)
    checkpoint = checkpoint_of(tmp_path / "c", BITSANDBYTES, tensors)
    bytes_ = tensors["w.weight"].reshape(-1).long()
    numbers = tensors["w.weight.quant_map"][torch.stack([bytes_ >> 4, bytes_ & 15], dim=-1).reshape(-1)]
    scale = tensors["w.weight.absmax"]
    if nested:
        table, own = tensors["w.weight.nested_quant_map"], tensors["w.weight.nested_absmax"]
        scale = table[scale.long()] * own.repeat_interleave(16)[: len(scale)] + 0.25
    expected = (numbers * scale.repeat_interleave(64)[: N * K]).reshape(N, K)
    np.testing.assert_array_equal(dense_values(checkpoint.computed["w.weight"]), expected.numpy())
    assert "1 weights in bitsandbytes' 4 bits are cast" in "".join(checkpoint.notes)
    assert not checkpoint.tensors


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def bitsandbytes(kind: str, nested: bool, n: int = N, k: int = K, **changes: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    blocks = n * k // 64
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {
        "w.weight": torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8),
        "w.weight.quant_map": torch.linspace(-0.1, 0.1, 16),
        "w.weight.absmax": torch.randint(0, 256, (blocks,), dtype=torch.uint8) if nested else torch.rand(blocks) + 0.1,
    }
    if nested:
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors["w.weight.nested_quant_map"] = torch.randn(256)
        tensors["w.weight.nested_absmax"] = torch.rand(-(-blocks // 16)) + 0.1
    fields = json.dumps(state | changes).encode()
    return tensors | {f"w.weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(fields), dtype=torch.uint8)}


@pytest.mark.parametrize(("kind", "bits"), [("nvfp4", None), ("nf4", None), ("nf4", 4)])
def test_an_artifact_of_4_bit_floats_computes_with_the_dequantized_weights(
    tmp_path: Path, tiny_checkpoint: Path, kind: str, bits: int | None
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(tiny_checkpoint, folder)
    actual = load_file(folder / "model.safetensors")
    for name in [name for name in actual if name.endswith("_proj.weight")]:
        n, k = actual.pop(name).shape
        own = nvfp4(n, k) if kind == "nvfp4" else bitsandbytes(kind, False, n, k)
        actual |= {part.replace("w.", name.removesuffix("weight"), 1): x for part, x in own.items()}
    save_file(actual, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = MODELOPT if kind == "nvfp4" else BITSANDBYTES
    (folder / "config.json").write_text(json.dumps(config))
    changes = {"model": {**RECIPE["model"], "path": str(folder)}, "weights": {"bits": bits}}
    artifact = kvexport.build(Recipe.model_validate(RECIPE | changes), tmp_path / "artifact")
    packed = kvexport.load(artifact).manifest.model.packed
    expected = {"int4, groups of 32", "int8, groups of 32"} if bits else set()
    assert set(packed) == ({"float4 e2m1 (4 bits), groups of 16"} if kind == "nvfp4" else expected)
    assert validate_artifact(artifact).passed


@pytest.mark.parametrize(("config", "tensors", "message"), [
    (MODELOPT, nvfp4() | {"w.weight_scale_2": torch.ones(2)}, r"F32 \[2\], expected one F32"),
    (MODELOPT, nvfp4() | {"w.weight_scale": torch.ones(N, 8)}, r"F32 \[24, 8\], expected F8_E4M3"),
    (MODELOPT, nvfp4() | {"w.weight": torch.zeros(N, 60, dtype=torch.uint8)}, "groups of 16 inputs do not divide"),
    (BITSANDBYTES, bitsandbytes("nf4", False, blocksize=128), r"\[48\], expected F32 \[24\]"),
    (BITSANDBYTES, bitsandbytes("nf4", False, shape=[N]), "expected what bitsandbytes writes of a weight"),
    (BITSANDBYTES, bitsandbytes("nf4", False, shape=[N, -K]), "sizes above 0"),
    (BITSANDBYTES, bitsandbytes("nf4", True, nested_blocksize=8), r"\[3\], expected F32 \[6\]"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_from_their_headers(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        checkpoint_of(tmp_path / "c", config, tensors)
