"""The Hugging Face model in PyTorch with an artifact's weights; rounded and packed weights are dequantized."""

from __future__ import annotations

from typing import Any

import torch

from kvexport.export.hooks.attention import IMPLEMENTATION
from kvexport.export.hooks.experts import expert_layouts
from kvexport.export.hooks.own_attention import lead
from kvexport.export.model.config import load_config
from kvexport.export.model.hf_model import attention_by_part, auto_class, buffers_as_parameters, hook_modules
from kvexport.export.model.tensors import Checkpoint, dense_values
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_specs
from kvexport.tensor_files.casting import load_tensor


def load_model(checkpoint: Checkpoint, recipe: Any, attention: str) -> Any:
    """Load the Hugging Face model of a checkpoint in eval mode, with the weights rounded as the recipe says."""
    dtype, config = getattr(torch, recipe.model.dtype), load_config(str(checkpoint.path), recipe)
    if not checkpoint.computed and recipe.weights.bits is None:
        model: Any = auto_class(config).from_pretrained(
            str(checkpoint.path),
            dtype=dtype,
            attn_implementation=attention_by_part(config, attention),
            experts_implementation="eager",  # the default refuses float64
            use_safetensors=True,
        )
        if attention != IMPLEMENTATION:
            return model.eval()
        hook_modules(model)
        return lead(model.eval())
    model = auto_class(config).from_config(
        config, dtype=dtype, attn_implementation=attention_by_part(config, attention), experts_implementation="eager"
    )
    if attention == IMPLEMENTATION:
        hook_modules(model)
    buffers_as_parameters(model)
    parameters = {f"model.{name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    layouts = {f"model.{name}": layout for name, layout in expert_layouts(model).items()}
    with torch.no_grad():
        for spec in weight_specs(checkpoint, model, recipe):
            if isinstance(spec, ComputedSpec):
                values = dense_values(spec.source)
            else:
                values = load_tensor(spec.entry, spec.dtype)
            stored = torch.from_numpy(values).reshape(spec.shape)
            layout = layouts.get(spec.name)
            parameters[spec.name].copy_(stored if layout is None else layout.to_module(stored))
    return lead(model.eval()) if attention == IMPLEMENTATION else model.eval()
