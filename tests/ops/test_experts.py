"""The ONNX function of Experts and its definition in PyTorch agree with each other and with a plain sum over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from kvexport.ops.experts import ExpertsForm, experts, experts_function

FORMS = [
    ExpertsForm(),
    ExpertsForm("gelu_tanh"),
    ExpertsForm("gelu"),
    ExpertsForm("relu_squared", gate=0),
    ExpertsForm("relu", gate=0, bias=1),
    ExpertsForm("silu", limit=0.5),
    ExpertsForm("silu", slope=1.702, limit=0.7, up_offset=1.0, bias=1),
]
KINDS = {torch.float32: 1, torch.float16: 10, torch.int64: 7}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3}  # relative to the largest output
Tensors = dict[str, torch.Tensor]


def case(form: ExpertsForm, rows: int, *, size: int = 16, inner: int = 12, count: int = 6, k: int = 2) -> Tensors:
    """Return random tensors of a call, in float64. No token chooses the last expert."""
    torch.manual_seed(rows)
    picked = [torch.randperm(count - 1)[:k] for _ in range(rows)]
    tensors = {
        "input": torch.randn(rows, size),
        "indices": torch.stack(picked),
        "weights": torch.rand(rows, k),
        "first": torch.randn(count, inner * (1 + form.gate), size) * 0.3,
        "down": torch.randn(count, size, inner) * 0.3,
    }
    if form.bias:
        tensors |= {"first_bias": torch.randn(count, inner * (1 + form.gate)), "down_bias": torch.randn(count, size)}
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}


def in_type(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def meaning(form: ExpertsForm, tensors: Tensors) -> torch.Tensor:
    """Return the output as a plain sum, token by token, in float64."""
    result = torch.zeros_like(tensors["input"])
    for row, (x, numbers, factors) in enumerate(
        zip(tensors["input"], tensors["indices"].tolist(), tensors["weights"], strict=True)
    ):
        for e, factor in zip(numbers, factors, strict=True):
            first = tensors["first"][e] @ x + (tensors["first_bias"][e] if form.bias else 0)
            down = tensors["down"][e] @ form.inner(first) + (tensors["down_bias"][e] if form.bias else 0)
            result[row] += factor * down
    return result


def model_of(form: ExpertsForm, tensors: Tensors, *, function: bool = True) -> onnx.ModelProto:
    """Return a model of one Experts node whose tensors are inputs."""
    value: Any = helper.make_tensor_value_info
    node = helper.make_node(
        "Experts", form.inputs, ["output"], domain="kvexport", overload=form.overload, **form.attributes
    )
    inputs = [value(name, KINDS[tensors[name].dtype], [None] * tensors[name].ndim) for name in form.inputs]
    output = value("output", KINDS[tensors["input"].dtype], [None, None])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    graph = helper.make_graph([node], "g", inputs, [output])
    functions = [experts_function(form)] if function else []
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.overload)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_the_onnx_function_equals_the_pytorch_function(form: ExpertsForm, dtype: torch.dtype, rows: int) -> None:
    exact = case(form, rows)
    right = meaning(form, exact)
    tensors = in_type(exact, dtype)
    model = model_of(form, tensors)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {name: tensors[name].numpy() for name in form.inputs})
    in_torch = experts(**{"first_bias": None, "down_bias": None, **tensors}, form=form)  # type: ignore[arg-type]
    largest = right.abs().max()
    assert (torch.from_numpy(np.asarray(actual)).double() - right).abs().max() <= TOLERANCE[dtype] * largest
    assert (in_torch.double() - right).abs().max() <= TOLERANCE[dtype] * largest


def test_forms_that_compute_differently_have_functions_of_different_names() -> None:
    assert len({form.overload for form in FORMS}) == len(FORMS)
