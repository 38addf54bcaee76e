"""The TensorRT plugins over the CUDA kernels on a GPU: the conformance suite, and the time that a plugin adds.

The tests need TensorRT's headers. All but the first two need a GPU and the kernels compiled for it (make gpu-check). A
skipped test names the missing part.
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvexport.methods.slots import Statistic
from kvexport.ops.vote_attention import VoteAttentionAttributes
from plugins.building import make
from tests.backends.tensorrt.test_plugins import every_merge, every_place, every_profile, hold_attention, hold_merges
from tests.conformance.cases import MergeProfile, Profile
from tests.conformance.cuda_library import DEVICE, Cuda, DeviceMemory, HostMemory, load, vote_attention_call
from tests.conformance.cuda_library import Caller as DirectCaller
from tests.support.tensorrt_harness import FIELDS, Caller, Harness, what_is_missing

QUERY_HEADS, HEADS, SIZE = 32, 8, 128
CALLS, ROUNDS = 20, 30


@pytest.fixture(scope="module")
def callers() -> tuple[Caller, DirectCaller]:
    if missing := what_is_missing():
        pytest.skip(missing)
    if problem := Cuda().available():
        pytest.skip(f"not reached: the TensorRT plugins on a GPU: {problem}")
    return Caller(Harness(make.harness_on(DEVICE)), DeviceMemory()), Cuda().caller


def test_the_harness_links_with_cudas_own_runtime_and_makes_plugins_without_a_gpu() -> None:
    if missing := what_is_missing() or what_is_missing("tensorrt"):
        pytest.skip(missing)
    harness = Harness(make.harness_on(make.build("cuda-host")))
    assert not hasattr(harness.library, "kv_cuda_runtime_calls"), "CUDA's runtime is the real one"
    for op, fields in FIELDS.items():
        plugin = harness.create(op, fields)
        assert plugin, harness.log()
        assert plugin.another("again").timing_cache_id == plugin.timing_cache_id


@every_place
@every_profile
def test_attention_on_a_gpu(callers: tuple[Caller, DirectCaller], profile: Profile, in_place: bool) -> None:
    hold_attention(*callers, profile, in_place)


@every_place
@every_merge
def test_merges_on_a_gpu(callers: tuple[Caller, DirectCaller], profile: MergeProfile, in_place: bool) -> None:
    hold_merges(*callers, profile, in_place)


def test_both_calls_that_are_timed_do_the_same() -> None:
    if missing := what_is_missing():
        pytest.skip(missing)
    memory = HostMemory()
    plugin = Caller(Harness(make.build("tensorrt-harness")), memory)
    direct = DirectCaller(load(make.build("cuda-host")), memory)
    (enqueue, written), (raw, output) = both(plugin, direct, decode_inputs(1, 128, 16))
    for _ in range(3):
        enqueue()
        raw()
        assert written["output"].tobytes() == output.tobytes()
        assert written["output"].any()
    assert (written["present_votes"] > 0).sum() == HEADS * (128 - 16 + 3)


def test_enqueue_takes_the_kernels_own_time_within_two_percent(callers: tuple[Caller, DirectCaller]) -> None:
    import torch

    # The call is so long that the next call always arrives before the GPU is done.
    (enqueue, _), (raw, _) = both(*callers, decode_inputs(32, 4096, 1024))

    def seconds(call: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    for call in (enqueue, raw):
        seconds(call)
    ratios = [seconds(enqueue) / seconds(raw) for _ in range(ROUNDS)]
    assert statistics.median(ratios) < 1.02, sorted(ratios)


def decode_inputs(batch: int, slots: int, free: int) -> dict[str, np.ndarray]:
    """Return one token per sequence in half precision, over caches with `free` free slots."""
    rng, cache = np.random.default_rng(0), (batch, HEADS * slots)
    query, key, value = (
        rng.standard_normal((batch, h, 1, SIZE), dtype=np.float32) for h in (QUERY_HEADS, HEADS, HEADS)
    )
    return {
        "query": query.astype(np.float16), "key": key.astype(np.float16), "value": value.astype(np.float16),
        "position": np.full((batch, 1), slots, np.int64), "query_length": np.ones((batch, 1), np.int64),
        "past_key": np.full((*cache, SIZE), 0.25, np.float16), "past_value": np.full((*cache, SIZE), 0.5, np.float16),
        "past_votes": np.tile((np.arange(slots) < slots - free).astype(np.float32), (batch, HEADS)),
        "past_score": np.zeros((batch, 1, HEADS * slots), np.float32),
        "past_position": np.tile(np.arange(slots, dtype=np.int32), (batch, HEADS)),
    }  # fmt: skip


def both(plugin: Caller, direct: DirectCaller, inputs: dict[str, np.ndarray]) -> Any:
    """Return the same call through the plugin and of the kernel itself, each with its own state."""
    attributes = VoteAttentionAttributes(SIZE**-0.5, 1.0, (Statistic("log_ema", 0.9),))
    memory = direct.memory
    held = {name: memory.put(x) for name, x in inputs.items()}
    output = memory.put(np.zeros_like(inputs["query"]))
    batch, slots, _ = inputs["past_key"].shape
    shape = (batch, HEADS, slots // HEADS, SIZE)
    call = vote_attention_call(attributes, "float16", inputs["query"].shape, shape, SIZE)
    for name in ("query", "key", "value", "position", "query_length"):
        setattr(call, name, memory.address(held[name]))
    call.past = call.present = direct.state(
        {name.removeprefix("past_"): x for name, x in held.items() if name.startswith("past_")}
    )
    call.output = memory.address(output)
    enqueue = direct.prepared("vote_attention", call)

    def raw(alive: Any = held) -> None:
        enqueue()

    return plugin.prepared_attention(inputs, attributes), (raw, output)
