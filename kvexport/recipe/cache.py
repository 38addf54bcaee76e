"""The fields of a recipe that describe the KV cache: its method, its size, and how layers share the budget."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.recipe.section import MOST, RecipeSection


def _slots_or_share(value: int | float) -> int | float:
    if isinstance(value, float) and not 0.0 < value <= 1.0:
        raise ValueError(f"a share lies in (0, 1], this is {value}; slots are written as an integer")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"slots cannot be negative, this is {value}")
    if value > MOST:
        raise ValueError(f"should be less than or equal to {MOST}")
    return value


SlotsOrShare = Annotated[
    int | float,
    AfterValidator(_slots_or_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": MOST},
                {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            ]
        }
    ),
]

Share = Annotated[float, Field(gt=0.0, le=MOST)]
HeadShares = Annotated[list[Share], Field(min_length=1)]


class AllocationSection(RecipeSection):
    """The recipe's keys `cache.allocation`: how the layers, or the KV heads, share the cache budget."""

    kind: Literal["uniform", "cosine", "pyramid", "listed"] | None = Field(
        None,
        description="uniform: the same budget for every layer; cosine, pyramid (linear): budgets fall from the first "
        "layer to the last, with the same total; listed: budgets in the ratios of shares; null: the method's own "
        "kind, which is uniform for most methods.",
    )
    minimum: float = Field(
        0.5, gt=0.0, le=1.0, description="The last layer's share of the first layer's budget (KeepKV's d)."
    )
    shares: list[HeadShares] = Field(
        default_factory=list,
        description="For kind: listed, for each layer a list with a number for each KV head: budgets have the ratios "
        "of these numbers, within the bounds that sinks, recent slots and limits.max_length set.",
    )
    whole: list[Annotated[int, Field(ge=0, le=MOST)]] = Field(
        default_factory=list,
        description="Layers, counted from 0, that evict nothing and have limits.max_length slots; the other layers "
        "share the rest of the budget.",
    )

    @field_validator("whole")
    @classmethod
    def _once(cls, layers: list[int]) -> list[int]:
        if twice := [layer for i, layer in enumerate(layers) if layer in layers[:i]]:
            raise ValueError(f"names layer {twice[0]} twice")
        return sorted(layers)


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

    @property
    def selected(self) -> int:
        """The slots that a selection of cache entries fills; the other slots take tokens until the next selection."""
        return (self.slots or 0) - self.every

    @model_validator(mode="after")
    def _fits(self) -> PeriodicSection:
        if self.slots is not None and self.selected < 1:
            raise ValueError(
                f"cache.periodic.slots {self.slots} leaves no slot to select: cache.periodic.every {self.every} slots "
                "stay free for the tokens between two selections"
            )
        return self


class CacheSection(RecipeSection):
    """The recipe's section `cache`: the KV cache, its compression method and its size."""

    method: str = Field(
        "keepkv",
        description="How entries are evicted and merged; `kvexport recipes methods` lists the methods.",
        json_schema_extra=lambda schema: schema.update(enum=list(all_methods())),
    )
    budget: SlotsOrShare = Field(
        512, description="Slots of a layer, on average: an integer, or a share of limits.max_length in (0, 1]."
    )
    allocation: AllocationSection = Field(AllocationSection(), description="How the layers share the budget.")
    slack: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="Slots beyond the budget; null: max(prefill_chunk, merge_every), or with merge_prompts: end "
        "what a prompt of limits.max_length needs.",
    )
    dtype: Literal["model", "int8", "int4", "k8v4"] = Field(
        "model",
        description="The type of the cache's keys and values. model: model.dtype; int8: about half the bytes of "
        "float16; int4: a little over a quarter; k8v4: keys in int8 and values in int4. Small types are rotated and "
        "have a scale for every slot.",
    )
    sinks: int = Field(4, ge=0, le=MOST, description="First positions, which are never evicted.")
    recent: SlotsOrShare = Field(
        0.5, description="Latest positions, which are never evicted: an integer, or a share of the layer's budget."
    )
    pinned: int = Field(
        0,
        ge=0,
        le=MOST,
        description="Slots beyond the budget of every KV head, as room for tokens of prompts that a request pins: they "
        "are never evicted. Room that pins do not take holds other tokens. See `kvexport docs tasks/pin`.",
    )
    positions: Literal["absolute", "cache"] = Field(
        "absolute",
        description="The positions that keys and queries are rotated by. absolute: positions in the sequence, which "
        "end at the model's trained length; cache: places in the cache, so that no distance exceeds the cache and a "
        "session never ends.",
    )
    merge_every: int = Field(32, ge=1, le=MOST, description="Decoded tokens between two merges.")
    merge_prompts: Literal["chunks", "end"] = Field(
        "chunks",
        description="When the tokens of a prompt merge. chunks: after each chunk; end: once, after a full cache has "
        "read the whole prompt, if it has at least merge_every tokens. See `kvexport docs tasks/compress-once`.",
    )
    periodic: PeriodicSection = Field(
        PeriodicSection(),
        description="Decoding over entries selected from a full cache, selected again at intervals of tokens.",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="The method's parameters; `kvexport recipes methods` lists them."
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _no_float8(cls, dtype: object) -> object:
        if isinstance(dtype, str) and dtype.startswith(("fp8", "float8", "f8")):
            raise ValueError(
                f"{dtype} is not supported: int8 with a scale for every row has 7 bits of precision in the same byte, "
                "where 8-bit floats have 3 or 2; write int8"
            )
        return dtype

    @field_validator("method")
    @classmethod
    def _known_method(cls, name: str) -> str:
        if name not in all_methods():
            raise ValueError(f"unknown method '{name}'; known: {', '.join(all_methods())}")
        return name

    def build_method(self) -> Method:
        return all_methods()[self.method](**self.parameters)
