"""The matrix products of a decoder for GPUs: Linear and Experts nodes become operators of ONNX Runtime and ONNX.

    y = Linear(x, weight, ...)   =>  y = com.microsoft.FusedMatMul<transB>(x, weight)
    with a packed weight         =>  y = com.microsoft.MatMulNBits<K, N, bits, block_size>(x, weight, scale, zero?)
    with a minimum               =>  y = MatMulNBits(...) + FusedMatMul<transB>(sums of x over groups, minimum)

The steps around a product are computed as in the ONNX functions of Linear and Experts. The function of Experts loops
over the experts and picks one expert's packed weights at a time. ONNX Runtime's CUDA provider has kernels of these
operators. With the ONNX functions of Linear and Experts, the CUDA provider would multiply by a float copy of a packed
weight. The bytes of a packed weight are already in the layout of MatMulNBits (`kvexport.export.weights.nbits`); this
module gives its initializers the types of that operator.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import inliner

from kvexport.errors import KvexportError
from kvexport.export.passes.forms import OP_TYPES, dtype_of, experts_form_of, form_of, is_linear
from kvexport.export.passes.nodes import dims, is_op, known_shape
from kvexport.ops.experts import WEIGHTS, ExpertsForm, experts_function
from kvexport.ops.linear import Form, linear_function, parts_after
from kvexport.ops.onnx_function import DOMAIN

EXPERTS, MICROSOFT = "Experts", "com.microsoft"
BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8}
SIGNED = (ir.DataType.INT4, ir.DataType.INT8)


class Weight(NamedTuple):
    """The sizes of a weight [outputs, inputs], the names of its other tensors such as the scale, and its types."""

    outputs: int
    inputs: int
    parts: tuple[str, ...] = ()
    group: int = 0
    numbers: ir.DataType | None = None
    scale: ir.DataType | None = None


def put_products(model: ir.Model) -> list[onnx.FunctionProto]:
    """Give every Linear and Experts node an ONNX function of ONNX Runtime's operators, for inlining by `inlined`."""
    functions: dict[str, onnx.FunctionProto] = {}
    types = {value: value.dtype for value in model.graph.initializers.values()}
    sizes = {value: known_shape(value) for value in model.graph.initializers.values()}
    for node in model.graph:
        if is_linear(node):
            function = _of_linear(node, types, sizes)
        elif is_op(node, EXPERTS, DOMAIN):
            function = _of_experts(node, types, sizes)
        else:
            continue
        node.overload = function.overload
        functions[f"{function.name} {function.overload}"] = function
    left = [node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear"]
    if left and left[0] is not None:
        raise KvexportError(f"{left[0].name} is packed, and is read by another node than a product or an embedding")
    return list(functions.values())


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    result = inliner.inline_selected_functions(model, [(DOMAIN, op_type) for op_type in (*OP_TYPES, EXPERTS)])
    if MICROSOFT not in {opset.domain for opset in result.opset_import}:
        result.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))
    return result


Types = Mapping[ir.Value, ir.DataType | None]
Sizes = Mapping[ir.Value, tuple[int | str, ...]]


def _of_linear(node: ir.Node, types: Types, sizes: Sizes) -> onnx.FunctionProto:
    form, dtype = form_of(node), dtype_of(node)
    assert dtype is not None
    inputs = {name: value for name, value in zip(form.inputs, node.inputs, strict=True) if value is not None}
    weights = []
    for i in range(form.weights):
        parts = form.weight_inputs("gate" if i == form.count else f"weight{i}", i)
        kind, group = (form.packed[i], form.group[i]) if form.packed else (0, 0)
        weights.append(_weight(inputs, parts, parts_after(kind), group, types, sizes))
    rank = 3 if form.input_heads else len(dims(node.inputs[0]))

    def multiply(_: Form, weight: str, i: int, rows: str, result: str) -> list[str]:
        return _product(weights[i], weight, {x: f"{weight}_{x}" for x in weights[i].parts}, rows, result, dtype, rank)

    return _named(linear_function(form, multiply), weights, dtype, rank)


def _of_experts(node: ir.Node, types: Types, sizes: Sizes) -> onnx.FunctionProto:
    form = experts_form_of(node)
    inputs = {name: value for name, value in zip(form.inputs, node.inputs, strict=True) if value is not None}
    dtype = inputs["input"].dtype
    assert dtype is not None
    weights = []
    for i, weight in enumerate(WEIGHTS):
        kind, group = (form.packed[i], form.group[i]) if form.packed else (0, 0)
        weights.append(_weight(inputs, form.weight_inputs(weight), parts_after(kind), group, types, sizes))
    return experts_library_function(form, weights, dtype)


def _weight(
    inputs: Mapping[str, ir.Value], names: Sequence[str], parts: tuple[str, ...], group: int, types: Types, sizes: Sizes
) -> Weight:
    """Set the types of a node's packed initializers to those that MatMulNBits takes; return the node's weight."""
    value = inputs[names[0]]
    *experts, outputs, columns = (int(size) for size in sizes.get(value) or known_shape(value))
    if not parts:
        return Weight(outputs, columns)
    numbers = types[value]
    assert numbers is not None
    bits, groups = BITS[numbers], columns // group
    retype(value, (*experts, outputs, groups, group * bits // 8))
    if "zero" in parts:
        retype(inputs[names[2]], (*experts, outputs, groups * bits // 8))
    return Weight(outputs, columns, parts, group, numbers, inputs[names[1]].dtype)


def retype(value: ir.Value, shape: Sequence[int]) -> None:
    if dims(value) == tuple(shape) and value.dtype == ir.DataType.UINT8:
        return
    value.shape, value.type = ir.Shape(shape), ir.TensorType(ir.DataType.UINT8)
    old = value.const_value
    assert old is not None
    if isinstance(old, ir.ExternalTensor):
        value.const_value = ir.ExternalTensor(
            old.location, old.offset, old.length, ir.DataType.UINT8, shape=ir.Shape(shape), name=str(value.name),
            base_dir=old.base_dir,
        )  # fmt: skip
    else:
        value.const_value = ir.tensor(np.frombuffer(old.tobytes(), np.uint8).reshape(shape), name=value.name)


def experts_library_function(form: ExpertsForm, weights: Sequence[Weight], dtype: ir.DataType) -> onnx.FunctionProto:
    def multiply(weight: str, data: str, result: str) -> list[str]:
        of = weights[WEIGHTS.index(weight)]
        picked = [f"{weight}_one = Gather <axis = 0> ({weight}, expert)"]
        picked += [f"{weight}_{x}_one = Gather <axis = 0> ({weight}_{x}, expert)" for x in of.parts]
        parts = {x: f"{weight}_{x}_one" for x in of.parts}
        return [*picked, *_product(of, f"{weight}_one", parts, data, result, dtype, 2)]

    return _named(experts_function(form, multiply), weights, dtype, 2)


def _named(
    function: onnx.FunctionProto, weights: Sequence[Weight], dtype: ir.DataType, rank: int
) -> onnx.FunctionProto:
    function.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))
    sizes = [f"{x.outputs}x{x.inputs}{x.numbers or ''}{x.scale or ''}" for x in weights]
    function.overload = "_".join([function.overload, *sizes, f"{dtype}", f"{rank}"])
    return function


def _product(
    weight: Weight, name: str, parts: Mapping[str, str], rows: str, result: str, dtype: ir.DataType, rank: int
) -> list[str]:
    if not parts:
        return [f"{result} = {MICROSOFT}.FusedMatMul <transB = 1> ({rows}, {name})"]
    assert weight.numbers is not None
    bits, groups = BITS[weight.numbers], weight.inputs // weight.group
    lines, scale = _cast(parts["scale"], weight.scale, dtype)
    operands = [rows, name, scale]
    if "zero" in parts:
        operands.append(parts["zero"])
    elif weight.numbers not in SIGNED:  # without a zero point, MatMulNBits subtracts half of the range
        lines += [
            f"{result}_shape = Constant <value_ints = [{weight.outputs}, {-(-groups * bits // 8)}]> ()",
            f"{result}_zero = ConstantOfShape <value = uint8[1] {{0}}> ({result}_shape)",
        ]
        operands.append(f"{result}_zero")
    product = f"{result}_scaled" if "minimum" in parts else result
    attributes = f"K = {weight.inputs}, N = {weight.outputs}, bits = {bits}, block_size = {weight.group}"
    lines.append(f"{product} = {MICROSOFT}.MatMulNBits <{attributes}> ({', '.join(operands)})")
    if "minimum" in parts:
        more, minimum = _cast(parts["minimum"], weight.scale, dtype)
        kept = ", ".join(["0"] * (rank - 1))
        lines += [
            *more,
            f"{result}_by_group = Constant <value_ints = [{kept}, {groups}, {weight.group}]> ()",
            f"{result}_groups = Reshape ({rows}, {result}_by_group)",
            f"{result}_last = Constant <value_ints = [-1]> ()",
            f"{result}_sums = ReduceSum <keepdims = 0> ({result}_groups, {result}_last)",
            f"{result}_least = {MICROSOFT}.FusedMatMul <transB = 1> ({result}_sums, {minimum})",
            f"{result} = Add ({product}, {result}_least)",
        ]
    return lines


def _cast(name: str, stored: ir.DataType | None, dtype: ir.DataType) -> tuple[list[str], str]:
    return ([], name) if stored == dtype else ([f"{name}_cast = Cast <to = {int(dtype)}> ({name})"], f"{name}_cast")
