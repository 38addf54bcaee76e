"""Conversion of a PyTorch module to ONNX by torch.export and torch.onnx.export, without their slowest steps.

A step is skipped only if it does not change the result.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset23 as op
from onnxscript import optimizer
from onnxscript.rewriter import onnx_fusions
from torch import nn
from torch.export import ExportedProgram

from kvexport.ops.exporter_steps import decompositions_skipped, mismatches_skipped, steps_skipped
from kvexport.ops.in_place import without_changes_in_place
from kvexport.quiet import quiet_exporter

OPSET = 23  # keeps RMSNormalization and RotaryEmbedding whole; 24 decomposes them


def to_onnx(
    module: nn.Module,
    arguments: Sequence[Any],
    shapes: Sequence[Any],
    translations: Mapping[Any, Any],
    **names: Sequence[str],
) -> ir.Model:
    """Convert a PyTorch module to an ONNX IR model of opset `OPSET`, without optimizations.

    Errors of torch.export and torch.onnx pass through.
    """
    with quiet_exporter(), torch.no_grad(), steps_skipped():
        exported = torch.export.export(
            module,
            tuple(arguments),
            dynamic_shapes=tuple(shapes),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        _pass_detached(exported)
        if without_changes_in_place(exported):
            with contextlib.suppress(torch.onnx.OnnxExporterError), decompositions_skipped():
                return _translate(exported, translations, names)
        return _translate(exported, translations, names)


def optimize(model: ir.Model) -> None:
    """Optimize an ONNX IR model in place: fold constants, and fuse nodes into operators of opset `OPSET`."""
    with quiet_exporter(), mismatches_skipped():
        optimizer.optimize(model)
        onnx_fusions.fuse(model)


def _pass_detached(exported: ExportedProgram) -> None:
    for module in exported.graph_module.modules():
        for node in [node for node in module.graph.nodes if node.target is torch.ops.aten.detach_.default]:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _translate(exported: ExportedProgram, translations: Mapping[Any, Any], names: dict[str, Any]) -> ir.Model:
    aten: Any = torch.ops.aten
    # Operators that torch.onnx translates only after decomposition.
    added: dict[Any, Any] = {
        aten.to.dtype: _to_dtype, aten.to.device: _to_device, aten.to.dtype_layout: _to_layout,
        aten.rsub.Scalar: _from_scalar, aten.__and__.Tensor: _and, aten.__or__.Tensor: _or, aten.min.other: _least,
        aten.square.default: _square, aten.erfinv.default: _erfinv,
    }  # fmt: skip
    program = torch.onnx.export(
        exported,
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        custom_translation_table={**added, **translations},
        **names,
    )
    assert program is not None
    return program.model


def _to_dtype(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: str = "") -> Any:
    return op.Cast(x, to=dtype)


def _to_device(
    x: Any, device: str, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: str = ""
) -> Any:
    return _to_dtype(x, dtype)


def _to_layout(
    x: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False, non_blocking: bool = False,
    copy: bool = False, memory_format: str = "",
) -> Any:  # fmt: skip
    return op.Identity(x) if dtype == -1 else _to_dtype(x, dtype)


def _from_scalar(x: Any, scalar: float, alpha: float = 1.0) -> Any:
    assert alpha == 1.0
    return op.Sub(op.CastLike(scalar, x), x)  # type: ignore[type-var]


def _and(x: Any, y: Any) -> Any:
    return op.And(x, y) if x.dtype == y.dtype == ir.DataType.BOOL else op.BitwiseAnd(x, y)


def _or(x: Any, y: Any) -> Any:
    return op.Or(x, y) if x.dtype == y.dtype == ir.DataType.BOOL else op.BitwiseOr(x, y)


def _least(x: Any, y: Any) -> Any:
    return op.Min(x, y)


def _square(x: Any) -> Any:
    return op.Mul(x, x)


def _erfinv(x: Any) -> Any:
    """Return the inverse error function in float32: Winitzki's approximation, and two of Newton's steps.

    Gemma 3n applies the function only to a constant, so the optimizer folds all nodes into a constant.
    """
    shape, log = 0.147, op.Log(op.Sub(1.0, op.Mul(x, x)))
    half = op.Add(2 / (math.pi * shape), op.Mul(log, 0.5))
    root = op.Sqrt(op.Sub(op.Mul(half, half), op.Mul(log, 1 / shape)))
    y = op.Mul(op.Sign(x), op.Sqrt(op.Relu(op.Sub(root, half))))
    for _ in range(2):
        slope = op.Mul(op.Exp(op.Mul(y, y)), math.sqrt(math.pi) / 2)
        y = op.Sub(y, op.Mul(op.Sub(op.Erf(y), x), slope))
    return y
