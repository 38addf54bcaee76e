"""Norms that scale in float32 are computed in float32. Norms of other types stay."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kvexport.export.graph.tracer import _optimize
from kvexport.export.passes.norm_types import cast_norm_rows
from kvexport.ops.to_onnx import to_onnx


@pytest.mark.parametrize("kind", [Gemma3RMSNorm, Olmo2RMSNorm])
def test_norms_that_scale_in_float32_round_once(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    norm, rows = kind(64), torch.randn(50, 3, 64, dtype=torch.float16) * 5
    nn.init.normal_(norm.weight)
    norm.half()
    model = to_onnx(norm, [rows], [{0: Dim("batch")}], {}, input_names=["rows"])
    _optimize(model, [])
    assert cast_norm_rows(model) == 1
    assert sum(node.op_type == "RMSNormalization" for node in model.graph) == 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = norm(rows).numpy()
    (actual,) = session.run(None, {"rows": rows.numpy()})
    assert actual.dtype == np.float16
    # Sums in another order move a few values to the next float16. One more rounding, of rows or scale, would move a
    # quarter of them.
    assert (actual != expected).mean() < 0.01


@pytest.mark.parametrize(("rows", "scale"), [("float", "float"), ("float", "float16")])
def test_other_types_stay_as_they_are(rows: str, scale: str) -> None:
    opening = '<ir_version: 11, opset_import: ["": 23]>'
    body = "{ y = RMSNormalization (x, s) }"
    model = ir.from_onnx_text(f"{opening} g ({rows}[B,T,8] x, {scale}[8] s) => ({scale}[B,T,8] y) {body}")
    assert cast_norm_rows(model) == 0
    assert [node.op_type for node in model.graph] == ["RMSNormalization"]
