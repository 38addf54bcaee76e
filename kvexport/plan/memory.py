"""The memory that a recipe will need, computed from the checkpoint's headers before anything is built.

Weights, KV caches and LoRA adapters are counted exactly. Activations, and memory that the backend takes for itself, are
estimated on a GPU and not counted on the CPU.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexport.errors import UsageError
from kvexport.images.rows import KEPT_ROWS
from kvexport.machine import KEPT_BYTES
from kvexport.plan.cache import CachePlan, LayerCache, LayerGeometry
from kvexport.plan.planner import cache_notes, plain_attention, plan_cache, settled_plan, state_bytes
from kvexport.recipe.fields import Recipe, shown_length
from kvexport.report import KeyValues, Section, Table
from kvexport.units import format_bytes

PROGRAM_BYTES = 512 << 20  # Python, the backend, and activations of a small model
NOT_COUNTED = "activations and the backend's own buffers are not counted"
ESTIMATED = "activations and CUDA's own memory are estimated, and were measured on no GPU"
# An assumption for CUDA's context, and the code and workspaces of its libraries.
CUDA_BYTES = 600 << 20


@dataclass(frozen=True)
class ServerMemory:
    weights: int  # size of the weights on disk
    state: int  # KV caches of all lanes
    prefixes: int = KEPT_BYTES  # limit for saved states of prompt prefixes
    sessions: int = KEPT_BYTES  # limit for sessions in memory
    adapters: int = 0  # matrices of all LoRA adapters
    images: int = 0  # limit for encoded images

    @property
    def total(self) -> int:
        """The most bytes that a server needs.

        Weights count twice, because kernels may copy them into another layout.
        """
        kept = self.prefixes + self.sessions + self.adapters + self.images
        return 2 * self.weights + self.state + kept + PROGRAM_BYTES

    def __str__(self) -> str:
        terms = {
            "2 times the weights (kernels may copy them)": 2 * self.weights,
            "caches": self.state,
            "prefixes": self.prefixes,
            "sessions": self.sessions,
            **({"adapters": self.adapters} if self.adapters else {}),
            **({"images": self.images} if self.images else {}),
            "the program": PROGRAM_BYTES,
        }
        return f"up to {format_bytes(self.total)}: " + ", ".join(f"{format_bytes(n)} {use}" for use, n in terms.items())


@dataclass(frozen=True)
class Fit:
    memory: int  # memory in bytes
    sequences: int  # number of the recipe's sequences that fit
    # Largest uniform budget, in slots of a layer, with which max_batch sequences fit. None if no budget fits, or if the
    # method keeps every slot.
    largest_budget: int | None


@dataclass(frozen=True)
class MemoryPlan:
    name: str
    recipe: Recipe
    geometry: tuple[LayerGeometry, ...]
    cache: CachePlan
    parameters: int  # parameters of the model; tied ones count once
    weight_bytes: int  # bytes of the weights, packed or in the recipe's dtype
    # Bytes of keys and values of one sequence of max_length in a full cache (a sliding-window layer keeps its window).
    # None if the length is unlimited.
    full_bytes: int | None
    expert_bytes: int = 0  # bytes of the experts' weights; 0 for a model without experts
    expert_read_bytes: int = 0  # bytes of the weights of the experts that the router chooses for one token
    adapter_bytes: int = 0  # bytes of `adapters.count` LoRA adapters of the largest rank
    arena_bytes: int = 0  # estimated bytes of activations and of CUDA on a GPU; 0 on the CPU
    image_bytes: int = 0  # bytes of the image encoder's weights; 0 if no images are read

    @property
    def _left_out(self) -> str:
        return ESTIMATED if self.arena_bytes else NOT_COUNTED

    @property
    def sequence_bytes(self) -> int:
        return state_bytes(self.recipe, self.cache)

    @property
    def settled_bytes(self) -> int:
        return state_bytes(self.recipe, settled_plan(self.recipe, self.cache))

    @property
    def batch_bytes(self) -> int:
        return state_bytes(self.recipe, self.cache, self.recipe.limits.max_batch)

    @property
    def server(self) -> ServerMemory:
        images = KEPT_ROWS if self.image_bytes else 0
        weights = self.weight_bytes + self.image_bytes
        return ServerMemory(weights, self.batch_bytes, adapters=self.adapter_bytes, images=images)

    @property
    def fixed_bytes(self) -> int:
        if self.arena_bytes:
            return self.weight_bytes + self.image_bytes + self.adapter_bytes + self.arena_bytes
        return replace(self.server, state=0, prefixes=0, sessions=0, images=0).total

    @property
    def ratio(self) -> float | None:
        return None if self.full_bytes is None else self.full_bytes / self.sequence_bytes

    def fit(self, memory: int) -> Fit:
        room = max(0, memory - self.fixed_bytes)
        return Fit(memory, room // state_bytes(self.recipe, self.cache), self._largest_budget(room))

    def _largest_budget(self, room: int) -> int | None:
        if not self.recipe.cache.build_method().compresses:
            return None
        # At max_length nothing is evicted and there is no slack, so it may take less than slightly smaller budgets.
        longest = self.recipe.limits.max_length
        picked = min((layer.most_picked for layer in self.geometry if layer.most_picked), default=longest)
        if picked < longest:  # a larger cache is refused
            longest = picked - self.recipe.slack
        if self._fits(longest, room):
            return longest
        low, high = 0, longest - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle, room) else (low, middle - 1)
        return low if low and self._with_budget(low) else None

    def _fits(self, budget: int, room: int) -> bool:
        cache = self._with_budget(budget)
        return cache is None or state_bytes(self.recipe, cache, self.recipe.limits.max_batch) <= room

    def _with_budget(self, budget: int) -> CachePlan | None:
        section = self.recipe.cache
        uniform = section.allocation.model_copy(update={"kind": "uniform"})
        changed = self.recipe.model_copy(
            update={"cache": section.model_copy(update={"budget": budget, "allocation": uniform})}
        )
        try:
            return plan_cache(changed, self.geometry, self.cache.attention_layers, self.cache.states)
        except UsageError:
            return None

    def to_json(self) -> dict[str, Any]:
        limits = self.recipe.limits
        return {
            "recipe": self.name,
            "model": self.recipe.model.path,
            "dtype": self.recipe.model.dtype,
            "method": self.recipe.cache.method,
            "weights": self.recipe.weights.model_dump(mode="json"),
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "max_length": shown_length(limits.max_length),
            "max_batch": limits.max_batch,
            "image_encoder_bytes": self.image_bytes,
            "adapter_bytes": self.adapter_bytes,
            "arena_bytes": self.arena_bytes,
            "cache_bytes_per_sequence": self.sequence_bytes,
            "cache_bytes_after_prompt": self.settled_bytes,
            "cache_bytes": self.batch_bytes,
            "server_bytes": self.server.total,
            "full_cache_bytes_per_sequence": self.full_bytes,
            "ratio": self.ratio,
            "layers": [
                {**entry, "bytes": layer.bytes()}
                for entry, layer in zip(self.cache.to_json(), self.cache.caches, strict=True)
            ],
            "not_counted": self._left_out,
        }

    def sections(self, fit: Fit | None = None) -> list[Section]:
        recipe, batch = self.recipe, self.recipe.limits.max_batch
        total = self.weight_bytes + self.image_bytes + self.adapter_bytes + self.arena_bytes + self.batch_bytes
        counted = ", image encoder" * bool(self.image_bytes) + ", adapters" * bool(self.adapter_bytes)
        bits = 8 * self.weight_bytes / self.parameters
        of_each = f", {bits:.2f} bits each" if bits < 15.9 else ""
        at_rest, read = format_bytes(self.expert_bytes), format_bytes(self.expert_read_bytes)
        adapters = f"{format_bytes(self.adapter_bytes)} for {recipe.adapters.count} of rank {recipe.adapters.rank}"
        later = f" while its prompt is read; {format_bytes(self.settled_bytes)} of it are used afterwards"
        later = later * (recipe.cache.merge_prompts != "chunks")
        summary: dict[str, str | int | float | None] = {
            "model": recipe.model.path,
            "dtype": recipe.shown_dtype,
            "method": recipe.cache.method,
            "weights": f"{format_bytes(self.weight_bytes)}, {self.parameters:,} parameters{of_each}",
            **({"experts": f"{at_rest} of the weights, of which a token reads {read}"} if self.expert_bytes else {}),
            **({"image encoder": f"{format_bytes(self.image_bytes)} of weights"} if self.image_bytes else {}),
            **({"adapters": adapters} if self.adapter_bytes else {}),
            "cache of 1 sequence": format_bytes(self.sequence_bytes) + later,
            f"cache of {batch} sequences": format_bytes(self.batch_bytes),
            **({"activations and CUDA": f"about {format_bytes(self.arena_bytes)}"} if self.arena_bytes else {}),
            f"weights{counted} and caches": f"{format_bytes(total)}; {self._left_out}",
            "kvexport serve": str(self.server),
        }
        if notes := cache_notes(recipe, self.cache):
            summary["note"] = "; ".join(notes)
        if plain := plain_attention(self.geometry, self.cache):
            summary["attention"] = plain
        if self.full_bytes is None or self.ratio is None:
            summary["full cache of 1 sequence"] = "without bound: limits.max_length is unlimited"
        else:
            tokens = f"keys and values of {recipe.limits.max_length} tokens"
            summary["full cache of 1 sequence"] = f"{format_bytes(self.full_bytes)}, {tokens}"
            smaller = f"{self.ratio:.3g} times smaller" if self.ratio >= 1 else f"{1 / self.ratio:.3g} times LARGER"
            summary["against the full cache"] = smaller
        return [
            KeyValues(f"Plan of {self.name or 'the recipe'}", summary),
            layer_table(self.cache),
            *([self._describe(fit)] if fit else []),
        ]

    def _describe(self, fit: Fit) -> Section:
        batch = self.recipe.limits.max_batch
        on_gpu = self.arena_bytes > 0
        fixed = "the weights" if on_gpu else "the program and 2 times the weights"
        sequences = f"{fit.sequences:,}" if on_gpu else f"{fit.sequences:,}, without saved prefixes and sessions"
        if fit.memory < self.fixed_bytes:
            sequences = f"none: {fixed} alone take {format_bytes(self.fixed_bytes)}"
        budget = f"none is small enough for {batch} sequences; fewer of them: --set limits.max_batch=N"
        if fit.largest_budget:
            settings = f"--set cache.budget={fit.largest_budget} --set cache.allocation.kind=uniform"
            budget = f"{fit.largest_budget} slots: {settings}"
        elif not self.recipe.cache.build_method().compresses:
            budget = f"none to choose: {self.recipe.cache.method} keeps every slot"
        return KeyValues(
            f"In {format_bytes(fit.memory)}" + f", {self._left_out}" * on_gpu,
            {f"sequences beside {fixed}": sequences, f"largest uniform budget for {batch} sequences": budget},
        )


def gpu_bytes(recipe: Recipe, config: Any, itemsize: int) -> int:
    """Estimate the bytes that a GPU needs beside weights and KV caches; 0 if the recipe runs on the CPU.

    Activations are largest in a feed-forward network while every lane (row of the batch) reads a prompt chunk: the
    residual stream, the normalised input, gate, up projection, and the product of gate and up. Logits are float32.
    """
    from kvexport import backends

    if not backends.get(recipe.backend.name).needs_gpu(recipe):
        return 0
    lanes, chunk = recipe.limits.max_batch, recipe.export.prefill_chunk
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    activations = lanes * chunk * (2 * config.hidden_size + 3 * inner) * itemsize
    logits = 4 * lanes * config.vocab_size * (chunk if recipe.all_logits else 1)
    return int(activations + logits + CUDA_BYTES)


def full_layer_bytes(layer: LayerGeometry, length: int, itemsize: int) -> int:
    slots = min(length, layer.sliding_window) if layer.sliding_window else length
    size = layer.key_size + (0 if layer.value_in_key else layer.value_size)
    return layer.kv_heads * slots * size * itemsize


def layer_groups(cache: CachePlan) -> list[tuple[str, LayerCache, int]]:
    groups = []
    for _, alike in itertools.groupby(enumerate(cache.caches), key=lambda item: item[1]):
        members = list(alike)
        first, last = members[0][0], members[-1][0]
        groups.append((f"{first}-{last}" if last > first else str(first), members[0][1], len(members)))
    return groups


def _of_heads(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def layer_table(cache: CachePlan) -> Table:
    rows: list[Sequence[str | int]] = []
    for label, layer, count in layer_groups(cache):
        size = str(layer.key_size)
        if layer.value_in_key:
            size += f", {layer.value_size} of them values"
        elif layer.key_size != layer.value_size:
            size += f"/{layer.value_size}"
        budget = _of_heads(layer.budget) if layer.merges else "all"
        window = str(layer.sliding_window or "-")
        shared = (
            layer.kv_heads, size, window, budget, _of_heads(layer.capacity), layer.sinks, _of_heads(layer.recent),
            format_bytes(count * layer.bytes()),
        )  # fmt: skip
        rows.append((label, *shared))
    header = ("layers", "KV heads", "head size", "window", "budget", "capacity", "sinks", "recent", "bytes")
    return Table("Cache of one sequence", header, rows)
