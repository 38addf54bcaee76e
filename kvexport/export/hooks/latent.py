"""The latent attention hook: attention over latent vectors instead of the keys and values that they expand to.

Models with latent attention (DeepSeek V3, GLM-4.7-Flash, MiniCPM 3) cache one latent vector of r elements and one
rotated key of p elements for each token. The matrix `kv_b_proj` expands them to the keys and values of every head. The
expansion is linear, so the query and the attention output can be multiplied with the matrix instead. The result is
attention with one KV head, whose key is the latent vector followed by the rotated key [r + p], and whose value is the
latent vector [r]. A merge of latent vectors in the KV cache therefore merges the keys and values of every head.
"""

from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kvexport.errors import UsageError


def is_latent(module: nn.Module) -> bool:
    return hasattr(module, "expand_kv")


_expanded: ContextVar[Tensor] = ContextVar("expanded")


def note_expansions(model: nn.Module) -> None:
    for module in model.modules():
        if is_latent(module):
            module.expand_kv = partial(_expand, module.expand_kv)  # type: ignore[assignment]


def _expand(own: Any, latent: Tensor, rotated: Tensor) -> Any:
    _expanded.set(latent)
    return own(latent, rotated)


def latest_expanded() -> Tensor:
    return _expanded.get()


def absorbed_query(module: Any, query: Tensor) -> Tensor:
    """Return a query [B, Hq, T, r + p] that has the same logits over latent keys as `query` over expanded keys."""
    plain, rotated = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([plain @ _matrices(module)[:, : module.qk_nope_head_dim], rotated], -1)


def latent_key(latent: Tensor, rotated: Tensor) -> Tensor:
    return torch.cat([latent, rotated], -1)


def expanded_output(module: Any, output: Tensor) -> Tensor:
    """Return the attention output over expanded values [B, Hq, T, v] from the output over latent vectors."""
    return output @ _matrices(module)[:, module.qk_nope_head_dim :].transpose(1, 2)


def expansion_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights that expand latent vectors; the ONNX graph multiplies with them head by head."""
    return {f"{name}.kv_b_proj.weight" for name, module in model.named_modules() if is_latent(module)}


def check_expansions(model: Any) -> None:
    for name, module in model.named_modules():
        if not is_latent(module):
            continue
        if not _is_known(module):
            raise UsageError(
                f"{model.config.model_type} has latent attention ('{name}') that expands its keys and values in "
                "another way than by the rows of kv_b_proj, head by head; it cannot be exported"
            )


def _matrices(module: Any) -> Tensor:
    """Return `kv_b_proj` by head, [Hq, n + v, r]: it expands r latent elements to a key of n and a value of v."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])


def _is_known(module: Any) -> bool:
    linear = getattr(module, "kv_b_proj", None)
    if not isinstance(linear, nn.Linear) or linear.bias is not None:
        return False
    heads, rank, tokens = 2, 3, 5
    try:
        plain, turned, size = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
        with torch.device("cpu"), torch.no_grad():
            small = nn.Linear(rank, heads * (plain + size), bias=False)
            stand_in = SimpleNamespace(
                qk_nope_head_dim=plain, qk_rope_head_dim=turned, v_head_dim=size, num_heads=heads, kv_b_proj=small
            )
            latent, rotated = torch.randn(1, 1, tokens, rank), torch.randn(1, 1, tokens, turned)
            query = torch.randn(1, heads, tokens, plain + turned)
            key, value = type(module).expand_kv(stand_in, latent, rotated)
            logits = absorbed_query(stand_in, query) @ latent_key(latent, rotated).transpose(-1, -2)
            return torch.allclose(logits, query @ key.transpose(-1, -2), atol=1e-4) and torch.allclose(
                expanded_output(stand_in, latent), value, atol=1e-4
            )
    except Exception:  # code of another form
        return False
