"""What a recipe may say of decoding over a part of a full cache."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from kvexport.recipe.section import MOST, RecipeSection


class PeriodicSection(RecipeSection):
    """Decoding over a part of a full cache that is chosen anew every so many tokens. docs/periodic.md."""

    slots: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="Slots of a layer that decode steps read, of a cache that evicts nothing; null: they read all.",
    )
    every: int = Field(
        64,
        ge=1,
        le=MOST,
        description="Tokens after which these slots are chosen anew, by a step that reads the full cache.",
    )
    delay: int = Field(
        0,
        ge=0,
        le=MOST,
        description="Steps that go on with the old slots while a thread chooses the new ones; 0: they wait for it.",
    )
    store: str | None = Field(
        None,
        description="An absolute path of a folder for a file that holds the full cache, mapped into memory; it has no "
        "name, so that it is gone with the process; null: memory holds it.",
    )
    limit: int | None = Field(
        None, ge=1, le=2**62, description="Most bytes of that file; null: as many as limits.max_batch sequences take."
    )

    @property
    def chosen(self) -> int:
        """Slots of a layer that a choice fills; the others are for the tokens until the next one is there."""
        return (self.slots or 0) - self.every - self.delay

    @field_validator("store")
    @classmethod
    def _absolute(cls, store: str | None) -> str | None:
        if store is not None and not store.startswith("/"):
            raise ValueError("should be an absolute path, of the machine that runs the artifact")
        return store

    @model_validator(mode="after")
    def _fits(self) -> PeriodicSection:
        if self.slots is None:
            if self.store is not None or self.limit is not None:
                raise ValueError("cache.periodic.store and limit need cache.periodic.slots, which is null")
            return self
        if self.limit is not None and self.store is None:
            raise ValueError("cache.periodic.limit bounds a file, and cache.periodic.store is null, which is memory")
        if self.delay and self.delay + 2 > self.every:
            raise ValueError(
                f"cache.periodic.delay {self.delay} is too long for cache.periodic.every {self.every}: the next choice "
                "would begin before this one is read"
            )
        if self.chosen < 1:
            raise ValueError(
                f"cache.periodic.slots {self.slots} leaves no slot to choose: cache.periodic.every {self.every} and "
                f"delay {self.delay} are kept free for the tokens between two choices"
            )
        return self
