"""The inputs of an image encoder that takes images of any size as patches, and the rotary positions of its outputs.

Patches are ordered by groups of neighbouring patches. The encoder returns one vector for each group. The rotary
position of the vector has three axes (M-RoPE): time, and the group's row and column in the image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.images.tiles import ImageSpec


def encoder_inputs(pixels: NDArray[np.float32], spec: ImageSpec) -> dict[str, NDArray[Any]]:
    """Return the inputs of the image encoder's ONNX graph, by name, for an image tile [1, 3, height, width]."""
    if spec.cut not in ("patches", "lines"):
        return {"pixel_values": pixels}
    height, width = (side // spec.height for side in pixels.shape[2:])
    places = _grouped(np.mgrid[:height, :width].reshape(2, height, width, 1, 1), spec)[..., 0, 0]
    patches = pixels[0].reshape(3, height, spec.height, width, spec.width).swapaxes(2, 3)
    repeated = np.repeat(_grouped(patches, spec)[:, :, None], spec.frames, axis=2)  # [N, 3, frames, side, side]
    inputs = {"pixel_values": repeated.reshape(len(repeated), -1), "position_ids": places}
    if spec.window:
        inputs |= _windows(height // spec.group, width // spec.group, spec)
    if spec.table:
        inputs |= _interpolation(places, (height, width), spec.table)
    return inputs


def _grouped(x: NDArray[Any], spec: ImageSpec) -> NDArray[Any]:
    """Reorder data of patches, [n, height, width, a, b] by image rows, by groups of patches: [patches, n, a, b]."""
    n, height, width, *sizes = x.shape
    blocks = x.reshape(n, height // spec.group, spec.group, width // spec.group, spec.group, *sizes)
    grouped: NDArray[Any] = blocks.transpose(1, 3, 2, 4, 0, 5, 6).reshape(height * width, n, *sizes)
    return grouped


def _windows(height: int, width: int, spec: ImageSpec) -> dict[str, NDArray[Any]]:
    """Return the order of patch groups by attention windows of the encoder, and where each window's patches begin."""
    y, x = np.mgrid[:height, :width].reshape(2, -1) // spec.window
    number = y * -(-width // spec.window) + x
    ends = np.cumsum(np.bincount(number)) * spec.group**2
    return {"window_index": np.argsort(number, kind="stable"), "cu_window_seqlens": np.append(0, ends)}


def _interpolation(places: NDArray[np.int64], sides: tuple[int, int], table: int) -> dict[str, NDArray[Any]]:
    """Return, for each patch, the four entries of a position embedding table to interpolate between, and weights."""
    indices: Any = np.zeros((len(places), 1), np.int64)
    weights: Any = np.ones((len(places), 1), np.float32)
    for place, side in zip(places.T, sides, strict=True):
        at = place.astype(np.float32) * np.float32(table - 1) / np.float32(max(side - 1, 1))
        low = np.floor(at)
        near = np.stack([low, np.minimum(low + 1, table - 1)], -1).astype(np.int64)
        shares = np.stack([1 - (at - low), at - low], -1)
        indices = (indices[:, :, None] * table + near[:, None]).reshape(len(places), -1)
        weights = (weights[:, :, None] * shares[:, None]).reshape(len(places), -1)
    return {"interp_indices": indices, "interp_weights": weights}


def row_offsets(pixels: NDArray[np.float32], spec: ImageSpec) -> NDArray[np.int64] | None:
    """Return how far the rotary positions of an image's vectors are from their token positions, [vectors, 4].

    The first three elements are the offsets on the three axes. The last is the change of the offset of all later
    tokens, because an image takes only as many rotary positions as its longer side has groups. The result is None if
    the model's images have no such positions.
    """
    if spec.cut != "patches":
        return None
    height, width = (side // spec.height // spec.group for side in pixels.shape[2:])
    y, x = np.mgrid[:height, :width].reshape(2, -1)
    rows = np.arange(height * width)
    offsets = np.stack([0 * y, y, x, rows], -1) - rows[:, None]
    offsets[-1, 3] = max(height, width) - height * width
    return offsets
