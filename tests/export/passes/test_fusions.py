"""Tests of the passes for Linear: which nodes of a decoder become one, and which nodes around them it replaces."""

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from kvexport.export.passes import DECODER_PASSES, join_products, pick_last_rows
from kvexport.export.passes.forms import linear_functions
from kvexport.export.passes.rewrite import run_passes

ONE_PRODUCT = DECODER_PASSES[: DECODER_PASSES.index(pick_last_rows)]
SEVERAL_PRODUCTS = DECODER_PASSES[DECODER_PASSES.index(join_products) :]


def model_of(text: str, weights: dict[str, Any], shapes: Any = None) -> ir.Model:
    """Return a graph with inputs x and r, [B, T, 8], and output y.

    A weight is (dtype, shape), filled with 0, or (dtype, shape, value).
    """
    known = ", ".join(f"float[{shape}] {name}" for name, shape in (shapes or SHAPES).items() if f" {name} = " in text)
    opening = '<ir_version: 11, opset_import: ["": 23]>\ng (float[B,T,8] x, float[B,T,8] r) => (float y)'
    model = ir.from_onnx_text(f"{opening} <{known}>\n{text}")
    for name, (dtype, shape, *content) in weights.items():
        value = ir.Value(
            name=name, const_value=ir.tensor(np.full(shape, content[0] if content else 0, dtype), name=name)
        )
        value.shape, value.dtype = ir.Shape(shape), ir.DataType.from_numpy(np.dtype(dtype))
        for node in model.graph:
            for i, read in enumerate(node.inputs):
                if read is not None and read.name == name:
                    node.replace_input_with(i, value)
        model.graph.initializers[name] = value
    return model


def fused(text: str, weights: dict[str, Any], several: bool = False, shapes: Any = None) -> list[tuple[str, ...]]:
    """Return the nodes of a graph after the passes of one product, or of several.

    A Linear is a tuple of its form and its inputs. Another node is a tuple of its type.
    """
    model = model_of(text, weights, shapes)
    run_passes(model, [*ONE_PRODUCT, *SEVERAL_PRODUCTS] if several else ONE_PRODUCT)
    assert {f.overload for f in linear_functions(model.graph)} == {
        node.overload for node in model.graph if node.op_type == "Linear"
    }
    return [
        (node.overload, *(str(x.name) for x in node.inputs if x is not None))
        if node.op_type == "Linear"
        else (node.op_type,)
        for node in model.graph
    ]


SHAPES = {
    "p": "B,T,8", "q": "B,T,8", "m": "B,T,8", "h": "B,T,2,4", "g": "T,B,2,4", "a": "B,2,T,4", "c": "B,T,2,4",
    "d": "B,T,8",
}  # fmt: skip
SQUARE = {"w": ("float32", [8, 8]), "v": ("float32", [8, 8]), "b": ("float32", [8]), "one": ("float32", [1])}


def body(*lines: str) -> str:
    return "{\n" + "\n".join(f" {line}" for line in lines) + "\n}"


def weights_of(*lines: str) -> dict[str, Any]:
    read = "".join(lines)
    return {name: value for name, value in SQUARE.items() if re.search(rf"[(,] ?{name}[,)]", read)}


PRODUCT = ("t = Transpose <perm = [1, 0]> (w)", "p = MatMul (x, t)")
SECOND = ("u = Transpose <perm = [1, 0]> (v)", "q = MatMul (x, u)")
SILU = (*PRODUCT, *SECOND, "s = Sigmoid (q)", "z = Mul (q, s)")
HEADS = (*PRODUCT, "h = Reshape (p, shape)")


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ((*PRODUCT, "y = Relu (p)"), [("", "x", "w"), ("Relu",)]),
        ((*PRODUCT, "y = Add (p, b)"), [("bias1", "x", "w", "b")]),
        ((*PRODUCT, "y = Add (b, p)"), [("bias1", "x", "w", "b")]),
        ((*PRODUCT, "y = Add (p, one)"), [("", "x", "w"), ("Add",)]),
        ((*PRODUCT, "y = Add (r, p)"), [("residual1", "x", "w", "r")]),
        # The shape of k is not known
        ((*PRODUCT, "k = Add (p, b)", "y = Add (r, k)"), [("bias1", "x", "w", "b"), ("Add",)]),
        ((*PRODUCT, "m = Add (p, b)", "y = Add (r, m)"), [("bias1_residual1", "x", "w", "b", "r")]),
        ((*PRODUCT, "e = Relu (p)", "y = Add (e, p)"), [("", "x", "w"), ("Relu",), ("Add",)]),
        ((*SILU, "y = Mul (z, p)"), [("gate1", "x", "w", "v")]),
        ((*SILU, "y = Mul (p, z)"), [("gate1", "x", "w", "v")]),
        ((*SILU, "k = Mul (z, p)", "y = Add (k, q)"),
         [("", "x", "w"), ("", "x", "v"), ("Sigmoid",), ("Mul",), ("Mul",), ("Add",)]),
        (
            (*PRODUCT, "u = Transpose <perm = [1, 0]> (v)", "q = MatMul (r, u)",
             "s = Sigmoid (q)", "z = Mul (q, s)", "y = Mul (z, p)"),
            [("", "x", "w"), ("", "r", "v"), ("Sigmoid",), ("Mul",), ("Mul",)],
        ),
        ((*HEADS, "y = Transpose <perm = [0, 2, 1, 3]> (h)"), [("output_heads2", "x", "w")]),
        ((*HEADS, "y = Transpose <perm = [0, 2, 3, 1]> (h)"), [("", "x", "w"), ("Reshape",), ("Transpose",)]),
        ((*PRODUCT, "g = Reshape (p, shape)", "y = Transpose <perm = [0, 2, 1, 3]> (g)"),
         [("", "x", "w"), ("Reshape",), ("Transpose",)]),
        (
            ("a = Relu (x)", "c = Transpose <perm = [0, 2, 1, 3]> (a)", "d = Reshape (c, shape)",
             "t = Transpose <perm = [1, 0]> (w)", "y = MatMul (d, t)"),
            [("Relu",), ("input_heads2", "a", "w")],
        ),
        (("t = Transpose <perm = [1, 0]> (r)", "y = MatMul (x, t)"), [("Transpose",), ("MatMul",)]),
    ],
)  # fmt: skip
def test_the_nodes_that_are_fused_with_a_product(lines: tuple[str, ...], left: list[tuple[str, ...]]) -> None:
    assert fused(body(*lines), weights_of(*lines)) == left


NORM = "n = RMSNormalization <axis = -1, epsilon = 0.001> (x, b)"
OF_NORM = ("t = Transpose <perm = [1, 0]> (w)", "p = MatMul (n, t)")
ROTATED = (
    "t = Transpose <perm = [1, 0]> (w)",
    "p = MatMul (x, t)",
    "h = Reshape (p, shape)",
    "a = Transpose <perm = [0, 2, 1, 3]> (h)",
)


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ((*PRODUCT, *SECOND, "y = Sub (p, q)"), [("2", "x", "w", "v"), ("Sub",)]),
        ((*PRODUCT, "k = Add (p, b)", *SECOND, "y = Sub (k, q)"), [("2_bias1.0", "x", "w", "b", "v"), ("Sub",)]),
        ((*SILU, "m = Mul (z, p)", "u2 = Transpose <perm = [1, 0]> (v)", "d = MatMul (x, u2)", "y = Sub (m, d)"),
         [("gate1", "x", "w", "v"), ("", "x", "v"), ("Sub",)]),
        ((NORM, *OF_NORM, "y = Relu (p)"), [("norm0.001", "x", "b", "w"), ("Relu",)]),
        ((NORM, *OF_NORM, "y = Sub (p, n)"), [("RMSNormalization",), ("", "n", "w"), ("Sub",)]),
        ((NORM.replace("-1", "1"), *OF_NORM, "y = Relu (p)"), [("RMSNormalization",), ("", "n", "w"), ("Relu",)]),
        ((*ROTATED, "y = RotaryEmbedding (a, cos, sin)"), [("output_heads2_rotated1", "x", "w", "cos", "sin")]),
        ((*ROTATED, "y = RotaryEmbedding <interleaved = 1> (a, cos, sin)"),
         [("output_heads2", "x", "w"), ("RotaryEmbedding",)]),
        ((*ROTATED, "y = RotaryEmbedding <rotary_embedding_dim = 2> (a, cos, sin)"),
         [("output_heads2", "x", "w"), ("RotaryEmbedding",)]),
        ((*ROTATED, "e = RotaryEmbedding (a, cos, sin)", "y = Sub (e, a)"),
         [("output_heads2", "x", "w"), ("RotaryEmbedding",), ("Sub",)]),
        ((*ROTATED, *SECOND, "g = Reshape (q, shape)", "c = Transpose <perm = [0, 2, 1, 3]> (g)",
          "e = RotaryEmbedding (a, cos, sin)", "f = RotaryEmbedding (c, cos, sin)", "y = Sub (e, f)"),
         [("2_output_heads2.2_rotated1.1", "x", "w", "v", "cos", "sin"), ("Sub",)]),
        ((*ROTATED, *SECOND, "g = Reshape (q, shape)", "c = Transpose <perm = [0, 2, 1, 3]> (g)",
          "e = RotaryEmbedding (a, cos, sin)", "f = RotaryEmbedding (c, sin, cos)", "y = Sub (e, f)"),
         [("2_output_heads2.2_rotated1.0", "x", "w", "v", "cos", "sin"), ("RotaryEmbedding",), ("Sub",)]),
    ],
)  # fmt: skip
def test_the_nodes_that_are_fused_with_products_of_one_input(
    lines: tuple[str, ...], left: list[tuple[str, ...]]
) -> None:
    shapes = SHAPES | {"n": "B,T,8", "g": "B,T,2,4", "c": "B,2,T,4"}
    assert fused(body(*lines), weights_of(*lines), True, shapes) == left


# Rotary embedding as models write it if cosines have a type of their own: with tables of two equal halves.
TABLE = "z2 = Concat <axis = -1> (f, f)"
COSINE = ("c1 = Cos (z2)", "c2 = Cast <to = 1> (c1)", "ct = Unsqueeze (c2, i1)")
SINE = ("s1 = Sin (z2)", "s2 = Cast <to = 1> (s1)", "st = Unsqueeze (s2, i1)")
HALVES = (
    "a1 = Slice (a, i0, i2, i3, i1)",
    "a2 = Slice (a, i2, big, i3, i1)",
    "n2 = Neg (a2)",
    "sw = Concat <axis = -1> (n2, a1)",
)
SUM = ("m1 = Mul (a, ct)", "m2 = Mul (sw, st)", "y = Add (m1, m2)")
ROPE = (*ROTATED, TABLE, *COSINE, *SINE, *HALVES, *SUM)
INDEX = {"i0": 0, "i1": 1, "i2": 2, "i3": 3, "big": 1 << 40}


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("", ""),
        ("m1 = Mul (a, ct)", "m1 = Mul (ct, a)"),
        ("y = Add (m1, m2)", "y = Add (m2, m1)"),
        # Any other form stays.
        ("Slice (a, i0, i2, i3, i1)", "Slice (a, i0, i2, i3, i2)"),  # every second element
        ("Slice (a, i2, big, i3, i1)", "Slice (a, i1, big, i3, i1)"),
        ("Slice (a, i0, i2, i3, i1)", "Slice (a, i0, i2, i2, i1)"),  # a slice of tokens
        ("Concat <axis = -1> (n2, a1)", "Concat <axis = -1> (a1, n2)"),
        ("Concat <axis = -1> (f, f)", "Concat <axis = -1> (f, e)"),  # different halves
        ("Concat <axis = -1> (f, f)", "Concat <axis = 1> (f, f)"),
        ("Unsqueeze (c2, i1)", "Unsqueeze (c2, i2)"),
        ("Cos (z2)", "Tan (z2)"),
        ("y = Add (m1, m2)", "m3 = Add (m1, m2)\n y = Sub (m3, a)"),  # other nodes read the heads too
        ("y = Add (m1, m2)", "y = Sub (m1, m2)"),
    ],
)
def test_rotary_embedding_that_is_written_out_is_fused_too(line: str, instead: str) -> None:
    shapes = SHAPES | {
        "z2": "B,T,4",
        "c1": "B,T,4",
        "c2": "B,T,4",
        "ct": "B,1,T,4",
        "s1": "B,T,4",
        "s2": "B,T,4",
        "st": "B,1,T,4",
    }
    text = body(*ROPE).replace(line, instead) if line else body(*ROPE)
    assert line in body(*ROPE)
    weights: dict[str, Any] = {"w": SQUARE["w"]} | {
        name: ("int64", [1], value) for name, value in INDEX.items() if f"{name}" in text
    }
    nodes = fused(text, weights, True, shapes)
    taken = line in ("", "m1 = Mul (a, ct)") or instead == "y = Add (m2, m1)"
    if taken:
        assert ("Add",) not in nodes and nodes[-1][0] == "output_heads2_rotated1" and nodes[-1][1:3] == ("x", "w")
        assert nodes[-1][3:] == ("c2.half", "s2.half")
    else:
        assert not [node for node in nodes if "rotated" in node[0]] and ("RotaryEmbedding",) not in nodes


def test_a_table_of_one_sequence_for_all_is_left_alone() -> None:
    shapes = SHAPES | {
        "z2": "1,T,4",
        "c1": "1,T,4",
        "c2": "1,T,4",
        "ct": "1,1,T,4",
        "s1": "1,T,4",
        "s2": "1,T,4",
        "st": "1,1,T,4",
    }
    weights: dict[str, Any] = {"w": SQUARE["w"]} | {name: ("int64", [1], value) for name, value in INDEX.items()}
    assert not [node for node in fused(body(*ROPE), weights, True, shapes) if "rotated" in node[0]]


def test_no_more_than_three_products_become_one() -> None:
    more = [f"{q} = MatMul (x, {t})\n {t}y = Relu ({q})" for q, t in (("p", "t"), ("q", "u"), ("m", "o"), ("d", "k"))]
    lines = [
        "t = Transpose <perm = [1, 0]> (w)",
        "u = Transpose <perm = [1, 0]> (v)",
        "o = Transpose <perm = [1, 0]> (w)",
    ]
    lines += ["k = Transpose <perm = [1, 0]> (v)", *more, "y = Sum (ty, uy, oy, ky)"]
    linears = [
        node for node in fused(body(*lines), {name: SQUARE[name] for name in "wv"}, True) if node[0] in ("", "3")
    ]
    assert linears == [("3", "x", "w", "v", "w"), ("", "x", "v")]


def test_weights_of_other_types_are_left_alone() -> None:
    assert fused(body(*PRODUCT, "y = Relu (p)"), {"w": ("float64", [8, 8])}) == [("Transpose",), ("MatMul",), ("Relu",)]


HEADS_FIRST = "a = Transpose <perm = [0, 2, 1, 3]> (h)"
GELU = (*PRODUCT, *SECOND, "e = Gelu (q)", "y = Mul (e, p)")
FROM_HEADS = ("e = Relu (x)", "c = Transpose <perm = [0, 2, 1, 3]> (e)", "d = Reshape (c, shape)")
OF_HEADS = ("t = Transpose <perm = [1, 0]> (w)", "y = MatMul (d, t)")


@pytest.mark.parametrize(
    ("name", "lines", "times"),
    [
        ("make_linear", ("t = Transpose <perm = [1, 0]> (r)", "y = MatMul (x, t)"), 0),  # r is no weight
        ("make_linear", ("t = Transpose <perm = [0, 1]> (w)", "y = MatMul (x, t)"), 0),
        ("add_bias", (*PRODUCT, "y = Add (p, one)"), 0),
        ("add_bias", (*PRODUCT, "e = Add (p, b)", "y = Sub (e, p)"), 0),
        ("add_bias", (*PRODUCT, "m = Add (p, b)", "y = Add (m, b)"), 1),
        ("add_gate", GELU, 0),
        ("add_gate", (*PRODUCT, *SECOND, "s = Sigmoid (p)", "z = Mul (q, s)", "y = Mul (z, p)"), 0),
        ("add_gate", (*PRODUCT, *SECOND, "m = Add (q, b)", "s = Sigmoid (m)", "z = Mul (m, s)", "y = Mul (z, p)"), 0),
        ("add_gate", (*SILU, "k = Mul (z, p)", "y = Add (k, q)"), 0),  # other nodes read the gate
        ("add_gate", (*SILU, "k = Mul (z, p)", "y = Add (k, p)"), 0),  # other nodes read the product
        ("add_gate", (*PRODUCT, "u = Transpose <perm = [1, 0]> (v)", "q = MatMul (r, u)", "s = Sigmoid (q)",
                      "z = Mul (q, s)", "y = Mul (z, p)"), 0),  # the products have two inputs
        ("add_residual", (*PRODUCT, "k = Add (p, b)", "y = Add (r, k)"), 0),  # the shape of k is not known
        ("add_residual", (*PRODUCT, "e = Relu (p)", "y = Add (e, p)"), 0),
        ("add_residual", (*PRODUCT, "m = Add (p, r)", "y = Add (m, x)"), 1),
        ("split_output", (*PRODUCT, "g = Reshape (p, shape)", "y = Transpose <perm = [0, 2, 1, 3]> (g)"), 0),
        ("split_output", (*HEADS, HEADS_FIRST, "y = Add (a, h)"), 0),
        ("read_heads", (*FROM_HEADS, *OF_HEADS, "k = Neg (d)"), 0),
        ("read_heads", (*(line.replace("d =", "k =") for line in FROM_HEADS), OF_HEADS[0], "y = MatMul (k, t)"), 0),
        ("add_norm", (NORM, *OF_NORM, "y = Sub (p, n)"), 0),
        ("add_norm", (NORM.replace("-1", "1"), *OF_NORM, "y = Relu (p)"), 0),
        ("add_norm", (NORM, "m = Cast <to = 1> (n)", OF_NORM[0], "y = MatMul (m, t)"), 0),
        ("add_rotary", (*ROTATED, "y = RotaryEmbedding <interleaved = 1> (a, cos, sin)"), 0),
        ("add_rotary", (*ROTATED, "e = RotaryEmbedding (a, cos, sin)", "y = Sub (e, a)"), 0),
        ("add_rotary", (*PRODUCT, "y = RotaryEmbedding (p, cos, sin)"), 0),  # no heads
        ("add_rotary", (*PRODUCT, "m = Add (p, r)", "h = Reshape (m, shape)", HEADS_FIRST,
                        "y = RotaryEmbedding (a, cos, sin)"), 0),  # the Linear has a residual
        ("add_rotary", (*ROTATED, *SECOND, "i = Reshape (q, shape)", "j = Transpose <perm = [0, 2, 1, 3]> (i)",
                        "e = RotaryEmbedding (a, cos, sin)", "f = RotaryEmbedding (j, sin, cos)",
                        "y = Sub (e, f)"), 1),  # the Linear rotates other heads by other angles
    ],
)  # fmt: skip
def test_a_fusion_that_would_change_values_is_left_out(name: str, lines: tuple[str, ...], times: int) -> None:
    model = model_of(body(*lines), weights_of(*lines), SHAPES | {"n": "B,T,8", "i": "B,T,2,4", "j": "B,2,T,4"})
    assert run_passes(model, [*ONE_PRODUCT, *SEVERAL_PRODUCTS])[name] == times
