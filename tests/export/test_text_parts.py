"""The text parts of vision models: an artifact's logits equal those of the whole model for text tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers as hf

from kvexport.artifact.reading import load_manifest
from kvexport.engine.load import load
from kvexport.export.build import build
from kvexport.export.model.hf_model import on_meta
from tests.support import models

TEXT = {name: value for name, value in models.SIZES.items() if not name.endswith("token_id")}
TOKENS = {"image_token_id": 99, "video_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
               "deepstack_visual_indexes": [0, 1]}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
PIXTRAL = hf.PixtralVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
WRAPPERS: dict[str, Callable[[], Any]] = {
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": ROPE}, vision_config=QWEN_VISION, **TOKENS
    ),
    "gemma4_unified": lambda: hf.Gemma4UnifiedConfig(
        text_config={
            **TEXT,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
        vision_config={"hidden_size": 32},
        audio_config=None,
        image_token_id=99,
        video_token_id=98,
        audio_token_id=97,
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=hf.MistralConfig(**TEXT, head_dim=16), vision_config=PIXTRAL, image_token_index=99
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_logits_are_those_of_the_whole_model_and_no_encoder_is_written(name: str, tmp_path: Path) -> None:
    config = WRAPPERS[name]()
    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
    model.save_pretrained(tmp_path / "checkpoint")
    export = {"logits": "all", "prefill_chunk": 32}
    recipe = models.make_recipe(tmp_path / "checkpoint", export=export, limits={"max_length": 160})
    artifact = build(recipe, tmp_path / "artifact")
    ids = models.random_ids(0, 90, 60, vocabulary=90)
    with torch.no_grad():
        right = [model.eval()(input_ids=torch.from_numpy(x)[None]).logits[0].numpy() for x in ids]
    for actual, logits in zip(models.given_tokens_logits(load(artifact), ids, (50, 20)), right, strict=True):
        assert np.abs(actual - logits).max() <= 1e-5 * np.abs(logits).max()
    assert load_manifest(artifact).no_images
    graph = onnx.load(artifact / "decoder.onnx", load_external_data=False).graph
    assert not any("vis" in tensor.name for tensor in graph.initializer)
    written = sum(file.stat().st_size for file in artifact.rglob("*.weights"))
    assert written < 4 * sum(p.numel() for n, p in model.named_parameters() if "vis" not in n) + (1 << 16)


def test_a_model_without_weights_takes_no_memory_for_parameters() -> None:
    """Gemma's embedding has a buffer, its scale, beside a parameter with more numbers than any other."""
    model = on_meta(hf.Gemma3TextConfig(**models.SIZES, head_dim=16), torch.float32, 512)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert float(model.model.embed_tokens.embed_scale) == models.SIZES["hidden_size"] ** 0.5
