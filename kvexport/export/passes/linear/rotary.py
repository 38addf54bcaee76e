"""The graph pass that makes the rotary embedding of heads the last step of the Linear node that computes the heads.

    a, b = Linear(x, w, v, ...)                 a [B, H, T, D], read by nothing else
    y = RotaryEmbedding(a, cosine, sine)        rotates elements f and f + D / 2 of a head together
=>  y, b = Linear(x, w, v, ..., cosine, sine)   rotated = [1, 0]; cosine, sine [B, T, D / 2]

A Linear node rotates all its rotated outputs by the same cosines and sines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import form_of, linear_of, put_linear
from kvexport.export.passes.nodes import is_op, read_only
from kvexport.export.passes.report import Rewrite


class Match(NamedTuple):
    linear: ir.Node
    rotary: ir.Node
    heads: ir.Value
    angles: list[ir.Value]


def pattern(node: ir.Node) -> list[Match]:
    linear = linear_of(node, 0) if is_op(node, "RotaryEmbedding") and len(node.inputs) == 3 else None
    heads, cosine, sine = node.inputs if linear is not None else (None, None, None)
    if linear is None or heads is None or cosine is None or sine is None:
        return []
    return [Match(linear, node, heads, [cosine, sine])]


def check(match: Match) -> str:
    """Return why a rotary embedding cannot be the last step of a Linear node; "" if it can.

    It cannot if its form differs from that of Linear, or if other nodes need the heads before they are rotated.
    """
    form, i = form_of(match.linear), list(match.linear.outputs).index(match.heads)
    for name in ("interleaved", "rotary_embedding_dim"):
        if value := match.rotary.attributes.get_int(name, 0):
            return f"{name} is {value}"
    if form.gate or form.residual:
        return f"its Linear has a gate or a residual ({match.linear.overload})"
    if not read_only(match.heads):
        return "its heads are read by other nodes too"
    if not form.output_heads[i] or form.rotated[i]:
        return "its Linear sets no heads apart" if not form.output_heads[i] else "its heads are rotated already"
    if any(form.rotated) and list(match.linear.inputs[-2:]) != match.angles:
        return "its Linear rotates other heads by other angles"
    return ""


def rewrite(match: Match) -> None:
    form, inputs, i = form_of(match.linear), list(match.linear.inputs), list(match.linear.outputs).index(match.heads)
    rotated = tuple(int(was or j == i) for j, was in enumerate(form.rotated))
    rest = inputs[:-2] if any(form.rotated) else inputs
    outputs = [match.rotary.outputs[0] if output is match.heads else output for output in match.linear.outputs]
    put_linear([match.linear, match.rotary], [*rest, *match.angles], replace(form, rotated=rotated), outputs)


ROTARY = Rewrite("rotary embedding", pattern, check, rewrite)
