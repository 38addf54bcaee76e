"""Quantized checkpoints: packed weights keep every number, and have the values that their authors' code computes."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import kvexport
from kvexport.errors import UsageError
from kvexport.export.build import read_model
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.tensors import Checkpoint, dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_specs
from kvexport.export.weights.write import write_weights
from kvexport.recipe.fields import Recipe
from kvexport.validate.runner import validate_artifact
from tests.support.quantized_files import awq, gptq, quantized
from tests.support.tiny_model import RECIPE

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
DOWN = "model.layers.1.mlp.down_proj"


def test_facts_of_a_checkpoint_change_with_files_of_packed_weights_alone(tmp_path: Path, tiny_checkpoint: Path) -> None:
    quantized(tiny_checkpoint, tmp_path / "quantized", GPTQ, gptq)
    checkpoint = replace(read_checkpoint(tmp_path / "quantized"), tensors={})
    before = checkpoint.facts()
    os.utime(tmp_path / "quantized" / "model.safetensors", (1, 1))
    assert checkpoint.facts() != before


def checkpoint_of(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    from safetensors.torch import save_file as save

    folder.mkdir()
    save(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return read_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (GPTQ, partial(gptq)),
        (GPTQ, partial(gptq, act_order=True)),
        (GPTQ, partial(gptq, symmetric=True)),
        ({**GPTQ, "bits": 8, "group_size": 32}, partial(gptq, bits=8, group=32)),
        ({**GPTQ, "bits": 8, "sym": True}, partial(gptq, bits=8, symmetric=True, act_order=True)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, version=2)),
        (AWQ, partial(awq)),
        ({**AWQ, "group_size": 32}, partial(awq, group=32)),
    ],
    ids=["gptq", "act-order", "symmetric", "8 bits", "8 bits, symmetric, act-order", "gptq_v2", "awq", "awq, 32"],
)
def test_packed_weights_equal_the_quantized_ones(
    tmp_path: Path, tiny_checkpoint: Path, config: dict[str, Any], make: Any
) -> None:
    expected = quantized(tiny_checkpoint, tmp_path / "quantized", config, make)
    checkpoint = read_checkpoint(tmp_path / "quantized")
    assert {*checkpoint.tensors, *checkpoint.computed} == expected.keys()
    assert len(checkpoint.computed) == 14
    for name, source in checkpoint.computed.items():
        np.testing.assert_array_equal(dense_values(source), expected[name])
        assert source.packing.signed == (make.keywords.get("symmetric", False))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("symmetric", "strategy"), [(True, "group"), (False, "group"), (True, "channel")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compressed_tensors_agree_with_their_library(
    tmp_path: Path, bits: int, symmetric: bool, strategy: str, dtype: torch.dtype
) -> None:
    pytest.importorskip("compressed_tensors", reason="not reached: pip install compressed-tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    n, k, group = 24, 128, 32
    count = k // group if strategy == "group" else 1
    arguments = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**arguments, group_size=group if strategy == "group" else None)
    )
    low = -(1 << (bits - 1))
    state = {
        "weight": torch.randn(n, k, dtype=dtype),
        "weight_scale": (torch.rand(n, count) + 0.5).to(dtype) * 2.0 ** (2 - bits),
        "weight_zero_point": torch.zeros(n, count, dtype=torch.int8)
        if symmetric
        else torch.randint(low, -low, (n, count), dtype=torch.int8),
    }
    compressed = PackedQuantizationCompressor.compress(dict(state), scheme)
    expected = PackedQuantizationCompressor.decompress(dict(compressed), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**arguments, "type": "int"}}},
    }
    tensors = {f"w.{name}": x.contiguous() for name, x in compressed.items()}
    source = checkpoint_of(tmp_path / "c", config, tensors).computed["w.weight"]
    actual = torch.from_numpy(dense_values(source))
    assert torch.equal(actual.to(expected.dtype), expected)
    assert source.packing is not None and source.packing.offset == ("none" if symmetric else "zero")


def test_int8_and_float8_weights_agree_with_compressed_tensors(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="not reached: pip install compressed-tensors")
    from compressed_tensors.compressors import FloatQuantizationCompressor, IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    cases: list[tuple[str, Any, dict[str, Any], tuple[int, ...]]] = [
        ("int-quantized", IntQuantizationCompressor, {"type": "int", "strategy": "channel"}, (24, 1)),
        ("float-quantized", FloatQuantizationCompressor, {"type": "float", "strategy": "channel"}, (24, 1)),
        ("float-quantized", FloatQuantizationCompressor, {"type": "float", "strategy": "tensor"}, (1,)),
    ]
    for i, (form, compressor, arguments, shape) in enumerate(cases):
        scheme = QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(num_bits=8, symmetric=True, **arguments)
        )
        scale = (torch.rand(shape) + 0.5).to(torch.bfloat16) * (0.02 if arguments["type"] == "int" else 0.01)
        state = {"weight": torch.randn(24, 128, dtype=torch.bfloat16), "weight_scale": scale}
        compressed = compressor.compress(dict(state), scheme)
        expected = compressor.decompress(dict(compressed), scheme)["weight"]
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"weights": {"num_bits": 8, **arguments}}},
        }
        tensors = {f"w.{name}": x.contiguous() for name, x in compressed.items()}
        checkpoint = checkpoint_of(tmp_path / str(i), config, tensors)
        source = checkpoint.computed["w.weight"]
        assert torch.equal(torch.from_numpy(dense_values(source)).to(torch.bfloat16), expected)
        assert (source.packing is None) == (form == "float-quantized")
        assert ("cast" in "".join(checkpoint.notes)) == (form == "float-quantized")


def test_float8_in_blocks_is_the_product_of_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 48).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3) + 0.5
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    source = checkpoint_of(tmp_path / "c", config, {"w.weight": weight, "w.weight_scale_inv": scale}).computed[
        "w.weight"
    ]
    each = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:40]
    np.testing.assert_array_equal(dense_values(source), (weight.float() * each).numpy())


def test_an_artifact_of_ordered_columns_computes_with_the_dequantized_weights(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """The three products of one input share one gather of columns, and so do the two products of the other input."""
    import onnx

    quantized(tiny_checkpoint, tmp_path / "quantized", GPTQ, partial(gptq, act_order=True))
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tmp_path / "quantized")}})
    artifact = kvexport.build(recipe, tmp_path / "artifact")
    assert validate_artifact(artifact, length=60, batch=1).passed
    nodes = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph.node
    assert len([node for node in nodes if node.op_type == "Gather" and node.input[1].endswith("order")]) == 4 * 2


def test_weights_are_written_as_they_are(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Equal orders are stored once."""
    quantized(tiny_checkpoint, tmp_path / "q", GPTQ, gptq)
    checkpoint = read_checkpoint(tmp_path / "q")
    source = checkpoint.computed[f"{DOWN}.weight"]
    spec = ComputedSpec("d.weight", source, "float32", source.shape)
    seen: list[int] = []
    locations, _ = write_weights([spec], tmp_path, seen.append)
    assert sum(seen) == spec.nbytes == sum(location.nbytes for location in locations.values())
    assert locations.keys() == {"d.weight", "d.scale", "d.zero"}
    at = locations["d.weight"]
    stored = (tmp_path / at.file).read_bytes()[at.offset : at.offset + at.nbytes]
    words = load_file(tmp_path / "q" / "model.safetensors")[f"{DOWN}.qweight"]
    assert stored == np.ascontiguousarray(words.T).tobytes()


@pytest.mark.parametrize(("group", "act_order", "kept"), [(16, False, True), (16, True, False), (32, False, False)])
def test_embeddings_are_packed_where_single_rows_can_be_picked(
    tmp_path: Path, tiny_checkpoint: Path, group: int, act_order: bool, kept: bool
) -> None:
    """A row of 32 inputs in groups of 32 has one zero point, half a byte: this embedding becomes floats."""
    make, folder = partial(gptq, group=group, act_order=act_order), tmp_path / "q"
    quantized(tiny_checkpoint, folder, {**GPTQ, "group_size": group}, make)
    tensors = load_file(folder / "model.safetensors")
    stored, values = make(*tensors.pop("model.embed_tokens.weight").shape, 0)
    tensors |= {f"model.embed_tokens.{part}": x for part, x in stored.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(folder)}})
    shape = read_model(recipe)
    specs = {spec.name: spec for spec in weight_specs(shape.checkpoint, shape.model, recipe)}
    spec = specs["model.model.embed_tokens.weight"]
    assert isinstance(spec, ComputedSpec)
    assert (spec.source.packing is not None) == kept
    np.testing.assert_array_equal(dense_values(spec.source), values)


def broken(folder: Path, **tensors: Any) -> None:
    """Change tensors of one projection, or remove those whose change returns None."""
    file = folder / "model.safetensors"
    tensors_of_file = load_file(file)
    for part, change in tensors.items():
        name = f"{DOWN}.{part}"
        value = change(tensors_of_file.pop(name))
        tensors_of_file |= {} if value is None else {name: np.ascontiguousarray(value)}
    save_file(tensors_of_file, file, {"format": "pt"})


def set_to(value: float) -> Any:
    def changed(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        scales = scales.copy()
        scales[1, 2] = value
        return scales

    return changed


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def rotated(*places: str) -> dict[str, Any]:
    steps = [{"targets": ["down_proj"], "location": place} for place in places]
    return {"config_groups": {"R": {"type": "hadamard", "apply": steps}}}


@pytest.mark.parametrize(("change", "config", "message"), [
    ({"scales": lambda x: None}, {}, "and no 'model.layers.1.mlp.down_proj.scales'"),
    ({"scales": lambda x: x[:2]}, {}, r"F16 \[2, 32\], expected F16 or BF16 or F32 \[4, 32\]"),
    ({"qzeros": lambda x: x[:, :2]}, {}, r"I32 \[4, 2\], expected I32 \[4, 4\]"),
    ({"qweight": lambda x: x.astype(np.int16)}, {}, "is I16"),
    ({"qweight": lambda x: x[:4]}, {}, r"F16 \[4, 32\], expected .* \[2, 32\]"),
    ({"g_idx": lambda x: x * 0}, {}, "groups that are not all of 16"),
    ({"g_idx": lambda x: x * 0 - 7}, {}, "groups that are not all of 16"),
    ({"g_idx": lambda x: x + 1000}, {}, "groups that are not all of 16"),
    ({"g_idx": lambda x: x[:5]}, {}, r"I32 \[5\], expected I32 or I64 \[64\]"),
    ({}, {"group_size": 24}, "groups of 24 inputs do not divide"),
    ({}, {"group_size": 8}, "groups of 8 inputs, expected 16 to 256"), ({}, {"bits": 3}, "gptq of 3 bits"),
    ({}, {"checkpoint_format": "marlin"}, "gptq of format 'marlin'"),
    ({}, {"quant_method": "hqq"}, "quantized as hqq, which is not read here"),
    ({}, {"quant_method": "bitnet"}, "quantized as bitnet, which is not read here"),
    ({}, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes of 8 bits, which is not read here"),
    ({}, {"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\), and no tensor is"),
    ({}, {"quant_method": "awq", "version": "gemv"}, "awq of version 'gemv'"),
    ({}, {"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
    ({}, {**COMPRESSED, "transform_config": rotated("weight_output", "input")}, r"at run time \(R: 'input'\)"),
    ({}, {**COMPRESSED, "transform_config": rotated("weight_input")}, "compressed-tensors.*and no tensor is"),
    ({}, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt w4a8_awq"),
    ({}, {"quant_method": "fp8"}, r"says that weights are quantized \(fp8\), and no tensor is"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_from_their_headers(
    tmp_path: Path, tiny_checkpoint: Path, change: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "quantized"
    quantized(tiny_checkpoint, folder, {**GPTQ, **config}, gptq)
    broken(folder, **change)
    with pytest.raises(UsageError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "names", [("quantization",), ("quantization_config",), ("quantization", "quantization_config")]
)
def test_a_checkpoint_of_mlx_is_named(tmp_path: Path, tiny_checkpoint: Path, names: list[str]) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "mlx"))
    settings = {name: {"group_size": 64, "bits": 4} for name in names}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(UsageError, match="quantized as MLX of 4 bits, which is not read here"):
        read_checkpoint(folder)


def test_no_quantization_config_ends_in_another_error(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """A quantization config with any value replaced by one of another kind is read, or refused with a message."""
    quantized(tiny_checkpoint, tmp_path / "gptq", GPTQ, gptq)
    packed = {"num_bits": 4, "block_structure": [16, 16], "type": "int"}
    scheme = {"weights": packed, "format": "pack-quantized"}
    compressed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": scheme}}
    words = {"w.weight_packed": torch.zeros(8, 4, dtype=torch.int32), "w.weight_shape": torch.tensor([8, 32])}
    checkpoint_of(tmp_path / "compressed", compressed, {**words, "w.weight_scale": torch.ones(8, 2).half()})
    floats = {"w.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(2, 2)}
    checkpoint_of(tmp_path / "floats", {"quant_method": "fp8", "weight_block_size": [16, 16]}, floats)
    tried = 0
    for folder in (tmp_path / "gptq", tmp_path / "compressed", tmp_path / "floats"):
        config = json.loads((folder / "config.json").read_text())
        for place in places(config["quantization_config"]):
            for value in (None, 0, -1, 3.5, True, "x", [], ["x", 1], {}, {"x": 1}):
                changed = json.loads(json.dumps(config))
                at = changed["quantization_config"]
                for key in place[:-1]:
                    at = at[key]
                at[place[-1]] = value
                (folder / "config.json").write_text(json.dumps(changed))
                tried += 1
                try:
                    read_checkpoint(folder)
                except UsageError as error:
                    assert len(str(error)) < 1000
    assert tried > 150


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all items in nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([above] if above else []), *(p for key, item in items for p in places(item, (*above, key)))]


@pytest.mark.parametrize(("value", "message"), [
    (np.nan, "scales of tensor .* hold values that are infinite or NaN"),
    (np.inf, "scales of tensor .* hold values that are infinite or NaN"),
    (0, "scales of tensor 'model.layers.1.mlp.down_proj.scales' hold a 0"),
])  # fmt: skip
def test_scales_that_are_none_are_refused(tmp_path: Path, tiny_checkpoint: Path, value: float, message: str) -> None:
    folder = tmp_path / "quantized"
    quantized(tiny_checkpoint, folder, GPTQ, gptq)
    broken(folder, scales=set_to(value))
    with pytest.raises(UsageError, match=message):
        if value == 0:  # a refused build leaves no artifact
            kvexport.build(Recipe.model_validate({**RECIPE, "model": {"path": str(folder)}}), tmp_path / "artifact")
        else:
            source = read_checkpoint(folder).computed[f"{DOWN}.weight"]
            write_weights([ComputedSpec("d.weight", source, "float32", source.shape)], tmp_path, lambda _: None)
    assert not (tmp_path / "artifact").exists()


def test_a_quantized_checkpoint_is_not_rounded_again(tmp_path: Path, tiny_checkpoint: Path) -> None:
    quantized(tiny_checkpoint, tmp_path / "q", AWQ, awq)
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tmp_path / "q")}, "weights": {"bits": 4}})
    with pytest.raises(UsageError, match="quantized already"):
        kvexport.build(recipe, tmp_path / "artifact")
