"""Experts' CUDA kernels on the host, from their source and from nvcc's PTX, against the oracle.

`test_experts.py` runs their binding to ONNX Runtime. These tests add bfloat16, calls of several ranges of tokens, and
the execution itself, as `test_cuda_on_host.py` does. None of them uses a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvexport.ops.experts import ExpertsForm
from kvexport.ops.linear import PACKED
from tests.conformance.cuda_experts import ExpertsCase
from tests.conformance.cuda_library import COUNTER_BYTES, Arrays, Caller, CudaPtx, HostMemory
from tests.conformance.cuda_linear import exact, stored
from tests.conformance.test_cuda_on_host import ORDERS, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture
from tests.conformance.test_experts import FORMS, PACKINGS, difference, draw, packed

CLAMPED = FORMS[6]
# Relative to the largest output. The inputs of both products in float32 may be rounded to bfloat16 if the weights are
# packed, which is twice what one product of Linear may lose (test_linear_on_host.py).
TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1e-2, "rounded": 1.6e-2}
DTYPES = ("float32", "float16", "bfloat16")
# (tokens, experts, chosen): a step; tiles of up to 8 rows on CUDA cores; of up to 32 rows, where they fit tensor cores
ROUTES = ((1, 6, 2), (3, 40, 3), (13, 12, 3), (61, 4, 2))


def in_dtype(tensors: Arrays, dtype: str) -> Arrays:
    return {name: x if x.dtype == np.int64 else exact(stored(x, dtype)) for name, x in tensors.items()}


def of_floats(form: ExpertsForm, dtype: str, tokens: int, count: int, chosen: int, **sizes: int) -> ExpertsCase:
    return ExpertsCase(form, in_dtype(draw(form, tokens, count, chosen, **sizes), dtype), dtype)


def of_packed(form: ExpertsForm, packing: Any, dtype: str, tokens: int, count: int, chosen: int) -> ExpertsCase:
    taken, tensors, weights = packed(form, in_dtype(draw(form, tokens, count, chosen), dtype), packing)
    return ExpertsCase(taken, tensors, dtype, weights)


def check(one: ExpertsCase, actual: np.ndarray, allowed: float = 0.0) -> None:
    assert difference(actual, one.form, one.tensors) < (allowed or TOLERANCE[one.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.overload)
def test_every_form_is_the_oracles(caller: Caller, form: ExpertsForm, dtype: str) -> None:
    for tokens, count, chosen in ROUTES:
        one = of_floats(form, dtype, tokens, count, chosen)
        check(one, one.run(caller))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_packed_weight_is_what_its_integers_stand_for(caller: Caller, packing: Any, dtype: str) -> None:
    for tokens, count, chosen in ROUTES:
        one = of_packed(CLAMPED, packing, dtype, tokens, count, chosen)
        # Rows whose numbers are all above 0 lose digits in the sums with minima.
        allowed = 1e-4 if "minimum" in PACKED[packing[1]] and dtype == "float32" else TOLERANCE[dtype]
        one.form = replace(one.form, float_input=1)
        check(one, one.run(caller), allowed)
        if dtype == "float32":
            one.form = replace(one.form, float_input=0)
            check(one, one.run(caller), TOLERANCE["rounded"])


def test_sizes_that_fill_no_vector_and_tensors_anywhere(caller: Caller) -> None:
    for dtype in ("float32", "float16"):
        odd = of_floats(CLAMPED, dtype, 9, 3, 2, hidden=21, inner=35)
        check(odd, odd.run(caller))
        moved = of_floats(CLAMPED, dtype, 9, 3, 2)
        right = moved.run(caller)
        moved.offset = 4
        assert difference(moved.run(caller), moved.form, moved.tensors) < TOLERANCE[dtype]
        assert np.abs(moved.run(caller) - right).max() <= TOLERANCE[dtype] * np.abs(right).max()


def test_a_call_of_several_ranges_of_tokens_has_the_bits_of_its_parts(caller: Caller) -> None:
    """A range has at most 4,096 rows, which are 1,024 tokens here; the last range has one token."""
    one = of_floats(FORMS[0], "float32", 2049, 8, 4, hidden=8, inner=8)
    whole = one.run(caller)
    check(one, whole)
    for part in (slice(0, 3), slice(2048, 2049)):
        rows = {name: one.tensors[name][part] for name in ("input", "indices", "weights")}
        assert np.array_equal(ExpertsCase(one.form, one.tensors | rows, "float32").run(caller), whole[part])


@pytest.mark.parametrize("tokens", [1, 6, 50])
@pytest.mark.parametrize("packing", [None, PACKINGS[0], PACKINGS[7]], ids=str)
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(caller: Caller, tokens: int, packing: Any) -> None:
    one = of_packed(FORMS[0], packing, "float32", tokens, 5, 3) if packing else of_floats(
        FORMS[0], "float32", tokens, 5, 3
    )  # fmt: skip
    results = []
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append(one.run(caller).tobytes())
    set_host(caller.library)
    assert all(found == results[0] for found in results[1:])


def test_a_number_that_is_not_finite_stays_in_its_token(caller: Caller) -> None:
    one = of_packed(FORMS[0], PACKINGS[0], "float32", 9, 4, 2)
    clean = one.run(caller)
    one.tensors["input"][4, 7], one.tensors["input"][6, 100] = np.nan, np.inf
    actual, rest = one.run(caller), [0, 1, 2, 3, 5, 7, 8]
    assert not np.isfinite(actual[[4, 6]]).any() and np.array_equal(actual[rest], clean[rest])


def test_tokens_without_experts_are_zeros_and_counters_come_back_to_zero(caller: Caller) -> None:
    fresh = Caller(caller.library, HostMemory())
    for tokens in (1, 4):
        one = of_floats(FORMS[1], "float32", tokens, 3, 2)
        one.tensors["indices"][:] = -1
        assert not one.run(fresh).any()
        one.tensors |= {name: one.tensors[name][:, :0] for name in ("indices", "weights")}
        assert not one.run(fresh).any()
    assert fresh.size > COUNTER_BYTES and not fresh.workspace[:COUNTER_BYTES].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": 3}, "neither float32, float16 nor bfloat16"),
        ({"weights_type": 3}, "neither float32, float16 nor bfloat16"),
        ({"inner": 0}, "a dimension is zero or negative"),
        ({"experts": 1 << 40}, r"a dimension is above 2\^28"),
        ({"chosen": 4097}, "a token chooses more than 4096 experts"),
        ({"activation": 5}, "the activation is unknown"),
        ({"first.bits": 2}, "neither 4 nor 8 bits"),
        ({"down.group": 36}, "no multiple of a weight's group"),
        ({"first.scale_type": 16}, "of a type that no kernel reads"),
        ({"first.zero": 16, "first.minimum": 16}, "both a zero point and a minimum"),
        ({"first.table": 16, "first.is_signed": 1}, "not unsigned integers of 4 bits alone"),
    ],
)
def test_refusals_say_why(caller: Caller, changes: dict[str, int], message: str) -> None:
    one = of_packed(FORMS[0], PACKINGS[0], "float32", 2, 3, 2)
    one.changes = changes
    with pytest.raises(RuntimeError, match=message):
        one.run(caller)


needs_ptx = pytest.mark.skipif(CudaPtx().available() is not None, reason=f"not reached: {CudaPtx().available()}")


@needs_ptx
@pytest.mark.parametrize("packing", [PACKINGS[0], PACKINGS[6]], ids=str)
def test_nvccs_ptx_of_it_is_the_oracles(packing: Any) -> None:
    small = (*packing[:3], 32, 32)
    for tokens in (1, 5, 13):  # a step, tiles on CUDA cores, and on tensor cores
        form = replace(FORMS[0], bias=1)
        tensors = in_dtype(draw(form, tokens, 3, 2, hidden=64, inner=32), "float16")
        taken, values, weights = packed(form, tensors, small)
        one = ExpertsCase(taken, values, "float16", weights)
        check(one, one.run(CudaPtx().caller))
