"""Tests of how the CUDA kernels divide their work on GPUs that this machine lacks, for the shipped recipes' shapes."""

import ctypes
from typing import Any

import numpy as np
import pytest

from kvexport.methods import all_methods
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.plan.cache import LayerCache, LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.load import load_recipe
from tests.conformance.cuda_library import Caller, checked_launches, merge_cache_call, vote_attention_call
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture
from tests.conformance.test_cuda_on_host import set_host

# Layers, query heads, KV heads, and elements per head of the checkpoints.
SHAPES = {
    "llama2-7b-keepkv": (32, 32, 32, 128),
    "llama31-8b-keepkv": (32, 32, 8, 128),
    "mistral-7b-keepkv": (32, 32, 8, 128),
    "qwen3-8b-keepkv": (36, 32, 8, 128),
    "smollm2-135m-keepkv": (30, 9, 3, 64),
    "smollm2-135m-chat": (30, 9, 3, 64),
}
# Multiprocessors, and bytes of shared memory per block.
DEVICES = {"H100 or H200": (132, 232448), "Orin": (16, 166912)}
SLOTS = 32  # slots per block of slots; a split consists of such blocks


def blocks_of(library: ctypes.CDLL, device: str, operator: str, call: Any) -> dict[str, int]:
    """Return the number of blocks in a call's launches on a device, by program."""
    multiprocessors, shared = DEVICES[device]
    set_host(library, multiprocessors=multiprocessors, shared_limit=shared)
    blocks = dict(checked_launches(library, operator, ctypes.byref(call)))
    set_host(library)
    return blocks


def layers_of(name: str) -> tuple[Any, int, list[LayerCache]]:
    """Return a recipe, its checkpoint's query heads, and the layers of the largest, a middle and the least budget."""
    recipe = load_recipe(name, []).recipe
    layers, query_heads, kv_heads, size = SHAPES[name]
    plan = plan_cache(recipe, [LayerGeometry(query_heads, kv_heads, size, size)] * layers)
    every = sorted({layer.budget: layer for layer in plan.caches if layer.merges}.values(), key=lambda x: x.budget)
    return recipe, query_heads, [every[0], every[len(every) // 2], every[-1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_decode_step_keeps_the_multiprocessors_busy(caller: Caller, name: str, device: str) -> None:
    """A decode step uses nearly all multiprocessors at batch 1, 8 and 32, before a merge and after it.

    If there is a block of slots for each multiprocessor, nine tenths of them have slots, and the fullest has less than
    twice the mean plus a block of slots.
    """
    recipe, query_heads, layers = layers_of(name)
    method, many = recipe.cache.build_method(), DEVICES[device][0]
    attributes = VoteAttentionAttributes(0.1, 1.0, method.statistics)
    for layer in layers:
        for batch in (1, 8, 32):
            heads, size = batch * layer.kv_heads, layer.key_size
            shape = (batch, layer.kv_heads, max(layer.capacity), size)
            call = vote_attention_call(attributes, "float16", (batch, query_heads, 1, size), shape, size)
            blocks = blocks_of(caller.library, device, "vote_attention", call)
            count = blocks["DecodeMma"]
            splits, rest = divmod(count, heads)
            assert rest == 0 and count <= max(heads, 24 * many)
            for slots in (max(layer.budget) + 1, max(layer.budget) + recipe.cache.merge_every):
                share = [caller.library.kv_host_share(i, splits, slots, SLOTS) for i in range(splits)]
                assert sum(share) == slots and sum(x % SLOTS != 0 for x in share) <= 1, "no whole blocks of slots"
                # The device assigns blocks to the multiprocessors in turn.
                load = np.bincount(np.arange(count) % many, np.tile(share, heads), many)
                if heads * -(-slots // SLOTS) >= many:
                    assert (load > 0).mean() >= 0.9 and load.max() < 2 * load.mean() + SLOTS, (
                        layer.budget,
                        batch,
                        slots,
                    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_a_merge_fill_the_device_and_no_more(caller: Caller, name: str, device: str) -> None:
    """A merge has places for the slots that some decoded tokens evict, not for those that a chunk could evict."""
    recipe, _, layers = layers_of(name)
    method, many = recipe.cache.build_method(), DEVICES[device][0]
    for layer in layers:
        for batch in (1, 8, 32):
            heads = batch * layer.kv_heads
            capacity = max(layer.capacity)
            shape = (batch, layer.kv_heads, capacity, layer.key_size)
            attributes = MergeCacheAttributes(method, max(layer.budget), layer.sinks, max(layer.recent))
            call = merge_cache_call(attributes, "float16", shape, layer.value_size, len(method.statistics))
            blocks = blocks_of(caller.library, device, "merge_cache", call)
            assert min(heads * (capacity // 128), many) * 0.9 <= blocks["NearestMma"] <= max(heads, 24 * many)
            assert min(32 * heads, many) * 0.9 <= blocks["MergeRows"] <= max(heads, 16 * many)


def test_a_head_has_up_to_128_splits(caller: Caller) -> None:
    shape = (1, 1, 16384, 16)
    call = vote_attention_call(VoteAttentionAttributes(0.25, 1.0, (Statistic(),)), "float16", (1, 2, 1, 16), shape, 16)
    assert blocks_of(caller.library, "H100 or H200", "vote_attention", call)["DecodeMma"] == 128


@pytest.mark.parametrize("method", ["keepkv", "ballot", "h2o", "kvslimmer"])
@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_the_limits_of_a_merge_are_those_of_the_kernels(caller: Caller, shared: int, method: str) -> None:
    """The kernels take the slots of the table in docs/tasks/cuda.md, and refuse one more.

    A block's shared memory has 16 bytes for every kernel, the selection with 5 bytes for each slot, and the merge with
    8 bytes for each evicted slot.
    """
    ask = caller.library.kv_cuda_merge_cache_problem
    ask.restype = ctypes.c_char_p
    policy = all_methods()[method]()
    set_host(caller.library, shared_limit=shared)
    try:
        most, evicted = (shared - 16 - 2064) // 5, (shared - 16 - 536) // 8
        sizes = [(most, most - 64, True), (most + 1, most - 63, False), (evicted + 64, 64, True)]
        if evicted + 65 <= most:
            sizes.append((evicted + 65, 64, policy.policy().merge == "drop"))
        for capacity, budget, runs in sizes:
            attributes = MergeCacheAttributes(policy, budget, 4, 32)
            call = merge_cache_call(attributes, "float16", (1, 2, capacity, 128), 128, len(policy.statistics))
            assert (ask(ctypes.byref(call)) is None) == runs, (capacity, budget)
    finally:
        set_host(caller.library)
