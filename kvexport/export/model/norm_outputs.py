"""The projections of a model that read the output of a norm.

If only projections read the output of a norm, a factor of each channel can move from the norm's weight into the weights
of the projections.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

LOOKS = {"__get__", "size", "dim", "stride"}  # at a tensor's form, not at its values


def is_norm(module: nn.Module) -> bool:
    """Return whether a module may be a norm: its only parameter is a weight of one dimension."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    return list(parameters) == ["weight"] and parameters["weight"].ndim == 1


class NormOutputs(TorchFunctionMode):
    """A recorder, while a model runs within it, of the outputs of norms and of the operations that read these outputs.

    Attributes:
        offsets: For each norm, by the name of its weight, c if the norm multiplies by (c + weight): 0, or 1 in Gemma.
        others: The norms whose output is read by an operation other than a projection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offsets: dict[str, float] = {}
        self.others: set[str] = set()
        self._outputs: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._weight: Any = None
        self._aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not record operations that read the output of a norm, within this context."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def hook(self, tensor: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """Return a forward hook that records the outputs of the norm whose weight is called `tensor`."""

        def record(module: nn.Module, args: tuple[Any, ...], y: Any) -> None:
            with self.aside():
                offset = _offset(module, args, y)
            if offset is not None:
                self.offsets[tensor] = offset
                self._outputs[id(y)] = weakref.ref(y), tensor

        return record

    def of(self, x: Any) -> str:
        """Return the name of the norm (normalization layer) whose output is `x`; empty if `x` is another tensor."""
        output, tensor = self._outputs.get(id(x), (None, ""))
        return tensor if output is not None and output() is x else ""

    def read_by(self, weight: Any) -> None:
        """Note that the next matrix product with `weight` is that of a projection.

        A norm's output that the projection reads is then not counted as read by another operation.
        """
        self._weight = weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the norm outputs among the arguments of a PyTorch call, and run the call (see `TorchFunctionMode`)."""
        name = getattr(func, "__name__", "")
        if not self._aside and name not in LOOKS and not (name == "linear" and args[1] is self._weight):
            self.others.update(norm for x in tree_leaves((args, kwargs)) if (norm := self.of(x)))
        return func(*args, **(kwargs or {}))


def _offset(module: nn.Module, args: tuple[Any, ...], y: Any) -> float | None:
    """Return the c, 0 or 1, with which `normalized input * (c + weight)` is the norm's output `y`; None if neither."""
    weight: Any = module.weight
    if len(args) != 1 or not isinstance(y, Tensor) or y.shape[-1:] != weight.shape:
        return None
    matching = None
    for offset in (0.0, 1.0):
        module._parameters["weight"] = nn.Parameter((offset + weight) / 2 - offset, requires_grad=False)
        if torch.allclose(2 * module.forward(args[0][:1]), y[:1], rtol=1e-4, atol=1e-6 * float(y.abs().max())):
            matching = offset
    module._parameters["weight"] = weight
    return matching
