"""The graph pass that makes an RMSNorm the first step of the only Linear node that reads its output.

    n = RMSNormalization<axis = -1>(x, scale)       scale [inputs], of the type of x and of the weights
    y = Linear(n, w, ...)
=>  y = Linear(x, scale, w, ...)                    norm = 1, epsilon

Linear always normalizes in float32, so the attribute stash_type of RMSNormalization has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from kvexport.export.passes.linear.forms import dtype_of, form_of, is_linear, put_linear
from kvexport.export.passes.nodes import dims, known_shape, producer, read_only, show
from kvexport.export.passes.report import Rewrite


class Match(NamedTuple):
    norm: ir.Node
    data: ir.Value
    scale: ir.Value
    linear: ir.Node


def pattern(node: ir.Node) -> list[Match]:
    """Return the matches at a Linear node whose input is the output of an RMSNormalization, perhaps through a Cast."""
    cast = producer(node, 0, "Cast") if is_linear(node) else None
    norm = producer(cast or node, 0, "RMSNormalization") if is_linear(node) else None
    if norm is None:
        return []
    data, scale = norm.inputs
    return [Match(norm, data, scale, node)] if data is not None and scale is not None else []


def check(match: Match) -> str:
    """Return why an RMSNorm cannot be the first step of a Linear node; "" if it can.

    It cannot if the norm covers other dimensions than the last, if data types differ, or if other nodes read its
    output.
    """
    norm, data, scale, linear = match
    form, types = form_of(linear), (data.dtype, scale.dtype, dtype_of(linear))
    if linear.inputs[0] is not norm.outputs[0]:
        return f"its rows are normalised in {scale.dtype} and cast to the weights' {dtype_of(linear)}"
    if form.norm or form.input_heads:
        return f"its Linear does more with its input already ({linear.overload})"
    if not read_only(norm.outputs[0]):
        return "its normalised rows are read by other nodes too"
    if len(set(types)) != 1:
        return f"rows, scale and weights are {', '.join(map(str, types))}, not of one type"
    last, axis = len(known_shape(data)) - 1, norm.attributes.get_int("axis", -1)
    if last < 1 or axis not in (-1, last) or known_shape(scale) != known_shape(data)[-1:]:
        return f"axis {axis} of {show(dims(data))} with a scale of {show(dims(scale))} is not the norm of whole rows"
    return ""


def rewrite(match: Match) -> None:
    epsilon = match.norm.attributes.get("epsilon")
    form = replace(
        form_of(match.linear), norm=1, epsilon=float(f"{epsilon.as_float():.6g}") if epsilon is not None else 1e-5
    )
    inputs = [match.data, match.scale, *match.linear.inputs[1:]]
    put_linear([match.norm, match.linear], inputs, form, match.linear.outputs)


NORM = Rewrite("norm", pattern, check, rewrite)
