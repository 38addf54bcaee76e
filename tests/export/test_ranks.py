"""The weights of ranks are slices of the model's float and packed weights.

A model that cannot be split is refused before a file is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import Phi3Config, Qwen3Config

from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.ranks import Slice, rank_specs, split_model
from kvexport.export.weights.computed import ComputedSpec, component_blocks
from kvexport.export.weights.specs import weight_specs
from kvexport.export.weights.write import TensorSpec, total_bytes, write_weights
from kvexport.ops.packed import PackedFormat, dequantize, pack
from kvexport.planning import plan_memory
from kvexport.recipe.fields import Recipe
from tests.support.models import SIZES, llama, save_checkpoint
from tests.support.tiny_model import RECIPE


def recipe(checkpoint: Path, ranks: int, **changes: Any) -> Recipe:
    sections = {**RECIPE, "model": {"path": str(checkpoint)}, "backend": {"tensor_parallel": ranks}, **changes}
    return Recipe.model_validate(sections)


def test_the_ranks_have_all_of_every_weight_between_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shape = read_model(recipe(tiny_checkpoint, 2))
    specs = weight_specs(shape.checkpoint, shape.model, recipe(tiny_checkpoint, 2))
    _, splits = split_model(shape, 2)
    assert sum(name.endswith("weight") for name in splits) == 2 * 7
    parts = rank_specs(specs, splits, 2)

    def values(kept: list[Any], folder: str) -> dict[str, Any]:
        (tmp_path / folder).mkdir()
        written = write_weights(kept, tmp_path / folder, "copy", lambda _: None)
        data = (tmp_path / folder / "decoder.weights").read_bytes()
        at = written.locations
        return {
            x.name: np.frombuffer(data, np.float32, at[x.name].nbytes // 4, at[x.name].offset).reshape(x.shape)
            for x in kept
        }

    whole, first, second = values(specs, "whole"), values(parts[0], "0"), values(parts[1], "1")
    for name, value in whole.items():
        if name in splits:
            assert np.array_equal(np.concatenate([first[name], second[name]], splits[name]), value), name
        else:
            assert np.array_equal(first[name], value), name
    rows = next(spec for spec in parts[1] if spec.name.endswith("q_proj.weight"))
    assert isinstance(rows, TensorSpec), "rows are contiguous, so the checkpoint could be linked"


@dataclass(frozen=True)
class Whole:
    """A packed source that yields blocks of three rows."""

    packing: PackedFormat
    shape: tuple[int, int] = (8, 64)
    name: str = "w"

    def stored(self) -> dict[str, Any]:
        rng, (n, k) = np.random.default_rng(0), self.shape
        low = self.packing.lowest
        problems = {
            "weight": rng.integers(low, low + (1 << self.packing.bits), (n, k)),
            "scale": rng.uniform(0.1, 1, (n, k // self.packing.group)).astype(np.float16),
        }
        if self.packing.offset == "zero":
            problems["zero"] = rng.integers(0, 1 << self.packing.bits, problems["scale"].shape).astype(np.uint8)
        return problems

    def blocks(self) -> Any:
        held = self.stored()
        for i in range(0, self.shape[0], 3):
            block = {name: x[i : i + 3] for name, x in held.items()}
            yield {**block, "weight": pack(block["weight"], self.packing.bits)}

    def order(self) -> Any:
        raise NotImplementedError

    def floats(self) -> Any:
        return floats(self)


def floats(source: Any) -> Any:
    spec = ComputedSpec("w", source, "float32", source.shape)
    stored = {name: np.concatenate([np.ravel(x) for x in blocks]) for name, blocks in component_blocks(spec)}
    return dequantize(source.packing, *source.shape, stored)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize(("bits", "signed", "offset"), [(4, True, "none"), (4, False, "zero"), (8, True, "none")])
def test_slices_of_packed_weights(bits: Any, signed: bool, offset: Any, dimension: int) -> None:
    whole = Whole(PackedFormat(bits, signed, 16, offset))
    size = whole.shape[dimension] // 2
    parts = [floats(Slice(whole, dimension, i * size, (i + 1) * size)) for i in range(2)]
    assert np.array_equal(np.concatenate(parts, dimension), floats(whole))


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        (PackedFormat(4, True, 64), "groups of 64 inputs, which the ranks' 32 inputs would cut"),
        (PackedFormat(4, True, 16, ordered=True), "columns in an order of its own"),
    ],
)
def test_groups_that_would_be_cut(packing: PackedFormat, message: str) -> None:
    spec = ComputedSpec("model.w", Whole(packing), "float32", (8, 64))
    assert len(rank_specs([spec], {"model.w": 0}, 2)) == 2
    with pytest.raises(UsageError, match=message):
        rank_specs([spec], {"model.w": 1}, 2)


def test_heads_that_ranks_cannot_share_are_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"backend.tensor_parallel is 3, and 2 KV heads cannot be shared equally") as e:
        build(recipe(tiny_checkpoint, 3), tmp_path / "out")
    assert e.value.fix == "--set backend.tensor_parallel=2"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=r"backend.tensor_parallel is 4, and 2 KV heads"):
        plan_memory(recipe(tiny_checkpoint, 4))


def test_features_that_ranks_cannot_share(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"which does not divide the 97 outputs of 'model.layers.0.mlp.gate_proj'"):
        split_model(read_model(recipe(save_checkpoint(tmp_path, llama(intermediate_size=97)), 2)), 2)


def test_models_that_transformers_does_not_split_are_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, Phi3Config(**SIZES))
    with pytest.raises(UsageError, match=r"splits 'self_attn.o_proj' of phi3 by rowwise_split_input"):
        split_model(read_model(recipe(checkpoint, 2)), 2)


def test_norms_of_heads_are_every_rank_s(tmp_path: Path) -> None:
    shape = read_model(recipe(save_checkpoint(tmp_path, Qwen3Config(**SIZES, head_dim=16)), 2))
    part, splits = split_model(shape, 2)
    assert [(layer.query_heads, layer.kv_heads) for layer in part.geometry] == [(2, 1)] * 2
    assert not any("norm" in name for name in splits)


def test_methods_that_join_heads_and_drafts_over_copies_are_refused(tiny_checkpoint: Path) -> None:
    for cache, speculate, message in (
        (
            {"method": "asymkv", "parameters": {"share_pairs": True}},
            {},
            "asymkv selects slots over all heads",
        ),
        ({"method": "cam"}, {}, "the method cam has no merge policy"),
        ({"method": "grkv"}, {}, "the method grkv keeps extra state"),
        ({"method": "full"}, {"draft": "cache"}, "speculate.draft is cache, which copies entries"),
    ):
        with pytest.raises(ValidationError, match=message):
            recipe(tiny_checkpoint, 2, cache=cache, speculate=speculate)
    with pytest.raises(UsageError, match=r"backend.tensor_parallel is 2, but tensorrt runs a model in one process"):
        build(recipe(tiny_checkpoint, 2, backend={"name": "tensorrt", "tensor_parallel": 2}), tiny_checkpoint / "out")


def test_the_plan_counts_the_bytes_of_a_rank(tiny_checkpoint: Path) -> None:
    one, two = (plan_memory(recipe(tiny_checkpoint, ranks)) for ranks in (1, 2))
    assert two.weight_bytes == one.weight_bytes == one.rank_weight_bytes
    hidden, kv, intermediate = 32, 16, 64
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate
    assert two.rank_weight_bytes == two.weight_bytes - 4 * 2 * layer // 2
    memory = two.rank_weight_bytes + 3 * two.cache.rank_plan(2).bytes(1)
    assert two.fit(memory).sequences == 3
    assert two.to_json()["ranks"] == 2
    message = " ".join(str(value) for section in two.sections(two.fit(memory)) for value in vars(section).values())
    assert "each of 2 ranks" in message and "of each rank" in message and "GPU" not in message
    gpus = plan_memory(recipe(tiny_checkpoint, 2, backend={"tensor_parallel": 2, "device": "cuda"}))
    assert "sequences' caches, on a GPU of its own" in str(gpus.sections())
    assert total_bytes([]) == 0
