"""The plugins Experts and LinearAttention without TensorRT and without a GPU, from nodes that `for_tensorrt` converts.

A result has the bits of a direct call of the kernels, which tests/conformance compares with the oracles.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from kvexport.backends.gpu_limits import MOST_KEYS
from kvexport.backends.tensorrt.graphs import for_tensorrt
from kvexport.ops.experts import ExpertsForm
from kvexport.ops.linear_attention import INPUTS, OUTPUTS, UpdateRule
from tests.conformance.cuda_experts import ExpertsCase
from tests.conformance.cuda_library import Arrays, HostMemory
from tests.conformance.cuda_library import Caller as DirectCaller
from tests.conformance.cuda_linear import exact, stored
from tests.conformance.cuda_recurrence import RULES, SCALE, Recurrence, RecurrenceCase, recurrence
from tests.conformance.test_experts import FORMS, PACKINGS, model_of
from tests.conformance.test_experts_on_host import DTYPES, of_floats, of_packed
from tests.support.tensorrt_harness import (
    BF16,
    EXPERTS,
    FLOAT,
    HALF,
    INT8,
    INT32,
    INT64,
    LINEAR_ATTENTION,
    Caller,
    Harness,
    Plugin,
    Tensor,
    fields_of,
    parsed,
)

N, B, T = -2, -3, -4  # symbols of rows, sequences and tokens
ROUTES = ((1, 6, 2), (3, 40, 3), (61, 4, 2))  # tokens, experts, chosen: a step, small tiles, and tensor cores
SIZES = (
    Recurrence((9, 4, 0), 3, 3, 8, 6),
    Recurrence((1, 0, 1), 4, 2, 16, 70),
    Recurrence((20, 8), 2, 1, 128, 64, by_channel=True),
)


def converted(model: onnx.ModelProto) -> tuple[onnx.NodeProto, Arrays]:
    """Return a model's only node as `for_tensorrt` converts it, and the arrays of the initializers."""
    seen, whys = for_tensorrt(model, lambda _: None)
    (node,) = seen.graph.node
    assert whys == {node.op_type: ""}
    return node, {tensor.name: numpy_helper.to_array(tensor) for tensor in seen.graph.initializer}


def experts_through(caller: Caller, one: ExpertsCase) -> np.ndarray:
    """Return the output of Experts' plugin in float64."""
    model = model_of(one.form, one.tensors, one.packed, "float32")  # the node has no types
    node, arrays = converted(model)
    floats = {name: x if x.dtype == np.int64 else stored(x, one.dtype) for name, x in one.tensors.items()}
    return exact(caller.node(node, {**floats, **arrays})["output"])


def recurrence_through(caller: Caller, one: RecurrenceCase, *, in_place: bool) -> Arrays:
    """Return the output and the present state of LinearAttention's plugin."""
    names = [name if name in one.feeds else "" for name in INPUTS]
    attributes = {"heads": one.sizes.heads, "key_heads": one.sizes.key_heads, "update_rule": one.rule, "scale": SCALE}
    node = helper.make_node("LinearAttention", names, OUTPUTS, domain="kvexport", overload=one.rule, **attributes)
    node, _ = converted(helper.make_model(helper.make_graph([node], "g", [], [])))
    assert list(node.input) == [name for name in names if name]
    return caller.node(node, one.feeds, in_place=in_place)


# ---- running ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[6]], ids=lambda form: form.overload)
def test_experts_are_the_kernels_bits(harness: Harness, direct: DirectCaller, form: ExpertsForm, dtype: str) -> None:
    for route in ROUTES:
        one = of_floats(form, dtype, *route)
        assert np.array_equal(experts_through(Caller(harness), one), one.run(direct)), route


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize(("form", "dtype"), [(FORMS[0], "float32"), (FORMS[6], "float16")], ids=["plain", "clamped"])
def test_packed_experts_are_the_kernels_bits(
    harness: Harness, direct: DirectCaller, packing: Any, form: ExpertsForm, dtype: str
) -> None:
    """The bytes of every packing reach the kernels, those of MXFP4 (a table and exponents) among them."""
    for route in ROUTES:
        one = of_packed(form, packing, dtype, *route)
        one.form = replace(one.form, float_input=int(dtype == "float32"))
        assert np.array_equal(experts_through(Caller(harness), one), one.run(direct)), route


def test_a_weight_of_floats_stands_beside_a_packed_one(harness: Harness, direct: DirectCaller) -> None:
    one = of_packed(FORMS[1], PACKINGS[2], "float16", 5, 4, 2)
    one.form = replace(one.form, packed=(0, *one.form.packed[1:]), group=(0, *one.form.group[1:]))
    one.packed = [part for part in one.packed if not part.name.startswith("first")]
    one.tensors["first"] = one.tensors["first"].astype(np.float16).astype(np.float64)
    assert np.array_equal(experts_through(Caller(harness), one), one.run(direct))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_linear_attention_is_the_kernels_bits(
    harness: Harness, direct: DirectCaller, rule: UpdateRule, in_place: bool
) -> None:
    """A node without a decay, which lies before beta, leaves no gap among the plugin's inputs."""
    for sizes in SIZES:
        one = recurrence(rule, sizes)
        actual, right = recurrence_through(Caller(harness), one, in_place=in_place), one.run(direct)
        assert {name: x.tobytes() for name, x in actual.items()} == {name: x.tobytes() for name, x in right.items()}


def test_a_clone_runs_without_another_change_of_shapes(harness: Harness) -> None:
    one = of_floats(FORMS[0], "float32", 1, 3, 2)
    node, _ = converted(model_of(one.form, one.tensors, [], "float32"))
    memory = HostMemory()
    held = [
        memory.put(x if x.dtype == np.int64 else x.astype(np.float32)) for x in (one.tensors[n] for n in node.input)
    ]
    plugin = create(harness, "Experts", fields_of(node)).another("attach")
    tensors = [Tensor.of(INT64 if x.dtype == np.int64 else FLOAT, x.shape, data=memory.address(x)) for x in held]
    output = memory.put(np.full(one.tensors["input"].shape, 77, np.float32))
    outputs = [Tensor.of(FLOAT, output.shape, data=memory.address(output))]
    workspace = memory.bytes(plugin.call("workspace", tensors, outputs), 0)
    assert plugin.call("shape_change", tensors, outputs) == 0, harness.log()
    results = []
    for runs in (plugin, plugin.another("clone")):
        output[...] = 77
        address = ctypes.c_void_p(memory.address(workspace))
        assert runs.call("enqueue", tensors, outputs, address) == 0, harness.log()
        results.append(output.copy())
    assert np.array_equal(*results) and not (results[0] == 77).any()


# ---- shapes and types ----


def create(harness: Harness, op: str, fields: dict[str, Any]) -> Plugin:
    plugin = harness.create(op, fields)
    assert plugin, harness.log()
    return plugin


def experts_tensors(rows: int = HALF, most: int = 40) -> list[Tensor]:
    """Return inputs of EXPERTS: 8 experts, 2 for a token, rows of 64 and 48 inner numbers; at most `most` rows."""

    def tensor(kind: int, *shape: int) -> Tensor:
        return Tensor.of(kind, shape, [most if size == N else size for size in shape])

    first = [tensor(INT8, 8, 96, 32), tensor(INT8, 8, 96, 2), tensor(INT8, 16), tensor(rows, 8, 96)]
    down = [tensor(INT8, 8, 64, 48), tensor(FLOAT, 8, 64, 3), tensor(INT8, 8 * 64 * 3), tensor(rows, 8, 64)]
    return [tensor(rows, N, 64), tensor(INT64, N, 2), tensor(FLOAT, N, 2), *first, *down]


def recurrence_tensors(value_size: int = 24) -> list[Tensor]:
    """Return inputs of LINEAR_ATTENTION with keys of 16 numbers."""

    def tensor(kind: int, *shape: int) -> Tensor:
        return Tensor.of(kind, shape, [3 if size == B else 9 if size == T else size for size in shape])

    keys, values = tensor(FLOAT, B, T, 32), tensor(FLOAT, B, T, 4 * value_size)
    state = tensor(FLOAT, B, 4, 16, value_size)
    return [keys, keys, values, state, tensor(INT64, B, 1), tensor(FLOAT, B, T, 4), tensor(FLOAT, B, T, 4)]


def changed(tensors: list[Tensor], at: int, kind: int | None = None, shape: tuple[int, ...] = ()) -> list[Tensor]:
    old = tensors[at]
    return [*tensors[:at], Tensor.of(old.type if kind is None else kind, shape or old.shape, shape), *tensors[at + 1 :]]


def test_shapes_are_propagated_with_rows_batch_and_tokens_open(harness: Harness) -> None:
    plugin = create(harness, "Experts", EXPERTS)
    assert plugin.output_shapes(experts_tensors()) == [[N, 64]]
    assert plugin.output_types(experts_tensors()) == [HALF]
    assert plugin.call("configure", experts_tensors()) == 0, harness.log()
    other = create(harness, "LinearAttention", LINEAR_ATTENTION)
    assert other.output_shapes(recurrence_tensors()) == [[B, T, 96], [B, 4, 16, 24]]
    assert other.output_types(recurrence_tensors()) == [FLOAT, FLOAT]
    assert other.call("configure", recurrence_tensors()) == 0, harness.log()
    by_channel = changed(recurrence_tensors(), 5, shape=(B, T, 64))
    assert other.output_shapes(by_channel) == [[B, T, 96], [B, 4, 16, 24]]


@pytest.mark.parametrize("rows", [FLOAT, HALF, BF16])
def test_every_type_of_experts_and_nothing_else_is_supported(harness: Harness, rows: int) -> None:
    plugin, floats = create(harness, "Experts", EXPERTS), {FLOAT, HALF}
    factors = floats | ({BF16} if rows == BF16 else set())
    right = [{FLOAT, HALF, BF16}, {INT64}, factors, {INT8}, {INT8}, {INT8}, {rows}, {INT8}, floats, {INT8}, {rows}]
    tensors = [*experts_tensors(rows), Tensor.of(rows, ())]
    for at, kinds in enumerate([*right, {rows}]):
        for kind in range(12):
            assert plugin.supports(at, changed(tensors, at, kind)) == (kind in kinds), (at, kind)


def test_linear_attention_is_of_float32(harness: Harness) -> None:
    plugin = create(harness, "LinearAttention", LINEAR_ATTENTION)
    tensors = [*recurrence_tensors(), Tensor.of(FLOAT, ()), Tensor.of(FLOAT, ())]
    for at in range(9):
        for kind in range(12):
            assert plugin.supports(at, changed(tensors, at, kind)) == (kind == (INT64 if at == 4 else FLOAT)), at
    assert plugin.output_types(changed(recurrence_tensors(), 4, INT32)) is None
    assert "LinearAttention: input 4 has the type 3, not 8" in harness.log()


@pytest.mark.parametrize(
    ("op", "tensors", "message"),
    [
        ("Experts", changed(experts_tensors(), 1, shape=(9, 2)), "indices is [9, 2], not [?, 2]"),
        ("Experts", changed(experts_tensors(), 3, shape=(8, 96, 64)), "first is [8, 96, 64], not [8, 96, 32]"),
        ("Experts", changed(experts_tensors(), 3, shape=(8, 97, 32)), "first is [8, 97, 32], not [8, 96, 32]"),
        ("Experts", changed(experts_tensors(), 4, shape=(8, 96, 4)), "an exponent is [8, 96, 4], not [8, 96, 2]"),
        ("Experts", changed(experts_tensors(), 5, shape=(8,)), "a table is [8], not [16]"),
        ("Experts", changed(experts_tensors(), 9, shape=(8, 64, 3)), "a zero point is [8, 64, 3], not [1536]"),
        ("Experts", experts_tensors()[:10], "it has 11 inputs and 1 outputs, not 10 and 1"),
        ("LinearAttention", changed(recurrence_tensors(), 1, shape=(B, T, 64)), "key is [?, ?, 64], not [?, ?, 32]"),
        ("LinearAttention", changed(recurrence_tensors(), 3, shape=(B, 2, 16, 24)), "past_state is [?, 2, 16, 24]"),
        ("LinearAttention", changed(recurrence_tensors(), 5, shape=(B, T, 8)), "decay is [?, ?, 8], not [?, ?, 4]"),
        ("LinearAttention", recurrence_tensors()[:6], "it has 7 inputs and 2 outputs, not 6 and 2"),
    ],
)
def test_shapes_that_do_not_fit_are_named(harness: Harness, op: str, tensors: list[Tensor], message: str) -> None:
    plugin = create(harness, op, {"Experts": EXPERTS, "LinearAttention": LINEAR_ATTENTION}[op])
    if message.startswith("indices"):
        tensors = changed(tensors, 0, shape=(7, 64))
        message = "indices is [9, 2], not [7, 2]"
    assert plugin.output_shapes(tensors) is None
    assert f"kvexport: {op}: {message}" in harness.log()


def test_calls_without_a_kernel_are_refused_when_the_engine_is_built(harness: Harness) -> None:
    experts = create(harness, "Experts", EXPERTS)
    assert experts.call("configure", changed(experts_tensors(), 0, shape=(N, -1))) != 0
    assert "only the batch and the number of tokens may be left open" in harness.log()
    odd = {**EXPERTS, **parsed({"group": [24, 16]})}
    tensors = changed(experts_tensors(), 4, shape=(8, 96, 2))
    assert create(harness, "Experts", odd).call("configure", tensors) != 0
    assert "the inputs are no multiple of a weight's group" in harness.log()
    wide = create(harness, "LinearAttention", LINEAR_ATTENTION)
    for size in (MOST_KEYS, MOST_KEYS + 1):
        tensors = recurrence_tensors()
        for at in (0, 1):
            tensors[at] = Tensor.of(FLOAT, (B, T, 2 * size), (3, 9, 2 * size))
        tensors[3] = Tensor.of(FLOAT, (B, 4, size, 24), (3, 4, size, 24))
        assert (wide.call("configure", tensors) == 0) == (size == MOST_KEYS)
    assert "a head has keys of more than 256 numbers" in harness.log()


def test_the_workspace_of_experts_does_for_fewer_rows(harness: Harness, direct: DirectCaller) -> None:
    plugin = create(harness, "Experts", EXPERTS)
    sizes = [plugin.call("workspace", experts_tensors(most=most)) for most in (1, 2, 40, 5000)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2]
    assert create(harness, "LinearAttention", LINEAR_ATTENTION).call("workspace", recurrence_tensors()) == 256


# ---- fields ----


@pytest.mark.parametrize("alias_state", [0, 1])
def test_the_recurrent_state_is_aliased_only_if_the_field_is_set(harness: Harness, alias_state: int) -> None:
    plugin = create(harness, "LinearAttention", {**LINEAR_ATTENTION, **parsed({"alias_state": alias_state})})
    assert [plugin.aliased(i) for i in range(2)] == [-1, 3 if alias_state else -1]
    experts = create(harness, "Experts", EXPERTS)
    assert experts.aliased(0) == -1 and harness.create("Experts", {**EXPERTS, **parsed({"alias_state": 0})}) is None
    assert "there is no field alias_state" in harness.log()


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("Experts", {"activation": "mish"}, "the activation 'mish' is unknown"),
        ("Experts", {"limit": -1.0}, "limit is -1.000000, and has to be at least 0"),
        ("Experts", {"gate": 2}, "gate is 2, and has to be 0 or 1"),
        ("Experts", {"packed": None}, "group has no use without packed"),
        ("Experts", {"packed": [5]}, "packed and group have an entry for each of 2 weights, not 1 and 2"),
        ("Experts", {"group": [0, 16]}, "group is 0, and has to be positive of a packed weight"),
        ("Experts", {"bits": None}, "the field bits is missing"),
        ("Experts", {"bits": [4]}, "bits and signed have an entry for each of 2 weights, not 1 and 2"),
        ("Experts", {"bits": [4, 2]}, "bits is 2, and has to be 4 or 8 of a packed weight"),
        ("Experts", {"bits": [8, 8]}, "a weight with a table has no unsigned integers of 4 bits"),
        ("Experts", {"signed": [0, 3]}, "signed is 3, and has to be 0 or 1"),
        ("Experts", {"group": [31, 16]}, "a group of 4-bit weights is odd: 31"),
        ("LinearAttention", {"update_rule": "other"}, "the update rule 'other' is unknown"),
        ("LinearAttention", {"key_heads": 3}, "4 heads are no multiple of 3 key heads"),
        ("LinearAttention", {"scale": None}, "the field scale is missing"),
    ],
)
def test_a_bad_field_is_a_reason_in_the_log(harness: Harness, op: str, change: dict[str, Any], message: str) -> None:
    fields = dict({"Experts": EXPERTS, "LinearAttention": LINEAR_ATTENTION}[op])
    for name, value in change.items():
        del fields[name]
        fields |= parsed({name: value}) if value is not None else {}
    assert harness.create(op, fields) is None
    assert f"kvexport: {op}: {message}" in harness.log()
