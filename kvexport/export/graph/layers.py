"""The decoder layers that compute the same function, found in a forward pass of the model without weights.

Two layers compute the same function if they call equal operations in equal order, with equal scalar arguments, on
corresponding tensors. Corresponding tensors are parameters with the same name, equal constants, results of
corresponding operations, the hidden states at the inputs, and tensors that all layers share (position embeddings). A
difference is therefore found wherever it comes from: the config, a module's type, an attribute, or the index of the
layer.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvexport.export.hooks.attention import PassThroughCache, attending

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Layers:
    name: str  # name of the model's module list that has the layers
    modules: tuple[nn.Module, ...]
    first: tuple[int, ...]  # for each layer, the number of the first layer that computes the same function

    def traced(self) -> tuple[int, ...]:
        return tuple(i for i, first in enumerate(self.first) if self.first[:i].count(first) < 2)


def find_layers(model: Any, mode: FakeTensorMode) -> Layers | None:
    """Return the decoder layers of `model`, grouped by the function that they compute.

    The result is None if one layer cannot be a copy of another: the layers are not in one list, or more than one hidden
    state connects a layer with the next.
    """
    name, modules = layer_list(model)
    if not modules:
        return None
    watch = _Watch(model, name, len(modules))
    try:
        with wrapped(dict(enumerate(modules)), watch.layer), attending(watch), torch.no_grad(), mode, watch:
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            model(input_ids=tokens, position_ids=tokens, **PassThroughCache().as_arguments(model))
    except Exception:  # A model that cannot be watched can still be traced whole.
        return None
    if not watch.regular or len(watch.records) != len(modules):
        return None
    return Layers(name, modules, tuple(watch.records.index(record) for record in watch.records))


@contextlib.contextmanager
def wrapped(modules: Mapping[int, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Within this context, calls of decoder layer i become calls of ``call(i, original forward, ...)``."""
    for i, module in modules.items():
        module.forward = partial(call, i, module.forward)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


@contextlib.contextmanager
def left_out(model: nn.Module, layers: Layers, numbers: Iterable[int]) -> Iterator[None]:
    modules: Any = model.get_submodule(layers.name)
    for i in numbers:
        modules[i] = _PassesOn(layers.modules[i])
    try:
        yield
    finally:
        for i in numbers:
            modules[i] = layers.modules[i]


class _PassesOn(nn.Module):
    """A stand-in for a decoder layer, with its attributes but without parameters, which a trace would record."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def layer_list(model: Any) -> tuple[str, tuple[nn.Module, ...]]:
    """Return the name of the model's list of decoder layers, and the layers; no layers if several lists qualify."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) > 1 and hasattr(model, "get_decoder"):  # an image encoder may have as many layers
        inside = set(model.get_decoder().modules())
        lists = [(name, m) for name, m in lists if m in inside]
    return (lists[0][0], tuple(lists[0][1])) if len(lists) == 1 else ("", ())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: Any, name: str, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.regular = True
        self.records: list[list[Any]] = []
        self._layer: int | None = None  # the layer that is running
        self._hidden: Any = None  # the hidden state, from layer to layer
        self._origins: dict[int, tuple[int | None, int]] = {}  # by tensor: the layer that made it, and its number there
        self._number = 0
        self._kept: list[Any] = []  # objects that stay alive, so that Python gives no id twice
        self._own: dict[int, tuple[int, str]] = {}  # by parameter: its layer and its name there
        inside = re.compile(re.escape(name) + r"\.(\d+)\.(.+)")
        seen: set[int] = set()
        for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
            match = inside.fullmatch(parameter_name)
            if id(parameter) in seen and (match or id(parameter) in self._own):
                self.regular = False  # the parameter is shared by layers, or by a layer and the rest of the model
            if match:
                self._own[id(parameter)] = int(match[1]), match[2]
            seen.add(id(parameter))

    def layer(self, i: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else None
        threaded = isinstance(hidden, Tensor) and (hidden is self._hidden or i == 0)
        self.regular &= threaded and self._layer is None and i == len(self.records)
        self._layer, self._hidden, self._number = i, hidden, 0
        self.records.append([])
        result = forward(*args, **kwargs)
        same = (
            isinstance(result, Tensor)
            and isinstance(hidden, Tensor)
            and (result.shape, result.dtype) == (hidden.shape, hidden.dtype)
        )
        self.regular &= same and self._maker(result) == i
        self.records[-1].append(self._describe(result))
        self._layer, self._hidden = None, result
        return result

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        # Each layer's number is its own, and its window is an attribute of its node.
        same = {name: option for name, option in options.items() if name not in ("layer", "attention_mask")}
        self._note("attention", (query, key, value, same))
        return query.new_empty(*query.shape[:3], value.shape[3])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note(str(func), (args, kwargs))
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.regular &= self._maker(args[i] if i < len(args) else kwargs.get(argument.name)) == self._layer
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._origins[id(tensor)] = self._layer, self._number
                self._number += 1
                self._kept.append(tensor)
        return result

    def _maker(self, x: Any) -> int | None:
        return self._origins.get(id(x), (None, 0))[0]

    def _note(self, what: str, arguments: Any) -> None:
        described = what, self._describe(arguments)
        if self._layer is not None:
            self.records[-1].append(described)

    def _describe(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, (list, tuple)):
            return [self._describe(item) for item in x]
        if isinstance(x, dict):
            return [(name, self._describe(item)) for name, item in x.items()]
        if isinstance(x, PLAIN):
            return type(x).__name__, repr(x)
        self._kept.append(x)
        return "object", id(x)

    def _tensor(self, x: Tensor) -> Any:
        if x is self._hidden:
            self.regular &= self._layer is not None or len(self.records) == self.count
            return "hidden"
        if id(x) in self._origins:
            layer, number = self._origins[id(x)]
            self.regular &= layer in (None, self._layer)
            return ("outer", id(x)) if layer is None else ("made", number)
        if id(x) in self._own:
            layer, name = self._own[id(x)]
            self.regular &= layer == self._layer
            return "own", name, tuple(x.shape), str(x.dtype)
        self._kept.append(x)
        if isinstance(x, FakeTensor) or x.is_meta:
            return "outer", id(x)
        with unset_fake_temporarily():
            return "constant", tuple(x.shape), str(x.dtype), x.reshape(-1).view(torch.uint8).numpy().tobytes()
