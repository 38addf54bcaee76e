"""The base class of the sections of a recipe (a YAML file that describes a deployment)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MOST = 2**31 - 1  # positions and counts of slots are int32


class RecipeSection(BaseModel):
    """A section of a recipe: a mapping of known keys. A section is immutable, so that recipes can be shared."""

    model_config = ConfigDict(frozen=True, extra="forbid")
