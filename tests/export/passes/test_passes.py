"""Tests of how often each pass applies to whole decoders, so that a fusion that silently stops matching is noticed."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig, Qwen2Config

from kvexport.export.build import build, read_model
from kvexport.export.graph.tracer import trace_decoder
from kvexport.export.passes import DECODER_PASSES
from kvexport.export.passes.report import PassReport, run_passes
from tests.support import models

LAYERS = models.SIZES["num_hidden_layers"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * LAYERS}
# Per layer: products for queries, keys, values, output, gate, up, down. Per decoder: the last norm and the logits.
LLAMA = {
    "product": 7 * LAYERS + 1,
    "gate": LAYERS,
    "residual": 2 * LAYERS,
    "output heads": 3 * LAYERS,
    "input heads": LAYERS,
    "last rows": 1,
    "shared input": LAYERS,
    "norm": 2 * LAYERS + 1,
    "rotary embedding": 2 * LAYERS,
}
# GELU instead of SiLU, and norms between the products and their residuals, so gate and up stay two products of one
# input. The norms scale in float32, so rows are cast before every product.
GEMMA_HALF = LLAMA | {
    "norm types": 4 * LAYERS + 1,
    "gate": 0,
    "residual": 0,
    "shared input": 2 * LAYERS,
    "norm": 0,
    "written-out rotary embedding": 2 * LAYERS,
}


def reports_of(folder: Path, config: Any, dtype: str) -> dict[str, PassReport]:
    checkpoint = models.save_checkpoint(folder / "checkpoint", config)
    shape = read_model(models.make_recipe(checkpoint, dtype=dtype, limits={"max_length": 512}))
    traced = trace_decoder(shape.model, shape.mode, shape.plan, last_logits=True)
    reports: dict[str, PassReport] = {}
    for report in run_passes(traced, DECODER_PASSES):
        reports[report.name] = report
    return reports


@pytest.mark.parametrize(
    ("config", "dtype", "expected", "reasons"),
    [
        (LlamaConfig(**models.SIZES), "float32", LLAMA, {}),
        (Qwen2Config(**models.SIZES), "float32", LLAMA | {"bias": 3 * LAYERS}, {}),
        (
            Gemma2Config(**models.SIZES, **GEMMA),
            "float16",
            GEMMA_HALF,
            {"gate": (LAYERS, "its activation is Gelu, not SiLU"), "norm": (2 * LAYERS + 1, "cast to the weights")},
        ),
    ],
    ids=["llama", "qwen2", "gemma2-half"],
)
def test_every_fusion_is_applied_at_all_its_places(
    config: Any, dtype: str, expected: dict[str, int], reasons: dict[str, tuple[int, str]], tmp_path: Path
) -> None:
    reports = reports_of(tmp_path, config, dtype)
    whole = {"order", "unused nodes"}
    assert {n: r.applied for n, r in reports.items() if n not in whole and (r.applied or n in expected)} == expected
    assert {name: len(report.refused) for name, report in reports.items() if report.refused} == {
        name: times for name, (times, _) in reasons.items()
    }
    for name, (_, words) in reasons.items():
        assert all(node and words in why for node, why in reports[name].refused), str(reports[name])


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
    assert f"gate: applied {LAYERS} times, refused 0 times" in lines
    assert len(lines) == len(DECODER_PASSES)
