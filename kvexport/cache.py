"""The cache ABI: names, shapes, types and bytes of every layer's state. See docs/contract.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.methods.base import Method
from kvexport.methods.slots import Rotary
from kvexport.recipe.fields import MOST, Recipe
from kvexport.schema.state import PAIRS, STATE, StateTensor, scales_of, types_of


@dataclass(frozen=True)
class LayerGeometry:
    """The model's part of one layer's attention, read from its trace. sliding_window: 0 = every position is
    visible. rotary: read for methods that rotate keys, and for positions in the cache."""

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    sliding_window: int = 0
    softcap: float = 0.0
    scale: float = 1.0
    sink_logits: bool = False
    rotary: Rotary = field(default_factory=Rotary)


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache. A sequence's share of `key` is [kv_heads, capacity, key_size]; capacity - budget is the slack.
    merges: False where the budget is the longest sequence, so that nothing is ever evicted. dtype: of the cache's keys
    and values. extra: the state tensors beside the contract's five: the scales of a small cache, then those of the
    method."""

    kv_heads: int
    key_size: int
    value_size: int
    statistics: int
    budget: int
    capacity: int
    sinks: int
    recent: int
    sliding_window: int
    merges: bool
    dtype: str
    rotary: Rotary = field(default_factory=Rotary)
    extra: tuple[StateTensor, ...] = ()

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The layer's state tensors, in the order of every graph."""
        return (*STATE, *self.extra)

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each state tensor for `batch` sequences."""
        sizes = {
            "B": batch,
            "H": self.kv_heads,
            "C": self.capacity,
            "K": self.statistics,
            "D": self.key_size,
            "Dv": self.value_size,
        }
        return {tensor.name: tensor.held_shape(self.dtype, sizes) for tensor in self.state}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """The type of each state tensor."""
        return {tensor.name: np.dtype(tensor.held_as(self.dtype)) for tensor in self.state}

    def bytes(self, batch: int = 1) -> int:
        """Bytes of all state tensors for `batch` sequences."""
        dtypes = self.dtypes()
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in self.shapes(batch).items())

    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one slot, of all heads."""
        shapes, dtypes = self.shapes(1), self.dtypes()
        return self.kv_heads * sum(shapes[name][-1] * dtypes[name].itemsize for name in ("key", "value"))


@dataclass(frozen=True)
class CachePlan:
    """The caches of all layers."""

    layers: tuple[LayerCache, ...]

    @property
    def cache_positions(self) -> bool:
        """Whether keys are rotated by their places in the cache; then every head of every layer holds as many
        entries."""
        return self.layers[0].rotary.cache_positions

    def of_rank(self, ranks: int) -> CachePlan:
        """That of one of so many ranks, which have equally many KV heads."""
        return CachePlan(tuple(replace(layer, kv_heads=layer.kv_heads // ranks) for layer in self.layers))

    def bytes(self, batch: int = 1) -> int:
        """Bytes of the whole state for `batch` sequences, `past_length` included."""
        return sum(layer.bytes(batch) for layer in self.layers) + 8 * batch

    def state_names(self) -> Iterator[tuple[str, str, LayerCache, str]]:
        """(input name, output name, layer, kind) of every state tensor, layer by layer."""
        for i, layer in enumerate(self.layers):
            for tensor in layer.state:
                yield tensor.past(i), tensor.present(i), layer, tensor.name

    def to_json(self) -> list[dict[str, Any]]:
        """For the manifest."""
        return [asdict(layer) for layer in self.layers]


def stored_rows(held: NDArray[Any], scale: NDArray[Any] | None) -> NDArray[np.float32]:
    """Keys or values [..., D] in float32 that a state tensor holds; those of a small cache, whose scales [...] are
    given, as they are stored, rotated."""
    if scale is None:
        return held.astype(np.float32)
    if held.dtype == np.uint8:
        held = np.array(PAIRS, np.int8)[held].reshape(*held.shape[:-1], -1)
    return held.astype(np.float32) * scale[..., None].astype(np.float32)


def plan_cache(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> CachePlan:
    """Every layer's budget and capacity. Raises UsageError where a budget, or that of `part_plan`, cannot hold sinks,
    recent and one slot more, or a layer would have more slots than can be counted, for rows of an odd size in int4, for
    positions in the cache where layers would hold different numbers of entries, and for speculation and periodic
    choices over a cache that merges."""
    method = recipe.cache.build_method()
    if recipe.cache.positions == "cache" and recipe.cache.allocation.whole:
        raise UsageError(
            "cache.positions is cache, where a new token has the same place in every layer, but "
            f"cache.allocation.whole lets layers {recipe.cache.allocation.whole} hold more entries than others",
            "--set cache.positions=absolute, or --set cache.allocation.whole=[]",
        )
    _require_pairs(recipe, geometry)
    budgets = allocate(recipe, len(geometry))
    if recipe.cache.positions == "cache":
        _require_one_place(geometry, budgets)
    _require_heads(recipe, geometry)
    layers = []
    for i, (layer, share) in enumerate(zip(of_caches(geometry, len(budgets)), budgets, strict=True)):
        budget = min(share, recipe.limits.max_length)
        if layer.sliding_window:
            budget = min(budget, layer.sliding_window)
        recent_setting = recipe.cache.recent
        recent = int(recent_setting * budget) if isinstance(recent_setting, float) else recent_setting
        merges = budget < recipe.limits.max_length
        if method.compresses and merges and budget < recipe.cache.sinks + recent + 1:
            raise UsageError(
                f"layer {i} has a budget of {budget} slots, which cannot hold {recipe.cache.sinks} sinks, {recent} "
                "recent and one more",
                f"--set cache.budget={recipe.cache.sinks + recent + 1}, or fewer cache.sinks or cache.recent",
            )
        capacity = recipe.capacity(budget) if merges else budget
        if capacity > MOST:
            raise UsageError(
                f"layer {i} would have {capacity} slots, {budget} of its budget and {capacity - budget} beyond it for "
                f"the tokens of a call; {MOST} is the most",
                "a smaller export.prefill_chunk, cache.merge_every or cache.slack",
            )
        layers.append(
            LayerCache(
                kv_heads=layer.kv_heads,
                key_size=layer.key_size,
                value_size=layer.value_size,
                statistics=len(method.statistics),
                budget=budget,
                capacity=capacity,
                sinks=recipe.cache.sinks,
                recent=recent,
                sliding_window=layer.sliding_window,
                merges=merges,
                dtype=recipe.cache_dtype,
                rotary=layer.rotary,
                extra=(*scales_of(recipe.cache_dtype), *method.extra_state),
            )
        )
    _require_no_merges(recipe, layers, method)
    plan = CachePlan(tuple(layers))
    part_plan(recipe, plan)  # which it has to have room for
    return plan


def part_plan(recipe: Recipe, plan: CachePlan) -> CachePlan | None:
    """The cache of a part of the entries of `plan`'s: that which drafts (`speculate.draft: cache`), or which decode
    steps read (`cache.periodic`), with room for the tokens until it is chosen anew; None where there is none. Raises
    UsageError where its budget cannot hold sinks, recent and one slot more."""
    speculate, periodic = recipe.speculate, recipe.cache.periodic
    if periodic.slots is not None:
        budget, slots = periodic.chosen, periodic.slots
        named, key = f"cache.periodic.slots {slots}, of which {budget} are chosen,", "cache.periodic.slots"
    elif speculate.draft == "cache":
        budget, slots = speculate.budget, speculate.budget + speculate.rebuild + speculate.tokens
        named, key = f"speculate.budget {budget}", "speculate.budget"
    else:
        return None
    sinks, share = recipe.cache.sinks, recipe.cache.recent
    recent = int(share * budget) if isinstance(share, float) else share
    if budget < sinks + recent + 1:
        least = sinks + recent + 1 + (slots - budget if periodic.slots is not None else 0)
        raise UsageError(
            f"{named} cannot hold {sinks} sinks, {recent} recent and one more",
            f"--set {key}={least}, or fewer cache.sinks or cache.recent",
        )
    layers = (replace(x, budget=budget, capacity=slots, recent=recent, merges=False) for x in plan.layers)
    return CachePlan(tuple(layers))


def settled_plan(recipe: Recipe, plan: CachePlan) -> CachePlan:
    """The slots that a sequence uses at most once its prompt has been read: all of `plan`; where prompts merge at their
    end, those of the budgets and of the tokens until the next merge, though the others stay allocated."""
    if recipe.cache.merge_prompts == "chunks":
        return plan
    most = recipe.cache.merge_every
    return CachePlan(
        tuple(replace(x, capacity=min(x.capacity, x.budget + most)) if x.merges else x for x in plan.layers)
    )


def state_bytes(recipe: Recipe, plan: CachePlan, sequences: int = 1) -> int:
    """Bytes of the state of so many sequences: the caches of `plan`, and those of a part of them; twice these where the
    next part is copied while steps read the last one."""
    part = part_plan(recipe, plan)
    copies = 2 if recipe.cache.periodic.slots is not None and recipe.cache.periodic.delay else 1
    return plan.bytes(sequences) + (copies * part.bytes(sequences) if part is not None else 0)


def _require_no_merges(recipe: Recipe, layers: Sequence[LayerCache], method: Method) -> None:
    """Speculation and periodic choices need layers that evict nothing; those with a sliding window may drop what it has
    passed where tokens are drafted."""
    merging = [i for i, layer in enumerate(layers) if layer.merges]
    if not merging or (recipe.speculate.draft is None and recipe.cache.periodic.slots is None):
        return
    i, fix = merging[0], "--set cache.method=full, or --set cache.budget=1.0 (a share of limits.max_length)"
    if recipe.cache.periodic.slots is not None:
        if layers[i].budget == layers[i].sliding_window:
            why, fix = f"a sliding window of {layers[i].sliding_window} tokens", "--set cache.periodic.slots=null"
        else:
            why = f"{layers[i].budget} slots, from which {method.name} evicts"
        raise UsageError(
            f"cache.periodic.slots is {recipe.cache.periodic.slots}, which are chosen from a cache that evicts "
            f"nothing, and layer {i} has {why}",
            fix,
        )
    if method.compresses:
        raise UsageError(
            f"speculate.draft is {recipe.speculate.draft}: rejected tokens are taken out of the cache again, and "
            f"{method.name} merges what they did to layer {i}, which has {layers[i].budget} slots",
            fix,
        )


def _require_pairs(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> None:
    """A byte holds two numbers of int4."""
    types = types_of(recipe.cache_dtype)
    for i, layer in enumerate(geometry):
        for name, size in (("key", layer.key_size), ("value", layer.value_size)):
            if types[name] == "int4" and size % 2:
                raise UsageError(
                    f"cache.dtype is {recipe.cache.dtype}, which holds two numbers in a byte, and layer {i} has "
                    f"{name}s of {size}, an odd number",
                    "--set cache.dtype=int8",
                )


def _require_one_place(geometry: Sequence[LayerGeometry], budgets: Sequence[int]) -> None:
    """A new token has one place in the cache, the same in every layer."""
    if len(set(budgets)) > 1:
        raise UsageError(
            f"cache.positions is cache, but layers have budgets of {min(budgets)} to {max(budgets)} slots: a new token "
            "would have another place in each",
            "--set cache.allocation.kind=uniform",
        )
    windows = [i for i, layer in enumerate(geometry) if layer.sliding_window]
    if windows:
        raise UsageError(
            f"cache.positions is cache, but layer {windows[0]} has a sliding window of "
            f"{geometry[windows[0]].sliding_window} positions, which drops entries that other layers keep",
            "--set cache.positions=absolute",
        )


def of_caches(geometry: Sequence[LayerGeometry], caches: int) -> list[LayerGeometry]:
    """The part of each cache in its layer, where there are `caches` of them: the layer, or one of its KV heads with the
    query heads of its group."""
    if caches == len(geometry):
        return list(geometry)
    one = (replace(x, query_heads=x.query_heads // x.kv_heads, kv_heads=1) for x in geometry)
    return [head for head, layer in zip(one, geometry, strict=True) for _ in range(layer.kv_heads)]


def layer_caches(geometry: Sequence[LayerGeometry], caches: int) -> list[range]:
    """The numbers of every layer's caches, where there are `caches` of them; see `of_caches`."""
    ends = itertools.accumulate(1 if caches == len(geometry) else layer.kv_heads for layer in geometry)
    return [range(first, end) for first, end in itertools.pairwise((0, *ends))]


def head_shares(recipe: Recipe) -> list[list[float]]:
    """`cache.allocation.shares` of KV heads, layer by layer; nothing where layers have one budget for all of them."""
    allocation, method = recipe.cache.allocation, recipe.cache.build_method()
    listed = method.compresses and (allocation.kind or method.allocation) == "listed"
    return [row for row in allocation.shares if isinstance(row, list)] if listed else []


def _require_heads(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> None:
    """Budgets of heads are for the heads that there are, and for the caches of one process."""
    shares, ranks = head_shares(recipe), recipe.backend.tensor_parallel
    for i, (row, layer) in enumerate(zip(shares, geometry, strict=bool(shares))):
        if len(row) != layer.kv_heads:
            raise UsageError(
                f"cache.allocation.shares has {len(row)} numbers for the KV heads of layer {i}, which has "
                f"{layer.kv_heads}",
                "one for each KV head, or one number for the layer, in all layers alike",
            )
    if shares and ranks > 1:
        raise UsageError(
            f"backend.tensor_parallel is {ranks}, which share the heads of every cache, but cache.allocation.shares "
            "gives every KV head a cache of its own",
            "--set backend.tensor_parallel=1, or shares of layers",
        )


def allocate(recipe: Recipe, layers: int) -> list[int]:
    """Slots of every cache, on average `recipe.budget`; a layer has one cache, or one for each KV head where their
    shares are listed. cosine: ``m_l = (1-d)(cos(pi l / L) + 1)/2 + d`` (KeepKV); pyramid: linear, ``m_l = 1 - (1-d) l /
    (L-1)`` (PyramidKV); both scaled; listed: see `_listed`. Whole layers have `limits.max_length`, and the others share
    what these leave. Raises UsageError where that is nothing, the model lacks such a layer, or shares are not those of
    its layers."""
    method = recipe.cache.build_method()
    allocation = recipe.cache.allocation
    if not method.compresses:
        return [recipe.budget] * layers
    kind, d = allocation.kind or method.allocation, allocation.minimum
    if kind == "listed" and len(allocation.shares) != layers:
        raise UsageError(
            f"cache.allocation.shares has {len(allocation.shares)} numbers, the model has {layers} layers",
            "one for each layer, or --set cache.allocation.kind=uniform",
        )
    of_layer = [i for i, row in enumerate(head_shares(recipe)) for _ in row] or list(range(layers))
    left = _left_by_whole_layers(recipe, of_layer)
    if kind == "uniform":
        raw = [1.0] * layers
    elif kind == "cosine":
        raw = [(1 - d) * (math.cos(math.pi * i / layers) + 1) / 2 + d for i in range(layers)]
    elif kind == "pyramid":
        raw = [1 - (1 - d) * i / max(layers - 1, 1) for i in range(layers)]
    else:
        raw = _listed(recipe, of_layer, left)
    whole = [layer in allocation.whole for layer in of_layer]
    raw = [0.0 if all_of_it else share for all_of_it, share in zip(whole, raw, strict=True)]
    scale = left / sum(raw) if any(raw) else 0.0
    # Rounding the running sum keeps the total exact.
    edges = [round(scale * sum(raw[:i])) for i in range(len(raw) + 1)]
    shares = [b - a for a, b in itertools.pairwise(edges)]
    return [recipe.limits.max_length if all_of_it else share for all_of_it, share in zip(whole, shares, strict=True)]


def _listed(recipe: Recipe, of_layer: Sequence[int], left: int) -> list[float]:
    """Slots by `cache.allocation.shares` of the caches whose layers are not whole, `left` in all, each between what
    holds its sinks, recent slots and two more, and `limits.max_length`. of_layer: the layer of every cache."""
    allocation = recipe.cache.allocation
    shares = [share for row in allocation.shares for share in (row if isinstance(row, list) else [row])]
    others = [share for layer, share in zip(of_layer, shares, strict=True) if layer not in allocation.whole]
    most, least = recipe.limits.max_length, least_slots(recipe)
    if not len(others) * least < left < len(others) * most:
        return [left / max(len(others), 1)] * len(shares)
    low, high = 0.0, most / min(others)
    for _ in range(100):
        scale = (low + high) / 2
        enough = sum(min(max(scale * share, least), most) for share in others) >= left
        low, high = (low, scale) if enough else (scale, high)
    return [min(max(high * share, least), most) for share in shares]


def least_slots(recipe: Recipe) -> float:
    """What holds the sinks, the recent slots and two more."""
    protected, recent = recipe.cache.sinks + 2, recipe.cache.recent
    return protected / (1 - recent) if isinstance(recent, float) and recent < 1 else protected + recent


def _left_by_whole_layers(recipe: Recipe, of_layer: Sequence[int]) -> int:
    """Slots of all caches together that are not those of whole layers. of_layer: the layer of every cache."""
    whole, length, layers = recipe.cache.allocation.whole, recipe.limits.max_length, of_layer[-1] + 1
    if whole and whole[-1] >= layers:
        raise UsageError(
            f"cache.allocation.whole names layer {whole[-1]}, the model has 0 to {layers - 1}",
            f"--set cache.allocation.whole={[layer for layer in whole if layer < layers]}",
        )
    slots, kept = recipe.budget * len(of_layer), sum(layer in whole for layer in of_layer)
    least = kept * length + (len(of_layer) - kept) * (recipe.cache.sinks + 1)
    if whole and slots < least:
        raise UsageError(
            f"{len(whole)} whole layers of limits.max_length {length} slots take {kept * length} of the "
            f"{slots} that {layers} layers have at a budget of {recipe.budget}, which leaves too few for the others",
            f"--set cache.budget={-(-least // len(of_layer))}, or fewer layers in cache.allocation.whole",
        )
    return slots - kept * length
