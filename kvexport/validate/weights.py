"""The Hugging Face model in PyTorch with an artifact's weights; rounded and packed weights are dequantized.

A packed weight has a byte for each number in memory. Its float values are computed when a module needs them: the rows
of a product block by block, those of an embedding token by token, and others as a whole, to be freed when the module
returns. The memory of the model is therefore that of its numbers, and not of their values in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvexport.export.hooks.attention import output_projection
from kvexport.export.hooks.experts import Layout, expert_layouts
from kvexport.export.model.config import load_config
from kvexport.export.model.conversion import PLAIN
from kvexport.export.model.hf_model import attention_by_part, auto_class, buffers_as_parameters, without_weights
from kvexport.export.model.tensors import Checkpoint, Source, dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_specs
from kvexport.export.weights.write import Key, Spec, weight_key
from kvexport.ops.packed import integers, scales
from kvexport.tensor_files.casting import load_tensor
from kvexport.validate.float64 import as_ever

BLOCK = 1 << 18  # weights; in float32 they stay in a core's cache from one operation to the next
BYTES = 1.25  # of a packed weight in memory: its number, and its share of a scale and a minimum in float32
Held: TypeAlias = "dict[Key, Tensor | Packed]"


def load_model(checkpoint: Checkpoint, recipe: Any, attention: str, held: Held | None = None) -> Any:
    """Load the Hugging Face model of a checkpoint in eval mode, with the weights rounded as the recipe says.

    Weights that are read are added to `held`, and models that get the same `held` share them.
    """
    dtype, config = getattr(torch, recipe.model.dtype), load_config(str(checkpoint.path), recipe)
    if not checkpoint.computed and recipe.weights.bits is None:
        loaded: Any = auto_class(config).from_pretrained(
            str(checkpoint.path),
            dtype=dtype,
            attn_implementation=attention_by_part(config, attention),
            experts_implementation="eager",  # the default refuses float64
            use_safetensors=True,
        )
        head = output_projection(loaded)
        if type(head) is nn.Linear:
            setattr(head, "forward", _in_blocks(head, head.weight))  # noqa: B010
        return loaded.eval()
    model: Any = without_weights(config, dtype, attention, "eager")
    buffers_as_parameters(model)
    layouts, held, given = expert_layouts(model), {} if held is None else held, set[tuple[int, str]]()
    for spec in weight_specs(checkpoint, model, recipe):
        if (weight := held.get(weight_key(spec))) is None:
            weight = held[weight_key(spec)] = _read(spec)
        name = spec.name.removeprefix("model.")
        prefix, _, own = name.rpartition(".")
        module = model.get_submodule(prefix)
        if (id(module), own) not in given:  # some layers share a module, which then has several names
            given.add((id(module), own))
            _give(module, own, weight, spec.shape, layouts.get(name, PLAIN))
    return model.eval()


class Packed:
    """A packed weight [rows, inputs]: a byte for each number, and float32 values of some rows when they are needed."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        packing, parts = source.packing, dict[str, list[Any]]()
        assert packing is not None
        self.group, self.dtype, self.order = packing.group, dtype, None
        for block in source.blocks():
            numbers = integers(packing, len(block[packing.scale]), source.shape[1], block)
            part = {
                "numbers": np.array(packing.table, np.int8)[numbers] if packing.table else numbers,
                "scale": scales(packing, block),
                **({"zero": block["zero"].astype(np.float32)} if packing.offset == "zero" else {}),
                **({"minimum": scales(packing, block, "minimum")} if packing.offset == "minimum" else {}),
            }
            for name, values in part.items():
                parts.setdefault(name, []).append(values)
            if packing.ordered:
                self.order = torch.from_numpy(np.argsort(block["order"]))
        self.parts = {name: torch.from_numpy(np.concatenate(parts.pop(name))) for name in list(parts)}
        self.shape = self.parts["numbers"].shape

    def rows(self, rows: slice | Tensor = slice(None)) -> Tensor:
        values: Tensor = as_ever(self._rows)(rows)
        return values

    def _rows(self, rows: slice | Tensor) -> Tensor:
        part = {name: x[rows] for name, x in self.parts.items()}
        values = part["numbers"].view(len(part["numbers"]), -1, self.group).float()
        if "zero" in part:
            values -= part["zero"][..., None]
        values *= part["scale"][..., None]
        if "minimum" in part:
            values += part["minimum"][..., None]
        columns = values.flatten(1)
        return (columns if self.order is None else columns[:, self.order]).to(self.dtype)


def _read(spec: Spec) -> Tensor | Packed:
    if isinstance(spec, ComputedSpec) and spec.source.packing is not None:
        return Packed(spec.source, getattr(torch, spec.dtype))
    values = dense_values(spec.source) if isinstance(spec, ComputedSpec) else load_tensor(spec.entry, spec.dtype)
    return torch.from_numpy(values).to(getattr(torch, spec.dtype))


def _give(module: Any, name: str, weight: Tensor | Packed, shape: tuple[int, ...], layout: Layout) -> None:
    """Let a module compute with `weight` as its parameter `name`."""
    if isinstance(weight, Tensor):
        _put(module, {name: layout.to_module(weight.reshape(shape))})
    elif type(module) is nn.Linear:
        module.forward = _in_blocks(module, weight)
    elif isinstance(module, nn.Embedding):
        module.register_forward_pre_hook(lambda _, arguments: _pick_rows(module, weight, arguments[0]))
    else:
        empty = module._parameters[name]
        module.register_forward_pre_hook(
            lambda *_: _put(module, {name: layout.to_module(weight.rows().reshape(shape))})
        )
        module.register_forward_hook(lambda *_: module._parameters.update({name: empty}))


def _in_blocks(module: nn.Linear, weight: Tensor | Packed) -> Any:
    """Return a product with some rows of a weight at a time, which alone are dequantized, or widened to float64."""
    step = max(1, BLOCK // weight.shape[1])
    # Within `in_float64` a slice would widen the whole weight.
    values = as_ever(weight.__getitem__) if isinstance(weight, Tensor) else weight.rows

    def product(hidden: Tensor, rows: slice) -> Tensor:
        return functional.linear(hidden, values(rows), None if module.bias is None else module.bias[rows])

    return lambda hidden: torch.cat([product(hidden, slice(i, i + step)) for i in range(0, weight.shape[0], step)], -1)


def _pick_rows(module: nn.Embedding, weight: Packed, ids: Tensor) -> Tensor:
    used, places = torch.unique(ids, return_inverse=True)
    _put(module, {"weight": weight.rows(used)})
    module.padding_idx = None  # the row of padding may be among those that are not picked
    return places


def _put(module: Any, parameters: Mapping[str, Tensor]) -> None:
    module._parameters.update({name: nn.Parameter(x, requires_grad=False) for name, x in parameters.items()})
