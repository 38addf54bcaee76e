"""The Hugging Face model in PyTorch with an artifact's weights; rounded and packed weights are dequantized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from kvexport.export.hooks.attention import IMPLEMENTATION
from kvexport.export.hooks.experts import Layout, expert_layouts
from kvexport.export.hooks.own_attention import lead
from kvexport.export.model.config import load_config
from kvexport.export.model.conversion import PLAIN
from kvexport.export.model.hf_model import (
    attention_by_part,
    auto_class,
    buffers_as_parameters,
    hook_modules,
    without_weights,
)
from kvexport.export.model.tensors import Checkpoint, Source, dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_specs
from kvexport.export.weights.write import Spec
from kvexport.ops.packed import dequantize, integers, pack
from kvexport.tensor_files.casting import load_tensor

BLOCK = 1 << 20  # numbers of a weight that a product dequantizes at a time


def load_model(checkpoint: Checkpoint, recipe: Any, attention: str) -> Any:
    dtype, config = getattr(torch, recipe.model.dtype), load_config(str(checkpoint.path), recipe)
    if not checkpoint.computed and recipe.weights.bits is None:
        model: Any = auto_class(config).from_pretrained(
            str(checkpoint.path),
            dtype=dtype,
            attn_implementation=attention_by_part(config, attention),
            experts_implementation="eager",  # the default refuses float64
            use_safetensors=True,
        )
    else:
        model = without_weights(config, dtype, attention, "eager")
        _read_weights(model, checkpoint, recipe)
    if attention != IMPLEMENTATION:
        return model.eval()
    hook_modules(model)
    return lead(model.eval())


def _read_weights(model: Any, checkpoint: Checkpoint, recipe: Any) -> None:
    buffers_as_parameters(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    layouts, weights = expert_layouts(model), dict[int, Tensor]()
    for spec in weight_specs(checkpoint, model, recipe):
        name = spec.name.removeprefix("model.")
        if (parameter := id(parameters[name])) not in weights:  # else it is tied to one that was read
            weights[parameter] = _read(spec, parameters[name], layouts.get(name, PLAIN))
    for module in model.modules():
        module._parameters.update({own: x if x is None else weights[id(x)] for own, x in module._parameters.items()})


def _read(spec: Spec, parameter: Tensor, layout: Layout) -> Tensor:
    if not isinstance(spec, ComputedSpec):
        values = load_tensor(spec.entry, spec.dtype)
    elif spec.source.packing is None:
        values = dense_values(spec.source)
    else:
        return PackedWeight(spec.source, parameter, layout)
    stored = torch.from_numpy(values).to(parameter.dtype).reshape(spec.shape)
    return nn.Parameter(layout.to_module(stored).contiguous(), requires_grad=False)


class PackedWeight(Tensor):
    """A packed weight of a module of PyTorch, in memory a byte for each number and the packed scales.

    PyTorch's functions get its values: a product those of some rows at a time, an embedding those of the picked rows,
    an index those of one expert, and other functions all.
    """

    def __new__(cls, source: Source, parameter: Tensor, layout: Layout) -> PackedWeight:
        # If a function bypassed `__torch_function__`, its result would be NaN.
        stand_in = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
        return Tensor._make_subclass(cls, stand_in)

    def __init__(self, source: Source, parameter: Tensor, layout: Layout) -> None:
        packing, self.expert_layout = source.packing, layout
        assert packing is not None
        self.full_shape, self.inputs = layout.artifact_shape(tuple(parameter.shape)), source.shape[1]
        blocks = []
        for block in source.blocks():
            stored = {**block, "weight": integers(packing, len(block[packing.scale]), self.inputs, block)}
            if "zero" in block:
                stored["zero"] = pack(block["zero"], 8)
            self.order = {name: stored.pop(name) for name in ("order",) if name in stored}
            stored.pop("high", None)
            blocks.append(stored)
        self.packing = replace(packing, bits=8)
        self.stored = {name: np.concatenate([block.pop(name) for block in blocks]) for name in list(blocks[0])}
        self.name_of_type = str(parameter.dtype).removeprefix("torch.")

    def rows(self, rows: Any) -> Tensor:
        part = {name: x[rows] for name, x in self.stored.items()}
        values = dequantize(self.packing, len(part["weight"]), self.inputs, part | self.order)
        return torch.from_numpy(values.astype(self.name_of_type, copy=False))

    def dense(self) -> Tensor:
        return self.expert_layout.to_module(self.rows(slice(None)).view(self.full_shape))

    def expert(self, number: int) -> Tensor:
        _, outputs, inputs = self.full_shape
        rows = self.rows(slice(number * outputs, (number + 1) * outputs))
        return self.expert_layout.to_module(rows.view(1, outputs, inputs))[0]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is functional.linear:
                return _product(*args, **(kwargs or {}))
            if function is functional.embedding:
                ids, weight = args
                return weight.rows(ids.flatten().numpy()).view(*ids.shape, -1)
            if function is Tensor.__getitem__ and len(args[0].full_shape) == 3:
                return args[0].expert(int(args[1]))
            if function.__name__ == "__get__" and not isinstance(fact := function(*args), Tensor):  # a shape, a type
                return fact
            args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs or {}))
            return function(*args, **kwargs)


def _product(hidden: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    step = max(1, BLOCK // weight.inputs)
    blocks = [slice(first, first + step) for first in range(0, weight.full_shape[0], step)]
    biases = [None if bias is None else bias[rows] for rows in blocks]
    parts = [functional.linear(hidden, weight.rows(rows), own) for rows, own in zip(blocks, biases, strict=True)]
    return torch.cat(parts, -1)
