"""ONNX translations of the PyTorch operators that torch.onnx translates in another way, or not at all."""

from typing import Any

import torch
from onnxscript import opset23 as op


def _stable_sort(values: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Translate a stable sort as TopK over the whole dimension: ONNX gives ties to the lower index."""
    size = op.Shape(values, start=dim, end=None if dim == -1 else dim + 1)
    return op.TopK(values, size, axis=dim, largest=int(descending), sorted=1)


def _gather(values: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """Translate ``values.gather(dim, index)`` to ONNX; an index expanded from [B, H, N, 1] copies whole rows."""
    expand = index.producer()
    if dim == 2 and len(index.shape) == 4 and expand is not None and expand.op_type == "Expand":
        row = expand.inputs[0]
        if row.shape is not None and row.shape[3] == 1 and tuple(row.shape[:3]) == tuple(index.shape[:3]):
            return op.GatherND(values, row, batch_dims=2)
    return op.GatherElements(values, index, axis=dim)


def _gather_rows(values: Any, indices: Any) -> Any:
    return op.GatherND(values, _joined(indices))


def _scatter_rows(values: Any, indices: Any, rows: Any, accumulate: bool = False) -> Any:
    """Translate ``values.index_put((i, j, k), rows)`` to ONNX, with the same index nodes as `_gather_rows`."""
    return op.ScatterND(values, _joined(indices), rows)


def _joined(indices: Any) -> Any:
    last: Any = op.Constant(value_ints=[-1])
    return op.Concat(*[op.Unsqueeze(index, last) for index in indices], axis=-1)


# The translation of each PyTorch operator.
TRANSLATIONS: dict[Any, Any] = {
    torch.ops.aten.sort.stable: _stable_sort,
    torch.ops.aten.gather.default: _gather,
    torch.ops.aten.index.Tensor: _gather_rows,
    torch.ops.aten.index_put.default: _scatter_rows,
}
