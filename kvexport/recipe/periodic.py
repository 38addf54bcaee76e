"""The recipe's keys `cache.periodic`: decode steps read a selection of a full KV cache's entries."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from kvexport.recipe.section import MOST, RecipeSection


class PeriodicSection(RecipeSection):
    """The recipe's keys `cache.periodic`: decode steps read entries selected from a full KV cache.

    The entries are selected again at fixed intervals of tokens. See docs/tasks/periodic.md.
    """

    slots: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="Slots of a layer that decode steps read, selected from a cache that evicts nothing; null: decode "
        "steps read the whole cache.",
    )
    every: int = Field(
        64,
        ge=1,
        le=MOST,
        description="Tokens after which these slots are selected again, by a step that reads the full cache.",
    )
    store: str | None = Field(
        None,
        description="The absolute path of a folder for a memory-mapped file that contains the full cache. The file "
        "has no name, so it is deleted when the process ends; null: the full cache is in memory.",
    )

    @property
    def selected(self) -> int:
        """The number of slots of a layer that a selection from the full KV cache fills.

        The remaining slots of the smaller cache take the tokens until the next selection.
        """
        return (self.slots or 0) - self.every

    @field_validator("store")
    @classmethod
    def _absolute(cls, store: str | None) -> str | None:
        if store is not None and not store.startswith("/"):
            raise ValueError("should be an absolute path on the machine that runs the artifact")
        return store

    @model_validator(mode="after")
    def _fits(self) -> PeriodicSection:
        if self.slots is None:
            if self.store is not None:
                raise ValueError("cache.periodic.store needs cache.periodic.slots, which is null")
            return self
        if self.selected < 1:
            raise ValueError(
                f"cache.periodic.slots {self.slots} leaves no slot to select: cache.periodic.every {self.every} slots "
                "stay free for the tokens between two selections"
            )
        return self
