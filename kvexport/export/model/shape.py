"""What is known of a checkpoint and its model before anything is built."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvexport.cache import CachePlan, LayerGeometry


class ModelShape(NamedTuple):
    """A checkpoint and what its model is, before anything is built."""

    checkpoint: Any
    model: Any
    mode: Any
    geometry: list[LayerGeometry]
    plan: CachePlan
