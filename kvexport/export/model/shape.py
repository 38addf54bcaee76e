"""The description of a checkpoint and its model before anything is built."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvexport.cache import CachePlan, LayerGeometry


class ModelShape(NamedTuple):
    """A checkpoint and its model before the build.

    Attributes:
        checkpoint: The checkpoint; None if only its config was read.
        model: The model of transformers, whose parameters are fake tensors.
        mode: The mode of these fake tensors.
        geometry: The attention of every layer.
        plan: The caches of the layers.
    """

    checkpoint: Any
    model: Any
    mode: Any
    geometry: list[LayerGeometry]
    plan: CachePlan
