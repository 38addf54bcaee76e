"""Builds that skip tracing the operators' ONNX functions, which takes seconds for every shape of heads.

Their artifacts run only with the native operators, as the tests of these operators require.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import onnx
from onnx import helper

from kvexport.export.graph import graphs
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION


@contextlib.contextmanager
def native_alone() -> Iterator[None]:
    """Replace the operators' functions within the `with` block by ones that pass their inputs on.

    It works for caches of five state tensors.
    """
    with (
        mock.patch.object(graphs, "vote_attention_functions", lambda *_, **__: [_hands_on(VOTE_ATTENTION, ["query"])]),
        mock.patch.object(graphs, "merge_cache_functions", lambda *_, **__: [_hands_on(MERGE_CACHE, [])]),
    ):
        yield


def _hands_on(operator: Any, first: Sequence[str]) -> onnx.FunctionProto:
    inputs, outputs = list(operator.input_names), list(operator.output_names)
    names = [*first, *(name.replace("present_", "past_") for name in outputs[len(first) :])]
    names = [name if name in inputs else name.removeprefix("past_") for name in names]
    nodes = [helper.make_node("Identity", [x], [y]) for x, y in zip(names, outputs, strict=True)]
    opset = helper.make_opsetid("", 23)
    return helper.make_function("kvexport", operator.name, inputs, outputs, nodes, [opset], overload="native_alone")
