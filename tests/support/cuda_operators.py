"""The operators that ONNX Runtime's CUDA provider has, with their types, and the nodes of a graph that it lacks.

cuda_kernels.json has the kernels for ONNX opset 23 of the wheel onnxruntime-gpu 1.31.1, as its function
`onnxruntime.capi.onnxruntime_pybind11_state.get_all_opkernel_def` lists them: by operator, the types of each of its
type parameters.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

OWN = ("VoteAttention", "MergeCache")  # kernels of kvexport
FROM_ATTRIBUTE = {"Cast": "to", "DequantizeLinear": "output_dtype"}
EXPANDED = ("CastLike",)  # ONNX Runtime expands it to a Cast
OPSET = 23


@cache
def kernels() -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = json.loads(Path(__file__).with_name("cuda_kernels.json").read_text())
    return found


@cache
def signatures() -> dict[str, tuple[list[str], list[str], bool]]:
    """Return by operator of com.microsoft the type parameters of its inputs and outputs."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return {
        schema.name: ([x.typeStr for x in schema.inputs], [x.typeStr for x in schema.outputs], False)
        for schema in get_all_operator_schema()
        if schema.domain == "com.microsoft"
    }


def problems(model: onnx.ModelProto) -> Iterator[str]:
    """Yield a line for each node that the CUDA provider has no kernel for, with the types of its inputs and outputs."""
    yield from _problems(model.graph, {}, {(function.domain, function.name) for function in model.functions})


def _problems(graph: onnx.GraphProto, outer: dict[str, str], functions: set[tuple[str, str]]) -> Iterator[str]:
    types = outer | {x.name: name_of(x.data_type) for x in graph.initializer}
    types |= {x.name: name_of(x.type.tensor_type.elem_type) for x in (*graph.input, *graph.output)}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _problems(attribute.g, types, functions)
                types |= {
                    name: name_of(x.type.tensor_type.elem_type)
                    for name, x in zip(node.output, attribute.g.output[node.op_type == "Loop" :], strict=True)
                }
        if node.op_type in ("Loop", "If"):
            continue
        if node.domain == "kvexport" and node.op_type in OWN:
            types |= {node.output[0]: types[node.input[0]]} if node.op_type.endswith("Attention") else {}
            continue
        if (node.domain, node.op_type) in functions:
            yield f"{node.name}: the function {node.op_type}"
            continue
        if node.op_type in EXPANDED:
            types[node.output[0]] = types[node.input[1]]
            continue
        key = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        bound = _bound(node, types)
        if node.op_type == "Constant":  # an initializer
            continue
        if key not in kernels():
            yield f"{node.name}: the CUDA provider has no {key}"
        elif not any(_takes(kernel, bound) for kernel in kernels()[key]):
            yield f"{node.name}: the CUDA provider has no {key} of {bound}"


def name_of(kind: int) -> str:
    return TensorProto.DataType.Name(kind).lower()


def _bound(node: onnx.NodeProto, types: dict[str, str]) -> dict[str, str]:
    """Return the types of a node's type parameters, and add those of its outputs to `types`."""
    inputs, outputs, variadic = _signature(node)
    bound = {
        inputs[min(i, len(inputs) - 1) if variadic else i]: types[name] for i, name in enumerate(node.input) if name
    }
    for i, name in enumerate(node.output):
        parameter = outputs[min(i, len(outputs) - 1)]
        if parameter.startswith("tensor("):
            types[name] = parameter[7:-1]
        elif parameter in bound:
            types[name] = bound[parameter]
        else:
            types[name] = bound[parameter] = _only_type(node, parameter) or _by_attribute(node, bound)
    return {name: kind for name, kind in bound.items() if not name.startswith("tensor(")}


def _signature(node: onnx.NodeProto) -> tuple[list[str], list[str], bool]:
    if node.domain == "com.microsoft":
        return signatures()[node.op_type]
    schema = onnx.defs.get_schema(node.op_type, OPSET, node.domain)
    variadic = bool(schema.inputs) and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    return [x.type_str for x in schema.inputs], [x.type_str for x in schema.outputs], variadic


def _only_type(node: onnx.NodeProto, parameter: str) -> str:
    if node.domain:
        return ""
    schema = onnx.defs.get_schema(node.op_type, OPSET, node.domain)
    allowed = next(x.allowed_type_strs for x in schema.type_constraints if x.type_param_str == parameter)
    return allowed[0][7:-1] if len(allowed) == 1 else ""


def _by_attribute(node: onnx.NodeProto, bound: Mapping[str, str]) -> str:
    attributes: dict[str, Any] = {a.name: a for a in node.attribute}
    if (name := FROM_ATTRIBUTE.get(node.op_type)) and name in attributes:
        return name_of(attributes[name].i)
    if node.op_type in ("Constant", "ConstantOfShape"):
        if "value" in attributes:
            return name_of(attributes["value"].t.data_type)
        return "float" if any("float" in x for x in attributes) or not attributes else "int64"
    if node.op_type == "DequantizeLinear":
        return bound["T2"]
    raise AssertionError(f"{node.op_type} {node.name} has outputs of an unknown type")


def _takes(kernel: Mapping[str, str], bound: Mapping[str, str]) -> bool:
    return all(kind in kernel[name].split() for name, kind in bound.items() if name in kernel)
