"""The keys of a recipe's section `backend:` that configure ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvexport.recipe.section import RecipeSection

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe

DEFAULT = True  # the backend of recipes that name none


class Section(RecipeSection):
    device: Literal["cpu", "cuda"] = Field("cpu", description="The device on which ONNX Runtime runs the graphs.")
    threads: int = Field(
        0, ge=0, le=1024, description="Threads of ONNX Runtime on the CPU; 0 for one on each fast core."
    )
    cuda_graph: bool = Field(
        True, description="On cuda, replay decode steps and merges as CUDA graphs if ONNX Runtime can capture them."
    )


def on_gpu(values: Mapping[str, Any]) -> bool:
    return bool(values.get("device") == "cuda")


def of(recipe: Recipe) -> Section:
    assert isinstance(recipe.backend, Section)
    return recipe.backend


def device_settings(device: str) -> list[str]:
    """Return the setting for `kvexport build --device`; auto means cuda if cuda runs on this machine, else cpu."""
    from kvexport.backends.onnxruntime import devices

    chosen = ("cpu" if devices.problems("cuda") else "cuda") if device == "auto" else device
    return [f"backend.device={chosen}"]
