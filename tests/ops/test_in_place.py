"""Programs that change tensors in place are traced once, and give PyTorch's values."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim

from kvexport.ops import to_onnx


class ScalesANewTensor(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        before = x + 1
        product = before * 3
        before *= 2
        before /= x.abs().sum(-1, keepdim=True) + 1
        return product, before, before + 1


class FillsSlices(nn.Module):
    """A module that fills slices of slices, with steps, of other types and in a single row."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1
        y[..., 0:6:2] = x[..., 1:6:2] * 10
        y[:, 2][..., 3:] = (x[:, 0, 3:] * 4).int()
        row = y[:, 1]
        row[..., :2] = x[:, 0, 4:]
        return y, row


class Scatters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask.scatter_(-1, x.argmax(-1, keepdim=True), 1.0)
        return mask.square() + x


class ReadsAViewLater(nn.Module):
    """A module that reads a slice from before the change: only a decomposition gives PyTorch's values."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        first = y[..., :2]
        y *= 2
        return first + y[..., 2:4]


class FillsByOneRow(nn.Module):
    """A module that copies one row, of another type, into all rows."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y[..., :3] = x[:, :1, :3].double()
        return y


ONCE = (ScalesANewTensor, FillsSlices, Scatters, FillsByOneRow)


@pytest.mark.parametrize("module", [*ONCE, ReadsAViewLater])
def test_values_are_pytorchs(module: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    if module in ONCE:
        monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *_: pytest.fail("decomposed"))
    model = to_onnx.to_onnx(module(), (torch.zeros(2, 3, 6),), ({0: Dim("batch")},), {})
    x = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(0)) * 5
    actual = ReferenceEvaluator(ir.to_proto(model)).run(None, {model.graph.inputs[0].name: x.numpy()})
    expected = module()(x.clone())
    for one, other in zip(actual, expected if isinstance(expected, tuple) else [expected], strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-6)
