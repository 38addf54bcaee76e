"""Linear with packed weights: kernel and function compute with the values of the integers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime.operators import VARIABLE, instruction_set, library
from kvexport.export.build import build
from kvexport.ops.linear import Form, linear_function
from kvexport.ops.packed import E2M1, IQ4, PackedFormat, dequantize
from kvexport.recipe.fields import Recipe
from tests.ops.test_linear import meaning, needs_library, session
from tests.support import models
from tests.support.packed_weights import random_parts

TYPES = {
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
}
OFFSETS = {"none": 1, "zero": 2, "minimum": 3}
TWO, THREE = PackedFormat(2, False, 16, "minimum", "uint4"), PackedFormat(3, True, 16, "none", "int6")
FORMATS = [
    PackedFormat(4, True, 32),
    PackedFormat(4, True, 16, "zero", "float32"),
    PackedFormat(4, False, 32, "zero"),
    PackedFormat(4, False, 48, "minimum", "float32"),
    PackedFormat(4, False, 64),
    PackedFormat(4, True, 256, "minimum"),
    PackedFormat(8, True, 32, "none", "float32"),
    PackedFormat(8, True, 16),
    PackedFormat(8, True, 128, "zero"),
    PackedFormat(8, False, 64, "zero", "float32"),
    PackedFormat(8, False, 32, "minimum"),
    PackedFormat(4, False, 24, "minimum"),  # blocks of 8 inputs
    PackedFormat(8, False, 48),
    PackedFormat(4, False, 6, "zero"),  # no panels: read as stored
    PackedFormat(4, False, 32, "minimum", "int8"),
    PackedFormat(4, True, 16, "none", "int8"),
    PackedFormat(5, True, 32),
    PackedFormat(5, False, 64, "minimum", "float32"),
    PackedFormat(5, False, 32, "minimum", "int8"),
    PackedFormat(5, True, 16, "none", "int8"),  # no panels
    PackedFormat(6, True, 16, "none", "int8"),
    PackedFormat(6, False, 128, "minimum"),
    TWO,
    THREE,
]
WITH_TABLES = [
    PackedFormat(4, False, 32, table=IQ4),
    PackedFormat(4, False, 16, scale_dtype="float32", table=E2M1),
    PackedFormat(4, False, 32, scale_dtype="uint8", table=E2M1),
    PackedFormat(4, False, 6, scale_dtype="uint8", table=E2M1),
    PackedFormat(4, False, 32, scale_dtype="int8", table=IQ4),
]
BLOCK = 32  # the number of inputs that are rounded together


def packed_weight(
    rng: np.random.Generator, packing: PackedFormat, name: str, n: int, k: int, size: float = 1.0
) -> tuple[list[TensorProto], np.ndarray[Any, Any]]:
    """Return the initializers of a random weight [n, k], and its values, whose size is about `size`."""
    parts, stored = packing.tensors(n, k), random_parts(rng, packing, n, k, size)
    initializers = [
        TensorProto(
            name=name if part == "weight" else f"{name}_{part}",
            data_type=TYPES[dtype],
            dims=shape,
            raw_data=stored[part].tobytes(),
        )
        for part, (dtype, shape) in parts.items()
    ]
    return initializers, dequantize(packing, n, k, stored)


def model_of(form: Form, dtype: str, shapes: dict[str, Sequence[Any]], weights: list[TensorProto]) -> onnx.ModelProto:
    outputs = [f"output{i}" for i in range(form.count)]
    node = helper.make_node(
        "Linear", form.inputs, outputs, domain="kvexport", overload=form.overload, **form.attributes
    )
    value = helper.make_tensor_value_info
    inputs = [value(name, TYPES[dtype], shape) for name, shape in shapes.items() if name in form.inputs]
    graph = helper.make_graph([node], "g", inputs, [value(x, TYPES[dtype], None) for x in outputs], weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[linear_function(form)], ir_version=11)


def form_of(packing: PackedFormat, **steps: Any) -> Form:
    return Form(packed=(packing.kind,), group=(packing.group,), **steps)


def error_bound(
    x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], largest: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Return the error bound [rows, outputs]: half a step of each block's largest input times the block's weights."""
    pad = ((0, 0), (0, -x.shape[1] % BLOCK))
    largest = largest_of_blocks(x) if largest is None else largest
    bound: np.ndarray[Any, Any] = largest @ np.abs(np.pad(weight, pad)).reshape(len(weight), -1, BLOCK).sum(-1).T / 254
    return bound


def largest_of_blocks(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the largest magnitude of each block of inputs [rows, blocks]."""
    largest: np.ndarray[Any, Any] = np.abs(np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))).reshape(len(x), -1, BLOCK)
    return largest.max(-1)


# (rows, outputs, inputs): below, at and above a tile and a block; inputs that fill no vector if a group is a row.
SIZES = [(1, 37, 768), (3, 5, 768), (5, 64, 768), (13, 33, 768), (70, 129, 768), (2, 3, 98), (50, 3, 770), (9, 16, 40)]


@pytest.mark.parametrize("packing", FORMATS + WITH_TABLES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("runs", ["native", "native, float input", "function"])
def test_products_equal_those_of_the_dequantized_weights(packing: PackedFormat, dtype: str, runs: str) -> None:
    if runs != "function":
        needs_library()
    rng = np.random.default_rng(0)
    for rows, n, k in SIZES:
        if k % 256 and (packing.high_bits or packing.has_supers):
            continue
        of_rows = replace(packing, group=packing.group if k % packing.group == 0 else k)
        weights, weight = packed_weight(rng, of_rows, "weight0", n, k)
        form = replace(form_of(of_rows), float_input=int(runs == "native, float input"))
        x = rng.standard_normal((rows, k)).astype(dtype)
        x[0] = np.sign(x[0]) * 0.7  # the largest error: every number is rounded in the same direction
        (actual,) = session(model_of(form, dtype, {"input": ["R", k]}, weights), runs != "function").run(
            None, {"input": x}
        )
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
        terms = np.abs(x).astype(np.float64) @ (np.abs(weight) + 2.0 * np.abs(weight).max()).T
        allowed = terms * 1e-6 + np.abs(exact) * (1e-3 if dtype == "float16" else 0)
        if runs == "native":
            allowed += error_bound(x.astype(np.float64), weight)
        if runs == "function" and dtype == "float16":
            allowed += 2e-3 * np.abs(x).astype(np.float64) @ np.abs(weight).T  # weights are rounded to float16
        assert actual.dtype == np.dtype(dtype) and (np.abs(actual - exact) <= allowed).all(), (rows, n, k)


@pytest.mark.parametrize("packing", FORMATS[:1] + FORMATS[4:7] + FORMATS[10:12], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 47, 48, 49, 512])
def test_rows_are_rounded_to_16_bits_and_those_of_prompts_to_8_without_large_numbers(
    packing: PackedFormat, rows: int
) -> None:
    needs_library()
    rng = np.random.default_rng(rows)
    weights, weight = packed_weight(rng, packing, "weight0", 35, 1536)
    x = rng.standard_normal((rows, 1536)).astype(np.float32)
    x[:, 320:352] *= 30  # in every row
    x[rows // 2, 64] = 90  # in one row of a group
    run = session(model_of(form_of(packing), "float32", {"input": ["R", 1536]}, weights), True)
    (actual,) = run.run(None, {"input": x})
    numbers = x.astype(np.float64)
    error = np.abs(actual - numbers @ weight.astype(np.float64).T)
    terms = np.abs(numbers) @ (np.abs(weight) + 2.0 * np.abs(weight).max()).T
    if rows >= 20 and instruction_set(library() or Path()) == "amx":
        assert (error <= error_bound(numbers, weight) + terms * 1e-6).all()
        return
    largest = largest_of_blocks(numbers)
    fine = error_bound(numbers, weight, largest / 100)
    if rows < 48:
        assert (error <= fine + terms * 1e-6).all()
        return
    coarse = np.minimum(largest, 5.001 * np.sqrt((numbers**2).mean(-1, keepdims=True)))
    assert (error <= error_bound(numbers, weight, coarse) + fine + terms * 1e-6).all()
    assert (error > fine + terms * 1e-6).any()  # some blocks have 8 bits
    (turned,) = run.run(None, {"input": x[::-1].copy()})
    np.testing.assert_array_equal(turned[::-1], actual)  # a row's products do not depend on the other rows


@pytest.mark.parametrize("rows", [1, 60])
def test_a_packed_weight_that_is_no_constant_is_multiplied_as_it_is(rows: int) -> None:
    needs_library()
    packing = PackedFormat(8, True, 32)
    rng = np.random.default_rng(4)
    weights, weight = packed_weight(rng, packing, "weight0", 21, 256)
    model = model_of(form_of(packing), "float32", {"input": ["R", 256]}, [])
    for tensor in weights:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    parts = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in weights}
    (actual,) = session(model, True).run(None, {"input": x, **parts})
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(actual - exact).max() < 1e-5 * np.abs(exact).max()


MIXED = [PackedFormat(4, False, 32, "minimum"), PackedFormat(8, True, 16), PackedFormat(4, True, 64, "zero")]
STEPS = [
    Form(norm=1, epsilon=1e-5, gate=1, bias=(1,), residual=1),
    Form(input_heads=2, residual=1),
    Form(norm=1, epsilon=1e-6, output_heads=(2, 2, 0), bias=(1, 0, 1), rotated=(1, 1, 0)),
]


@pytest.mark.parametrize("steps", STEPS, ids=lambda form: form.overload)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "function"])
@pytest.mark.parametrize("plain", [False, True], ids=["all packed", "one is not"])
def test_packed_weights_take_every_step(steps: Form, dtype: str, native: bool, plain: bool) -> None:
    if native:
        needs_library()
    rng, n, k = np.random.default_rng(0), 32, 128
    names = [*(f"weight{i}" for i in range(steps.count)), *["gate"] * steps.gate]
    packings: list[Any] = MIXED[: len(names)]
    weights, values = [], {}
    for name, packing in zip(names, packings, strict=True):
        tensors, values[name] = packed_weight(rng, packing, name, n, k, 1 / np.sqrt(k))
        weights += tensors
    packed, group = [OFFSETS[p.offset] for p in packings], [p.group for p in packings]
    if plain:
        packed[-1] = group[-1] = 0
        values[names[-1]] = values[names[-1]].astype(dtype)
        weights = [w for w in weights if not w.name.startswith(names[-1])]
        weights.append(onnx.numpy_helper.from_array(values[names[-1]], names[-1]))
    form = replace(steps, packed=tuple(packed), group=tuple(group), float_input=1)
    for batch, tokens in [(1, 1), (2, 3), (1, 50)]:
        data = [batch, form.input_heads, tokens, k // 2] if form.input_heads else [batch, tokens, k]
        angles = [batch, tokens, n // 4]
        shapes = {"input": data, "norm": [k], "residual": [batch, tokens, n], "cosine": angles, "sine": angles}
        shapes |= {f"bias{i}": [n] for i in range(form.count)}
        model = model_of(form, dtype, shapes, weights)
        feeds = {x.name: rng.standard_normal(shapes[x.name]).astype(dtype) for x in model.graph.input}
        terms = {name: torch.from_numpy(x).double() for name, x in {**feeds, **values}.items()}
        for actual, right in zip(session(model, native).run(None, feeds), meaning(form, **terms), strict=True):
            error = np.abs(actual.astype(np.float64) - right.numpy()).max() / np.abs(right.numpy()).max()
            assert actual.shape == right.shape and error < (5e-3 if dtype == "float16" else 3e-6), (batch, tokens)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("packing", FORMATS[:1] + FORMATS[6:7], ids=str)
def test_tiny_and_huge_numbers_are_rounded_like_any(size: float, packing: PackedFormat) -> None:
    needs_library()
    rng = np.random.default_rng(1)
    weights, weight = packed_weight(rng, packing, "weight0", 5, 256, 1e-3)
    x = (rng.standard_normal((4, 256)) * size).astype(np.float32)
    x[1, 32:64], x[2] = 0, 0
    (actual,) = session(model_of(form_of(packing), "float32", {"input": [4, 256]}, weights), True).run(
        None, {"input": x}
    )
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert (np.abs(actual - exact) <= error_bound(x.astype(np.float64), weight) * 1.001).all() and not actual[2].any()


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    needs_library()
    rng = np.random.default_rng(2)
    weights, _ = packed_weight(rng, FORMATS[0], "weight0", 5, 256)
    run = session(model_of(form_of(FORMATS[0]), "float32", {"input": ["R", 256]}, weights), True)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    (clean,) = run.run(None, {"input": x})
    x[1, 7], x[3, 200] = np.nan, np.inf
    (actual,) = run.run(None, {"input": x})
    assert not np.isfinite(actual[[1, 3]]).any() and np.array_equal(actual[[0, 2, 4]], clean[[0, 2, 4]])


def test_a_row_is_the_same_alone_and_among_a_few() -> None:
    needs_library()
    rng = np.random.default_rng(3)
    weights, _ = packed_weight(rng, FORMATS[2], "weight0", 37, 256)
    run = session(model_of(form_of(FORMATS[2]), "float32", {"input": ["R", 256]}, weights), True)
    x = rng.standard_normal((11, 256)).astype(np.float32)
    (together,) = run.run(None, {"input": x})
    for i in range(len(x)):
        assert np.array_equal(run.run(None, {"input": x[i : i + 1]})[0][0], together[i])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"group": [0]}, "group is 0, and has to be positive of a packed weight"),
        ({"group": [48]}, r"a weight \[5, 256\] in groups of 48 does not fit"),
        ({"group": [64]}, r"in groups of 64 does not fit a scale, zero point or minimum \[5, 8\]"),
        ({"group": [33]}, "a group of 4-bit weights is odd: 33"),
        ({"packed": [6]}, "packed is 6, and has to be 0 to 5"),
        ({"packed": [67]}, "packed is 67, and has to be 0 to 5"),
        ({"packed": [0], "group": [0]}, "there are 4 inputs, not 2"),
        ({"packed": [0]}, "group is 32, and has to be 0 of a weight that is not packed"),
        ({"packed": [2, 2]}, "an entry for each of 1 weights, not 2 and 1"),
        ({"packed": [3]}, "input 3 is a scale or a minimum, and neither float32 nor float16"),
        ({"packed": [1]}, "there are 4 inputs, not 3"),
    ],
)
def test_attributes_that_contradict_the_weights_are_refused(change: dict[str, Any], problem: str) -> None:
    needs_library()
    weights, _ = packed_weight(np.random.default_rng(0), FORMATS[2], "weight0", 5, 256)
    model = model_of(form_of(FORMATS[2]), "float32", {"input": ["R", 256]}, weights)
    node = model.graph.node[0]
    kept = [a for a in node.attribute if a.name not in change]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in change.items())])
    with pytest.raises(Exception, match=problem):
        session(model, True)


@pytest.mark.parametrize(("packing", "part", "instead", "problem"), [
    (FORMATS[2], "", np.zeros((5, 256), np.float32), "input 1 is a packed weight, and of no type of 4 or 8 bits"),
    (FORMATS[2], "", np.zeros((5, 256), np.uint8), "input 3 is a zero point, and of another type than its weight"),
    (FORMATS[2], "_scale", np.zeros((5, 8), np.int8), "input 2 is a scale or a minimum, and neither"),
    (FORMATS[2], "_scale", np.zeros((5, 9), np.float32), r"does not fit a scale, zero point or minimum \[5, 9\]"),
    (FORMATS[2], "_scale", np.zeros((8,), np.float32), r"does not fit a scale, zero point or minimum \[8\]"),
    (FORMATS[2], "_zero", np.zeros((5, 8), np.uint8), "input 3 is a zero point, and of another type than its"),
    (TWO, "", np.zeros((5, 64), np.int8), "input 1 is a weight of 2 or 3 bits, and not uint8"),
    (TWO, "_minimum", np.zeros((5, 16), np.int8), "input 3 is a scale or a minimum, and not uint4"),
    (THREE, "_scale", np.zeros((5, 16), np.uint8), r"does not fit a scale, zero point or minimum \[5, 16\]"),
    (THREE, "_high", np.zeros((5, 64), np.uint8), r"upper bits of a weight, .* \[5, 64\] and not \[5, 32\]"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused(
    packing: PackedFormat, part: str, instead: np.ndarray[Any, Any], problem: str
) -> None:
    needs_library()
    weights, _ = packed_weight(np.random.default_rng(0), packing, "weight0", 5, 256)
    name = f"weight0{part}"
    weights = [w if w.name != name else onnx.numpy_helper.from_array(instead, name) for w in weights]
    with pytest.raises(Exception, match=problem):
        session(model_of(form_of(packing), "float32", {"input": ["R", 256]}, weights), True)


def test_a_plain_tensor_of_another_type_than_the_input_is_refused() -> None:
    needs_library()
    weights, _ = packed_weight(np.random.default_rng(0), FORMATS[0], "weight0", 5, 256)
    model = model_of(form_of(FORMATS[0], bias=(1,)), "float32", {"input": ["R", 256], "bias0": [5]}, weights)
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.FLOAT16
    with pytest.raises(Exception, match="input 3 is of another type than input 0"):
        session(model, True)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_generate_equal_tokens_with_and_without_the_kernel(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_library()
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", models.llama())
    recipe = models.make_recipe(checkpoint, dtype="float16", limits={"max_length": 512})
    fields = recipe.model_dump() | {"weights": {"bits": bits, "head": "same"}}
    path = build(Recipe.model_validate(fields), tmp_path / "artifact")
    decoder = onnx.load(path / load_manifest(path, verify=False).graphs.decoder, load_external_data=False)
    types = [node.op_type for node in decoder.graph.node]
    assert types.count("Linear") == 4 * types.count("VoteAttention") + 1
    assert not {"MatMul", "Sigmoid", "RMSNormalization", "RotaryEmbedding"} & set(types)
    assert types.count("DequantizeLinear") == 1  # the rows of the embedding
    overloads = [node.overload for node in decoder.graph.node if node.op_type == "Linear"]
    assert all("packed1" in overload and "group" in overload for overload in overloads)
    logits = []
    for operators in ("", "off"):
        monkeypatch.setenv(VARIABLE, operators)
        lanes = kvexport.load(path).lanes(2)
        first = lanes.prefill([np.arange(120) % 50 + 3, np.arange(7) + 3]).copy()
        logits.append(np.stack([first, lanes.append([np.array([5]), np.array([6])])[:, 0]]))
    assert np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[1]).max()
