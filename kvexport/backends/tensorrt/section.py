"""The keys of a recipe's section `backend:` that configure TensorRT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from kvexport.recipe.section import RecipeSection

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe


class TensorRTSection(RecipeSection):
    """Schema of the recipe keys `backend.tensorrt`, which say how TensorRT engines are built."""

    plugin: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Use of plugins for kvexport's operators. auto: if the library exists; always; never, when engines "
        "contain the functions of the ONNX graph.",
    )
    version_compatible: bool = Field(
        False, description="Whether plans also run on later versions of TensorRT, and on the lean runtime."
    )
    hardware_compatible: Literal["none", "same_compute_capability", "ampere_plus"] = Field(
        "none", description="The other GPUs on which plans run."
    )
    weight_streaming: int | None = Field(
        None,
        ge=0,
        description="Bytes of weights that stay on the GPU; the others are copied at every call; null: all stay.",
    )
    refit: bool = Field(False, description="Whether the weights of a plan can be replaced.")
    embed_plugin: bool = Field(False, description="Whether plans contain the plugin library.")
    alias_state: bool = Field(
        False, description="Whether the plugins declare that past and present state are the same memory."
    )
    workspace: int | None = Field(
        None, ge=1, description="The largest scratch memory of a layer, in bytes; null: all memory of the GPU."
    )
    optimization_level: int = Field(3, ge=0, le=5, description="0 builds fastest, 5 runs fastest.")

    @model_validator(mode="after")
    def _together(self) -> TensorRTSection:
        if self.embed_plugin and (not self.version_compatible or self.plugin == "never"):
            raise ValueError("embed_plugin needs version_compatible, and plugin auto or always")
        return self


class Section(RecipeSection):
    """Schema of the keys that TensorRT adds to a recipe's section `backend:`."""

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
