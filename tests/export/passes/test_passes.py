"""Tests of how often each pass applies to whole decoders, so that a fusion that silently stops matching is noticed."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig, Qwen2Config

from kvexport.export.build import build, read_model
from kvexport.export.graph.tracer import trace_decoder
from kvexport.export.passes import DECODER_PASSES
from kvexport.export.passes.rewrite import run_passes
from tests.support import models

LAYERS = models.SIZES["num_hidden_layers"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * LAYERS}
# Per layer: products for queries, keys, values, output, gate, up, down. Per decoder: the last norm and the logits.
LLAMA = {
    "make_linear": 7 * LAYERS + 1, "add_gate": LAYERS, "add_residual": 2 * LAYERS, "split_output": 3 * LAYERS,
    "read_heads": LAYERS, "pick_last_rows": 1, "join_products": LAYERS, "add_norm": 2 * LAYERS + 1,
    "add_rotary": 2 * LAYERS,
}  # fmt: skip
# GELU instead of SiLU, and norms between the products and their residuals, so gate and up stay two products of one
# input. The norms scale in float32, so rows are cast before every product.
GEMMA_HALF = LLAMA | {
    "cast_norm_rows": 4 * LAYERS + 1,
    "add_gate": 0,
    "add_residual": 0,
    "join_products": 2 * LAYERS,
    "add_norm": 0,
    "recognize_rotary": 2 * LAYERS,
}


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LlamaConfig(**models.SIZES), "float32", LLAMA),
        (Qwen2Config(**models.SIZES), "float32", LLAMA | {"add_bias": 3 * LAYERS}),
        (Gemma2Config(**models.SIZES, **GEMMA), "float16", GEMMA_HALF),
    ],
    ids=["llama", "qwen2", "gemma2-half"],
)
def test_every_fusion_is_applied_at_all_its_places(
    config: Any, dtype: str, expected: dict[str, int], tmp_path: Path
) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", config)
    shape = read_model(models.make_recipe(checkpoint, dtype=dtype, limits={"max_length": 512}))
    applied = run_passes(trace_decoder(shape.model, shape.mode, shape.plan, last_logits=True), DECODER_PASSES)
    whole = {"sort_nodes", "remove_unused"}
    assert {name: n for name, n in applied.items() if name not in whole and (n or name in expected)} == expected


def test_a_build_notes_the_results_of_its_passes(tmp_path: Path) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvexport.export.passes")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        checkpoint = models.save_checkpoint(tmp_path / "checkpoint", LlamaConfig(**models.SIZES))
        build(models.make_recipe(checkpoint, limits={"max_length": 64}), tmp_path / "artifact")
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert f"add_gate: applied {LAYERS} times" in lines
    assert len(lines) == len(DECODER_PASSES)
