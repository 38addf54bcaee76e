"""The graph passes that make a Linear node split its output into heads, or read an input that is split into heads.

    p = Linear(x, w, ...)                       [B, T, H D] of H heads of size D, read by nothing else
    h = Reshape(p, ...)                         [B, T, H, D]
    y = Transpose<perm = [0, 2, 1, 3]>(h)       [B, H, T, D]
=>  y = Linear(x, w, ...)                       output_heads = [H]

    t = Transpose<perm = [0, 2, 1, 3]>(x)       [B, H, T, D] to [B, T, H, D]
    f = Reshape(t, ...)                         [B, T, H D]
    y = Linear(f, w, ...)
=>  y = Linear(x, w, ...)                       input_heads = H
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import READ_TWICE, form_of, is_linear, linear_of, put_linear
from kvexport.export.passes.nodes import HEADS_TO_FRONT, dims, permutes, producer, read_only, show
from kvexport.export.passes.report import Rewrite


class Match(NamedTuple):
    linear: ir.Node
    reshape: ir.Node
    transpose: ir.Node


def _wrong_shapes(flat: ir.Value, apart: ir.Value) -> str:
    """Return why a Reshape does not split or join H attention heads of size D; "" if it does.

    It does if the shape of `flat` is [B, T, H D] and that of `apart` is [B, T, H, D], with a known number H.
    """
    one, other = dims(flat), dims(apart)
    known = len(one) == 3 and len(other) == 4 and None not in (*one, *other)
    if known and one[:2] == other[:2] and isinstance(other[2], int):
        return ""
    return f"the Reshape is between {show(one)} and {show(other)}, not between [B, T, H D] and [B, T, H, D]"


def output_pattern(node: ir.Node) -> list[Match]:
    """Return the matches of a Linear whose output is split into heads: a Reshape, then a Transpose to [B, H, T, D]."""
    reshape = producer(node, 0, "Reshape") if permutes(node, HEADS_TO_FRONT) else None
    linear = linear_of(reshape, 0) if reshape is not None else None
    return [Match(linear, reshape, node)] if reshape is not None and linear is not None else []


def output_check(match: Match) -> str:
    """Return why a Linear node cannot split its output into heads; "" if it can.

    It cannot if other nodes read the values between the Linear and the Transpose, if it already splits heads, or if the
    shapes are not those of heads.
    """
    if not read_only(match.linear.outputs[0]) or not read_only(match.reshape.outputs[0]):
        return READ_TWICE
    if form_of(match.linear).output_heads != (0,):
        return "its Linear sets heads apart already"
    return _wrong_shapes(match.linear.outputs[0], match.reshape.outputs[0])


def output_rewrite(match: Match) -> None:
    form = replace(form_of(match.linear), output_heads=(_heads(match.reshape.outputs[0]),))
    put_linear([match.linear, match.reshape, match.transpose], match.linear.inputs, form)


def input_pattern(node: ir.Node) -> list[Match]:
    reshape = producer(node, 0, "Reshape") if is_linear(node) else None
    transpose = producer(reshape, 0, "Transpose") if reshape is not None else None
    if reshape is None or transpose is None or not permutes(transpose, HEADS_TO_FRONT):
        return []
    return [Match(node, reshape, transpose)]


def input_check(match: Match) -> str:
    """Return why a Linear node cannot read heads [B, H, T, D]; "" if it can.

    It cannot if the shapes are not those of heads, if it already reads heads, or if other nodes read a value in
    between.
    """
    if not read_only(match.transpose.outputs[0]) or not read_only(match.reshape.outputs[0]):
        return "its input without heads is read by other nodes too"
    if form_of(match.linear).input_heads:
        return "its Linear reads heads already"
    return _wrong_shapes(match.reshape.outputs[0], match.transpose.outputs[0])


def input_rewrite(match: Match) -> None:
    form = replace(form_of(match.linear), input_heads=_heads(match.transpose.outputs[0]))
    inputs = [match.transpose.inputs[0], *match.linear.inputs[1:]]
    put_linear([match.transpose, match.reshape, match.linear], inputs, form)


def _heads(apart: ir.Value) -> int:
    heads = dims(apart)[2]
    assert isinstance(heads, int)
    return heads


OUTPUT_HEADS = Rewrite("output heads", output_pattern, output_check, output_rewrite)
INPUT_HEADS = Rewrite("input heads", input_pattern, input_check, input_rewrite)
