"""The plugin Linear without TensorRT and without a GPU, from nodes that `for_tensorrt` converts.

A result has the bits of a direct call of the kernels, which tests/conformance compares with PyTorch.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kvexport.backends.tensorrt.graphs import for_tensorrt, plugin_refusal
from kvexport.ops.linear import Form
from kvexport.ops.packed import E2M1, PackedFormat
from tests.conformance.cuda_library import Arrays, HostMemory
from tests.conformance.cuda_library import Caller as DirectCaller
from tests.conformance.cuda_linear import Case, case
from tests.conformance.test_linear_on_host import DTYPES, WITHOUT_ADAPTERS, packed_form
from tests.ops.test_linear_packed import FORMATS, MIXED, OFFSETS, STEPS, TYPES, form_of, model_of, packed_weight
from tests.support.tensorrt_harness import (
    BF16,
    FLOAT,
    HALF,
    INT8,
    PRODUCTS,
    Caller,
    Harness,
    Plugin,
    Tensor,
    fields_of,
    parsed,
)

B, T, N = -2, -3, -4  # symbols of sequences, tokens and rows
ROWS = ((1, 1), (2, 3), (1, 20))


def node_of(form: Form) -> onnx.NodeProto:
    outputs = [f"output{i}" for i in range(form.count)]
    return helper.make_node(
        "Linear", form.inputs, outputs, domain="kvexport", overload=form.overload, **form.attributes
    )


def initializers(one: Case) -> list[TensorProto]:
    """Return the packed weights of a call as an artifact has them."""
    tensors = []
    for name, weight in one.weights.items():
        outputs, inputs = weight.values.shape
        for part, (dtype, shape) in weight.packing.tensors(outputs, inputs).items() if weight.packing else ():
            of = name if part == "weight" else f"{name}_{part}"
            raw = weight.parts[part].tobytes()
            tensors.append(TensorProto(name=of, data_type=TYPES[dtype], dims=shape, raw_data=raw))
    return tensors


def through_plugin(harness: Harness, one: Case) -> list[np.ndarray]:
    """Return the outputs of the plugin for the node that `for_tensorrt` makes of a call with packed weights."""
    model = helper.make_model(helper.make_graph([node_of(one.form)], "g", [], [], initializers(one)))
    seen, whys = for_tensorrt(model, lambda _: None)
    (node,) = seen.graph.node
    assert whys == {"Linear": ""} and node.overload == ""
    return outputs_of(harness, node, one, {x.name: numpy_helper.to_array(x) for x in seen.graph.initializer})


def outputs_of(harness: Harness, node: onnx.NodeProto, one: Case, arrays: Arrays) -> list[np.ndarray]:
    plain = {name: weight.parts["weight"] for name, weight in one.weights.items() if weight.packing is None}
    outputs = Caller(harness).node(node, {**one.feeds, **plain, **arrays})
    return [outputs[name] for name in node.output]


def require_same_bits(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [x.shape for x in actual] == [x.shape for x in expected]
    assert [x.tobytes() for x in actual] == [x.tobytes() for x in expected]


# ---- running ----


@pytest.mark.parametrize("form", WITHOUT_ADAPTERS, ids=lambda form: form.overload or "plain")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_is_the_kernels_bits(harness: Harness, direct: DirectCaller, form: Form, dtype: str) -> None:
    for rows in ROWS:
        one = case(form, dtype, rows, 96, 28)
        require_same_bits(outputs_of(harness, node_of(form), one, {}), one.run(direct))


@pytest.mark.parametrize("packing", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_packing_is_the_kernels_bits(
    harness: Harness, direct: DirectCaller, packing: PackedFormat, dtype: str
) -> None:
    for rows, float_input in zip(ROWS, (0, 0, 1), strict=True):
        one = case(packed_form(packing, float_input=float_input), dtype, rows, 768, 37, (packing,))
        require_same_bits(through_plugin(harness, one), one.run(direct))


@pytest.mark.parametrize("steps", STEPS, ids=lambda form: form.overload)
@pytest.mark.parametrize("plain", [False, True], ids=["all packed", "one is not"])
def test_packed_weights_of_several_kinds_take_every_step(
    harness: Harness, direct: DirectCaller, steps: Form, plain: bool
) -> None:
    packings: tuple[PackedFormat, ...] = tuple(MIXED[: steps.weights])
    packed, group = [OFFSETS[p.offset] for p in packings], [p.group for p in packings]
    if plain:
        packed[-1] = group[-1] = 0
    if not any(packed):
        return
    for rows in ROWS:
        one = case(replace(steps, packed=tuple(packed), group=tuple(group)), "float16", rows, 128, 32, packings)
        require_same_bits(through_plugin(harness, one), one.run(direct))


def test_zeros_of_an_odd_number_of_groups_end_within_a_byte(harness: Harness, direct: DirectCaller) -> None:
    packing = PackedFormat(4, False, 32, "zero")
    one = case(packed_form(packing), "float16", (1, 3), 96, 5, (packing,))
    require_same_bits(through_plugin(harness, one), one.run(direct))


@pytest.mark.parametrize("shape", [(768,), (3, 768), (2, 1, 3, 768)])
def test_rows_have_any_number_of_dimensions(harness: Harness, direct: DirectCaller, shape: tuple[int, ...]) -> None:
    packing = PackedFormat(4, True, 32)
    rows = int(np.prod(shape[:-1]))
    one = case(packed_form(packing, residual=1), "float16", (1, rows), 768, 36, (packing,))
    expected = one.run(direct)[0].reshape(*shape[:-1], 36)
    one.feeds["input"] = one.feeds["input"].reshape(shape)
    one.feeds["residual"] = one.feeds["residual"].reshape(*shape[:-1], 36)
    require_same_bits(through_plugin(harness, one), [expected])


def test_a_clone_runs_without_another_change_of_shapes(harness: Harness, direct: DirectCaller) -> None:
    one = case(Form(norm=1, epsilon=1e-5), "float32", (1, 2), 96, 28)
    memory, arrays = HostMemory(), [one.feeds["input"], one.feeds["norm"], one.weights["weight0"].parts["weight"]]
    held = [memory.put(x) for x in arrays]
    plugin = create(harness, fields_of(node_of(one.form))).another("attach")
    tensors = [Tensor.of(FLOAT, x.shape, data=memory.address(x)) for x in held]
    output = memory.put(np.full((1, 2, 28), 77, np.float32))
    outputs = [Tensor.of(FLOAT, output.shape, data=memory.address(output))]
    workspace = memory.bytes(plugin.call("workspace", tensors, outputs), 0)
    assert plugin.call("shape_change", tensors, outputs) == 0, harness.log()
    for runs in (plugin, plugin.another("clone")):
        output[...] = 77
        assert runs.call("enqueue", tensors, outputs, ctypes.c_void_p(memory.address(workspace))) == 0, harness.log()
        require_same_bits([output], one.run(direct))


# ---- conversion ----


def two_products() -> onnx.ModelProto:
    """Return a model of a plain Linear, whose function has no overload, and of one with a packed weight behind it."""
    parts, _ = packed_weight(np.random.default_rng(0), PackedFormat(8, True, 16), "weight0", 32, 64)
    packed = form_of(PackedFormat(8, True, 16))
    model = model_of(packed, "float32", {"input": [2, 3, 64]}, parts)
    plain = model_of(Form(), "float32", {"input": [2, 3, 64]}, [])
    square = numpy_helper.from_array(np.eye(64, dtype=np.float32), "square")
    model.graph.initializer.append(square)
    first = helper.make_node("Linear", ["input", "square"], ["rows"], domain="kvexport")
    model.graph.node[0].input[0] = "rows"
    model.graph.node.insert(0, first)
    model.functions.append(plain.functions[0])
    return model


def test_a_linear_of_floats_is_written_out_beside_one_that_is_a_plugin() -> None:
    model = two_products()
    assert [function.overload for function in model.functions].count("") == 1
    seen, whys = for_tensorrt(model, lambda _: None)
    assert whys == {"Linear": ""} and not seen.functions
    assert [node.op_type for node in seen.graph.node] == ["Transpose", "MatMul", "Linear"]
    written, whys = for_tensorrt(model, plugin_refusal("off"))
    assert whys == {"Linear": "off"} and "Linear" not in {node.op_type for node in written.graph.node}


def test_a_weight_that_two_nodes_read_is_bytes_of_one_length() -> None:
    model = two_products()
    again = model.graph.node.add()
    again.CopyFrom(model.graph.node[1])
    again.output[0] = "again"
    parts, _ = packed_weight(np.random.default_rng(0), PackedFormat(4, False, 16, "zero"), "weight0", 3, 48)
    del model.graph.initializer[:-1]
    model.graph.initializer.extend(parts)
    for node in model.graph.node[1:]:
        node.input[:] = [node.input[0], *(part.name for part in parts)]
        next(a for a in node.attribute if a.name == "packed").ints[:] = [2]
    seen, _ = for_tensorrt(model, lambda _: None)
    dims = {x.name: (x.data_type, list(x.dims)) for x in seen.graph.initializer}
    assert dims["weight0"] == (TensorProto.INT8, [3, 24]) and dims["weight0_zero"] == (TensorProto.INT8, [5])
    nodes = [node for node in seen.graph.node if node.op_type == "Linear"]
    fields = [{a.name: list(a.ints) for a in node.attribute if a.name in ("bits", "signed")} for node in nodes]
    assert fields == [{"bits": [4], "signed": [0]}] * 2


# ---- shapes and types ----


def create(harness: Harness, fields: dict[str, Any] = PRODUCTS) -> Plugin:
    plugin = harness.create("Linear", fields)
    assert plugin, harness.log()
    return plugin


def tensors_of(rows: int = HALF, most: int = 9) -> list[Tensor]:
    """Return inputs of PRODUCTS: rows of 128 numbers, and outputs of 4 heads of 16, 2 of 12, and 10 numbers."""

    def tensor(kind: int, *shape: int) -> Tensor:
        return Tensor.of(kind, shape, [3 if size == B else most if size == T else size for size in shape])

    first = [tensor(INT8, 64, 64), tensor(FLOAT, 64, 4), tensor(INT8, 128), tensor(rows, 64)]
    second = [tensor(INT8, 24, 128), tensor(HALF, 24, 2)]
    angles = [tensor(rows, B, T, 8), tensor(rows, B, T, 8)]
    return [tensor(rows, B, T, 128), tensor(rows, 128), *first, *second, tensor(rows, 10, 128), *angles]


def changed(tensors: list[Tensor], at: int, kind: int | None = None, shape: tuple[int, ...] = ()) -> list[Tensor]:
    old = tensors[at]
    return [*tensors[:at], Tensor.of(old.type if kind is None else kind, shape or old.shape, shape), *tensors[at + 1 :]]


def test_shapes_are_propagated_with_batch_and_tokens_open(harness: Harness) -> None:
    plugin = create(harness)
    assert plugin.outputs == 3
    assert plugin.output_shapes(tensors_of()) == [[B, 4, T, 16], [B, 2, T, 12], [B, T, 10]]
    assert plugin.output_types(tensors_of()) == [HALF] * 3
    assert plugin.call("configure", tensors_of()) == 0, harness.log()
    heads = create(harness, parsed(Form(input_heads=4).attributes))
    attended = [Tensor.of(HALF, (B, 4, T, 16), (3, 4, 9, 16)), Tensor.of(HALF, (10, 64))]
    assert heads.output_shapes(attended) == [[B, T, 10]]
    assert heads.call("configure", attended) == 0, harness.log()
    rows = create(harness, parsed(Form().attributes))
    assert rows.output_shapes([Tensor.of(HALF, (N, 64), (9, 64)), Tensor.of(HALF, (10, 64))]) == [[N, 10]]


@pytest.mark.parametrize("rows", [FLOAT, HALF, BF16])
def test_every_type_and_nothing_else_is_supported(harness: Harness, rows: int) -> None:
    plugin, floats, alike = create(harness), {FLOAT, HALF}, {rows}
    first, second = [{INT8}, floats, {INT8}, alike], [{INT8}, floats]
    right = [{FLOAT, HALF, BF16}, alike, *first, *second, alike, alike, alike, alike, alike, alike]
    tensors = [*tensors_of(rows), *[Tensor.of(rows, ())] * 3]
    for at, kinds in enumerate(right):
        for kind in range(12):
            assert plugin.supports(at, changed(tensors, at, kind)) == (kind in kinds), (at, kind)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(tensors_of(), 0, shape=(B, 128)), "input is [?, 128], not [1, ?, 128]"),
        (changed(tensors_of(), 0, shape=(B, T, 96)), "input is [?, ?, 96], not [?, ?, 128]"),
        (changed(tensors_of(), 1, shape=(96,)), "norm is [96], not [128]"),
        (changed(tensors_of(), 3, shape=(64, 8)), "a scale is [64, 8], not [64, 4]"),
        (changed(tensors_of(), 4, shape=(64, 4)), "a zero point is [64, 4], not [128]"),
        (changed(tensors_of(), 5, shape=(63,)), "bias is [63], not [64]"),
        (changed(tensors_of(), 6, shape=(24, 96)), "weight is [24, 96], not [24, 128]"),
        (changed(tensors_of(), 9, shape=(3, 2, 8)), "cosine is [3, 2, 8], not [2, 2, 8]"),
        (changed(tensors_of(), 6, shape=(25, 128)), "an output has 25 numbers in 2 heads"),
        (tensors_of()[:10], "it has 11 inputs and 3 outputs, not 10 and 3"),
    ],
)
def test_shapes_that_do_not_fit_are_named(harness: Harness, tensors: list[Tensor], message: str) -> None:
    if message.startswith("cosine"):
        tensors = changed(tensors, 0, shape=(2, 2, 128))
    if "25 numbers" in message:
        tensors = changed(tensors, 7, shape=(25, 2))
    assert create(harness).output_shapes(tensors) is None
    assert f"kvexport: Linear: {message}" in harness.log()


def test_calls_without_a_kernel_are_refused_when_the_engine_is_built(harness: Harness) -> None:
    assert create(harness).call("configure", changed(tensors_of(), 1, shape=(-1,))) == 0, harness.log()
    assert create(harness).call("configure", changed(tensors_of(), 8, shape=(-1, 128))) != 0
    assert "only the batch and the number of tokens may be left open" in harness.log()
    odd = {**PRODUCTS, **parsed({"group": [48, 64, 0]})}
    tensors = changed(changed(tensors_of(), 3, shape=(64, 2)), 4, shape=(64,))
    assert create(harness, odd).call("configure", tensors) != 0
    assert "the inputs are no multiple of a weight's group" in harness.log()
    angles = changed(changed(tensors_of(), 9, shape=(B, T, 4)), 10, shape=(B, T, 4))
    assert create(harness).call("configure", angles) != 0
    assert "cosine and sine are not of half a head's size" in harness.log()


@pytest.mark.parametrize("rows", [FLOAT, HALF])
def test_the_workspace_does_for_fewer_rows(harness: Harness, rows: int) -> None:
    """The tallest calls of one kernel need more than the shortest of the next, whose blocks have more rows."""
    plugin = create(harness)
    sizes = [plugin.call("workspace", tensors_of(rows, most=most)) for most in range(1, 81)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


# ---- fields ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": -1.0}, "epsilon is -1.000000, and has to be at least 0"),
        ({"norm": 2}, "norm is 2, and has to be 0 or 1"),
        ({"bias": [1, 0]}, "output_heads, bias and rotated have an entry for each of one to three products, not 3, 2"),
        ({"rotated": [0, 0, 1]}, "an output without heads is rotated"),
        ({"gate": 1}, "a gate or a residual goes with one product, not several"),
        ({"packed": None}, "group has no use without packed"),
        ({"packed": [2, 1]}, "packed and group have an entry for each of 3 weights, not 2 and 3"),
        ({"packed": [4, 1, 0]}, "there is no kernel for a packed weight with a table of numbers"),
        ({"bits": None}, "the field bits is missing"),
        ({"bits": [4, 8, 8]}, "bits is 8, and has to be 0 of a weight that is not packed"),
        ({"group": [31, 64, 0]}, "a group of 4-bit weights is odd: 31"),
        ({"input_heads": None}, "the field input_heads is missing"),
        ({"alias_state": 0}, "there is no field alias_state"),
    ],
)
def test_a_bad_field_is_a_reason_in_the_log(harness: Harness, change: dict[str, Any], message: str) -> None:
    fields = dict(PRODUCTS)
    for name, value in change.items():
        fields.pop(name, None)
        fields |= parsed({name: value}) if value is not None else {}
    assert harness.create("Linear", fields) is None
    assert f"kvexport: Linear: {message}" in harness.log()


def test_a_rotated_product_with_a_gate_is_refused(harness: Harness) -> None:
    fields = parsed(Form(output_heads=(2,), rotated=(1,), gate=1).attributes)
    assert harness.create("Linear", fields) is None
    assert "Linear: a product that has a gate is not rotated" in harness.log()


def test_a_table_is_refused_by_the_creator(harness: Harness) -> None:
    packing = PackedFormat(4, False, 32, table=E2M1)
    parts, _ = packed_weight(np.random.default_rng(0), packing, "weight0", 8, 64)
    model = model_of(form_of(packing), "float32", {"input": [1, 1, 64]}, parts)

    def refusal(node: onnx.NodeProto) -> str | None:
        return None if harness.create("Linear", fields_of(node)) else harness.log()

    _, whys = for_tensorrt(model, refusal)
    assert "with a table of numbers" in whys["Linear"]
