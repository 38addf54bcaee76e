"""Tests of the pass that makes LoRA adapters a step of their Linear node, and of the products that it leaves alone."""

import numpy as np
import onnx_ir as ir
import pytest

from kvexport.export.passes import DECODER_PASSES, pick_last_rows
from kvexport.export.passes.rewrite import run_passes

INPUTS = "float[B,T,8] x, float[B,T,8] r, float[B,1,A] rows, float[A,8] f, float[A,8] s, float[A,8] f2, float[A,8] s2"
SHAPES = ", ".join(f"float[B,T,8] {name}" for name in ("p", "q", "a", "b", "m"))
PRODUCT = ["t = Transpose <perm = [1, 0]> (w)", "p = MatMul (x, t)"]
GATE = ["u = Transpose <perm = [1, 0]> (v)", "q = MatMul (x, u)"]


def change(of: str, to: str, suffix: str = "", data: str = "x") -> list[str]:
    """Return the nodes that add the change of an adapter, whose matrices are named with a suffix, to a value."""
    return [
        f"ft{suffix} = Transpose <perm = [1, 0]> (f{suffix})",
        f"n{suffix} = MatMul ({data}, ft{suffix})",
        f"k{suffix} = Mul (n{suffix}, rows)",
        f"c{suffix} = MatMul (k{suffix}, s{suffix})",
        f"{to} = Add ({of}, c{suffix})",
    ]


def fused(*lines: str) -> list[tuple[str, ...]]:
    """Return the nodes of a graph after all passes of one product."""
    body = "\n".join(lines)
    text = f'<ir_version: 11, opset_import: ["": 23]>\ng ({INPUTS}) => (float[B,T,8] y) <{SHAPES}> {{\n{body}\n}}'
    model = ir.from_onnx_text(text)
    for name, shape in {"w": [8, 8], "v": [8, 8], "bias": [8]}.items():
        value = ir.Value(name=name, const_value=ir.tensor(np.zeros(shape, np.float32), name=name))
        value.shape, value.dtype = ir.Shape(shape), ir.DataType.FLOAT
        for node in model.graph:
            for i, read in enumerate(node.inputs):
                if read is not None and read.name == name:
                    node.replace_input_with(i, value)
        model.graph.initializers[name] = value
    run_passes(model, DECODER_PASSES[: DECODER_PASSES.index(pick_last_rows)])
    return [
        (f"{node.op_type} {node.overload}".strip(), *(str(x.name) for x in node.inputs if x is not None))
        for node in model.graph
    ]


@pytest.mark.parametrize(
    ("lines", "node"),
    [
        ((*PRODUCT, *change("p", "y")), ("AdaptedLinear adapted1", "x", "rows", "w", "f", "s")),
        (
            (*PRODUCT, "a = Add (p, bias)", *change("a", "b"), "y = Add (r, b)"),
            ("AdaptedLinear bias1_residual1_adapted1", "x", "rows", "w", "bias", "f", "s", "r"),
        ),
        (
            (*PRODUCT, *GATE, *change("p", "a"), *change("q", "b", "2"), "d = Sigmoid (b)", "z = Mul (b, d)",
             "y = Mul (z, a)"),
            ("AdaptedLinear gate1_adapted1.1", "x", "rows", "w", "f", "s", "v", "f2", "s2"),
        ),
        (
            (*PRODUCT, *GATE, *change("q", "b", "2"), "d = Sigmoid (b)", "z = Mul (b, d)", "y = Mul (z, p)"),
            ("AdaptedLinear gate1_adapted0.1", "x", "rows", "w", "v", "f2", "s2"),
        ),
    ],
)  # fmt: skip
def test_adapters_become_inputs_of_their_linear(lines: tuple[str, ...], node: tuple[str, ...]) -> None:
    assert fused(*lines) == [node]


@pytest.mark.parametrize(
    "lines",
    [
        (*PRODUCT, *change("p", "y", data="r")),  # the adapters read another input
        (*PRODUCT, *change("p", "m"), *change("m", "y", "2")),  # the Linear has adapters already
        (*PRODUCT, *change("p", "m"), "y = Mul (m, p)"),  # the product is read by another node too
        (*PRODUCT, *[line.replace("rows", "r") for line in change("p", "y")]),  # the rows have another shape
    ],
)
def test_other_products_of_low_rank_stay(lines: tuple[str, ...]) -> None:
    assert sum(node[0] == "MatMul" for node in fused(*lines)) == 2
