"""A device that is not there: PyTorch computes on the CPU, and refuses what a GPU refuses.

`torch.device(ELSEWHERE)` stands for the GPU. Its tensors hold their numbers on the CPU, but an operation on one of them
and a tensor of the CPU is an error, as is reading one with numpy before `.cpu()`. Code for a GPU can so be held to the
CPU's results where no GPU is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")  # a name that PyTorch's autograd knows without a driver


class _There(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _There:
        size = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: Any = Tensor._make_wrapper_subclass(cls, held.size(), **size, device=ELSEWHERE)  # type: ignore[attr-defined]
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[None]:
    with _Operations(), _Literals():
        yield


class _Literals(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Move what `torch.tensor` makes of Python numbers, because operations hear nothing of it."""
        kwargs = dict(kwargs or {})
        target = kwargs.pop("device", None) if function is torch.tensor else None
        result = function(*args, **kwargs)
        return result if target is None else result.to(target)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = any(isinstance(x, _There) for x in tensors)
    if there and any(not isinstance(x, _There) and x.dim() for x in tensors):
        raise RuntimeError(f"{function} got tensors of the GPU and of the CPU")
    target = kwargs.get("device")
    if target is not None:
        there, kwargs = torch.device(target) == ELSEWHERE, {**kwargs, "device": torch.device("cpu")}
    result = function(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
    if there and function._schema.is_mutable:
        return args[0]
    return tree_map(lambda x: _There(x) if there and isinstance(x, Tensor) else x, result)


def _numbers(x: Any) -> Any:
    return x.held if isinstance(x, _There) else x
