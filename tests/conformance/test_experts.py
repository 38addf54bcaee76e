"""The kernels of Experts, its ONNX function and PyTorch compute the same as the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from kvexport.backends.onnxruntime.operators import library
from kvexport.export.model.ggml_blocks import LAYOUTS
from kvexport.ops.experts import WEIGHTS, ExpertsForm, experts, experts_function
from kvexport.ops.linear import parts_after
from kvexport.ops.packed import PackedFormat, dequantize
from kvexport.schema.operators import EXPERTS_ACTIVATIONS, EXPERTS_ATTRIBUTES
from tests.conformance import oracle_experts as oracle
from tests.support.packed_weights import random_parts

TYPES = {
    "int4": TensorProto.INT4, "uint4": TensorProto.UINT4, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8,
    "float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "int64": TensorProto.INT64,
}  # fmt: skip
FORMS = [
    ExpertsForm(), ExpertsForm("gelu", bias=1), ExpertsForm("gelu_tanh"), ExpertsForm("relu_squared", gate=0),
    ExpertsForm("relu", gate=0, bias=1), ExpertsForm("silu", limit=0.5),
    ExpertsForm("silu", slope=1.702, limit=0.7, up_offset=1.0, bias=1),
]  # fmt: skip
# (type of the integers, `PackedFormat.kind`, type of the scales, group of first, group of down)
PACKINGS = [
    ("int4", 1, "float16", 32, 32),
    ("uint4", 2, "float16", 32, 16),
    ("int8", 1, "float32", 16, 48),
    ("uint8", 3, "float16", 64, 24),
    ("uint4", 3, "float32", 192, 96),  # one group per row
    ("int4", 2, "float16", 6, 2),  # no panels: the weights are read as they are stored
    ("uint4", 4, "float16", 32, 48),  # with a table
    ("uint4", 5, "uint8", 32, 16),  # with a table and exponents
    ("uint4", 5, "uint8", 6, 2),
]
# (tokens, experts, chosen): a step, a few lanes, a prompt whose experts get rows of tiles and of blocks, one expert
ROUTES = [(1, 6, 2), (5, 6, 3), (61, 4, 2), (150, 3, 2), (7, 1, 1), (0, 4, 2)]
Arrays = dict[str, np.ndarray[Any, Any]]


def draw(form: ExpertsForm, tokens: int, count: int, top_k: int, *, hidden: int = 192, inner: int = 96) -> Arrays:
    rng = np.random.default_rng(tokens + count)
    picked = [rng.permutation(count)[:top_k] for _ in range(tokens)]
    indices = np.array(picked, np.int64).reshape(tokens, top_k)
    if tokens > 2:
        indices[1, 0], indices[2, -1] = -1, count
    rows = inner * (1 + form.gate)
    tensors = {
        "input": rng.standard_normal((tokens, hidden)),
        "indices": indices,
        "weights": rng.random((tokens, top_k)),
        "first": rng.standard_normal((count, rows, hidden)) * 0.1,
        "down": rng.standard_normal((count, hidden, inner)) * 0.1,
    }
    if form.bias:
        tensors["first_bias"] = rng.standard_normal((count, rows))
        tensors["down_bias"] = rng.standard_normal((count, hidden))
    return tensors


def packed(form: ExpertsForm, tensors: Arrays, packing: Any) -> tuple[ExpertsForm, Arrays, list[TensorProto]]:
    """Return the form with packed weights, the tensors with these weights' values, and the initializers."""
    kind, offset, scale_type, *groups = packing
    rng, stored, values = np.random.default_rng(1), [], dict(tensors)
    for weight, group in zip(WEIGHTS, groups, strict=True):
        shape = tensors[weight].shape
        of_groups = (*shape[:2], shape[2] // group)
        parts: dict[str, Any] = {"scale": (rng.random(of_groups) * 0.02).astype(scale_type)}
        kinds = {"scale": scale_type, "exponent": scale_type, "table": "int8"}
        numbers = {"": shape}
        if parts_after(offset)[-1] == "table":
            parts["table"] = rng.integers(-128, 128, 16).astype(np.int8)
            parts["exponent"] = np.where(rng.random(of_groups) < 0.1, 1, rng.integers(112, 120, of_groups)).astype(
                np.uint8
            )
        if parts_after(offset)[0] == "exponent":
            parts["scale"] = 2.0 ** (parts["exponent"].astype(np.float64) - 128)
        if parts_after(offset)[-1] == "zero":
            numbers["zero"] = of_groups
        if parts_after(offset)[-1] == "minimum":
            parts["minimum"], kinds["minimum"] = (rng.standard_normal(of_groups) * 0.1).astype(scale_type), scale_type
        whole = {}
        for name, dims in numbers.items():
            count = int(np.prod(dims))
            raw = rng.integers(0, 256, (count + 1) // 2 if kind.endswith("4") else count).astype(np.uint8)
            whole[name], parts[name], kinds[name] = oracle.integers(raw, kind, dims), raw, kind
        values[weight] = oracle.dequantized(
            parts["table"].astype(np.float64)[whole[""].astype(int)] if "table" in parts else whole[""],
            parts["scale"].astype(np.float64),
            whole.get("zero"),
            parts.get("minimum"),
        )
        for name in ("", *parts_after(offset)):
            dims = (16,) if name == "table" else of_groups if name else shape
            title = f"{weight}_{name}" if name else weight
            stored.append(
                TensorProto(name=title, data_type=TYPES[kinds[name]], dims=dims, raw_data=parts[name].tobytes())
            )
    return replace(form, packed=(offset, offset), group=tuple(groups)), values, stored


def model_of(form: ExpertsForm, tensors: Arrays, weights: list[TensorProto], dtype: str) -> onnx.ModelProto:
    """Return a model of one Experts node, whose inputs are the tensors that have no initializer."""
    node = helper.make_node(
        "Experts", form.inputs, ["output"], domain="kvexport", overload=form.overload, **form.attributes
    )
    held = {weight.name for weight in weights}
    value: Any = helper.make_tensor_value_info
    inputs = [
        value(name, TYPES["int64" if name == "indices" else dtype], [None] * tensors[name].ndim)
        for name in form.inputs if name not in held
    ]  # fmt: skip
    graph = helper.make_graph([node], "g", inputs, [value("output", TYPES[dtype], [None, None])], weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[experts_function(form)], ir_version=11)


def run(model: onnx.ModelProto, tensors: Arrays, dtype: str, *, native: bool, threads: int = 2) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    path = library() if native else None
    if native and path is None:
        pytest.skip("not reached: the native operators are not built (make native)")
    if path is not None:
        options.register_custom_ops_library(str(path))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {x.name: tensors[x.name] for x in session.get_inputs()}
    output: np.ndarray[Any, Any] = session.run(
        None, {name: x if x.dtype == np.int64 else x.astype(dtype) for name, x in feeds.items()}
    )[0]
    return output


def in_type(tensors: Arrays, dtype: str) -> Arrays:
    """Return the float64 values of the tensors after rounding to the dtype of a call."""
    return {name: x if x.dtype == np.int64 else x.astype(dtype).astype(np.float64) for name, x in tensors.items()}


def difference(
    actual: np.ndarray[Any, Any], form: ExpertsForm, tensors: Arrays, blocks: tuple[int, int] | None = None
) -> float:
    """Return the largest difference from the oracle, relative to the largest output."""
    right = oracle.experts(form.attributes, tensors, blocks)
    assert actual.shape == right.shape
    return float(np.abs(actual - right).max(initial=0) / np.abs(right).max(initial=1e-30))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.overload)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("runs", ["native", "function", "pytorch"])
def test_experts_of_floats_are_the_oracles(form: ExpertsForm, dtype: str, runs: str) -> None:
    for tokens, count, top_k in ROUTES:
        tensors = in_type(draw(form, tokens, count, top_k), dtype)
        if runs == "pytorch":
            floats = {name: torch.from_numpy(x) for name, x in tensors.items()}
            named = {name: x if x.dtype == torch.int64 else x.to(getattr(torch, dtype)) for name, x in floats.items()}
            actual = experts(**{"first_bias": None, "down_bias": None, **named}, form=form).numpy()  # type: ignore[arg-type]
        else:
            actual = run(model_of(form, tensors, [], dtype), tensors, dtype, native=runs == "native")
        assert difference(actual, form, tensors) < (5e-3 if dtype == "float16" else 3e-6), (tokens, count, top_k)


def test_forms_that_compute_differently_have_functions_of_different_names() -> None:
    assert len({form.overload for form in FORMS}) == len(FORMS)
    for form in FORMS:
        onnx.checker.check_model(model_of(form, draw(form, 1, 6, 2), [], "float32"))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[6]], ids=lambda form: form.overload)
@pytest.mark.parametrize("runs", ["native", "native, float input", "function"])
def test_packed_experts_are_the_oracles(packing: Any, form: ExpertsForm, runs: str) -> None:
    for tokens, count, top_k in ROUTES:
        taken, tensors, weights = packed(form, in_type(draw(form, tokens, count, top_k), "float32"), packing)
        taken = replace(taken, float_input=int(runs == "native, float input"))
        model = model_of(taken, tensors, weights, "float32")
        actual = run(model, tensors, "float32", native=runs.startswith("native"))
        # Rows whose numbers are all above 0 lose digits in the sums with minima.
        allowed = 3e-4 if runs == "native" else 1e-4 if "minimum" in parts_after(packing[1]) else 5e-6
        first, down = (next((block for block in (32, 16, 8) if group % block == 0), 0) for group in packing[3:])
        rounding = (first, down) if runs == "native" and first and down else None  # without panels nothing is rounded
        assert difference(actual, taken, tensors, rounding) < allowed, (tokens, count, top_k)


@pytest.mark.parametrize("packing", [layout.packing for layout in LAYOUTS.values()], ids=LAYOUTS)
@pytest.mark.parametrize("runs", ["native", "native, float input", "function"])
def test_experts_in_the_types_of_gguf_files_are_the_oracles(packing: PackedFormat, runs: str) -> None:
    form, rng, values, stored = FORMS[6], np.random.default_rng(1), draw(FORMS[6], 61, 4, 2, hidden=512, inner=256), []
    for weight in WEIGHTS:
        *matrices, inputs = values[weight].shape
        rows = int(np.prod(matrices))
        parts = random_parts(rng, packing, rows, inputs, 0.1)
        values[weight] = dequantize(packing, rows, inputs, parts).reshape(*matrices, inputs).astype(np.float64)
        for name, tensor in packing.tensors(rows, inputs).items():
            dims = tensor.shape if name == "table" else (*matrices, tensor.shape[-1])
            title, data = weight if name == "weight" else f"{weight}_{name}", parts[name].tobytes()
            stored.append(TensorProto(name=title, data_type=TYPES[tensor.dtype], dims=dims, raw_data=data))
    form = replace(form, packed=(packing.kind,) * 2, group=(packing.group,) * 2)
    form, tensors = replace(form, float_input=int(runs == "native, float input")), in_type(values, "float32")
    actual = run(model_of(form, tensors, stored, "float32"), tensors, "float32", native=runs.startswith("native"))
    block = 16 if packing.group == 16 else 32
    rounding = (block, block) if runs == "native" else None
    assert difference(actual, form, tensors, rounding) < (3e-4 if runs == "native" else 1e-4)


@pytest.mark.parametrize("packing", PACKINGS[:2], ids=str)
def test_packed_experts_under_float16(packing: Any) -> None:
    taken, tensors, weights = packed(FORMS[6], in_type(draw(FORMS[6], 61, 4, 2), "float16"), packing)
    actual = run(model_of(taken, tensors, weights, "float16"), tensors, "float16", native=True)
    assert actual.dtype == np.float16 and difference(actual, taken, tensors) < 2e-3


def test_matrices_whose_rows_fill_no_panel() -> None:
    form = FORMS[6]
    for hidden, inner, packing in [(48, 20, ("int4", 1, "float16", 16, 20)), (21, 35, ("int8", 2, "float32", 21, 35))]:
        taken, tensors, weights = packed(
            form, in_type(draw(form, 61, 4, 2, hidden=hidden, inner=inner), "float32"), packing
        )
        actual = run(model_of(taken, tensors, weights, "float32"), tensors, "float32", native=True)
        assert difference(actual, taken, tensors) < 3e-4, (hidden, inner)


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    taken, tensors, weights = packed(
        FORMS[0], in_type(draw(FORMS[0], 61, 6, 3, hidden=768, inner=768), "float32"), PACKINGS[0]
    )
    model = model_of(taken, tensors, weights, "float32")
    one, four = (run(model, tensors, "float32", native=True, threads=n) for n in (1, 4))
    assert np.array_equal(one, four)


def test_a_number_that_is_not_finite_stays_in_its_token() -> None:
    taken, tensors, weights = packed(FORMS[0], in_type(draw(FORMS[0], 9, 4, 2), "float32"), PACKINGS[0])
    model = model_of(taken, tensors, weights, "float32")
    clean = run(model, tensors, "float32", native=True)
    tensors["input"][4, 7], tensors["input"][6, 100] = np.nan, np.inf
    actual = run(model, tensors, "float32", native=True)
    rest = [0, 1, 2, 3, 5, 7, 8]
    assert not np.isfinite(actual[[4, 6]]).any() and np.array_equal(actual[rest], clean[rest])


def test_the_schema_has_the_forms_attributes() -> None:
    form = ExpertsForm(packed=(1, 1), group=(32, 32))
    assert list(form.attributes) == [attribute.name for attribute in EXPERTS_ATTRIBUTES]
    assert EXPERTS_ATTRIBUTES[0].words == EXPERTS_ACTIVATIONS
    for attribute in EXPERTS_ATTRIBUTES:
        assert not attribute.problem(form.attributes[attribute.name])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"activation": "mish"}, "the activation 'mish' is unknown"),
        ({"limit": -1.0}, "limit is -1"),
        ({"gate": 0}, "does not fit down"),
        ({"bias": 1}, "there are 7 inputs, not 9"),
        ({"packed": [1]}, "an entry for each of 2 weights, not 1 and 2"),
        ({"packed": [0, 1]}, "group is 32, and has to be 0 of a weight that is not packed"),
        ({"group": [96, 32]}, r"Experts: a weight \[4, 192, 192\] in groups of 96 does not fit"),
    ],
)
def test_a_malformed_node_is_refused(change: dict[str, Any], problem: str) -> None:
    taken, tensors, weights = packed(FORMS[0], in_type(draw(FORMS[0], 1, 4, 2), "float32"), PACKINGS[0])
    model = model_of(taken, tensors, weights, "float32")
    for attribute in list(model.graph.node[0].attribute):
        if attribute.name in change:
            model.graph.node[0].attribute.remove(attribute)
    model.graph.node[0].attribute.extend(helper.make_attribute(name, value) for name, value in change.items())
    del model.functions[:]  # otherwise the functions' shapes would be refused first
    with pytest.raises(Exception, match=problem):
        run(model, tensors, "float32", native=True)
