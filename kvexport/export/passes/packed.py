"""The nodes of an ONNX graph that dequantize a packed weight in place of a float initializer w [N, K].

Every reader of w, except a Gather of its rows, reads the output d of the nodes of `kvexport.ops.linear.dequantized`,
cast to the type of w. If the columns of w are stored in another order, products reorder their input:

    y = MatMul(x, Transpose(w))  =>  y = MatMul(Gather<axis = -1>(x, order), Transpose(d))

A Gather of the rows of w (an embedding) becomes nodes that dequantize only those rows:

    y = Gather<axis = 0>(w, ids)  =>  r = Gather<axis = 0>(rows, ids), scale, zero, minimum and so on likewise;
                                      numbers unpacked, cast to float32, (r - zero) * scale + minimum

`rows` has the same bytes as w. Tensors of four bits are uint8 [N, K / 2] there, because Gather supports no 4-bit types.
ONNX Runtime's CUDA provider has no kernels of operators on bits, so for it the Gather becomes

    y = com.microsoft.GatherBlockQuantized<bits, block_size = g>(rows, ids, scale, zero?)    and + minimum

with g the number of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx.parser
import onnx_ir as ir
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.passes.nodes import is_op, permutes
from kvexport.export.weights.computed import component_name
from kvexport.ops.linear import dequantized, parts_after
from kvexport.ops.packed import SUPER, PackedFormat

TYPES = {
    "int4": ir.DataType.INT4,
    "uint4": ir.DataType.UINT4,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "float16": ir.DataType.FLOAT16,
    "float32": ir.DataType.FLOAT,
    "int64": ir.DataType.INT64,
}
ROWS = "rows"
_PACKED = "kvexport.packed"  # the key of a dequantized value's packed weight in its metadata


class Packed(NamedTuple):
    """A packed weight in an ONNX graph: its format, and its tensors in the order of a Linear node's inputs."""

    packing: PackedFormat
    parts: list[ir.Value]


def packed_of(value: ir.Value | None) -> Packed | None:
    """Return the packed weight (columns in stored order) that nodes dequantize to `value`; None if there is none."""
    return value.meta.get(_PACKED) if value is not None else None


def put_packed(
    model: ir.Model, packings: Mapping[str, PackedFormat], same: Callable[[str, str], bool], *, library: bool = False
) -> dict[str, str]:
    """Replace float initializers of a model by packed weights without data, and add nodes that dequantize them.

    `same` says whether two initializers have the same bytes; with `library`, ONNX Runtime's GatherBlockQuantized reads
    rows of embeddings. The result is {initializer: tensor} for each initializer that has the bytes of a packed weight's
    tensor under another name.
    """
    renamed: dict[str, str] = {}
    ordered: dict[ir.Value, list[tuple[ir.Value, ir.Value]]] = {}  # by product's input: (order, reordered input)
    for name, packing in packings.items():
        value = model.graph.initializers.get(name)
        if value is None:
            continue
        assert value.shape is not None and value.dtype is not None
        n, k = value.shape.numpy()
        put = _Putter(model.graph, name, (n, k), packing, value.dtype)
        readers = list(value.uses())
        gathers = [node for node, i in readers if is_op(node, "Gather") and i == 0]
        gathers = [node for node in gathers if "axis" not in node.attributes or node.attributes["axis"].as_int() == 0]
        del model.graph.initializers[name]
        for node in gathers:
            put.library_embedding(node) if library else put.embedding(node)
            parts = ("zero", "scale", "minimum")
            renamed |= {component_name(name, f"{part}_{ROWS}"): component_name(name, part) for part in parts}
            renamed[component_name(name, ROWS)] = name
        if others := [(node, i) for node, i in readers if node not in gathers]:
            dense = put.dense()
            for node, i in others:
                node.replace_input_with(i, dense)
                if packing.ordered:
                    _order_input(node, put.component("order"), ordered, same)
    return renamed


def _order_input(
    node: ir.Node,
    order: ir.Value,
    known: dict[ir.Value, list[tuple[ir.Value, ir.Value]]],
    same: Callable[[str, str], bool],
) -> None:
    products = [(use, i) for use, i in node.outputs[0].uses()] if permutes(node, [1, 0]) else []
    if not products or any(not is_op(use, "MatMul") or i != 1 for use, i in products):
        raise UsageError(
            f"{order.name} orders the columns of a weight that is not only a product's second factor",
            "set model.path to a checkpoint that was quantized without act-order (desc_act: false)",
        )
    for product, _ in products:
        data = product.inputs[0]
        assert data is not None
        gathered = [y for x, y in known.get(data, []) if same(str(x.name), str(order.name))]
        if not gathered:
            gather = ir.node("Gather", [data, order], {"axis": -1}, name=f"{product.name}.order")
            _like(gather.outputs[0], data, f"{product.name}.ordered")
            _graph(product).insert_before(product, gather)
            gathered = [gather.outputs[0]]
            known.setdefault(data, []).append((order, gathered[0]))
        product.replace_input_with(0, gathered[0])


class _Putter:
    def __init__(
        self,
        graph: ir.Graph,
        name: str,
        shape: tuple[int, int],
        packing: PackedFormat,
        dtype: ir.DataType,
    ) -> None:
        self.graph, self.name, self.shape, self.packing, self.dtype = graph, name, shape, packing, dtype
        self.components = packing.tensors(*shape)
        self.before = graph[0]
        self.node_count = 0

    def component(self, component: str, shape: Sequence[int] | None = None, dtype: str = "") -> ir.Value:
        """Return the initializer of one tensor of the packed weight, such as the scale; the first call adds it."""
        name = component_name(self.name, component)
        if name not in self.graph.initializers:
            kind, sizes = (dtype, shape) if shape is not None else self.components[component]
            self.graph.initializers[name] = ir.Value(name=name, shape=ir.Shape(sizes), type=ir.TensorType(TYPES[kind]))
        return self.graph.initializers[name]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        domain: str = "",
        **attributes: int | str | ir.TensorProtocol | ir.Attr,
    ) -> ir.Value:
        self.node_count += 1
        name = f"{self.name}.dequantize.{self.node_count}"
        node = ir.node(op_type, inputs, attributes, domain=domain, name=name)
        node.outputs[0].name = name
        self.graph.insert_before(self.before, node)
        return node.outputs[0]

    def constant(self, numbers: Sequence[int] | Sequence[list[int]], dtype: type = np.int64) -> ir.Value:
        array: NDArray[Any] = np.array(numbers, dtype)
        name = f"kvexport.{array.dtype.name}.{'x'.join(map(str, array.shape))}.{'_'.join(map(str, array.ravel()))}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(array, name=name)
            self.graph.initializers[name] = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self.graph.initializers[name]

    def cast(self, value: ir.Value, stored: ir.DataType, target: ir.DataType) -> ir.Value:
        return value if stored == target else self.node("Cast", [value], to=int(target))

    def dense(self) -> ir.Value:
        """Add nodes that dequantize the whole packed weight, at the beginning of the graph, and return their result."""
        self.before, kind = self.graph[0], self.packing.kind
        names = ["weight", *parts_after(kind)]
        lines, result = dequantized(names, kind, self.packing.group, axis=1)
        header = '<domain: "kvexport", opset_import: ["": 23]>'
        text = "\n".join([header, f"Dequantize ({', '.join(names)}) => ({result})", "{", *lines, "}"])
        function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
        parts = [self.component(name) for name in names]
        values = dict(zip(function.inputs, parts, strict=True))
        for node in function:
            inputs = [values[value] for value in node.inputs if value is not None]
            values[node.outputs[0]] = self.node(
                node.op_type, inputs, "", **{str(k): x for k, x in node.attributes.items()}
            )
        value = values[function.outputs[0]]
        _typed(value, ir.DataType.FLOAT, self.shape)
        value = self.cast(value, ir.DataType.FLOAT, self.dtype)
        _typed(value, self.dtype, self.shape)
        value.meta[_PACKED] = Packed(self.packing, parts)
        return value

    def embedding(self, gather: ir.Node) -> None:
        """Replace a Gather of the weight's rows by nodes that gather the packed rows and dequantize them."""
        self.before = gather
        packing, k = self.packing, self.shape[1]
        ids, computed = gather.inputs[1], ir.DataType.FLOAT
        assert ids is not None
        values = self.numbers("weight", ids, k, packing.group)
        if packing.offset == "zero":
            values = self.node("Sub", [values, self.numbers("zero", ids, k // packing.group, 1)])
        values = self.node("Mul", [values, self.floats(packing.scale, ids)])
        if packing.offset == "minimum":
            values = self.node("Add", [values, self.floats("minimum", ids)])
        rows = self.cast(self.node("Reshape", [values, self.constant([0, 0, k])]), computed, self.dtype)
        old = gather.outputs[0]
        _like(rows, old, str(old.name))
        ir.convenience.replace_all_uses_with(old, rows, replace_graph_outputs=True)
        self.graph.remove(gather, safe=True)

    def floats(self, component: str, ids: ir.Value) -> ir.Value:
        """Add nodes that gather rows of the packed weight's scales or minimums; return float32 [B, T, groups, 1]."""
        dtype, float32, last = self.packing.scale_dtype, ir.DataType.FLOAT, self.constant([-1])
        groups = self.shape[1] // self.packing.group
        if dtype == "uint4":
            name, sizes = f"{component}_{ROWS}", (self.shape[0], groups // 2)
            picked = self.node("Gather", [self.component(name, sizes, "uint8"), ids], axis=0)
            picked = self.node("Cast", [self.halves(picked)], to=int(float32))
        else:
            picked = self.node("Gather", [self.component(component), ids], axis=0)
        if dtype == "int6":
            picked = self.sixes(self.node("Reshape", [picked, self.constant([0, 0, groups // 4, 3])]))
        elif dtype != "uint4":
            picked = self.cast(picked, TYPES[dtype], float32)
        if component == "exponent":
            exponent = self.node("Sub", [picked, self.constant([128], np.float32)])
            picked = self.node("Pow", [self.constant([2], np.float32), exponent])
        if self.packing.has_supers:
            supers = self.shape[1] // SUPER
            factors = self.node("Gather", [self.component(f"super_{component}"), ids], axis=0)
            factors = self.node("Unsqueeze", [self.cast(factors, ir.DataType.FLOAT16, float32), last])
            apart = self.node("Reshape", [picked, self.constant([0, 0, supers, groups // supers])])
            picked = self.node("Reshape", [self.node("Mul", [apart, factors]), self.constant([0, 0, groups])])
        return self.node("Unsqueeze", [picked, last])

    def library_embedding(self, gather: ir.Node) -> None:
        """Replace a Gather of the packed weight's rows by ONNX Runtime's GatherBlockQuantized."""
        self.before = gather
        packing, (n, k) = self.packing, self.shape
        groups, ids = k // packing.group, gather.inputs[1]
        assert ids is not None
        zeros = (n, -(-groups * packing.bits // 8))
        inputs = [self.component(ROWS, (n, k * packing.bits // 8), "uint8"), ids]
        inputs.append(self.cast(self.component("scale"), TYPES[packing.scale_dtype], self.dtype))
        if packing.offset == "zero":
            inputs.append(self.component(f"zero_{ROWS}", zeros, "uint8"))
        elif not packing.signed:
            shape = self.constant(list(zeros))
            inputs.append(self.node("ConstantOfShape", [shape], value=ir.tensor(np.zeros(1, np.uint8))))
        rows = self.node(
            "GatherBlockQuantized", inputs, domain="com.microsoft", bits=packing.bits, block_size=packing.group,
            gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        if packing.offset == "minimum":
            picked = self.node("Gather", [self.component("minimum"), ids], axis=0)
            picked = self.cast(picked, TYPES[packing.scale_dtype], self.dtype)
            least = self.node("Unsqueeze", [picked, self.constant([-1])])
            apart = self.node("Reshape", [rows, self.constant([0, 0, groups, packing.group])])
            rows = self.node("Reshape", [self.node("Add", [apart, least]), self.constant([0, 0, k])])
        old = gather.outputs[0]
        _like(rows, old, str(old.name))
        ir.convenience.replace_all_uses_with(old, rows, replace_graph_outputs=True)

    def numbers(self, component: str, ids: ir.Value, count: int, group: int) -> ir.Value:
        """Add nodes that gather `count` packed codes for each token; return float32 [B, T, count / group, group]."""
        packing = self.packing
        shape = self.constant([0, 0, count // group, group])
        name = ROWS if component == "weight" else f"{component}_{ROWS}"
        if packing.bits == 8:
            picked = self.node(
                "Gather", [self.component(name, self.components[component].shape, packing.dtype), ids], axis=0
            )
            return self.node("Cast", [self.node("Reshape", [picked, shape])], to=int(ir.DataType.FLOAT))
        stored = (self.shape[0], count * packing.low_bits // 8)
        picked = self.node("Gather", [self.component(name, stored, "uint8"), ids], axis=0)
        values = self.fields(picked, 2, count) if packing.low_bits == 2 else self.halves(picked)
        if packing.high_bits:
            upper = self.node("Gather", [self.component("high"), ids], axis=0)
            upper = self.node("Reshape", [self.fields(upper, packing.high_bits, count), shape])
            upper = self.node("BitShift", [upper, self.constant([packing.low_bits], np.uint8)], direction="LEFT")
            values = self.node("BitwiseOr", [self.node("Reshape", [values, shape]), upper])
        elif packing.signed:
            values = self.node("BitwiseXor", [values, self.constant([8], np.uint8)])
        if packing.table:
            indices = self.node("Cast", [values], to=int(ir.DataType.INT32))
            values = self.node("Gather", [self.component("table"), indices], axis=0)
        value = self.node("Cast", [self.node("Reshape", [values, shape])], to=int(ir.DataType.FLOAT))
        half = 1 << (packing.bits - 1)
        return self.node("Sub", [value, self.constant([half], np.float32)]) if packing.signed else value

    def halves(self, picked: ir.Value) -> ir.Value:
        """Add nodes that unpack 4-bit codes [B, T, bytes]; return uint8 [B, T, bytes, 2]."""
        low = self.node("BitwiseAnd", [picked, self.constant([15], np.uint8)])
        high = self.node("BitShift", [picked, self.constant([4], np.uint8)], direction="RIGHT")
        last = self.constant([-1])
        return self.node("Concat", [self.node("Unsqueeze", [x, last]) for x in (low, high)], axis=-1)

    def fields(self, picked: ir.Value, bits: int, count: int) -> ir.Value:
        """Add nodes that unpack rows of `count` codes of 1 or 2 bits (`pack_fields`); return uint8 [B, T, ...]."""
        apart = self.node("Reshape", [picked, self.constant([0, 0, count * bits // 32, 1, 4])])
        fields = self.constant([[field] for field in range(0, 8, bits)], np.uint8)
        apart = self.node("BitShift", [apart, fields], direction="RIGHT")
        return self.node("BitwiseAnd", [apart, self.constant([(1 << bits) - 1], np.uint8)])

    def sixes(self, apart: ir.Value) -> ir.Value:
        """Add nodes that unpack scales [B, T, groups / 4, 3] of 6 bits (`pack_sixes`); return float32."""
        to_float = int(ir.DataType.FLOAT)
        three = self.node("BitwiseAnd", [apart, self.constant([63], np.uint8)])
        twos = self.node("BitShift", [apart, self.constant([6], np.uint8)], direction="RIGHT")
        powers = self.constant([[1], [4], [16]], np.float32)
        fourth = self.node("MatMul", [self.node("Cast", [twos], to=to_float), powers])
        four = self.node("Concat", [self.node("Cast", [three], to=to_float), fourth], axis=-1)
        return self.node("Sub", [four, self.constant([32], np.float32)])


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def _like(value: ir.Value, other: ir.Value, name: str) -> None:
    value.name, value.shape, value.type = name, other.shape, other.type


def _typed(value: ir.Value, dtype: ir.DataType, shape: Sequence[int]) -> None:
    value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
