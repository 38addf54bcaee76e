"""GGUF files of many decoder types give the logits of the models from which they were made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvexport.errors import UsageError
from kvexport.export.build import read_model
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.gguf import read_gguf
from kvexport.export.model.gguf_architectures import ARCHITECTURES
from kvexport.export.model.gguf_model import tensors_of
from kvexport.export.model.tensors import dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_specs
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.casting import load_tensor
from tests.export import test_gguf_architectures
from tests.support.gguf_decoders import CASES, text, write_decoder
from tests.support.tiny_model import RECIPE


@pytest.mark.parametrize("kind", CASES)
def test_a_file_has_the_logits_of_its_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_decoder(kind, tmp_path / "tiny.gguf")
    fields = {**RECIPE, "model": {"path": str(tmp_path / "tiny.gguf")}}
    if CASES[kind].meta.get("attention.head_count") == 0:
        fields["cache"] = {"method": "full"}
    recipe = Recipe.model_validate(fields)
    shape = read_model(recipe)
    read = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape.checkpoint.path)).eval()
    state = read.state_dict()
    names = {name.removeprefix("model."): name for name in state}
    for spec in weight_specs(shape.checkpoint, shape.model, recipe):
        values = dense_values(spec.source) if isinstance(spec, ComputedSpec) else load_tensor(spec.entry, "float32")
        parameter = state[names.pop(spec.name.removeprefix("model.").removeprefix("model."))]
        parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))
    assert set(names) <= ({"lm_head.weight"} if read.config.tie_word_embeddings else set())
    ids = torch.tensor([text()])
    with torch.no_grad():
        expected, logits = model(ids).logits, read(ids).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("kind", "meta", "problem"), [
    ("deepseek2", {"expert_gating_func": 1}, "expert_weights_norm normalizes a softmax over experts"),
    ("deepseek2", {"attention.temperature_scale": 0.1}, "makes queries depend on their positions"),
    ("gptneox", {"attention.head_count": 5}, r"'blk.0.attn_qkv.weight' .* \[192, 64\], which 5 heads do not share"),
    ("chatglm with joint queries, keys and values", {"attention.head_count": 5}, "which 5 heads do not share"),
])  # fmt: skip
def test_a_file_whose_metadata_does_not_fit_is_refused(
    kind: str, meta: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(CASES, kind, replace(CASES[kind], meta={**CASES[kind].meta, **meta}))
    write_decoder(kind, tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=problem):
        read_checkpoint(tmp_path / "tiny.gguf")


def test_half_of_a_latent_expansion_is_refused(tmp_path: Path) -> None:
    write_decoder("deepseek2", tmp_path / "tiny.gguf")
    file = read_gguf(tmp_path / "tiny.gguf")
    del file.tensors["blk.1.attn_v_b.weight"]
    with pytest.raises(UsageError, match=r"no fitting attn_k_b and attn_v_b .* it has attn_k_b \[4, 32, 32\]"):
        tensors_of(file)


def test_every_architecture_is_tested() -> None:
    named = {kind.split()[0] for kind in CASES}
    assert {*named, *test_gguf_architectures.CASES, "qwen2"} == set(ARCHITECTURES)
