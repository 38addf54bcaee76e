"""The KV cache in 8 or 4 bits: rounding and dequantizing (docs/reference/contract.md, "A quantized cache").

A key or a value is rotated by a Hadamard matrix, which spreads large elements of a few dimensions over all dimensions.
The vector is then rounded to multiples of a scale of its own; a 4-bit cache rounds to sixteen of these multiples.

All steps are IEEE operations in a fixed order, so all backends compute the same bits from the same key or value.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvexport.schema.state import INT4, PAIRS

LEVELS = 127
LEAST = 1e-30  # a smaller scale becomes 0, because its reciprocal could be infinite
# For every int8 number from -128 on, the code of the nearest number of INT4; of two equally near, the one nearer to 0.
CODES = [min(range(16), key=lambda code: (abs(INT4[code] - number), abs(INT4[code]))) for number in range(-128, 128)]


def is_quantized(stored: Tensor) -> bool:
    return stored.dtype in (torch.int8, torch.uint8)


def block_of(size: int) -> int:
    """Return the number of dimensions that a Hadamard rotation mixes: the largest power of two that divides `size`."""
    return size & -size


def rotated_by_hadamard(x: Tensor) -> Tensor:
    """Return the keys or values x [..., D] float32 multiplied with the orthonormal Hadamard matrix H, ``x H``.

    H has a block for every group of `block_of(D)` dimensions. H is symmetric, so a second rotation restores x.
    """
    size = x.shape[-1]
    block, half = block_of(size), 1
    while half < block:
        partner = torch.tensor([i ^ half for i in range(size)], device=x.device)
        sign = torch.tensor([-1.0 if i & half else 1.0 for i in range(size)], device=x.device)
        x = x.index_select(-1, partner) + x * sign
        half *= 2
    return x * (1.0 / math.sqrt(block)) if block > 1 else x


def quantized(rows: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return keys or values [..., D] float32 as int8 [..., D] or 4-bit pairs uint8 [..., D / 2], and scales [...].

    The scale of a key or value x is ``max |x| / 127``, rounded to bfloat16. Products of an integer and a scale are
    therefore exact in float32, the largest integer of a vector is 127, and a dequantized vector becomes the same bits
    again. A vector of zeros has the scale 0. A 4-bit code stands for the nearest integer of the table `INT4`.
    """
    largest = rows.abs().amax(-1, keepdim=True)
    scale = (largest / LEVELS).to(torch.bfloat16).to(torch.float32)
    scale = torch.where(scale < LEAST, 0.0, scale)
    numbers = torch.round(rows / torch.where(scale > 0, scale, 1.0))
    numbers = torch.clamp(numbers, -LEVELS, LEVELS).to(torch.int8)
    return (_packed(numbers) if dtype == torch.uint8 else numbers), scale[..., 0]


def _packed(numbers: Tensor) -> Tensor:
    table = torch.tensor(CODES, dtype=torch.float32, device=numbers.device)[:, None]
    codes = embedding(numbers.to(torch.int32) + 128, table)[..., 0]
    return (codes[..., 0::2] + 16.0 * codes[..., 1::2]).to(torch.uint8)


def dequantized(stored: Tensor, scale: Tensor) -> Tensor:
    """Reverse `quantized`: return float32 keys or values [..., D], of which each was stored with one scale."""
    if stored.dtype == torch.uint8:
        table = torch.tensor(PAIRS, dtype=torch.float32, device=stored.device)
        return embedding(stored.to(torch.int32), table).flatten(-2) * scale[..., None]
    return stored.to(torch.float32) * scale[..., None]
