"""A fast path for the result shapes of pointwise operators while torch.export traces a program.

torch.export takes milliseconds for each of these shapes, because it compares sizes as symbolic expressions. If all
operands are contiguous, and one of them clearly has the shape of the result, the fast path takes that operand's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_dtypes: dict[Any, torch.dtype | None] = {}  # keys: operator, and the dtype and number of dimensions of its operands


def with_fast_path(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch_impl(mode: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        result = None if kwargs else _result(mode, func, args)
        return dispatch(mode, func, types, args, kwargs) if result is None else result

    return dispatch_impl


def _result(mode: Any, func: Any, args: Sequence[Any]) -> FakeTensor | None:
    tensors = [x for x in args if _is_tensor(x)]
    if not all(type(x) is FakeTensor and x.fake_mode is mode and x.constant is None for x in tensors):
        return None
    like = _largest(tensors)
    if like is None or not all(_is_contiguous(x) for x in tensors):
        return None
    dtype = _dtype(func, args)
    if dtype is None:
        return None
    meta = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device=like.device)


def _dtype(func: Any, args: Sequence[Any]) -> torch.dtype | None:
    key = (func, *((x.dtype, x.dim(), x.device) if isinstance(x, Tensor) else type(x) for x in args))
    if key not in _dtypes:
        _dtypes[key] = None
        numbers = all(isinstance(x, (Tensor, bool, int, float, type(None))) for x in args)
        if numbers and _makes_a_tensor(func) and all(x.device.type == "cpu" for x in args if isinstance(x, Tensor)):
            example = [torch.empty([1] * x.dim(), dtype=x.dtype, device="meta") if _is_tensor(x) else x for x in args]
            _dtypes[key] = func(*example).dtype
    return _dtypes[key]


def _makes_a_tensor(func: Any) -> bool:
    tags = getattr(func, "tags", ())
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags or func._schema.is_mutable:
        return False
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _largest(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose shape is the broadcast shape of all `tensors`; None if that is not certain."""
    if not any(x._has_symbolic_sizes_strides for x in tensors):
        return None
    largest = max(tensors, key=lambda x: x.dim())
    for tensor in tensors:
        if tensor.dim() == largest.dim() and sum(_is_one(x) for x in tensor.shape) < sum(map(_is_one, largest.shape)):
            largest = tensor
    for tensor in tensors:
        pairs = zip(reversed(tensor.shape), reversed(largest.shape), strict=False)
        if tensor is not largest and not all(_is_one(a) or _expression(a) == _expression(b) for a, b in pairs):
            return None
    return largest


def _is_contiguous(tensor: Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if _is_one(size):
            continue
        if _expression(stride) != expected:
            return False
        expected = expected * _expression(size)
    return True


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
