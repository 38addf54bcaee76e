"""Packed weights in an ONNX graph, run by ONNX Runtime, against their definition in numpy."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from kvexport.errors import UsageError
from kvexport.export.passes.packed import TYPES, packed_of, put_packed
from kvexport.export.weights.computed import component_name
from kvexport.ops.packed import E2M1, IQ4, PackedFormat, PackedTensor, dequantize
from tests.support.packed_weights import random_parts

N, K = 6, 256
FORMATS = [
    PackedFormat(bits, signed, group, offset, scale, ordered)
    for bits, signed, group, offset, scale, ordered in [
        (4, True, 32, "none", "float16", False),
        (4, True, 128, "none", "float32", False),
        (4, False, 16, "zero", "float16", True),
        (4, False, 32, "minimum", "float16", False),
        (4, False, 64, "minimum", "float32", True),
        (8, True, 32, "none", "float32", True),
        (8, True, 16, "minimum", "float16", False),
        (8, False, 64, "zero", "float16", False),
        (4, False, 32, "minimum", "int8", False),
        (5, True, 32, "none", "float16", False),
        (5, False, 32, "minimum", "int8", False),
        (6, True, 16, "none", "int8", False),
        (2, False, 16, "minimum", "uint4", False),
        (3, True, 16, "none", "int6", False),
    ]
]
FORMATS += [
    PackedFormat(4, False, 32, table=IQ4),
    PackedFormat(4, False, 32, scale_dtype="int8", table=IQ4),
    PackedFormat(4, False, 32, scale_dtype="uint8", table=E2M1),
]


def graph(dtype: int, embedding: bool) -> ir.Model:
    """Return a graph with two products of one input with w and v, and optionally the rows of w for given ids."""
    text = """<ir_version: 11, opset_import: ["": 23]>
      g (TYPE[B,T,256] x, int64[B,T] ids, TYPE[6,256] w, TYPE[6,256] v) => (y, z{}) {{
        wt = Transpose<perm = [1, 0]>(w)
        y = MatMul(x, wt)
        vt = Transpose<perm = [1, 0]>(v)
        z = MatMul(x, vt)
        {}
      }}"""
    text = text.format(*((", e", "e = Gather<axis = 0>(w, ids)") if embedding else ("", "")))
    model = onnx.parser.parse_model(text.replace("TYPE", "float" if dtype == onnx.TensorProto.FLOAT else "float16"))
    return with_initializers(onnx.shape_inference.infer_shapes(model), "w", "v")


def with_initializers(proto: onnx.ModelProto, *names: str) -> ir.Model:
    """Return the model with inputs of these names turned into initializers without data."""
    model = ir.serde.deserialize_model(proto)
    for name in names:
        value = next(x for x in model.graph.inputs if x.name == name)
        model.graph.inputs.remove(value)
        model.graph.initializers[name] = value
    return model


def run(model: ir.Model, parts: dict[str, Any], names: dict[str, str], feed: dict[str, Any]) -> list[Any]:
    proto = ir.to_proto(model)
    del proto.graph.initializer[:]
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            proto.graph.initializer.append(ir.serde.serialize_tensor(value.const_value))
            continue
        assert value.dtype is not None and value.shape is not None
        data = np.ascontiguousarray(parts[names.get(name, name)]).tobytes()
        proto.graph.initializer.append(
            onnx.helper.make_tensor(name, int(value.dtype), value.shape.numpy(), data, raw=True)
        )
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("packing", FORMATS, ids=str)
def test_onnx_runtime_dequantizes_as_numpy_does(packing: PackedFormat, dtype: str) -> None:
    model = graph(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), embedding=not packing.ordered)
    parts = random_parts(np.random.default_rng(0), packing, N, K)
    stored = {component_name(w, part): x for w in ("w", "v") for part, x in parts.items()}
    names = put_packed(model, {"w": packing, "v": packing, "absent": packing}, lambda a, b: True)
    gathers = [node for node in model.graph if node.op_type == "Gather"]
    looked_up = 2 if packing.table else 0  # once in each dense weight
    assert len(gathers) == (1 if packing.ordered else len(parts) + looked_up)  # both products share one order
    rng = np.random.default_rng(1)
    feed = {"x": rng.standard_normal((2, 3, K)).astype(dtype), "ids": rng.integers(0, N, (2, 3))}
    y, z, *rows = run(model, stored, names, feed)
    value = dequantize(packing, N, K, parts)
    held = value.astype(dtype)
    expected = feed["x"].astype(np.float32) @ held.T.astype(np.float32)
    tolerance = (1e-5 if dtype == "float32" else 2e-2) * np.abs(expected).max()
    np.testing.assert_allclose(y.astype(np.float32), expected, atol=tolerance)
    np.testing.assert_array_equal(y, z)
    for row in rows:
        np.testing.assert_array_equal(row, held[feed["ids"]])


@pytest.mark.parametrize("packing", FORMATS, ids=str)
def test_inserted_nodes_are_recognised(packing: PackedFormat) -> None:
    for dtype in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
        model = graph(dtype, embedding=False)
        put_packed(model, {"w": packing}, lambda a, b: a == b)
        transposes = {node.inputs[0]: node for node in model.graph if node.op_type == "Transpose"}
        recognised = [packed for value in transposes if (packed := packed_of(value))]
        assert len(recognised) == 1
        stored = {name: part for name, part in packing.tensors(N, K).items() if name != "order"}
        assert recognised[0].packing == packing
        assert [part.name for part in recognised[0].parts] == [component_name("w", name) for name in stored]
        assert [str(part.dtype) for part in recognised[0].parts] == [str(TYPES[x.dtype]) for x in stored.values()]


def test_an_order_is_refused_where_no_product_reads_the_weight() -> None:
    text = """<ir_version: 11, opset_import: ["": 23]>
      g (float[6,128] x, float[6,128] w) => (float[6,128] y) { y = Add(x, w) }"""
    model = with_initializers(onnx.parser.parse_model(text), "w")
    with pytest.raises(UsageError, match="orders the columns"):
        put_packed(model, {"w": PackedFormat(4, True, 32, ordered=True)}, lambda a, b: a == b)


def test_parts_have_sizes_that_the_graph_declares() -> None:
    assert PackedTensor("uint4", (3, 5)).nbytes == 8
    assert PackedTensor("float16", (3, 5)).nbytes == 30
