"""Keys and values in 8 or 4 bits (docs/contract.md, "A small cache"): a row is rotated by a Hadamard matrix, which
spreads what is large in a few dimensions over all of them, and rounded to multiples of one scale of its own, in 4 bits
to sixteen of these.

Butterflies, scales and roundings are single operations of IEEE arithmetic in a fixed order, so that every backend makes
the same bits of the same row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvexport.schema.state import INT4, PAIRS

LEVELS = 127
LEAST = 1e-30  # a scale below is 0: its reciprocal could be infinite
# Of every int8 number from -128 the code of the nearest of INT4, of two as near of the one nearer to 0.
CODES = [min(range(16), key=lambda code: (abs(INT4[code] - number), abs(INT4[code]))) for number in range(-128, 128)]


def is_small(stored: Tensor) -> bool:
    """Whether keys or values that are stored so go with scales: int8 ones, and pairs of int4 in a byte."""
    return stored.dtype in (torch.int8, torch.uint8)


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


def quantized(rows: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """rows [..., D] float32 as numbers, and scales [...] float32: multiples of ``max |x| / 127``, itself rounded to
    bfloat16. So a product of number and scale is exact in float32, the largest number of a row is 127, and what was
    dequantized becomes the same bits again. A row of zeros has the scale 0. Numbers are int8 [..., D]; of uint8 the
    codes of the nearest of INT4, two in a byte, [..., D / 2]."""
    largest = rows.abs().amax(-1, keepdim=True)
    scale = (largest / LEVELS).to(torch.bfloat16).to(torch.float32)
    scale = torch.where(scale < LEAST, 0.0, scale)
    numbers = torch.round(rows / torch.where(scale > 0, scale, 1.0))
    numbers = torch.clamp(numbers, -LEVELS, LEVELS).to(torch.int8)
    return (_packed(numbers) if dtype == torch.uint8 else numbers), scale[..., 0]


def _packed(numbers: Tensor) -> Tensor:
    """int8 [..., D] as codes, two in a byte, the first in its low half."""
    table = torch.tensor(CODES, dtype=torch.float32, device=numbers.device)[:, None]
    codes = embedding(numbers.to(torch.int32) + 128, table)[..., 0]
    return (codes[..., 0::2] + 16.0 * codes[..., 1::2]).to(torch.uint8)


def dequantized(stored: Tensor, scale: Tensor) -> Tensor:
    """The rows [..., D] float32 that these numbers, int8 [..., D] or uint8 [..., D / 2], and scales [...] stand for."""
    if stored.dtype == torch.uint8:
        table = torch.tensor(PAIRS, dtype=torch.float32, device=stored.device)
        return embedding(stored.to(torch.int32), table).flatten(-2) * scale[..., None]
    return stored.to(torch.float32) * scale[..., None]
