"""The cache plan of a recipe for a model: the budget of every KV cache, and checks that its entries have room."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvexport.backends.sections import default
from kvexport.errors import UsageError
from kvexport.methods.base import Method
from kvexport.plan.budgets import allocate, head_shares
from kvexport.plan.cache import CachePlan, LayerCache, LayerGeometry, LayerStates
from kvexport.recipe.fields import MOST, Recipe, shown_length
from kvexport.schema.state import SMALL, scales_of, types_of


def plan_cache(
    recipe: Recipe,
    geometry: Sequence[LayerGeometry],
    attention_layers: tuple[int, ...] = (),
    states: tuple[LayerStates, ...] = (),
    readers: Mapping[int, int] | None = None,
) -> CachePlan:
    method = recipe.cache.build_method()
    if recipe.cache.positions == "cache" and recipe.cache.allocation.whole:
        raise UsageError(
            "cache.positions is cache, where a new token has the same place in every layer, but "
            f"cache.allocation.whole lets layers {recipe.cache.allocation.whole} hold more entries than others",
            "--set cache.positions=absolute, or --set cache.allocation.whole=[]",
        )
    if states:
        _require_states_kept(recipe, states)
    if readers:
        _require_caches_read(recipe, readers)
    _require_pairs(recipe, geometry)
    _require_exact_positions(recipe, geometry)
    if recipe.cache.pinned:
        _require_pins_kept(recipe, method, geometry)
    if not geometry and method.compresses:
        raise UsageError(
            f"cache.method is {method.name}, but no layer of the model attends, so it has no KV cache to compress",
            "--set cache.method=full",
        )
    budgets = allocate(recipe, len(geometry))
    if recipe.cache.positions == "cache":
        _require_one_place(geometry, budgets)
    _require_heads(recipe, geometry)
    shares = [[share] for share in budgets]
    if rows := head_shares(recipe):
        left = iter(budgets)
        shares = [[next(left) for _ in row] for row in rows]
    caches = [_planned(recipe, method, i, *layer) for i, layer in enumerate(zip(geometry, shares, strict=True))]
    _require_no_merges(recipe, caches, method)
    plan = CachePlan(tuple(caches), attention_layers, states)
    _require_plain(recipe, geometry, plan)
    selected_plan(recipe, plan)  # raises an error if its budget is too small
    return plan


def _planned(recipe: Recipe, method: Method, i: int, layer: LayerGeometry, shares: Sequence[int]) -> LayerCache:
    most = min(layer.sliding_window or recipe.limits.max_length, recipe.limits.max_length)
    shares, budgets, capacities = [min(share, most) for share in shares], [], []
    # In a layer with a sliding window pinned tokens leave with the window, so they need no room.
    pinned = 0 if layer.sliding_window else recipe.cache.pinned
    for head, budget in enumerate(shares):
        name = _name(i, head, apart=len(shares) > 1)
        sinks, recent = recipe.cache.sinks, _recent(recipe, budget)
        merges = budget + pinned < recipe.limits.max_length
        if method.compresses and merges and budget < sinks + recent + 1:
            window = ", the size of its sliding window" if budget == layer.sliding_window else ""
            raise UsageError(
                f"{name} has a budget of {budget} slots{window}, which cannot hold {sinks} sinks, {recent} recent "
                "and one more",
                _enough(recipe, "cache.budget", most),
            )
        budget = min(budget + pinned, most)
        budgets.append(budget)
        capacity = recipe.capacity(budget) if merges else budget
        if capacity > MOST:
            raise UsageError(
                f"{name} would have {capacity} slots, {budget} of its budget and {capacity - budget} beyond it for "
                f"the tokens of a call; {MOST} is the most",
                "a smaller export.prefill_chunk, cache.merge_every or cache.slack",
            )
        capacities.append(capacity)
    alike = layer.kv_heads if len(budgets) == 1 else 1
    return LayerCache(
        key_size=layer.key_size,
        value_size=layer.value_size,
        statistics=len(method.statistics),
        budget=(*budgets,) * alike,
        capacity=(*capacities,) * alike,
        sinks=recipe.cache.sinks,
        recent=tuple(_recent(recipe, share) for share in shares) * alike,
        sliding_window=layer.sliding_window,
        merges=any(budget < recipe.limits.max_length for budget in budgets),
        dtype=recipe.cache_dtype,
        rotary=layer.rotary,
        extra=(*scales_of(recipe.cache_dtype), *method.extra_state),
        value_in_key=layer.value_in_key and _reads_values_from_keys(recipe, method),
        key_shift=layer.key_shift if recipe.cache_dtype in SMALL else None,
    )


def _reads_values_from_keys(recipe: Recipe, method: Method) -> bool:
    """Return whether values that are parts of their keys (latent attention) are read from the keys, not stored again.

    After a merge such a value must still be a part of its key. Quantized caches store values with a scale of their own,
    and only the kernels of the CPU read values from keys.
    """
    on_cpu = recipe.backend.name == default() and getattr(recipe.backend, "device", "cpu") == "cpu"
    return on_cpu and recipe.cache_dtype not in SMALL and method.merges_values_as_keys


def _enough(recipe: Recipe, key: str, most: int, beside: int = 0) -> str:
    sinks, recent = recipe.cache.sinks, recipe.cache.recent
    share = min(recent, 0.99) if isinstance(recent, float) else 0.0
    least = math.ceil((sinks + 1 + (0 if share else recent)) / (1 - share))
    if least > most:
        return f"--set cache.sinks={min(sinks, most // 4)} --set cache.recent={most // 2}"
    return f"--set {key}={least + beside}, or fewer cache.sinks or cache.recent"


def _recent(recipe: Recipe, budget: int) -> int:
    recent = recipe.cache.recent
    return int(recent * budget) if isinstance(recent, float) else recent


def selected_plan(recipe: Recipe, plan: CachePlan) -> CachePlan | None:
    """Return the plan of the smaller cache that decode steps read with `cache.periodic`, or None without it."""
    periodic = recipe.cache.periodic
    if periodic.slots is None:
        return None
    budget, slots = periodic.selected, periodic.slots
    sinks, recent = recipe.cache.sinks, _recent(recipe, budget)
    if budget < sinks + recent + 1:
        raise UsageError(
            f"cache.periodic.slots {slots}, of which {budget} are selected, cannot hold {sinks} sinks, {recent} recent "
            "and one more",
            _enough(recipe, "cache.periodic.slots", recipe.limits.max_length, slots - budget),
        )
    return CachePlan(tuple(_with_slots(x, budget, slots, recent) for x in plan.caches))


def _with_slots(cache: LayerCache, budget: int, slots: int, recent: int) -> LayerCache:
    n = cache.kv_heads
    return replace(cache, merges=False, budget=(budget,) * n, capacity=(slots,) * n, recent=(recent,) * n)


def settled_plan(recipe: Recipe, plan: CachePlan) -> CachePlan:
    """Return the plan of the slots in use after a prompt was read: fewer if it is compressed only at its end."""
    if recipe.cache.merge_prompts == "chunks":
        return plan
    most = recipe.cache.merge_every

    def settled(cache: LayerCache) -> LayerCache:
        heads = zip(cache.capacity, cache.budget, strict=True)
        return replace(cache, capacity=tuple(min(slots, budget + most) for slots, budget in heads))

    return replace(plan, caches=tuple(settled(cache) if cache.merges else cache for cache in plan.caches))


def plain_attention(geometry: Sequence[LayerGeometry], plan: CachePlan) -> str:
    """Return notes on layers that attend to all tokens, although the model's layers choose tokens; "" without any."""
    picked, chunks = [x for x in geometry if x.most_picked], [x for x in geometry if x.chunk]
    notes = []
    if picked:
        slots = max(max(y.capacity) for x, y in zip(geometry, plan.caches, strict=True) if x.most_picked)
        notes.append(
            f"{_layers(len(picked))} no indexer: it would pick {picked[0].most_picked:,} tokens, and no cache has more "
            f"than {slots:,} slots"
        )
    if chunks:
        notes.append(f"{_layers(len(chunks))} one chunk of {chunks[0].chunk:,} tokens: no sequence is longer")
    return "; ".join(notes)


def _layers(count: int) -> str:
    return "1 layer has" if count == 1 else f"{count} layers have"


def cache_notes(recipe: Recipe, plan: CachePlan) -> list[str]:
    """Return notes for the user about a cache plan, such as a budget that no sequence of the allowed length exceeds."""
    budget, length, pinned = recipe.cache.budget, recipe.limits.max_length, recipe.cache.pinned
    if any(cache.merges and not cache.sliding_window for cache in plan.caches):
        return [f"{pinned:,} slots of each budget are room for pinned tokens (cache.pinned)"] if pinned else []
    if not recipe.cache.build_method().compresses or isinstance(budget, float) or budget + pinned < length:
        return []
    return [
        f"cache.budget is {budget} slots and limits.max_length is {length} tokens, so nothing is ever evicted: "
        f"--budget {max(length // 4, 1)}, or a larger --max-length"
    ]


def state_bytes(recipe: Recipe, plan: CachePlan, sequences: int = 1) -> int:
    selected = selected_plan(recipe, plan)
    return plan.bytes(sequences) + (selected.bytes(sequences) if selected is not None else 0)


def _name(layer: int, head: int, *, apart: bool) -> str:
    return f"KV head {head} of layer {layer}" if apart else f"layer {layer}"


def _require_not_periodic(recipe: Recipe, why: str) -> None:
    if recipe.cache.periodic.slots is not None:
        raise UsageError(
            f"cache.periodic.slots is {recipe.cache.periodic.slots}, which is not supported where {why}",
            "--set cache.periodic.slots=null",
        )


def _require_pins_kept(recipe: Recipe, method: Method, geometry: Sequence[LayerGeometry]) -> None:
    why, fix = "", "--set cache.pinned=0"
    if not method.compresses:
        why = f"the method {method.name} evicts nothing, so every token is kept"
    elif recipe.cache.periodic.slots is not None:
        why = f"cache.periodic.slots is {recipe.cache.periodic.slots}: the cache evicts nothing, so every token is kept"
    elif recipe.cache.positions == "cache":
        why = "cache.positions is cache: the places of tokens before a pinned one would change"
        fix = "--set cache.positions=absolute, or " + fix
    elif all(layer.sliding_window for layer in geometry):
        why = "every layer has a sliding window, which pinned tokens leave as all others do"
    if why:
        raise UsageError(f"cache.pinned is {recipe.cache.pinned}, but {why}", fix)


def _require_states_kept(recipe: Recipe, states: Sequence[LayerStates]) -> None:
    why = f"layer {states[0].layer} has a recurrent state"
    if recipe.speculate.draft is not None:
        raise UsageError(
            f"speculate.draft is {recipe.speculate.draft}: rejected tokens are removed from the cache again, but "
            f"{why}, from which no token can be removed",
            "--set speculate.draft=null",
        )
    _require_not_periodic(recipe, why)
    if recipe.cache.positions == "cache":
        raise UsageError(
            f"cache.positions is cache, which is not supported where {why}", "--set cache.positions=absolute"
        )


def _require_caches_read(recipe: Recipe, readers: Mapping[int, int]) -> None:
    layer, source = next(iter(readers.items()))
    why = f"layer {layer} reads the cache of layer {source}"
    if head_shares(recipe):
        raise UsageError(
            f"cache.allocation.shares gives KV heads budgets of their own, which is not supported where {why}",
            "--set cache.allocation.kind=uniform",
        )
    _require_not_periodic(recipe, why)
    if recipe.backend.name != default():
        raise UsageError(
            f"backend.name is {recipe.backend.name}, which is not supported where {why}",
            f"--set backend.name={default()}",
        )
    if (device := getattr(recipe.backend, "device", "cpu")) != "cpu":
        raise UsageError(f"backend.device is {device}, which is not supported where {why}", "--set backend.device=cpu")


def _require_no_merges(recipe: Recipe, caches: Sequence[LayerCache], method: Method) -> None:
    merging = [i for i, cache in enumerate(caches) if cache.merges]
    if not merging or (recipe.speculate.draft is None and recipe.cache.periodic.slots is None):
        return
    i, fix = merging[0], "--set cache.method=full, or --set cache.budget=1.0 (a share of limits.max_length)"
    head = next(h for h, budget in enumerate(caches[i].budget) if budget < recipe.limits.max_length)
    name, budget = _name(i, head, apart=bool(head_shares(recipe))), caches[i].budget[head]
    if recipe.cache.periodic.slots is not None:
        if max(caches[i].budget) == caches[i].sliding_window:
            why, fix = f"a sliding window of {caches[i].sliding_window} tokens", "--set cache.periodic.slots=null"
        else:
            why = f"{budget} slots, from which {method.name} evicts"
        raise UsageError(
            f"cache.periodic.slots is {recipe.cache.periodic.slots}, which are selected from a cache that evicts "
            f"nothing, but {name} has {why}",
            fix,
        )
    if method.compresses:
        raise UsageError(
            f"speculate.draft is {recipe.speculate.draft}: rejected tokens are removed from the cache again, but "
            f"{method.name} may have merged them into {name}, which has {budget} slots",
            fix,
        )


def _require_plain(recipe: Recipe, geometry: Sequence[LayerGeometry], plan: CachePlan) -> None:
    length = recipe.limits.max_length
    for i, (layer, cache) in enumerate(zip(geometry, plan.caches, strict=True)):
        number = plan.attention_layers[i] if plan.attention_layers else i
        if layer.chunk and length > layer.chunk:
            raise UsageError(
                f"layer {number} attends in chunks of {layer.chunk} tokens, of which a cache holds only the first, and "
                f"limits.max_length is {shown_length(length)}",
                f"--set limits.max_length={layer.chunk}",
            )
        slots, most = max(cache.capacity), layer.most_picked
        if most and slots > most:
            beyond = slots - max(cache.budget)
            parts = f", {slots - beyond} of its budget and {beyond} for a call" if beyond else ""
            fix = f"--set limits.max_length={most}"
            if cache.merges and recipe.cache.merge_prompts == "end" and recipe.cache.slack is None:
                fix = f"--set cache.merge_prompts=chunks, or {fix}"
            elif cache.merges and beyond < most:
                budget = (most - beyond) * recipe.budget // max(cache.budget)
                fix = f"--set cache.budget={budget}, or {fix}"
            raise UsageError(
                f"the indexer of layer {number} would pick only {most} of the {slots} slots of its cache{parts}", fix
            )


def _require_pairs(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> None:
    types = types_of(recipe.cache_dtype)
    for i, layer in enumerate(geometry):
        for name, size in (("key", layer.key_size), ("value", layer.value_size)):
            if types[name] == "int4" and size % 2:
                raise UsageError(
                    f"cache.dtype is {recipe.cache.dtype}, which stores two numbers in a byte, but layer {i} has "
                    f"{name}s of {size} elements, an odd number",
                    "--set cache.dtype=int8",
                )


def _require_exact_positions(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> None:
    placed = [i for i, layer in enumerate(geometry) if layer.position_in_key]
    if placed and recipe.cache_dtype in SMALL:
        raise UsageError(
            f"cache.dtype is {recipe.cache.dtype}, which would round the positions that the keys of layer {placed[0]} "
            "contain (ALiBi)",
            "--set cache.dtype=model",
        )


def _require_one_place(geometry: Sequence[LayerGeometry], budgets: Sequence[int]) -> None:
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


def _require_heads(recipe: Recipe, geometry: Sequence[LayerGeometry]) -> None:
    shares = head_shares(recipe)
    for i, (row, layer) in enumerate(zip(shares, geometry, strict=bool(shares))):
        if len(row) != layer.kv_heads:
            raise UsageError(
                f"cache.allocation.shares has {len(row)} numbers for the KV heads of layer {i}, which has "
                f"{layer.kv_heads}",
                "a number for each KV head, in every layer",
            )
