"""The description of a checkpoint and its model before anything is built."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvexport.export.model.tensors import Checkpoint
from kvexport.plan.cache import CachePlan, LayerGeometry


class ModelShape(NamedTuple):
    checkpoint: Checkpoint
    model: Any  # model of transformers, whose parameters are fake tensors
    mode: Any  # mode of these fake tensors
    geometry: list[LayerGeometry]  # attention of every layer
    plan: CachePlan  # caches of the layers
