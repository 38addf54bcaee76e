"""Models that read images: an artifact's logits with images are those of transformers, or the reason is in it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.vision import COMPARED, planned_encoder_bytes
from kvexport.images.rows import PromptImages, call_images, chunk_end, places_of
from kvexport.recipe.fields import Recipe
from tests.support import models, vision
from tests.support.vision import picture, png

EXPORT = {"logits": "all", "prefill_chunk": 16}  # an image is longer than a chunk


def logits_with_images(
    engine: Engine, prompts: Sequence[tuple[models.Ids, PromptImages | None]]
) -> list[models.Logits]:
    """Return the logits of every token of prompts that are read together, chunk by chunk."""
    lanes, chunk = engine.lanes(len(prompts)), engine.manifest.limits.prefill_chunk
    rows: list[list[models.Logits]] = [[] for _ in prompts]
    placed = [(ids, places_of(ids, images, engine.manifest.images), images) for ids, images in prompts]
    ends = [0] * len(prompts)
    while any(end < len(ids) for end, (ids, *_) in zip(ends, placed, strict=True)):
        parts = [slice(end, chunk_end(places, images, end, chunk))
                 for end, (_, places, images) in zip(ends, placed, strict=True)]  # fmt: skip
        call = call_images([(places[part], images) for part, (_, places, images) in zip(parts, placed, strict=True)])
        tokens = [ids[part] for part, (ids, *_) in zip(parts, placed, strict=True)]
        logits = lanes.append(tokens, prefill=True, images=call)
        for own, row, some in zip(rows, logits, tokens, strict=True):
            own.append(row[: len(some)].copy())
        ends = [part.stop for part in parts]
    return [np.concatenate(one) for one in rows]


def test_every_compared_family_is_tested() -> None:
    assert set(vision.KINDS) == COMPARED


@pytest.mark.parametrize("kind", vision.KINDS)
def test_logits_and_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    checkpoint = vision.save_checkpoint(kind, tmp_path / "checkpoint")
    artifact = build(models.make_recipe(checkpoint, export=EXPORT, limits={"max_length": 400}), tmp_path / "artifact")
    engine, right = load(artifact), vision.Transformers(checkpoint)
    marker, pictures = engine.manifest.images.marker, [picture(37, 61), picture(90, 33), picture(28, 28)]
    texts = [f"a{marker}bc{marker} d", f"{marker}efgh", "without images"]
    images = [pictures[:2], pictures[2:], []]
    prompts = [engine.encode_with_images(text, some) if some else (engine.encode(text), None)
               for text, some in zip(texts, images, strict=True)]  # fmt: skip
    inputs = [right.inputs(text, some) for text, some in zip(texts, images, strict=True)]
    for (ids, _), (expected, _) in zip(prompts, inputs, strict=True):
        assert np.array_equal(ids, expected)
    for actual, pair in zip(logits_with_images(engine, prompts), inputs, strict=True):
        logits = right.logits(*pair)
        assert np.abs(actual - logits).max() <= 1e-4 * np.abs(logits).max()
    answers = engine.generate(texts, images=images, max_new_tokens=5)
    for answer, (ids, pixels) in zip(answers, inputs, strict=True):
        for token in answer.token_ids:
            assert token == right.logits(ids, pixels)[-1].argmax()
            ids = np.append(ids, token)


def _of(kind: str) -> Callable[[Path], Path]:
    return lambda folder: vision.save_checkpoint(kind, folder)


def _with(kind: str, name: str, **changes: Any) -> Callable[[Path], Path]:
    """Return a function that saves a checkpoint one of whose JSON files is changed."""

    def save(folder: Path) -> Path:
        file = vision.save_checkpoint(kind, folder) / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return folder

    return save


def test_images_whose_tokens_see_later_ones_are_refused_on_gpus(tmp_path: Path) -> None:
    checkpoint = vision.save_checkpoint("gemma3", tmp_path / "checkpoint")
    for device, reads in (("cpu", True), ("cuda", False)):
        plain = models.make_recipe(checkpoint, export=EXPORT).model_dump()
        recipe = Recipe.model_validate({**plain, "backend": {"name": "onnxruntime", "device": device}})
        assert (planned_encoder_bytes(read_model(recipe), recipe) > 0) == reads


@pytest.mark.parametrize(
    ("save", "settings", "reason"),
    [
        (_of("llava"), {"export": {"images": False}}, "the recipe says export.images: false"),
        (_of("qwen2_vl"), {"cache": {"method": "asymkv"}}, "cache.method: asymkv rotates keys by their index"),
        (_of("qwen2_vl"), {"cache": {"positions": "cache"}}, "cache.positions: cache or cache.method"),
        (_of("gemma3"), {"export": {"prefill_chunk": 15}}, "--set export.prefill_chunk=16 reads images"),
        (_with("llava", "preprocessor_config.json", image_processor_type="None"), {}, "read its image processor"),
        (_with("llava", "preprocessor_config.json", do_normalize=False), {}, "a way that kvexport does not know"),
        (_with("llava", "processor_config.json", patch_size=4), {}, "its image encoder cannot be traced"),
        (_with("internvl", "processor_config.json", image_seq_length=10**9), {}, "hold the number 1e+09"),
        (_with("internvl", "preprocessor_config.json", size={"height": "x", "width": []}), {}, "cannot read its image"),
    ],
    ids=["recipe", "method", "positions", "chunk", "processor", "pixels", "tokens", "number", "type"],
)
def test_a_model_whose_images_are_not_built_says_why(
    save: Callable[[Path], Path], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path / "checkpoint")
    recipe = models.make_recipe(checkpoint, **settings, limits={"max_length": 64})
    artifact = build(recipe, tmp_path / "artifact")
    engine = load(artifact)
    assert reason in engine.manifest.no_images and not (artifact / "vision.onnx").exists()
    with pytest.raises(UsageError, match=r"reads no images"):
        engine.generate("a", images=[png(picture(9, 9))], max_new_tokens=1)
    assert engine.generate([1, 2], max_new_tokens=1)[0].token_ids
