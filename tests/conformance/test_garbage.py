"""The CUDA kernels on caches that no engine makes.

Positions tie, are in any order or of any size; occupied slots are not the first ones; numbers are infinite or NaN. A
TensorRT builder runs the operators on such caches, because it times them on the contents of its memory.

The results are undefined. But a call must end, give the same bits in every order of threads and blocks, and leave the
counters at zero. It must read or write nothing outside of a buffer: `test_cuda_on_host.py` checks this by running this
file under the sanitizers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvexport.methods import all_methods
from kvexport.methods.slots import Rotary
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.ops.vote_attention import VoteAttentionAttributes
from tests.conformance.cuda_library import COUNTER_BYTES, Caller, names_of
from tests.conformance.quantized import BITS, small
from tests.conformance.test_cuda_on_host import (
    BOTH,
    METHODS,
    ORDERS,
    Arrays,
    assert_same_bits,
    caller,  # noqa: F401 - a fixture
    inputs_of,
    set_host,
)

EXTREMES = np.array([-(2**31), -1, 0, 1, 2**31 - 2, 2**31 - 1])
NUMBERS = np.array([np.nan, np.inf, -np.inf, -1.0, 0.0, 1e-38, 3e38], np.float32)


def ties(state: Arrays, rng: np.random.Generator) -> None:
    position = state["position"]
    position[...] = -np.sort(-rng.integers(0, position.shape[-1] // 3, position.shape), axis=-1)


def extremes(state: Arrays, rng: np.random.Generator) -> None:
    state["position"][...] = rng.choice(EXTREMES, state["position"].shape)


def any_positions(state: Arrays, rng: np.random.Generator) -> None:
    state["position"][...] = rng.integers(-(2**31), 2**31 - 1, state["position"].shape)


def zeros(state: Arrays, _: np.random.Generator) -> None:
    for name in ("key", "value", "score", "position"):
        state[name][...] = 0


def holes(state: Arrays, rng: np.random.Generator) -> None:
    state["votes"][...] = rng.choice(NUMBERS, state["votes"].shape)
    state["votes"][..., 0] = 1.0


def no_numbers(state: Arrays, rng: np.random.Generator) -> None:
    for name, x in state.items():  # a quantized cache's bytes are all numbers; only its scales may be none
        if x.dtype.kind == "f" and name != "votes":
            x[...] = rng.choice(NUMBERS, x.shape).astype(x.dtype)


def bits(state: Arrays, rng: np.random.Generator) -> None:
    for x in state.values():
        x.view(np.uint8)[...] = rng.integers(0, 256, x.view(np.uint8).shape)


every_garbage = pytest.mark.parametrize("spoil", [ties, extremes, any_positions, zeros, holes, no_numbers, bits])


def held_to_itself(caller: Caller, call: Callable[[], Arrays]) -> None:  # noqa: F811
    results = []
    for order, late in ORDERS[:3]:
        set_host(caller.library, order, late)
        with np.errstate(all="ignore"):
            results.append(call())
        assert not caller.workspace[:COUNTER_BYTES].any()
    set_host(caller.library)
    assert_same_bits(results)


@every_garbage
@pytest.mark.parametrize(
    ("method", "parameters"), METHODS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
def test_a_merge_of_garbage(
    caller: Caller,  # noqa: F811
    method: str,
    parameters: dict[str, Any],
    spoil: Callable[[Arrays, np.random.Generator], None],
) -> None:
    name, _, by_place = method.partition(" by ")
    rng, method_object, slots, size = np.random.default_rng(11), all_methods()[name](**parameters), (1, 2, 150), 16
    state = {name: rng.normal(size=(*slots, size)).astype(np.float16) for name in ("key", "value")}
    state["votes"], state["position"] = np.ones(slots, np.float32), np.zeros(slots, np.int32)
    state["position"][...] = np.arange(slots[2])
    state["score"] = rng.gamma(1.0, size=(*slots[:2], len(method_object.statistics), slots[2])).astype(np.float32)
    with np.errstate(all="ignore"):
        spoil(state, rng)
    frequencies = tuple(float(2.0**-i) for i in range(8)) if method_object.rotary or by_place else ()
    rotary = Rotary(frequencies, cache_positions=bool(by_place))
    for window in (0,) if by_place else (0, 90):
        attributes = MergeCacheAttributes(method_object, 100, 4, 40, window, rotary)
        held_to_itself(caller, lambda a=attributes: caller.merge_cache(state, a))  # type: ignore[misc]


@every_garbage
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=["alone", "group3"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_attention_over_garbage(
    caller: Caller,  # noqa: F811
    dtype: str,
    heads: tuple[int, int],
    tokens: int,
    spoil: Callable[[Arrays, np.random.Generator], None],
) -> None:
    rng = np.random.default_rng(12)
    inputs = inputs_of(heads, (16, 16), 400, tokens, [390, 120], 2, "float32" if dtype in BITS else dtype)
    if dtype in BITS:
        inputs = small(inputs, dtype, "past_")
    past = {name: inputs[f"past_{name}"] for name in names_of(inputs["past_key"])}
    with np.errstate(all="ignore"):
        spoil(past, rng)
    inputs["position"][...] = rng.choice([-(2**63), -1, 0, 2**31, 2**63 - 1], inputs["position"].shape)
    inputs["query_length"][...] = rng.choice([-5, 1, tokens, 2**40], inputs["query_length"].shape)
    attributes = VoteAttentionAttributes(0.2, 1.0, BOTH, sliding_window=100)
    held_to_itself(caller, lambda: caller.vote_attention(inputs, attributes))
