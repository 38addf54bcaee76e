"""Linear's CUDA kernels on the host, from their source and from nvcc's PTX, against PyTorch in double precision.

The tests cover all forms, types, packed weights, odd sizes and numbers of rows. They check the execution itself as
`test_cuda_on_host.py` does. None of them uses a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from kvexport.ops.linear import Form
from kvexport.ops.packed import PackedFormat
from tests.conformance.cuda_library import COUNTER_BYTES, Caller, CudaPtx, HostMemory, Where
from tests.conformance.cuda_linear import Case, case, exact
from tests.conformance.test_cuda_on_host import ORDERS, set_host
from tests.conformance.test_cuda_on_host import caller as caller  # the fixture
from tests.ops.test_linear import FORMS, meaning
from tests.ops.test_linear_packed import FORMATS, MIXED, OFFSETS, STEPS

DTYPES = ("float32", "float16", "bfloat16")
WITHOUT_ADAPTERS = [form for form in FORMS if not form.adapted]  # a build for CUDA leaves adapters outside of Linear
# Relative to the largest output. float32 rows may be rounded to bfloat16 if the weights are packed.
TOLERANCE = {"float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2, "rounded": 8e-3}


def check(one: Case, actual: list[np.ndarray], *, rounded: bool = False) -> None:
    terms = {name: torch.from_numpy(x) for name, x in one.terms().items()}
    for output, right in zip(actual, meaning(one.form, **terms), strict=True):
        error = np.abs(exact(output) - right.numpy()).max() / np.abs(right.numpy()).max()
        assert output.shape == right.shape
        assert error < TOLERANCE["rounded" if rounded else one.dtype], (error, one.rows)


def packed_form(packing: PackedFormat, **steps: Any) -> Form:
    return Form(packed=(OFFSETS[packing.offset],), group=(packing.group,), **steps)


@pytest.mark.parametrize("form", WITHOUT_ADAPTERS, ids=lambda form: form.overload or "plain")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_equals_pytorch(caller: Caller, form: Form, dtype: str) -> None:
    """Every form equals PyTorch for rows of one panel and of several.

    Some inputs fill the steps of tensor cores, the others run without tensor cores.
    """
    for rows, inputs, outputs in (((1, 1), 288, 100), ((2, 4), 96, 28), ((1, 17), 192, 132), ((3, 3), 30, 10)):
        one = case(form, dtype, rows, inputs, outputs)
        check(one, one.run(caller))


@pytest.mark.parametrize("packing", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_packed_weight_equals_its_dequantized_form(caller: Caller, packing: PackedFormat, dtype: str) -> None:
    for rows, inputs, outputs in (((1, 1), 768, 37), ((1, 7), 768, 70), ((1, 9), 768, 130)):
        one = case(packed_form(packing), dtype, rows, inputs, outputs, (packing,))
        check(one, one.run(caller), rounded=dtype == "float32")
    # Inputs that are not rounded, and rows that are one group each without a whole number of steps.
    for float_input, inputs in ((1, 768), (0, 98)):
        of_row = replace(packing, group=packing.group if inputs == 768 else inputs)
        one = case(packed_form(of_row, float_input=float_input), dtype, (1, 3), inputs, 5, (of_row,))
        check(one, one.run(caller))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [96, 384, 768, 1536])
@pytest.mark.parametrize("multiprocessors", [1, 150])
def test_groups_may_end_anywhere_in_a_chunk_or_many_chunks_later(
    caller: Caller, bits: int, group: int, multiprocessors: int
) -> None:
    packing = PackedFormat(bits, False, group, "zero")
    set_host(caller.library, multiprocessors=multiprocessors)
    for rows in (2, 9):
        one = case(packed_form(packing), "float16", (1, rows), 1536, 70, (packing,))
        check(one, one.run(caller))
    set_host(caller.library)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("offset", ["none", "zero"])
@pytest.mark.parametrize("multiprocessors", [1, 150])
def test_groups_are_copied_as_they_are_stored(
    caller: Caller, group: int, offset: Literal["none", "zero"], multiprocessors: int
) -> None:
    """Scales in float16 and zero points are copied with their weights, in 32 and in 128 inputs, for 8 chunks of inputs.

    The gate's integers are signed, the product's are not.
    """
    packings = tuple(PackedFormat(4, signed, group, offset) for signed in (False, True))
    form = Form(packed=(OFFSETS[offset],) * 2, group=(group,) * 2, gate=1)
    set_host(caller.library, multiprocessors=multiprocessors)
    for rows in (1, 8, 9, 32):
        one = case(form, "float16", (1, rows), 2048, 70, packings)
        check(one, one.run(caller))
    set_host(caller.library)


@pytest.mark.parametrize("steps", STEPS, ids=lambda form: form.overload)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("plain", [False, True], ids=["all packed", "one is not"])
def test_packed_weights_of_several_kinds_take_every_step(caller: Caller, steps: Form, dtype: str, plain: bool) -> None:
    packings: tuple[PackedFormat, ...] = tuple(MIXED[: steps.weights])
    packed, group = [OFFSETS[p.offset] for p in packings], [p.group for p in packings]
    if plain:
        packed[-1] = group[-1] = 0
    form = replace(steps, packed=tuple(packed), group=tuple(group))
    for rows in ((1, 1), (2, 3), (1, 20)):
        one = case(form, dtype, rows, 128, 32, packings)
        check(one, one.run(caller), rounded=dtype == "float32")


@pytest.mark.parametrize("multiprocessors", [1, 7, 150])
@pytest.mark.parametrize("rows", [3, 33])
def test_however_the_work_is_shared_out(caller: Caller, multiprocessors: int, rows: int) -> None:
    packing = PackedFormat(4, False, 96, "minimum")
    set_host(caller.library, multiprocessors=multiprocessors)
    form = Form(packed=(3, 3), group=(96, 96), norm=1, epsilon=1e-5, gate=1, residual=1)
    one = case(form, "float16", (1, rows), 3 * 768, 70, (packing, packing))
    check(one, one.run(caller))
    set_host(caller.library)


@pytest.mark.parametrize(
    ("dtype", "packing", "rows"),
    [
        ("float32", None, 5),
        ("float32", None, 70),
        ("float16", None, 5),
        ("float16", PackedFormat(4, True, 32, "zero"), 40),
        ("bfloat16", PackedFormat(8, True, 32), 5),
        ("float32", PackedFormat(4, False, 64, "minimum"), 5),
    ],
    ids=str,
)
def test_no_bit_depends_on_the_order_of_threads_blocks_and_copies(
    caller: Caller, dtype: str, packing: PackedFormat | None, rows: int
) -> None:
    form = Form(norm=1, epsilon=1e-5, output_heads=(2, 0), bias=(1, 0), rotated=(1, 0))
    packings = (packing, packing) if packing else ()
    if packing:
        form = replace(form, packed=(OFFSETS[packing.offset],) * 2, group=(packing.group,) * 2)
    one, results = case(form, dtype, (1, rows), 1024, 72, packings), []  # type: ignore[arg-type]
    for order, late in ORDERS:
        set_host(caller.library, order, late)
        results.append([x.tobytes() for x in one.run(caller)])
    set_host(caller.library)
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_does_not_depend_on_the_other_rows_of_a_small_call(caller: Caller, dtype: str) -> None:
    packing = PackedFormat(4, True, 32)
    one = case(packed_form(packing, norm=1, epsilon=1e-5), dtype, (1, 7), 512, 37, (packing,))
    together = one.run(caller)[0][0]
    rows = one.feeds["input"]
    for i in range(7):
        one.feeds["input"] = rows[:, i : i + 1]
        assert np.array_equal(one.run(caller)[0][0, 0], together[i])
    one.feeds["input"] = rows.copy()
    one.feeds["input"][0, 2, 7], one.feeds["input"][0, 5, 300] = np.nan, np.inf
    alone = one.run(caller)[0][0]
    assert np.isnan(alone[2]).all() and not np.isfinite(alone[5]).any()
    assert np.array_equal(alone[[0, 1, 3, 4, 6]], together[[0, 1, 3, 4, 6]])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_may_be_at_any_address(caller: Caller, dtype: str) -> None:
    one = case(Form(norm=1, epsilon=1e-5, gate=1), dtype, (1, 3), 96, 20)
    one.offset = 4
    check(one, one.run(caller))


def test_counters_come_back_to_zero(caller: Caller) -> None:
    fresh = Caller(caller.library, HostMemory())
    case(Form(), "float16", (1, 2), 2048, 40).run(fresh)
    assert fresh.size > COUNTER_BYTES and not fresh.workspace[:COUNTER_BYTES].any()


def test_no_rows_are_no_work(caller: Caller) -> None:
    assert case(Form(), "float16", (0, 1), 64, 8).run(caller)[0].shape == (0, 1, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": 3}, "the type of the input is neither float32, float16 nor bfloat16"),
        ({"batch": -1}, "a dimension is zero or negative"),
        ({"tokens": 1 << 31}, r"more than 2\^28 rows or inputs"),
        ({"input_heads": 5}, "the inputs are no multiple of their heads"),
        ({"count": 4}, "no products, or more than 3"),
        ({"count": 2}, "a gate or a residual goes with one product"),
    ],
)
def test_refusals_have_a_reason(caller: Caller, change: dict[str, int], message: str) -> None:
    call, _ = case(Form(residual=1), "float16", (1, 2), 64, 8).call(caller)
    for name, value in change.items():
        setattr(call, name, value)
    with pytest.raises(RuntimeError, match=message):
        caller.prepared("linear", call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": 0}, "a dimension is zero or negative"),
        ({"heads": 3}, "the outputs are no multiple of their heads"),
        ({"rotated": 1}, "cosine and sine are not of half a head's size"),
        ({"bits": 2}, "neither 4 nor 8 bits"),
        ({"group": 48}, "no multiple of a weight's group"),
        ({"scale_type": 2}, "neither float32 nor float16"),
        ({"minimum": 16}, "both a zero point and a minimum"),
        ({"table": 16}, "no kernel for a packed weight with a table of numbers"),
    ],
)
def test_a_product_that_cannot_be_is_refused(caller: Caller, change: dict[str, int], message: str) -> None:
    packing = PackedFormat(4, True, 32, "zero")
    call, _ = case(packed_form(packing), "float16", (1, 2), 64, 8, (packing,)).call(caller)
    for name, value in change.items():
        product = call.products[0]
        setattr(product if hasattr(product, name) else product.weight, name, value)
    with pytest.raises(RuntimeError, match=message):
        caller.prepared("linear", call)
    ask = caller.library.kv_cuda_linear_problem
    ask.restype = ctypes.c_char_p
    assert ask(ctypes.byref(call)) is not None, "the check before a call and the call itself differ"


def test_a_gate_of_rotated_heads_and_a_small_workspace_are_refused(caller: Caller) -> None:
    call, _ = case(Form(gate=1), "float16", (1, 2), 64, 8).call(caller)
    where = Where(None, 256, 1024)
    assert b"workspace is smaller" in caller.library.kv_cuda_linear(call, where)
    call.planes, call.products[0].rotated = 4, 1
    assert b"a product that has a gate is not rotated" in caller.library.kv_cuda_linear(call, where)


needs_ptx = pytest.mark.skipif(CudaPtx().available() is not None, reason=f"not reached: {CudaPtx().available()}")


@needs_ptx
@pytest.mark.parametrize(
    ("dtype", "packing", "rows"),
    [
        ("float16", PackedFormat(4, True, 32), 2),
        ("float32", PackedFormat(8, False, 64, "minimum"), 2),
        ("float32", None, 3),
    ],
    ids=str,
)
def test_nvccs_ptx_equals_pytorch(dtype: str, packing: PackedFormat | None, rows: int) -> None:
    form = Form(norm=1, epsilon=1e-5, output_heads=(2,), rotated=(1,), bias=(1,))
    if packing:
        form = replace(form, packed=(OFFSETS[packing.offset],), group=(packing.group,))
    one = case(form, dtype, (1, rows), 320, 12, (packing,) if packing else ())
    check(one, one.run(CudaPtx().caller), rounded=dtype == "float32" and packing is not None)
