"""The ONNX decoder graph cut between its layers, so that each layer's error can be measured by itself.

Each layer of the cut decoder takes the PyTorch reference's hidden state as an input, so errors of earlier layers do not
reach it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from kvexport.export.graph.graphs import open_slots
from kvexport.plan.cache import CachePlan
from kvexport.schema.operators import VOTE_ATTENTION

STATE_INPUT = "past_key_values."


def layer_borders(graph: onnx.GraphProto) -> dict[int, str]:
    """Return, for layers 1, 2, ..., the name of the only tensor of the ONNX graph that leads into the layer.

    All later nodes depend on the tokens only through this tensor and state tensors. If there are several such tensors,
    the last one before the layer's attention is taken; in decoders with residuals it is the residual stream. A layer
    without such a tensor is missing in the result.
    """
    last_use = {name: i for i, node in enumerate(graph.node) for name in node.input}
    hidden: set[str] = set()  # tensors that depend on the values of the tokens, not only on their number
    in_use: set[str] = set()
    borders: dict[int, str] = {}
    lone = ""
    for i, node in enumerate(graph.node):
        if node.op_type == VOTE_ATTENTION.name:
            layer = next(int(name.split(".")[1]) for name in node.input if name.startswith(STATE_INPUT))
            if lone and layer > 0:
                borders[layer] = lone
            lone = ""
        if node.op_type != "Shape" and not {"input_ids", *hidden}.isdisjoint(node.input):
            hidden.update(node.output)
            in_use.update(name for name in node.output if last_use.get(name, -1) > i)
        in_use -= {name for name in node.input if last_use.get(name) == i}
        if len(in_use) == 1:
            (lone,) = in_use
    return borders


def border_name(layer: int) -> str:
    return f"border.{layer}"


class CutDecoder:
    def __init__(
        self, path: Path, dtype: str, open_session: Callable[[bytes], Any], plan: CachePlan | None = None
    ) -> None:
        model = onnx.load(path, load_external_data=False)
        if plan is not None:
            open_slots(model, plan)
        self.borders = layer_borders(model.graph)
        _cut(model.graph, self.borders, dtype)
        self._session = open_session(model.SerializeToString())
        self._names = [output.name for output in self._session.get_outputs()]

    def infer(
        self, feed: Mapping[str, NDArray[Any]], hidden: Mapping[int, NDArray[Any]]
    ) -> tuple[dict[str, NDArray[Any]], dict[int, NDArray[Any]]]:
        border_values = {border_name(i): np.ascontiguousarray(hidden[i]) for i in self.borders}
        outputs = dict(zip(self._names, self._session.run(self._names, {**feed, **border_values}), strict=True))
        reached = {i: outputs.pop(name) for i, name in self.borders.items()}
        return outputs, reached


def _cut(graph: onnx.GraphProto, borders: Mapping[int, str], dtype: str) -> None:
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inside = {name: border_name(i) for i, name in borders.items()}
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = inside.get(name, name)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    for i, name in borders.items():
        # [B, T, hidden], or [B, T, streams, hidden] of a model with several residual streams
        dims = ["batch", "tokens", *(f"hidden.{i}.{n}" for n in range(2, ranks.get(name, 3)))]
        graph.input.append(helper.make_tensor_value_info(border_name(i), elem, dims))
        graph.output.append(helper.make_tensor_value_info(name, elem, None))
