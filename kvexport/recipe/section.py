"""What every section of a recipe has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MOST = 2**31 - 1  # positions and counts of slots are int32


class RecipeSection(BaseModel):
    """A mapping of known keys; unchangeable, so that recipes can be shared."""

    model_config = ConfigDict(frozen=True, extra="forbid")
