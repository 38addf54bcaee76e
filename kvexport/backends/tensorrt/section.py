"""The keys of a recipe's section `backend:` that configure TensorRT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvexport.recipe.section import RecipeSection

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe


# Keys that manifests of earlier builds have: (section of `backend:`, key)
FORMER_KEYS = (("tensorrt", "version_compatible"), ("tensorrt", "hardware_compatible"))


class TensorRTSection(RecipeSection):
    plugin: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether plugins run kvexport's operators. auto: if the plugins' library exists; always: a build "
        "without it fails; never: TensorRT runs the operators' ONNX functions.",
    )
    optimization_level: int = Field(3, ge=0, le=5, description="0 builds fastest, 5 runs fastest.")


class Section(RecipeSection):
    tensorrt: TensorRTSection = Field(TensorRTSection(), description="How TensorRT engines are built.")


def on_gpu(values: Mapping[str, Any]) -> bool:
    return True


def of(recipe: Recipe) -> Section:
    assert isinstance(recipe.backend, Section)
    return recipe.backend


def device_settings(device: str) -> list[str]:
    """Return no recipe settings for `kvexport build --device`; refuse the device cpu: TensorRT needs a GPU."""
    from kvexport.backends.sections import default
    from kvexport.errors import UsageError

    if device == "cpu":
        raise UsageError("--backend tensorrt runs on GPUs alone", f"--device cuda, or --backend {default()}")
    return []
