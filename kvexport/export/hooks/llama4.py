"""The hook for Llama 4, which computes in its own code what other decoders leave to interfaces of transformers.

transformers computes every token with every expert of Llama 4. Before that, hidden states are multiplied by the
router's scores, which are 0 for experts that the router does not choose. A trace computes only the chosen experts.

Layers without rotary embedding multiply their queries by a factor of the token's position, which they count from the
length of the cache. The hook takes `position_ids`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvexport.export.hooks.experts import UNDECLARED, call_experts

UNDECLARED["Llama4TextExperts"] = {"is_concatenated": True, "is_transposed": True, "has_gate": True, "has_bias": False}


def route_to_experts(model: nn.Module) -> None:
    """Make the mixtures of experts of a Llama 4 model call Experts nodes."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            module.forward = partial(_mixture, module)


def _mixture(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    hidden = hidden_states.reshape(-1, module.hidden_dim)
    logits = nn.Linear.forward(module.router, hidden)
    top, chosen = torch.topk(logits, module.top_k, dim=1)  # [N, k]
    scores = torch.sigmoid(top.float()).to(top.dtype)
    # Each chosen expert of a token has a row of its own, as its score multiplies what it reads.
    rows = (hidden[:, None] * scores[:, :, None]).flatten(0, 1)
    chosen = chosen.reshape(-1, 1)
    routed = call_experts(module.experts, rows, chosen, torch.ones_like(chosen, dtype=rows.dtype), module.top_k)
    return module.shared_expert(hidden) + routed.view(-1, module.top_k, module.hidden_dim).sum(1), logits


class _Positions:
    def __init__(self, model: nn.Module) -> None:
        self.ids: Tensor
        model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.ids = kwargs["position_ids"]


def scale_by_positions(model: Any) -> None:
    """Make layers of Llama 4 without rotary embedding scale queries by the token positions that the model is given."""
    positions = None
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            positions = positions or _Positions(model)
            module.attn_temperature_tuning = False
            module.q_proj.register_forward_hook(partial(_scale, module, positions))


def _scale(attention: Any, positions: _Positions, module: nn.Module, args: Any, query: Tensor) -> Tensor:
    """Return the outputs of the query projection [B, T, heads * D], scaled as `Llama4TextAttention` scales queries."""
    steps = torch.floor((positions.ids.float() + 1.0) / attention.floor_scale)
    factor: Tensor = torch.log1p(steps) * attention.attn_scale + 1.0
    return (query * factor[..., None]).to(query.dtype)
