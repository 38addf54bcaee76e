"""GGUF files of many decoder types give the logits of the models from which they were made."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvexport.export.build import read_model
from kvexport.export.model.gguf_architectures import ARCHITECTURES
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
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tmp_path / "tiny.gguf")}})
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


def test_every_architecture_is_tested() -> None:
    named = {kind.split()[0] for kind in CASES}
    assert {*named, *test_gguf_architectures.CASES, "qwen2"} == set(ARCHITECTURES)
