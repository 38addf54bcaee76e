"""Tests of decoder.onnx cut between its layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from kvexport.artifact.reading import load_manifest
from kvexport.engine.load import load
from kvexport.validate.cut import CutDecoder, layer_borders


def test_the_border_is_the_residual_stream() -> None:
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["x0"]),
        node("VoteAttention", ["x0", "past_key_values.0.key"], ["a0", "present.0.key"], domain="kvexport"),
        node("Add", ["a0", "x0"], ["m0"]),
        node("Mul", ["m0", "m0"], ["p0"]),
        node("Add", ["p0", "m0"], ["x1"]),
        node("Neg", ["x1"], ["n1"]),
        node("VoteAttention", ["n1", "past_key_values.1.key"], ["a1", "present.1.key"], domain="kvexport"),
        node("Add", ["a1", "x1"], ["x2"]),
        node("VoteAttention", ["x2", "past_key_values.2.key"], ["a2", "present.2.key"], domain="kvexport"),
        node("Add", ["a2", "x1"], ["logits"]),
    ]
    assert layer_borders(helper.make_graph(nodes[:8], "two", [], [])) == {1: "x1"}
    assert layer_borders(helper.make_graph(nodes, "three", [], [])) == {1: "x1"}


def test_a_cut_model_has_only_the_entries_of_its_layers(tiny_artifact: Path) -> None:
    manifest = load_manifest(tiny_artifact)
    engine = load(tiny_artifact)
    cut = CutDecoder(tiny_artifact / manifest.graphs.decoder, "float32", engine.model.open_decoder)
    assert set(cut.borders) == {1}
    lanes, tokens = 2, 5
    feed = {
        "input_ids": np.arange(lanes * tokens).reshape(lanes, tokens),
        "query_length": np.full((lanes, 1), tokens),
        "past_length": np.zeros((lanes, 1), np.int64),
        **{
            name: np.zeros(layer.shapes(lanes)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in engine.plan.state_names()
        },
    }
    hidden = {1: np.zeros((lanes, tokens, 32), np.float32)}
    _, reached = cut.infer(feed, hidden)
    names = [output.name for output in engine.model.decoder.get_outputs()]
    whole = dict(zip(names, engine.model.decoder.run(names, feed), strict=True))
    outputs, again = cut.infer(feed, reached)
    np.testing.assert_array_equal(again[1], reached[1])
    for name, array in whole.items():
        np.testing.assert_array_equal(outputs[name], array)
    other, _ = cut.infer(feed, hidden)
    np.testing.assert_array_equal(other["present.0.key"], whole["present.0.key"])
    assert np.abs(other["present.1.key"] - whole["present.1.key"]).max() > 0.01
    assert (
        not onnx.load(tiny_artifact / manifest.graphs.decoder, load_external_data=False)
        .graph.input[-1]
        .name.startswith("border")
    )
