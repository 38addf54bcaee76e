"""The pass that picks the last token's row as early as shapes prove that no other node reads the other rows."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from transformers import Gemma2Config, LlamaConfig, Qwen2Config

from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime.operators import VARIABLE
from kvexport.engine.load import load
from kvexport.export.build import build
from kvexport.export.passes.last_rows import pick_last_rows
from kvexport.export.passes.rewrite import remove_unused, run_passes
from tests.support import models
from tests.support.tensorrt_walk import artifact_problems

INPUTS = {
    "x": "float[B,T,8]", "r": "float[B,T,8]", "other": "float[B,S,8]", "heads": "float[B,2,T,4]",
    "whole": "float[B,T,16]", "w": "float[8,8]", "v": "float[8,8]", "b": "float[8]", "row_of_ones": "float[1,8]",
    "sequence": "float[B,1,8]", "token": "float[T,1]", "tokens": "float[1,T,1]", "picked": "int64[B,1,1]",
    "two": "int64[B,2,1]", "elements": "int64[B,1,8]",
}  # fmt: skip
KNOWN = {"h": "B,2,T,4", "left": "B,T,8", "right": "B,T,8", "e": "B,1,8", "y": "B,1,8", "u": "8,8"} | dict.fromkeys(
    "mnpqs", "B,T,8"
)
EXPAND = ("shape = Constant <value_ints = [1, 1, 8]> ()", "e = Expand (picked, shape)")
TAIL = (*EXPAND, "y = GatherElements <axis = 1> (m, e)", "z = Relu (y)")


def model_of(*lines: str) -> onnx.ModelProto:
    """Return a graph with the inputs INPUTS and the output z, and the output k if a line computes k.

    Computed values whose names are in KNOWN have these shapes. k and z do not.
    """
    text = "\n".join(lines)
    kept = ", float[B,T,8] k" if "k =" in text else ""
    kinds = {name: "int64" if name == "e" else "float" for name in KNOWN}
    known = ", ".join(
        f"{kinds[name]}[{shape}] {name}" for name, shape in KNOWN.items() if f"{name} =" in text or f"{name}, " in text
    )
    inputs = ", ".join(f"{kind} {name}" for name, kind in INPUTS.items() if name in text)
    opening = '<ir_version: 11, opset_import: ["": 23, "kvexport": 1, "another": 1]>'
    return onnx.parser.parse_model(f"{opening}\ng ({inputs}) => (float[B,1,8] z{kept}) <{known}>\n{{\n{text}\n}}")


def moved(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return the model after the pass, and the inputs of its picks."""
    changed = ir.from_proto(model)
    run_passes(changed, [pick_last_rows, remove_unused])
    proto = ir.to_proto(changed)
    onnx.checker.check_model(proto)
    onnx.shape_inference.infer_shapes(proto, strict_mode=True)  # refuses shapes that contradict the nodes
    return proto, sorted(
        node.input[0] for node in proto.graph.node if node.op_type.startswith("Gather") and node.op_type != "Gather"
    )


def outcome(model: onnx.ModelProto) -> list[Any]:
    """Return the outputs for three sequences of five tokens, with the first, the last and a middle one picked."""
    rng = np.random.default_rng(0)
    sizes = {"B": 3, "T": 5, "S": 5}
    feeds = {}
    for value in model.graph.input:
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    for name in {"picked", "two", "elements"} & feeds.keys():
        feeds[name] = np.broadcast_to(np.array([0, 4, 2])[:, None, None], feeds[name].shape).astype(np.int64)
    return list(ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds))


@pytest.mark.parametrize(
    ("lines", "picks"),
    [
        (["m = MatMul (x, w)"], ["x"]),
        (["u = Transpose (w)", "m = MatMul (x, u)"], ["x"]),
        (["t = Transpose (w)", "m = MatMul (x, t)"], ["m"]),  # the shape of t is unknown
        (["p = MatMul (x, w)", "q = Sigmoid (p)", "n = Mul (p, q)", "m = MatMul (n, v)"], ["x"]),
        (["p = MatMul (x, w)", "m = Add (r, p)"], ["r", "x"]),
        (["p = MatMul (x, w)", "m = Add (p, x)"], ["x"]),
        (["p = MatMul (x, w)", "m = Mul (p, p)"], ["x"]),
        # Other nodes read the value too.
        (["p = MatMul (x, w)", "m = MatMul (p, v)", "k = Relu (p)"], ["p"]),
        (["k = MatMul (x, w)", "p = Relu (k)", "m = MatMul (p, v)"], ["k"]),
        (
            ["n = Relu (x)", "p = MatMul (n, w)", "q = Softmax <axis = 1> (n)", "s = MatMul (q, v)", "m = Add (p, s)"],
            ["n", "q"],
        ),
        # Factors and terms that are equal for all rows, and some that are not, or may not be.
        (["p = MatMul (x, w)", "m = Add (p, b)"], ["x"]),
        (["p = MatMul (x, w)", "m = Mul (row_of_ones, p)"], ["x"]),
        (["p = MatMul (x, w)", "m = Sub (sequence, p)"], ["x"]),
        (["p = MatMul (x, w)", "m = Mul (p, token)"], ["m"]),
        (["p = MatMul (x, w)", "m = Mul (tokens, p)"], ["m"]),
        (["p = MatMul (x, w)", "m = Add (p, other)"], ["m"]),
        (["p = MatMul (x, w)", "one = Constant <value_float = 1.0> ()", "m = Mul (p, one)"], ["m"]),
        # Along the last axis, and along others.
        (
            ["n = RMSNormalization <axis = -1> (x, b)", "p = MatMul (n, w)",
             "m = LayerNormalization <axis = 2> (p, b, b)"],
            ["x"],
        ),
        (["n = LayerNormalization <axis = 1> (x, b)", "m = MatMul (n, w)"], ["n"]),
        (["n = Softmax <axis = 1> (x)", "m = MatMul (n, w)"], ["n"]),
        (
            ["left, right = Split <axis = -1, num_outputs = 2> (whole)", "p = Mul (left, right)", "m = MatMul (p, w)"],
            ["whole"],
        ),
        (["n = Transpose <perm = [0, 1, 2]> (x)", "m = MatMul (n, w)"], ["n"]),
        (["unknown = Relu (x)", "m = MatMul (unknown, w)"], ["m"]),
        # The pick saves nothing.
        (["m = Add (x, r)"], ["m"]),
    ],
)  # fmt: skip
def test_the_pick_moves_up_through_operators_of_single_rows(lines: list[str], picks: list[str]) -> None:
    before = model_of(*lines, *TAIL)
    after, actual = moved(before)
    assert actual == picks
    if picks == ["m"]:
        assert [node.op_type for node in after.graph.node] == [node.op_type for node in before.graph.node]
    else:
        assert not {"y", "e", "shape"} & {name for node in after.graph.node for name in node.output}
        assert "GatherND" not in {node.op_type for node in after.graph.node}, "no CUDA graph can replay it"
        shapes = {
            v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in after.graph.value_info
        }
        assert shapes["m"] == ["B", 1, 8]
    for got, expected in zip(outcome(after), outcome(before), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("line", "picks"),
    [
        ("m = kvexport.Linear (x, w)", ["x"]),
        ("m = kvexport.Linear <residual = 1, norm = 1, bias = [1]> (x, b, w, b, r)", ["r", "x"]),
        ("m = kvexport.Linear <input_heads = 2, residual = 1> (heads, w, r)", ["heads", "r"]),
        ("m = kvexport.Linear <input_heads = 3> (heads, w)", ["m"]),
        ("m = kvexport.Linear <input_heads = 0> (heads, w)", ["m"]),
        ("m = kvexport.Linear <residual = 1> (x, w, sequence)", ["m"]),
        ("m = kvexport.Linear (x, w, r)", ["m"]),  # rows of unknown purpose
        ("m, n = kvexport.Linear (x, w, v)", ["m"]),
        ("m = another.Linear (x, w)", ["m"]),
        ("p = kvexport.Linear (x, w)\nm = another.Relu (p)", ["m"]),
    ],
)
def test_a_linear_reads_rows_of_its_data_and_its_residual(line: str, picks: list[str]) -> None:
    after, picked = moved(model_of(line, *TAIL))
    assert picked == picks
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in after.graph.value_info
    }
    if "heads" in picks:
        assert shapes["heads.row"] == ["B", 2, 1, 4] and shapes["r.row"] == ["B", 1, 8]


def test_the_heads_of_a_linear_are_left_alone() -> None:
    lines = ["h = kvexport.Linear <output_heads = 2> (x, w)", "m = kvexport.Linear <input_heads = 2> (h, v)"]
    assert moved(model_of(*lines, *TAIL))[1] == ["h"]


def test_rows_of_all_heads_are_those_of_their_sequence() -> None:
    tail = (*EXPAND, "y = GatherElements <axis = 1> (m, e)", "z = Relu (y)")
    after, _ = moved(model_of("m = kvexport.Linear <input_heads = 2> (heads, w)", *tail))
    functions = '<domain: "kvexport", opset_import: ["": 23]>\nLinear (a, w) => (c)\n{\n'
    functions += "t = Transpose <perm = [0, 2, 1, 3]> (a)\n i = Constant <value_ints = [0, 0, -1]> ()\n"
    functions += " s = Reshape (t, i)\n c = MatMul (s, w)\n}"
    before = model_of("m = kvexport.Linear <input_heads = 2> (heads, w)", *tail)
    for model in (before, after):
        model.functions.append(onnx.parser.parse_function(functions))
    np.testing.assert_allclose(outcome(after)[0], outcome(before)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "tail",
    [
        ["y = GatherElements <axis = 1> (m, elements)", "z = Relu (y)"],
        [EXPAND[0], "e = Expand (two, shape)", *TAIL[2:]],
        [*EXPAND, "y = GatherElements <axis = 2> (m, e)", "z = Relu (y)"],
        ["e = Add (picked, elements)", *TAIL[2:]],
        [*EXPAND, "z = GatherElements <axis = 1> (m, e)"],
    ],
    ids=["elements", "two rows", "elements of rows", "an index of its own for every element", "an output"],
)
def test_nodes_that_pick_several_rows_stay(tail: list[str]) -> None:
    model = model_of("m = MatMul (x, w)", *tail)
    changed = ir.from_proto(model)
    assert pick_last_rows(changed) == 0
    assert [node.op_type for node in ir.to_proto(changed).graph.node] == [node.op_type for node in model.graph.node]


# Artifacts.

CHUNK = 16
PROMPTS = (5, 16, 23, 41)  # within a chunk, a whole chunk, and more, with last chunks of different lengths
STEPS = (6, 2, 6, 4)
SEQUENCES = models.random_ids(3, *(n + steps for n, steps in zip(PROMPTS, STEPS, strict=True)))
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "gemma2": Gemma2Config}
# Attention has the same form as the others', so that they share its function.
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": None,
    "layer_types": ["full_attention"] * 2,
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns a model's artifact and Hugging Face's logits of all SEQUENCES, made once per model."""
    folder = tmp_path_factory.mktemp("rows")

    @cache
    def get(name: str) -> tuple[Path, list[models.Logits]]:
        checkpoint = models.save_checkpoint(
            folder / name, CONFIGS[name](**models.SIZES, **(GEMMA if name == "gemma2" else {}))
        )
        limits = {"max_length": 128, "max_batch": len(PROMPTS)}
        recipe = models.make_recipe(
            checkpoint, cache={"method": "full"}, export={"prefill_chunk": CHUNK}, limits=limits
        )
        return build(recipe, folder / f"{name}-artifact"), models.hugging_face_logits(checkpoint, SEQUENCES)

    return get


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_layer_has_one_row_from_its_attention_on(name: str, workshop: Any) -> None:
    path, _ = workshop(name)
    assert not artifact_problems(path)  # TensorRT's parser accepts all nodes
    graph = onnx.load(path / load_manifest(path, verify=False).graphs.decoder, load_external_data=False).graph
    nodes = list(graph.node)
    infos = [*graph.value_info, *graph.output]
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in infos}
    attention = [i for i, node in enumerate(nodes) if node.op_type == "VoteAttention"]
    after = [
        node
        for node in nodes[attention[-1] + 1 :]
        if node.op_type in ("Linear", "RMSNormalization", "Add", "Mul", "Gelu")
    ]
    rows = [shapes[value] for node in after for value in node.output if len(shapes.get(value, [])) == 3]
    assert len(rows) >= 4 and {shape[1] for shape in rows} == {1}
    between = [shapes[node.output[0]] for node in nodes[attention[0] : attention[-1]] if node.op_type == "Linear"]
    assert between and 1 not in {shape[1] for shape in between}  # the layers before need all their rows
    # The index, shared by all heads, and picks of the residual stream and of the attention's output.
    index = ["Clip", "Expand", "Expand", "GatherElements", "GatherElements", "Sub", "Unsqueeze", "Unsqueeze"]
    names = [node.op_type for node in nodes[attention[-1] + 1 :]]
    assert sorted(x for x in names if x in {*index, "Gather", "GatherND", "Concat"}) == index


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("operators", ["", "off"], ids=["kernels", "functions"])
def test_logits_are_those_of_the_last_token(
    name: str, operators: str, workshop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, operators)
    path, expected = workshop(name)
    lanes = load(path).lanes(len(PROMPTS))
    first = lanes.prefill([s[:n] for s, n in zip(SEQUENCES, PROMPTS, strict=True)])
    np.testing.assert_allclose(first, [rows[n - 1] for rows, n in zip(expected, PROMPTS, strict=True)], atol=1e-4)
    for step in range(max(STEPS)):
        # Lanes whose sequence has ended are idle.
        continuations = [s[n + step : n + step + 1] for s, n in zip(SEQUENCES, PROMPTS, strict=True)]
        logits = lanes.append(continuations)
        for lane, rows in enumerate(expected):
            if len(continuations[lane]):
                np.testing.assert_allclose(logits[lane, 0], rows[PROMPTS[lane] + step], atol=1e-4)
