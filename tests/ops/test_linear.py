"""The kernel of Linear, its function and PyTorch agree, and a malformed Linear is refused."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper
from transformers import LlamaConfig, Qwen2Config

from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime.operators import VARIABLE, library
from kvexport.engine.load import load
from kvexport.export.build import build
from kvexport.ops.linear import Form, linear_function
from tests.support import models

TYPES = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}
FORMS = [
    Form(), Form(bias=(1,)), Form(gate=1), Form(residual=1), Form(output_heads=(2,), bias=(1,)),
    Form(output_heads=(1,)), Form(input_heads=2, residual=1),
    Form(input_heads=3, output_heads=(2,), bias=(1,), gate=1, residual=1), Form(norm=1, epsilon=1e-5, gate=1),
    Form(output_heads=(0, 0), bias=(0, 1), rotated=(0, 0)),
    Form(norm=1, epsilon=1e-6, output_heads=(2, 1, 0), bias=(1, 0, 1), rotated=(1, 1, 0)),
    Form(output_heads=(2, 2), bias=(0, 0), rotated=(0, 1)), Form(adapted=(1,)),
    Form(input_heads=2, bias=(1,), gate=1, residual=1, adapted=(1, 1)), Form(gate=1, adapted=(0, 1)),
    Form(norm=1, epsilon=1e-6, output_heads=(2, 1, 0), bias=(1, 0, 1), rotated=(1, 1, 0), adapted=(1, 0, 1)),
]  # fmt: skip
RANKS = {"input": 3, "norm": 1, "bias": 1, "residual": 3, "cosine": 3, "sine": 3, "adapter_rows": 3}  # all others: 2
ADAPTER_ROWS = 13


def model_of(form: Form, dtype: str, shape: list[Any], weight: list[Any], function: bool) -> onnx.ModelProto:
    kind = TYPES[dtype]
    value = helper.make_tensor_value_info
    shapes: dict[str, list[Any]] = {name: [None] * RANKS.get(name.rstrip("012"), 2) for name in form.inputs}
    shapes |= {"input": shape, "weight0": weight}
    outputs = [f"output{i}" for i in range(form.count)]
    node = helper.make_node(
        form.op_type, list(shapes), outputs, domain="kvexport", overload=form.overload, **form.attributes
    )
    inputs = [value(name, kind, dims) for name, dims in shapes.items()]
    graph = helper.make_graph([node], "g", inputs, [value(name, kind, None) for name in outputs])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    functions = [linear_function(form)] if function else []
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11)


def session(model: onnx.ModelProto, native: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    if native:
        options.register_custom_ops_library(str(library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def needs_library() -> None:
    if library() is None:
        pytest.skip("not reached: the native operators are not built (make native)")


def meaning(form: Form, input: torch.Tensor, **terms: torch.Tensor) -> list[torch.Tensor]:
    rows = input.transpose(1, 2).flatten(2) if form.input_heads else input
    if form.norm:
        rows = torch.nn.functional.rms_norm(rows, rows.shape[-1:], terms["norm"], form.epsilon)
    outputs = []

    def change(i: int) -> torch.Tensor | int:
        if not form.adapter_inputs(i):
            return 0
        return (rows @ terms[f"adapter_first{i}"].T * terms["adapter_rows"]) @ terms[f"adapter_second{i}"]

    for i, (heads, rotated) in enumerate(zip(form.output_heads, form.rotated, strict=True)):
        x = torch.nn.functional.linear(rows, terms[f"weight{i}"], terms.get(f"bias{i}")) + change(i)
        if form.gate:
            x = x * torch.nn.functional.silu(torch.nn.functional.linear(rows, terms["gate"]) + change(form.count))
        if form.residual:
            x = x + terms["residual"]
        if heads:
            x = x.view(*x.shape[:2], heads, -1).transpose(1, 2)
        if rotated:
            (a, b), cosine, sine = x.chunk(2, -1), terms["cosine"][:, None], terms["sine"][:, None]
            x = torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
        outputs.append(x)
    return outputs


# (batch, tokens, inputs, outputs): fewer rows than a small tile, as many and more, enough for packed blocks and for two
# panels of them; sizes that fill no vector, and sizes with many tasks. Inputs are multiples of 6 and outputs of 2, for
# heads.
SIZES = [
    (1, 1, 66, 48), (1, 1, 6, 2), (1, 3, 30, 8), (2, 2, 258, 130), (3, 11, 96, 516), (1, 48, 546, 66),
    (2, 300, 1002, 70),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.overload or "plain")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "function"])
def test_the_function_equals_pytorch(form: Form, dtype: str, native: bool) -> None:
    if native:
        needs_library()
    rng = np.random.default_rng(0)
    run = session(model_of(form, dtype, [None] * (4 if form.input_heads else 3), [None, None], not native), native)
    for batch, tokens, inputs, outputs in SIZES:
        planes = max(1, outputs // 4)  # planes of a head that is rotated
        split = [batch, form.input_heads, tokens, inputs // max(1, form.input_heads)]
        shapes = {
            "input": split if form.input_heads else [batch, tokens, inputs],
            "norm": [inputs],
            "gate": [outputs, inputs],
        }
        shapes |= {
            "residual": [batch, tokens, outputs],
            "cosine": [batch, tokens, planes],
            "sine": [batch, tokens, planes],
        }
        # Products of one input have different outputs. All rotated heads have one size.
        sizes = [
            2 * planes * heads if any(form.rotated) and heads else outputs + 6 * i
            for i, heads in enumerate(form.output_heads)
        ]
        shapes |= {f"weight{i}": [size, inputs] for i, size in enumerate(sizes)} | {
            f"bias{i}": [size] for i, size in enumerate(sizes)
        }
        for i, size in enumerate([*sizes, outputs][: form.weights]):
            shapes |= {f"adapter_first{i}": [ADAPTER_ROWS, inputs], f"adapter_second{i}": [ADAPTER_ROWS, size]}
        shapes["adapter_rows"] = [batch, 1, ADAPTER_ROWS]
        feeds = {name: rng.standard_normal(shapes[name]).astype(dtype) for name in (i.name for i in run.get_inputs())}
        for name in feeds:
            if name.startswith(("weight", "gate", "adapter_first")):
                feeds[name] /= np.sqrt(inputs).astype(dtype)
        if form.adapted:  # the last sequence has the first adapter, the one before it the second, and others have none
            feeds["adapter_rows"][:] = 0
            feeds["adapter_rows"][-1, :, 1:9], feeds["adapter_rows"][-2:-1, :, 9:] = 1, 1
        expected = meaning(form, **{name: torch.from_numpy(x).double() for name, x in feeds.items()})
        for actual, right in zip(run.run(None, feeds), expected, strict=True):
            assert actual.shape == right.shape and actual.dtype == np.dtype(dtype)
            error = np.abs(actual.astype(np.float64) - right.numpy()).max() / np.abs(right.numpy()).max()
            assert error < (4e-3 if dtype == "float16" else 2e-6), (batch, tokens, inputs, outputs)


def test_no_rows_give_no_rows() -> None:
    needs_library()
    run = session(model_of(Form(), "float32", ["T", 8], [4, 8], False), True)
    assert run.run(None, {"input": np.zeros((0, 8), np.float32), "weight0": np.zeros((4, 8), np.float32)})[0].shape == (
        0,
        4,
    )


@pytest.mark.parametrize(("form", "shape", "weight", "problem"), [
    (Form(), ["T", 8], [4, 9], r"Linear: input \[\?, 8\] does not fit a weight \[4, 9\]"),
    (Form(input_heads=2), ["B", 2, "T", 8], [4, 8], r"\[\?, 2, \?, 8\] does not fit a weight \[4, 8\] with 2"),
    (Form(input_heads=2), ["B", 3, "T", 8], [4, 16], "does not fit"),
    (Form(output_heads=(3,)), ["B", "T", 8], [4, 8], "with 0 input heads and 3 output heads"),
    (Form(output_heads=(2,)), ["T", 8], [4, 8], "does not fit"),
])  # fmt: skip
def test_mismatched_sizes_are_refused_when_the_session_is_created(
    form: Form, shape: Any, weight: Any, problem: str
) -> None:
    needs_library()
    with pytest.raises(Exception, match=problem):
        session(model_of(form, "float32", shape, weight, False), True)


def test_tensors_that_do_not_fit_are_refused_by_the_run() -> None:
    needs_library()
    run = session(model_of(Form(gate=1, residual=1), "float32", ["B", "T", "K"], ["N", "M"], False), True)
    shapes = {"input": (1, 2, 8), "weight0": (4, 8), "gate": (4, 8), "residual": (1, 2, 4)}
    good = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    run.run(None, good)
    for name, shape in {"weight0": (4, 9), "gate": (5, 8), "residual": (2, 1, 4)}.items():
        with pytest.raises(Exception, match="does not fit a weight" if name == "weight0" else f"{name} is"):
            run.run(None, good | {name: np.zeros(shape, np.float32)})


def test_products_of_one_input_that_do_not_fit_are_refused_by_the_run() -> None:
    needs_library()
    form = Form(norm=1, epsilon=1e-5, output_heads=(2, 1), bias=(0, 1), rotated=(1, 0))
    run = session(model_of(form, "float32", ["B", "T", "K"], ["N", "M"], False), True)
    shapes: dict[str, tuple[int, ...]] = {
        "input": (1, 2, 6),
        "norm": (6,),
        "weight0": (8, 6),
        "weight1": (4, 6),
        "bias1": (4,),
    }
    good = {
        name: np.zeros(shape, np.float32) for name, shape in (shapes | {"cosine": (1, 2, 2), "sine": (1, 2, 2)}).items()
    }
    run.run(None, good)
    wrong = {"norm": (5,), "weight0": (9, 6), "weight1": (4, 7), "bias1": (5,), "sine": (1, 2, 1)}
    problems = {"weight0": "does not fit", "weight1": "does not fit"}
    for name, shape in wrong.items():
        with pytest.raises(Exception, match=problems.get(name, f"{name.rstrip('1')} is")):
            run.run(None, good | {name: np.zeros(shape, np.float32)})
    with pytest.raises(Exception, match="cosine and sine are not of half a head's size"):
        run.run(None, good | {"cosine": np.zeros((1, 2, 3), np.float32), "sine": np.zeros((1, 2, 3), np.float32)})


def test_adapters_that_do_not_fit_are_refused_by_the_run() -> None:
    needs_library()
    run = session(model_of(Form(gate=1, adapted=(1, 1)), "float32", ["B", "T", "K"], ["N", "M"], False), True)
    shapes: dict[str, tuple[int, ...]] = {"input": (2, 3, 8), "weight0": (4, 8), "gate": (4, 8)}
    shapes |= {"adapter_rows": (2, 1, 5)}
    shapes |= {f"adapter_first{i}": (5, 8) for i in (0, 1)} | {f"adapter_second{i}": (5, 4) for i in (0, 1)}
    good = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    run.run(None, good)
    for name, shape, problem in (
        ("adapter_rows", (1, 1, 5), "adapter_rows"),
        ("adapter_first0", (4, 8), "first"),
        ("adapter_second0", (5, 8), "second"),
        ("adapter_first1", (5, 4), "first"),
        ("adapter_second1", (4, 4), "second"),
    ):
        with pytest.raises(Exception, match=f"AdaptedLinear: {problem} is"):
            run.run(None, good | {name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("adapted", "problem"),
    [
        ([1, 1], "adapted has an entry for each of 1 weights, not 2"),
        ([0], "adapted is 0 or 1, and 1 of at least one weight"),
        ([3], "adapted is 0 or 1, and 1 of at least one weight"),
        (None, "the attribute adapted should be a list of integers"),
    ],
)
def test_a_node_that_contradicts_its_adapters_is_refused(adapted: list[int] | None, problem: str) -> None:
    needs_library()
    model = model_of(Form(adapted=(1,)), "float32", ["B", "T", 8], [4, 8], False)
    node = model.graph.node[0]
    kept = [a for a in node.attribute if a.name != "adapted"]
    del node.attribute[:]
    node.attribute.extend([*kept, *([helper.make_attribute("adapted", adapted)] if adapted else [])])
    with pytest.raises(Exception, match=problem):
        session(model, True)


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({"output_heads": [0, 0]}, "an entry for each of one to three products, not 2, 1 and 1"),
        ({"output_heads": [0] * 4, "bias": [0] * 4, "rotated": [0] * 4}, "one to three products, not 4"),
        ({"output_heads": [0, 0], "bias": [0, 0], "rotated": [0, 0], "gate": 1}, "goes with one product, not several"),
        ({"output_heads": [-1]}, "output_heads is negative"),
        ({"rotated": [1]}, "an output without heads is rotated"),
        ({"rotated": [1], "output_heads": [2]}, "there are 2 inputs, not 4"),
        ({"bias": [2]}, "bias and rotated are 0 or 1"),
        ({"rotated": [-1], "output_heads": [2]}, "bias and rotated are 0 or 1"),
        ({"output_heads": [0, 0], "bias": [0, 0], "rotated": [0, 0]}, "there are 2 inputs, not 3"),
    ],
)
def test_attributes_that_contradict_each_other_are_refused(attributes: dict[str, Any], problem: str) -> None:
    needs_library()
    model = model_of(Form(), "float32", ["B", "T", 8], [4, 8], False)
    node = model.graph.node[0]
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in attributes.items())])
    with pytest.raises(Exception, match=problem):
        session(model, True)


@pytest.mark.parametrize("left_out", ["weight1", "bias0", "cosine", "sine"])
def test_an_input_that_is_left_out_is_refused(left_out: str) -> None:
    needs_library()
    form = Form(norm=1, epsilon=1e-5, output_heads=(2, 1), bias=(1, 0), rotated=(1, 0))
    model = model_of(form, "float32", ["B", "T", 8], [4, 8], False)
    i = form.inputs.index(left_out)
    model.graph.node[0].input[i] = ""
    with pytest.raises(Exception, match=f"input {i} is left out"):
        session(model, True)


def test_an_output_that_is_left_out_is_refused() -> None:
    needs_library()
    model = model_of(Form(output_heads=(0, 0), bias=(0, 0), rotated=(0, 0)), "float32", ["B", "T", 8], [4, 8], False)
    model.graph.node[0].output[1] = ""
    del model.graph.output[1:]
    with pytest.raises(Exception, match=r"output 1 is left out|there are 1 outputs, not 2"):
        session(model, True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_give_the_same_bits_at_any_address(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants are copied into huge pages if there are any. A weight that is an input is read in its place."""
    needs_library()
    form = Form(norm=1, epsilon=1e-5, gate=1, bias=(1,))
    rng = np.random.default_rng(0)
    shapes = {"norm": [130], "weight0": [70, 130], "bias0": [70], "gate": [70, 130]}
    constants = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    feeds = {"input": rng.standard_normal((2, 3, 130)).astype(dtype)}
    model = model_of(form, dtype, ["B", "T", 130], [70, 130], False)
    (expected,) = session(model, True).run(None, feeds | constants)
    held = onnx.ModelProto()
    held.CopyFrom(model)
    del held.graph.input[1:]
    held.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    for setting in ("", "off"):
        monkeypatch.setenv("KVEXPORT_HUGE_PAGES", setting)
        runs = [session(held, True) for _ in range(2)]
        del runs[0]  # shared copies stay
        assert np.array_equal(runs[0].run(None, feeds)[0], expected)


def test_a_node_without_the_inputs_that_it_names_is_refused() -> None:
    needs_library()
    model = model_of(Form(bias=(1,)), "float32", ["T", 8], [4, 8], False)
    model.graph.node[0].input.pop()
    with pytest.raises(Exception, match="there are 2 inputs, not 3"):
        session(model, True)
    del model.graph.node[0].attribute[:]
    with pytest.raises(Exception, match="the attribute input_heads should be an integer"):
        session(model, True)


@pytest.mark.parametrize(("dtype", "config"), product(["float16", "float32"], [LlamaConfig, Qwen2Config]))
def test_an_engine_generates_equal_tokens_with_and_without_the_kernel(
    dtype: str, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_library()
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", config(**models.SIZES))
    recipe = models.make_recipe(checkpoint, dtype=dtype, limits={"max_length": 512})
    path = build(recipe, tmp_path / "artifact")
    decoder = onnx.load(path / load_manifest(path, verify=False).graphs.decoder, load_external_data=False)
    types = [node.op_type for node in decoder.graph.node]
    layers = types.count("VoteAttention")
    # Queries, keys and values; the output; gate and up; down; the logits.
    assert types.count("Linear") == 4 * layers + 1
    assert not {"MatMul", "Sigmoid", "RMSNormalization", "RotaryEmbedding", "Reshape"} & set(types)
    # Only the index of the last token's row is expanded, and no key or value.
    expanded = {name for node in decoder.graph.node if node.op_type == "Expand" for name in node.output}
    assert expanded <= {node.input[1] for node in decoder.graph.node if node.op_type == "GatherElements"}
    forms = sorted(node.overload for node in decoder.graph.node if node.op_type == "Linear")
    assert (
        sum("output_heads" in form for form in forms) == layers
        and sum("input_heads" in form for form in forms) == layers
    )
    assert sum("residual" in form for form in forms) == 2 * layers and sum("gate" in form for form in forms) == layers
    assert sum("bias1.1.1" in form for form in forms) == (layers if config is Qwen2Config else 0)
    assert (
        sum("rotated1.1.0" in form for form in forms) == layers
        and sum("norm" in form for form in forms) == 2 * layers + 1
    )
    logits = []
    for operators in ("", "off"):
        monkeypatch.setenv(VARIABLE, operators)
        lanes = load(path).lanes(2)
        first = lanes.prefill([np.arange(120) % 50 + 3, np.arange(7) + 3]).copy()
        logits.append(np.stack([first, lanes.append([np.array([5]), np.array([6])])[:, 0]]))
    assert np.abs(logits[0] - logits[1]).max() < (0.02 if dtype == "float16" else 1e-4) * np.abs(logits[1]).max()


@pytest.mark.parametrize("rows", [1, 12, 256])
def test_rounding_errors_do_not_add_up_over_the_inputs(rows: int) -> None:
    needs_library()
    rng = np.random.default_rng(rows)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((1, rows, 1536), (576, 1536)))
    actual = session(model_of(Form(), "float32", ["B", "T", 1536], [576, 1536], False), True).run(
        None, {"input": x, "weight0": weight}
    )[0][0]
    exact = x[0].astype(np.float64) @ weight.T.astype(np.float64)
    error = np.linalg.norm(actual - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error.max() < 5e-7
