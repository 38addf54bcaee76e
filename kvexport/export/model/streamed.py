"""A Hugging Face model that runs without having all its weights in memory.

Each module reads its own weights when it is called and frees them when it returns. The peak memory is therefore that of
the largest weight and of the activations between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvexport.errors import UsageError
from kvexport.export.hooks.attention import output_projection
from kvexport.export.model.checkpoint import Checkpoint
from kvexport.export.model.config import first_line_of, load_config
from kvexport.export.model.hf_model import buffers_as_parameters, on_meta, parameter_sources
from kvexport.export.model.norm_outputs import NormOutputs, is_norm
from kvexport.export.model.tensors import dense_values
from kvexport.quiet import quiet_exporter
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.casting import load_tensor, read_rows

UNREAD = nn.UninitializedParameter(requires_grad=False)
"""In the place of a weight. Whatever is computed with it is an error, where one on the meta device may give numbers."""


@torch.no_grad()
def run_streamed(
    checkpoint: Checkpoint,
    recipe: Recipe,
    ids: Tensor,
    seen: Callable[[str, Tensor], None],
    of_norm: Callable[[str, str, Tensor, Tensor | None], None] | None = None,
) -> NormOutputs:
    """Run the uncompressed model on `ids`, without its output head, and pass the inputs of projections to callbacks.

    The model runs in float32 with transformers' attention. Weights are read module by module.

    Args:
        checkpoint: The checkpoint.
        recipe: The recipe.
        ids: [B, T] int64, the token ids.
        seen: Called as seen(tensor, x) with the input x [..., inputs] of every projection, the head included; `tensor`
            is the name of the projection's weight.
        of_norm: Called as of_norm(norm, tensor, x, weight) if x is the output of a norm. `norm` is the name of the
            norm's weight. `weight` is [outputs, inputs] float32, None for the head.

    Returns:
        The record of the operations that read norm outputs; empty if `of_norm` is None.

    Raises:
        UsageError: The model uses a weight without calling the module that has it, or a weight cannot be read.
    """
    outputs = NormOutputs()
    with quiet_exporter():
        model = float_model(checkpoint, recipe)
        sources = parameter_sources(model, [*checkpoint.tensors, *checkpoint.computed])
        head, embedding = output_projection(model), model.get_input_embeddings()
        if unread := next((name for name, _ in model.named_parameters() if name not in sources), ""):
            raise UsageError(
                f"parameter '{unread}' of {model.config.model_type} is assembled from several tensors, and inputs of "
                "such weights cannot be recorded",
                "--set weights.method=rtn, which does not run the model",
            )
        for prefix, module in model.named_modules():
            above = f"{prefix}." if prefix else ""
            names = {own: sources[above + own] for own, p in module._parameters.items() if p is not None}
            if module is head:
                module.forward = lambda x: x
            elif module is embedding:
                module.register_forward_pre_hook(_pick_rows(checkpoint, names["weight"]))
            elif names:
                module.register_forward_pre_hook(_read(checkpoint, names))
            if isinstance(module, nn.Linear):
                tensor = names["weight"]
                weight: Any = checkpoint.tensors.get(tensor) or checkpoint.computed[tensor]
                module.register_forward_pre_hook(_look(weight.name, outputs, seen, of_norm, is_head=module is head))
            elif of_norm is not None and is_norm(module) and names["weight"] in checkpoint.tensors:
                module.register_forward_hook(outputs.hook(names["weight"]))
            module.register_forward_hook(_let_go(names))
            module._parameters.update(dict.fromkeys(names, UNREAD))
        try:
            with outputs if of_norm is not None else nullcontext():
                model(input_ids=ids, use_cache=False)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{model.config.model_type} cannot be run a layer at a time: {type(error).__name__}: "
                f"{first_line_of(error)}",
                "--set weights.method=rtn, which does not run the model",
            ) from error
    return outputs


def stream_weights(model: Any, checkpoint: Checkpoint, sources: Mapping[str, str]) -> None:
    """Let each module of a model read its own weights when it is called, and free them when it returns.

    Args:
        model: The model, without weights.
        checkpoint: The checkpoint.
        sources: The name of the checkpoint tensor of each parameter.
    """
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
    """Return the model of a checkpoint in eval mode without weights, its type float32.

    Args:
        checkpoint: The checkpoint.
        recipe: The recipe, for its longest sequence.
        attention: Name of an attention implementation of transformers.
    """
    config = load_config(str(checkpoint.path), recipe)
    try:
        model = on_meta(config, torch.float32, recipe.rotary_length, attention)
    except ValueError:  # it has sink logits, or another reason why transformers will not have it so
        model = on_meta(config, torch.float32, recipe.rotary_length, "eager")
    buffers_as_parameters(model)
    return model.eval()


def _look(tensor: str, outputs: NormOutputs, seen: Any, of_norm: Any, *, is_head: bool) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        with outputs.aside():
            seen(tensor, args[0])
            if of_norm is not None and (norm := outputs.of(args[0])):
                of_norm(norm, tensor, args[0], None if is_head else module.weight)
        outputs.read_by(module.weight)

    return hook


def _read(checkpoint: Checkpoint, names: Mapping[str, str]) -> Any:
    def hook(module: nn.Module, _: Any) -> None:
        for own, tensor in names.items():
            source = checkpoint.computed.get(tensor)
            values = load_tensor(checkpoint.tensors[tensor], "float32") if source is None else dense_values(source)
            module._parameters[own] = nn.Parameter(torch.from_numpy(values), requires_grad=False)

    return hook


def _pick_rows(checkpoint: Checkpoint, tensor: str) -> Any:
    """Return a hook that reads only the current tokens' rows of the embedding, which may be the largest weight."""

    def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        used, places = torch.unique(args[0], return_inverse=True)
        if tensor in checkpoint.tensors:
            rows = np.concatenate([read_rows(checkpoint.tensors[tensor], range(i, i + 1)) for i in used.tolist()])
        else:
            rows = dense_values(checkpoint.computed[tensor])[used.numpy()]
        module._parameters["weight"] = nn.Parameter(torch.from_numpy(rows), requires_grad=False)
        module.padding_idx = None  # it is one of the rows that are left out
        return (places, *args[1:])

    return hook


def _let_go(names: Mapping[str, str]) -> Any:
    return lambda module, _, __: module._parameters.update(dict.fromkeys(names, UNREAD))
