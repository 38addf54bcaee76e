"""A Hugging Face model that runs without having all its weights in memory.

Each module reads its own weights when it is called and frees them when it returns. The peak memory is therefore that of
the largest weight and of the activations between layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvexport.export.model.config import load_config
from kvexport.export.model.hf_model import buffers_as_parameters, on_meta
from kvexport.export.model.tensors import Checkpoint, dense_values
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.casting import load_tensor, read_rows

UNREAD = nn.UninitializedParameter(requires_grad=False)
"""The placeholder of a weight that is not in memory. Any computation with it is an error."""


def stream_weights(model: Any, checkpoint: Checkpoint, sources: Mapping[str, str]) -> None:
    embedding = model.get_input_embeddings()
    for prefix, module in model.named_modules():
        above = f"{prefix}." if prefix else ""
        names = {own: sources[above + own] for own, p in module._parameters.items() if p is not None}
        if not names:
            continue
        read = _pick_rows(checkpoint, names["weight"]) if module is embedding else _read(checkpoint, names)
        module.register_forward_pre_hook(read)
        module.register_forward_hook(_let_go(names))
        module._parameters.update(dict.fromkeys(names, UNREAD))


def float_model(checkpoint: Checkpoint, recipe: Recipe, attention: str = "sdpa") -> Any:
    config = load_config(str(checkpoint.path), recipe)
    try:
        model = on_meta(config, torch.float32, recipe.rotary_length, attention)
    except ValueError:  # transformers refuses this attention for the model, for example because of sink logits
        model = on_meta(config, torch.float32, recipe.rotary_length, "eager")
    buffers_as_parameters(model)
    return model.eval()


def _read(checkpoint: Checkpoint, names: Mapping[str, str]) -> Any:
    def hook(module: nn.Module, _: Any) -> None:
        for own, tensor in names.items():
            source = checkpoint.computed.get(tensor)
            values = load_tensor(checkpoint.tensors[tensor], "float32") if source is None else dense_values(source)
            module._parameters[own] = nn.Parameter(torch.from_numpy(values), requires_grad=False)

    return hook


def _pick_rows(checkpoint: Checkpoint, tensor: str) -> Any:
    """Return a hook that reads only the embedding's rows of the current tokens, as the embedding may be large."""

    def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        used, places = torch.unique(args[0], return_inverse=True)
        if tensor in checkpoint.tensors:
            rows = np.concatenate([read_rows(checkpoint.tensors[tensor], range(i, i + 1)) for i in used.tolist()])
        else:
            rows = dense_values(checkpoint.computed[tensor])[used.numpy()]
        module._parameters["weight"] = nn.Parameter(torch.from_numpy(rows), requires_grad=False)
        module.padding_idx = None  # the row of padding may be among those that are not read
        return (places, *args[1:])

    return hook


def _let_go(names: Mapping[str, str]) -> Any:
    return lambda module, _, __: module._parameters.update(dict.fromkeys(names, UNREAD))
