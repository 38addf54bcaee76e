"""The nodes of an ONNX graph that dequantize a packed weight in place of a float initializer w [N, K].

Every reader of w, except a Gather of its rows, reads the output d of the nodes of `kvexport.ops.linear.dequantized`,
cast to the type of w. If the columns of w are stored in another order, products reorder their input:

    y = MatMul(x, Transpose(w))  =>  y = MatMul(Gather<axis = -1>(x, order), Transpose(d))

A Gather of the rows of w (an embedding) becomes nodes that dequantize only those rows:

    y = Gather<axis = 0>(w, ids)  =>  r = Gather<axis = 0>(rows, ids), scale, zero, minimum and so on likewise;
                                      y = the same nodes with these in place of the whole tensors

`rows` has the same bytes as w. Tensors of four bits are uint8 [N, K / 2] there, because Gather supports no 4-bit types.
ONNX Runtime's CUDA provider has no kernels of operators on bits, so for it the Gather becomes

    y = com.microsoft.GatherBlockQuantized<bits, block_size = g>(rows, ids, scale, zero?)    and + minimum

with g the number of inputs that share a scale.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx.parser
import onnx_ir as ir

from kvexport.errors import UsageError
from kvexport.export.passes.nodes import is_op, permutes
from kvexport.export.weights.computed import component_name
from kvexport.ops.linear import dequantized, parts_after
from kvexport.ops.packed import PackedFormat

TYPES = {
    "int4": ir.DataType.INT4, "uint4": ir.DataType.UINT4, "int8": ir.DataType.INT8, "uint8": ir.DataType.UINT8,
    "float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64,
}  # fmt: skip
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
            rows, old = put.library_embedding(node) if library else put.embedding(node), node.outputs[0]
            _like(rows, old, str(old.name))
            ir.convenience.replace_all_uses_with(old, rows, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
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
        self, graph: ir.Graph, name: str, shape: tuple[int, int], packing: PackedFormat, dtype: ir.DataType
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

    def constant(self, numbers: Sequence[int]) -> ir.Value:
        name = f"kvexport.int64.{'_'.join(map(str, numbers))}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(np.array(numbers, np.int64), name=name)
            self.graph.initializers[name] = ir.Value(
                name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self.graph.initializers[name]

    def cast(self, value: ir.Value, stored: ir.DataType, target: ir.DataType) -> ir.Value:
        return value if stored == target else self.node("Cast", [value], to=int(target))

    def computed(self, lines: Sequence[str], inputs: Mapping[str, ir.Value], result: str) -> ir.Value:
        """Add the nodes of `lines`, in ONNX's textual form, which read `inputs` by name; return the value `result`."""
        header = '<domain: "kvexport", opset_import: ["": 23]>'
        text = "\n".join([header, f"Dequantize ({', '.join(inputs)}) => ({result})", "{", *lines, "}"])
        function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
        values = dict(zip(function.inputs, inputs.values(), strict=True))
        for node in function:
            read = [values[value] for value in node.inputs if value is not None]
            attributes = {str(name): x for name, x in node.attributes.items()}
            values[node.outputs[0]] = self.node(node.op_type, read, "", **attributes)
        return values[function.outputs[0]]

    def dense(self) -> ir.Value:
        """Add nodes that dequantize the whole packed weight, at the beginning of the graph, and return their result."""
        self.before, kind = self.graph[0], self.packing.kind
        parts = {name: self.component(name) for name in ("weight", *parts_after(kind))}
        lines, result = dequantized([*parts], kind, self.packing.group, axis=1)
        value = self.computed(lines, parts, result)
        _typed(value, ir.DataType.FLOAT, self.shape)
        value = self.cast(value, ir.DataType.FLOAT, self.dtype)
        _typed(value, self.dtype, self.shape)
        value.meta[_PACKED] = Packed(self.packing, [*parts.values()])
        return value

    def embedding(self, gather: ir.Node) -> ir.Value:
        """Add nodes that gather the packed rows and dequantize them, in place of a Gather of the weight's rows."""
        self.before, ids, kind = gather, gather.inputs[1], self.packing.kind
        assert ids is not None
        inputs, lines, picked = {"ids": ids}, list[str](), dict[str, str]()
        for name in ("weight", *parts_after(kind)):
            dtype, shape = self.components[name]
            halves = dtype in ("int4", "uint4")
            alias = (ROWS if name == "weight" else f"{name}_{ROWS}", (shape[0], shape[-1] // 2), "uint8")
            inputs[name] = self.component(*alias) if halves else self.component(name)
            picked[name] = name if name == "table" else f"{name}_picked"
            if name != "table":
                lines.append(f"{picked[name]} = Gather <axis = 0> ({name}, ids)")
            if halves:
                lines += _codes(picked[name], signed=dtype == "int4")
                picked[name] += "_codes"
        more, result = dequantized([*picked.values()], kind, self.packing.group, axis=2)
        return self.cast(self.computed([*lines, *more], inputs, result), ir.DataType.FLOAT, self.dtype)

    def library_embedding(self, gather: ir.Node) -> ir.Value:
        """Add ONNX Runtime's GatherBlockQuantized in place of a Gather of the weight's rows."""
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
        return rows


def _codes(name: str, *, signed: bool) -> list[str]:
    """Return the nodes that unpack rows of 4-bit codes, two in a byte; the result is `name`_codes, uint8 or int8."""
    lines = [
        f"{name}_fifteen = Constant <value = uint8[1] {{15}}> ()",
        f"{name}_four = Constant <value = uint8[1] {{4}}> ()",
        f"{name}_end = Constant <value_ints = [-1]> ()",
        f"{name}_row = Constant <value_ints = [0, 0, -1]> ()",
        f"{name}_low = BitwiseAnd ({name}, {name}_fifteen)",
        f'{name}_upper = BitShift <direction = "RIGHT"> ({name}, {name}_four)',
        f"{name}_low_column = Unsqueeze ({name}_low, {name}_end)",
        f"{name}_upper_column = Unsqueeze ({name}_upper, {name}_end)",
        f"{name}_pairs = Concat <axis = -1> ({name}_low_column, {name}_upper_column)",
    ]
    if not signed:
        return [*lines, f"{name}_codes = Reshape ({name}_pairs, {name}_row)"]
    return [
        *lines,
        f"{name}_unsigned = Reshape ({name}_pairs, {name}_row)",
        f"{name}_eight = Constant <value = uint8[1] {{8}}> ()",
        f"{name}_raised = BitwiseXor ({name}_unsigned, {name}_eight)",  # the code plus 8
        f"{name}_float = Cast <to = 1> ({name}_raised)",
        f"{name}_lift = Constant <value_float = 8.0> ()",
        f"{name}_difference = Sub ({name}_float, {name}_lift)",
        f"{name}_codes = Cast <to = 3> ({name}_difference)",
    ]


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def _like(value: ir.Value, other: ir.Value, name: str) -> None:
    value.name, value.shape, value.type = name, other.shape, other.type


def _typed(value: ir.Value, dtype: ir.DataType, shape: Sequence[int]) -> None:
    value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
