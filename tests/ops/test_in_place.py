"""Programs that change tensors in place are traced once, and give PyTorch's values."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim

from kvexport.ops import to_onnx
from kvexport.ops.in_place import without_changes_in_place


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


class KeepsItsType(nn.Module):
    """A module whose float16 tensor is multiplied in place by a float32 one, and stays float16."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.to(torch.float16) * 1
        y *= x.abs()
        return y, y + 1


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


ONCE = (ScalesANewTensor, FillsSlices, Scatters, FillsByOneRow, KeepsItsType)


@pytest.mark.parametrize("module", [*ONCE, ReadsAViewLater])
def test_values_are_pytorchs(module: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    if module in ONCE:
        monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *_: pytest.fail("decomposed"))
    model = to_onnx.to_onnx(module(), (torch.zeros(2, 3, 6),), ({0: Dim("batch")},), {})
    x = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(0)) * 5
    actual = ReferenceEvaluator(ir.to_proto(model)).run(None, {model.graph.inputs[0].name: x.numpy()})
    expected = module()(x.clone())
    for one, other in zip(actual, expected if isinstance(expected, tuple) else [expected], strict=True):
        assert one.dtype == other.numpy().dtype
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-3 if one.dtype == np.float16 else 1e-6)


class ChangesAnotherArgument(nn.Module):
    """A module with a batch norm, which changes the running mean and variance, but not its first argument."""

    def forward(self, x: Tensor) -> Tensor:
        y, mean, variance = x * 2, x[0] * 0, x[0] * 0 + 1
        norm = torch.ops.aten._native_batch_norm_legit(y, None, None, mean, variance, True, 0.1, 1e-5)[0]
        return norm + y + mean


def test_an_operator_that_changes_another_argument_than_its_first_stays() -> None:
    exported = torch.export.export(ChangesAnotherArgument(), (torch.zeros(2, 3),), strict=False)
    before = str(exported.graph)
    assert not without_changes_in_place(exported)
    assert str(exported.graph) == before
