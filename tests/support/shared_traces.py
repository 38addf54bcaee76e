"""A folder of the operators' traced ONNX functions, shared by the workers of pytest-xdist. One trace takes seconds."""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import onnx


@contextmanager
def shared_traces(folder: Path) -> Iterator[Path]:
    """Save traced functions in `folder` within the `with` block, and load those that `folder` has."""
    from kvexport.ops import layer_state, onnx_function

    folder.mkdir(exist_ok=True)
    attention = cache(_shared(folder, onnx_function.heads_vote_attention_function))
    merge = _shared(folder, onnx_function._trace_merge_cache)
    with (
        mock.patch.object(layer_state, "heads_vote_attention_function", attention),
        mock.patch.object(onnx_function, "_trace_merge_cache", merge),
    ):
        yield folder


def _shared(folder: Path, trace: Callable[..., onnx.FunctionProto]) -> Callable[..., onnx.FunctionProto]:
    def function(*arguments: Any, **named: Any) -> onnx.FunctionProto:
        meaning = repr(
            (trace.__name__, arguments, sorted(named.items()), [_code(x.method) for x in arguments if _has_one(x)])
        )
        path = folder / hashlib.sha256(meaning.encode()).hexdigest()
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(trace(*arguments, **named).SerializeToString())
            partial.replace(path)
        return onnx.FunctionProto.FromString(path.read_bytes())

    return function


def _has_one(attributes: Any) -> bool:
    return getattr(attributes, "method", None) is not None


def _code(method: Any) -> str:
    """Return the source of the method's file. Several tests define methods with the same name."""
    return inspect.getsource(sys.modules[type(method).__module__])
