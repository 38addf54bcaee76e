"""The shift of keys: a vector common to all keys of a KV head is subtracted before a quantized cache stores them.

Some models (Qwen2) add a bias to their keys with a few very large elements, in planes that the rotary embedding hardly
rotates. A quantized cache would spend its few bits on that bias. Softmax ignores a vector that is subtracted from all
keys, since all logits of a query then change by one number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvexport.methods.primitives.pairs import turned
from kvexport.methods.slots import Rotary

if TYPE_CHECKING:
    from torch import Tensor, nn

# The bias is rotated by its token's position. The mean rotation over these positions leaves a plane that turns often
# near 0, so that nothing is taken off there, and one that turns slowly nearly as it is.
POSITIONS = 4096


def key_bias(module: nn.Module) -> Tensor | None:
    """Return the bias of an attention module's keys; None without a bias, or if keys are normalized after it."""
    if any(name.startswith("k") and "norm" in name for name, _ in module.named_children()):
        return None
    bias: Tensor | None = getattr(getattr(module, "k_proj", None), "bias", None)
    return bias


def shifted(module: nn.Module, key: Tensor, rotary: Rotary | None) -> Tensor:
    """Subtract from keys [B, H, T, D] the bias of their projection, rotated by `rotary`, averaged over POSITIONS."""
    bias = key_bias(module)
    if rotary is None or bias is None:
        return key
    cosine, sine = (torch.tensor(x, dtype=bias.dtype, device=bias.device) for x in mean_rotation(rotary))
    bias = bias.view(key.shape[1], 1, key.shape[3])
    return key - turned(bias, cosine, sine, interleaved=rotary.interleaved)


def mean_rotation(rotary: Rotary) -> tuple[list[float], list[float]]:
    """Return the mean cosine and the mean sine of each rotary plane's angle, over the positions in POSITIONS."""
    angle = np.arange(POSITIONS)[:, None] * np.array(rotary.inverse_frequencies)
    return np.cos(angle).mean(0).tolist(), np.sin(angle).mean(0).tolist()
