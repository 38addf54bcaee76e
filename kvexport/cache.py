"""The cache ABI: names, shapes, types and bytes of every layer's state. See docs/contract.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.allocation import allocate, head_shares
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
    """The caches of a model: one a layer, or one a KV head where heads have budgets of their own."""

    caches: tuple[LayerCache, ...]

    @property
    def cache_positions(self) -> bool:
        """Whether keys are rotated by their places in the cache; then every head of every layer holds as many
        entries."""
        return self.caches[0].rotary.cache_positions

    def of_rank(self, ranks: int) -> CachePlan:
        """That of one of so many ranks, which have equally many KV heads."""
        return CachePlan(tuple(replace(layer, kv_heads=layer.kv_heads // ranks) for layer in self.caches))

    def bytes(self, batch: int = 1) -> int:
        """Bytes of the whole state for `batch` sequences, `past_length` included."""
        return sum(layer.bytes(batch) for layer in self.caches) + 8 * batch

    def state_names(self) -> Iterator[tuple[str, str, LayerCache, str]]:
        """(input name, output name, layer, kind) of every state tensor, layer by layer."""
        for i, layer in enumerate(self.caches):
            for tensor in layer.state:
                yield tensor.past(i), tensor.present(i), layer, tensor.name

    def to_json(self) -> list[dict[str, Any]]:
        """For the manifest."""
        return [asdict(layer) for layer in self.caches]


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
    names, parts = _names(geometry, len(budgets)), of_caches(geometry, len(budgets))
    layers = [_planned(recipe, method, *one) for one in zip(names, parts, budgets, strict=True)]
    _require_no_merges(recipe, names, layers, method)
    plan = CachePlan(tuple(layers))
    part_plan(recipe, plan)  # which it has to have room for
    return plan


def _planned(recipe: Recipe, method: Method, name: str, layer: LayerGeometry, share: int) -> LayerCache:
    """The cache that messages call `name`, of a layer or of a KV head, which has `share` slots of the budget."""
    budget = min(share, recipe.limits.max_length)
    if layer.sliding_window:
        budget = min(budget, layer.sliding_window)
    sinks, recent = recipe.cache.sinks, _recent(recipe, budget)
    merges = budget < recipe.limits.max_length
    if method.compresses and merges and budget < sinks + recent + 1:
        raise UsageError(
            f"{name} has a budget of {budget} slots, which cannot hold {sinks} sinks, {recent} recent and one more",
            f"--set cache.budget={sinks + recent + 1}, or fewer cache.sinks or cache.recent",
        )
    capacity = recipe.capacity(budget) if merges else budget
    if capacity > MOST:
        raise UsageError(
            f"{name} would have {capacity} slots, {budget} of its budget and {capacity - budget} beyond it for "
            f"the tokens of a call; {MOST} is the most",
            "a smaller export.prefill_chunk, cache.merge_every or cache.slack",
        )
    return LayerCache(
        kv_heads=layer.kv_heads,
        key_size=layer.key_size,
        value_size=layer.value_size,
        statistics=len(method.statistics),
        budget=budget,
        capacity=capacity,
        sinks=sinks,
        recent=recent,
        sliding_window=layer.sliding_window,
        merges=merges,
        dtype=recipe.cache_dtype,
        rotary=layer.rotary,
        extra=(*scales_of(recipe.cache_dtype), *method.extra_state),
    )


def _recent(recipe: Recipe, budget: int) -> int:
    """`cache.recent` in slots."""
    recent = recipe.cache.recent
    return int(recent * budget) if isinstance(recent, float) else recent


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
    sinks, recent = recipe.cache.sinks, _recent(recipe, budget)
    if budget < sinks + recent + 1:
        least = sinks + recent + 1 + (slots - budget if periodic.slots is not None else 0)
        raise UsageError(
            f"{named} cannot hold {sinks} sinks, {recent} recent and one more",
            f"--set {key}={least}, or fewer cache.sinks or cache.recent",
        )
    layers = (replace(x, budget=budget, capacity=slots, recent=recent, merges=False) for x in plan.caches)
    return CachePlan(tuple(layers))


def settled_plan(recipe: Recipe, plan: CachePlan) -> CachePlan:
    """The slots that a sequence uses at most once its prompt has been read: all of `plan`; where prompts merge at their
    end, those of the budgets and of the tokens until the next merge, though the others stay allocated."""
    if recipe.cache.merge_prompts == "chunks":
        return plan
    most = recipe.cache.merge_every
    return CachePlan(
        tuple(replace(x, capacity=min(x.capacity, x.budget + most)) if x.merges else x for x in plan.caches)
    )


def state_bytes(recipe: Recipe, plan: CachePlan, sequences: int = 1) -> int:
    """Bytes of the state of so many sequences: the caches of `plan`, and those of a part of them; twice these where the
    next part is copied while steps read the last one."""
    part = part_plan(recipe, plan)
    copies = 2 if recipe.cache.periodic.slots is not None and recipe.cache.periodic.delay else 1
    return plan.bytes(sequences) + (copies * part.bytes(sequences) if part is not None else 0)


def _require_no_merges(recipe: Recipe, names: Sequence[str], layers: Sequence[LayerCache], method: Method) -> None:
    """Speculation and periodic choices need layers that evict nothing; those with a sliding window may drop what it has
    passed where tokens are drafted. names: of every cache, for messages."""
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
            f"nothing, and {names[i]} has {why}",
            fix,
        )
    if method.compresses:
        raise UsageError(
            f"speculate.draft is {recipe.speculate.draft}: rejected tokens are taken out of the cache again, and "
            f"{method.name} merges what they did to {names[i]}, which has {layers[i].budget} slots",
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
        which = "layers" if len(budgets) == len(geometry) else "KV heads"
        raise UsageError(
            f"cache.positions is cache, but {which} have budgets of {min(budgets)} to {max(budgets)} slots: a new "
            "token would have another place in each",
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


def _names(geometry: Sequence[LayerGeometry], caches: int) -> list[str]:
    """What messages call every cache; see `of_caches`."""
    if caches == len(geometry):
        return [f"layer {i}" for i in range(caches)]
    return [f"KV head {head} of layer {i}" for i, layer in enumerate(geometry) for head in range(layer.kv_heads)]


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
