"""Keys and values in int8 (docs/contract.md, "A small cache"): a row is rotated by a Hadamard matrix, which spreads
what is large in a few dimensions over all of them, and rounded to multiples of one scale of its own.

Butterflies, scales and roundings are single operations of IEEE arithmetic in a fixed order, so that every backend makes
the same bits of the same row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEVELS = 127
LEAST = 1e-30  # a scale below is 0: its reciprocal could be infinite


def is_small(stored: Tensor) -> bool:
    """Whether keys or values that are stored so go with scales."""
    return stored.dtype == torch.int8


def block_of(size: int) -> int:
    """The dimensions that are rotated together: the largest power of two that divides `size`; 1: nothing is rotated."""
    return size & -size


def rotated_by_hadamard(x: Tensor) -> Tensor:
    """``x H`` of the rows of x [..., D] float32, H the orthonormal Hadamard matrix of every block of dimensions. H is
    symmetric, so that a second time turns back."""
    size = x.shape[-1]
    block, half = block_of(size), 1
    while half < block:
        partner = torch.tensor([i ^ half for i in range(size)], device=x.device)
        sign = torch.tensor([-1.0 if i & half else 1.0 for i in range(size)], device=x.device)
        x = x.index_select(-1, partner) + x * sign
        half *= 2
    return x * (1.0 / math.sqrt(block)) if block > 1 else x


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [..., D] float32 as int8 and scales [...] float32: multiples of ``max |x| / 127``, itself rounded to
    bfloat16. So a product of number and scale is exact in float32, the largest number of a row is 127, and what was
    dequantized becomes the same bits again. A row of zeros has the scale 0."""
    largest = rows.abs().amax(-1, keepdim=True)
    scale = (largest / LEVELS).to(torch.bfloat16).to(torch.float32)
    scale = torch.where(scale < LEAST, 0.0, scale)
    numbers = torch.round(rows / torch.where(scale > 0, scale, 1.0))
    return torch.clamp(numbers, -LEVELS, LEVELS).to(torch.int8), scale[..., 0]


def dequantized(numbers: Tensor, scale: Tensor) -> Tensor:
    """The rows [..., D] float32 that int8 numbers [..., D] and scales [...] stand for."""
    return numbers.to(torch.float32) * scale[..., None]
