"""Tests of rounding by importance: an error counts by the mean square of the input of its weight, over a text."""

from __future__ import annotations

import shutil
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
import torch
from safetensors.numpy import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.errors import UsageError
from kvexport.export.build import read_model
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.streamed import run_streamed
from kvexport.export.model.tensors import dense_values
from kvexport.export.weights import importance
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.importance import FILE, LEAST, as_built, weigh
from kvexport.export.weights.quantize import Rounded, round_groups
from kvexport.export.weights.specs import weight_specs
from kvexport.language.tokenizer import Tokenizer
from kvexport.ops.packed import PackedFormat
from kvexport.recipe.fields import Recipe
from kvexport.validate import layers
from kvexport.validate.runner import validate_artifact
from tests.support import models
from tests.support.tiny_model import RECIPE

FORMATS = [
    PackedFormat(4, True, 32),
    PackedFormat(4, False, 32, "zero"),
    PackedFormat(4, True, 128),
    PackedFormat(8, True, 32),
]
Change = Callable[..., Recipe]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with words of letters of different frequencies."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list(string.ascii_lowercase), p=np.arange(1, 27) / 351, size=(500, 4))
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text(" ".join("".join(word) for word in letters))
    return file


@pytest.fixture
def changed(tiny_checkpoint: Path, text: Path) -> Change:
    """A function that returns the tiny recipe with 4 bits by importance, changed by its arguments."""

    def change(**weights: Any) -> Recipe:
        fields = {"bits": 4, "method": "importance", "calibration": str(text), **weights}
        return Recipe.model_validate({**RECIPE, "model": {"path": str(tiny_checkpoint)}, "weights": fields})

    return change


def weighed(recipe: Recipe) -> dict[str, Rounded]:
    """Return the rounded sources by tensor."""
    shape = read_model(recipe)
    specs = weigh(weight_specs(shape.checkpoint, shape.model, recipe), shape.checkpoint, recipe)
    sources = [spec.source for spec in specs if isinstance(spec, ComputedSpec)]
    return {source.name: source for source in sources if isinstance(source, Rounded)}


def values_of(groups: Any, packing: PackedFormat, counted: Any) -> Any:
    numbers, parts = round_groups(groups, packing, counted)
    zero = parts["zero"][..., None].astype(np.float32) if "zero" in parts else 0
    return (numbers - zero) * parts["scale"][..., None].astype(np.float32)


@pytest.mark.parametrize("packing", FORMATS, ids=lambda packing: packing.label)
def test_rounding_errors_count_by_the_mean_square_of_their_inputs(packing: PackedFormat) -> None:
    rng = np.random.default_rng(0)
    groups = rng.standard_normal((96, 512 // packing.group, packing.group)).astype(np.float32)
    counted = rng.lognormal(0, 2, groups.shape[1:]).astype(np.float32)
    plain, weighted = (values_of(groups, packing, x) for x in (None, counted))
    error = [((values - groups) ** 2 * counted).sum((1, 2)) for values in (plain, weighted)]
    assert error[1].sum() < (0.75 if packing.bits == 4 else 0.95) * error[0].sum()
    # The inputs have the mean squares that weighted the errors.
    inputs = rng.standard_normal((1024, *counted.shape)).astype(np.float32) * np.sqrt(counted)
    products = [np.square(np.einsum("ngk,rgk->nr", inputs, values - groups)).mean() for values in (plain, weighted)]
    assert products[1] < (0.8 if packing.bits == 4 else 0.97) * products[0]
    alike = values_of(groups, packing, np.ones_like(counted))
    assert ((alike - groups) ** 2).sum() <= (1 + 1e-6) * ((plain - groups) ** 2).sum()


@pytest.mark.parametrize(
    "config",
    [
        models.llama(tie_word_embeddings=False, attention_bias=True),
        # Scaled embeddings, norms that add 1, a soft cap, a window, a head tied to the embedding.
        Gemma2Config(**{**models.SIZES, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    ],
    ids=["llama", "gemma2"],
)
def test_a_module_at_a_time_gets_the_inputs_of_the_whole_model(tmp_path: Path, config: Any) -> None:
    folder = models.save_checkpoint(tmp_path / "checkpoint", config, dtype=torch.bfloat16)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (3, 40)))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected: dict[str, Any] = {}
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear):
            tied = name == "lm_head" and config.tie_word_embeddings
            module.register_forward_pre_hook(
                lambda _, args, key=f"{'model.embed_tokens' if tied else name}.weight": expected.update({key: args[0]})
            )
    with torch.no_grad():
        whole(input_ids=ids)
    actual: dict[str, Any] = {}
    recipe = models.make_recipe(folder, limits={"max_length": 512})
    run_streamed(read_checkpoint(folder), recipe, ids, actual.__setitem__)
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact rounded by importance, whose inputs are not rounded."""
    weights = {"bits": 4, "method": "importance", "calibration": str(text), "inputs": "float"}
    recipe = Recipe.model_validate({**RECIPE, "model": {"path": str(tiny_checkpoint)}, "weights": weights})
    return models.build_shared(recipe, tmp_path_factory.mktemp("importance") / "artifact")


def test_an_artifact_is_validated_and_repeated_by_the_file_that_it_holds(
    artifact: Path, changed: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FILE in load_manifest(artifact).files
    recipe, repeated = changed(), changed(calibration=str(artifact / FILE))
    assert as_built(recipe, artifact) == repeated
    assert weighed(repeated) == weighed(recipe)
    plain = changed(method="rtn", calibration=None)
    assert as_built(plain, artifact) == plain
    # This works without the text.
    monkeypatch.setattr(importance, "_pieces", None)
    assert validate_artifact(artifact, length=60, batch=1).passed
    built: list[Recipe] = []
    monkeypatch.setattr(layers, "build", lambda recipe, *_, **__: built.append(recipe))
    with layers.first_layers(artifact, 1):
        assert built[0].weights == repeated.weights.model_copy(update={"inputs": "float"})


def test_products_of_the_text_are_nearer(changed: Change, tiny_checkpoint: Path, text: Path) -> None:
    weighted, plain = weighed(changed()), weighed(changed(method="rtn", calibration=None))
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([Tokenizer.from_folder(tiny_checkpoint).encode(text.read_text())[:400]])
    errors: list[tuple[float, float]] = []

    def note(name: str, weight: nn.Linear, x: torch.Tensor) -> None:
        of = [torch.from_numpy(dense_values(some[f"{name}.weight"])) - weight.weight for some in (weighted, plain)]
        errors.append((float((x @ of[0].T).square().mean()), float((x @ of[1].T).square().mean())))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda m, args, name=name: note(name, m, args[0]))
    with torch.no_grad():
        model(input_ids=ids)
    ratios = [one / other for one, other in errors]
    assert len(ratios) == 14
    # A random model's channels are nearly alike, unlike those of a trained one.
    assert np.mean(ratios) < 0.99


def test_importance_is_relative_and_leaves_nothing_out(changed: Change) -> None:
    sources = weighed(changed())
    assert len(sources) == 15
    for source in sources.values():
        values = np.frombuffer(source.importance, np.float32)
        assert values.shape == (source.shape[1],)
        assert values.min() >= LEAST
        assert 0.99 < values.mean() < 1.02


def test_a_calibration_that_cannot_be_is_refused(tmp_path: Path, changed: Change, tiny_checkpoint: Path) -> None:
    short, binary, other = tmp_path / "short.txt", tmp_path / "binary.txt", tmp_path / "other.safetensors"
    short.write_text("too few words")
    binary.write_bytes(b"\xff\xfe\x00")
    for file, message in [
        (None, "does not know the words of the package's text"),
        (short, "short.txt has 13 tokens, expected at least 256"),
        (binary, "binary.txt' cannot be read: it is no UTF-8"),
        (tmp_path / "none.txt", "none.txt' cannot be read: No such file"),
        (tmp_path / "none.safetensors", "none.safetensors' cannot be read"),
    ]:
        with pytest.raises(UsageError, match=message):
            weighed(changed(calibration=None if file is None else str(file)))
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = {key: np.frombuffer(source.importance, np.float32) for key, source in weighed(changed()).items()}
    for values, message in [
        (None, f"other.safetensors has nothing for tensor '{name}', expected float32 \\[32\\]"),
        (np.ones(64, np.float32), "has float32 \\[64\\] for tensor"),
        (np.ones(32, np.float64), "has float64 \\[32\\] for tensor"),
        (np.full(32, np.nan, np.float32), "infinite, NaN or negative"),
        (np.zeros(32, np.float32), "or all 0"),
    ]:
        save_file({key: x for key, x in {**whole, name: values}.items() if x is not None}, other)
        with pytest.raises(UsageError, match=message):
            weighed(changed(calibration=str(other)))
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(tiny_checkpoint / file, bare / file)
    recipe = changed(calibration=None)
    with pytest.raises(UsageError, match=r"reads a text, and .*bare has no tokenizer\.json"):
        weighed(recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(bare)})}))


def test_the_packages_text_is_prose_and_code(tmp_path: Path, changed: Change, tiny_checkpoint: Path) -> None:
    """The package's text is prose and code. A tokenizer of bytes cuts it into pieces."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({x: i for i, x in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))
    checkpoint = replace(read_checkpoint(tiny_checkpoint), path=tmp_path)
    pieces = importance._pieces(checkpoint, changed(calibration=None))
    assert [len(piece) for piece in pieces] == [256] * 8
    pieces_of_text = [inner.decode(piece) for piece in pieces]
    assert "Alice" in pieces_of_text[0]
    assert "def " in "".join(pieces_of_text[4:])


def test_a_weight_that_is_not_read_by_its_module_is_refused(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.up_proj.weight), self.down_proj.weight)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(UsageError, match="llama cannot be run a layer at a time") as error:
        weighed(changed())
    assert "weights.method=rtn" in str(error.value.fix)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"bits": None, "calibration": None}, "weights.method is importance, but weights.bits is null"),
        ({"method": "rtn"}, "weights.calibration is set, but weights.method is rtn"),
    ],
)
def test_settings_that_do_nothing_are_refused(changed: Change, weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(**weights)


def test_inputs_stay_unrounded_if_the_recipe_sets_it(artifact: Path) -> None:
    decoder = onnx.load(artifact / "decoder.onnx", load_external_data=False)
    functions = {function.overload for function in decoder.functions if function.name == "Linear"}
    nodes = [node for node in decoder.graph.node if node.op_type == "Linear"]
    assert {node.overload for node in nodes} == functions
    for node in nodes:
        assert [attribute.i for attribute in node.attribute if attribute.name == "float_input"] == [1]
    logits = [
        kvexport.load(artifact, float_input=float_input).lanes(1).prefill([np.arange(30)]).copy()
        for float_input in (False, True)
    ]
    np.testing.assert_array_equal(*logits)
