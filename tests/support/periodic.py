"""Recipes with periodic selection."""

from pathlib import Path
from typing import Any

from tests.support.models import make_recipe

SLOTS, EVERY, SINKS, RECENT = 36, 8, 2, 6


def recipe_of(checkpoint: Path, *, method: str = "h2o", parameters: Any = None, **periodic: Any) -> Any:
    """Return a recipe with periodic selection. slots=None gives the full cache without selection."""
    settings = {"slots": SLOTS, "every": EVERY, **periodic}
    return make_recipe(
        checkpoint,
        cache={
            "method": method,
            "budget": 1.0,
            "sinks": SINKS,
            "recent": RECENT,
            "parameters": parameters or {},
            "periodic": settings if settings["slots"] else {},
        },
        export={"prefill_chunk": 16},
        limits={"max_length": 256, "max_batch": 4},
    )
