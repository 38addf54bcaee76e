"""What a recipe may say of ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvexport.recipe.section import RecipeSection

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe

DEFAULT = True  # the backend of recipes that name none


class Section(RecipeSection):
    """Keys of `backend:`."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="Where ONNX Runtime runs the graphs.")
    threads: int = Field(0, ge=0, le=1024, description="Threads of ONNX Runtime on the CPU; 0 lets it choose.")
    cuda_graph: bool = Field(
        True, description="On cuda, replay decode steps and merges as CUDA graphs where ONNX Runtime can capture them."
    )


def of(recipe: Recipe) -> Section:
    """What a recipe says of this backend."""
    assert isinstance(recipe.backend, Section)
    return recipe.backend
