"""Traces that tests reuse, because one takes seconds: operators' functions in a folder, and decoders in memory."""

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
    """Within the `with` block, save traced functions in `folder`, load those that it has, and remember decoders."""
    from kvexport.export.graph import tracer
    from kvexport.ops import layer_state, onnx_function

    folder.mkdir(exist_ok=True)
    attention = cache(_shared(folder, onnx_function.heads_vote_attention_function))
    merge = _shared(folder, onnx_function._trace_merge_cache)
    with (
        mock.patch.object(layer_state, "heads_vote_attention_function", attention),
        mock.patch.object(onnx_function, "_trace_merge_cache", merge),
        mock.patch.object(tracer, "trace_decoder", _remembered(tracer.trace_decoder)),
    ):
        yield folder


def _remembered(trace: Callable[..., Any]) -> Callable[..., Any]:
    traces: dict[str, Any] = {}

    def trace_decoder(model: Any, mode: Any, plan: Any, **options: Any) -> Any:
        config = model.config
        parameters = [(name, x.shape, x.dtype) for name, x in model.named_parameters()]
        state = [(layer.shapes(1), layer.dtypes()) for layer in (*plan.caches, *plan.states)]
        # Only attention that reads a cache after its layer has appended to it is traced with attributes.
        reads = getattr(config.get_text_config(), "num_kv_shared_layers", 0) or options.get("bidirectional")
        relevant = options if reads else options | {"attributes": ()}
        shifts = [cache.key_shift for cache in plan.caches]
        key = repr((type(model), config.to_json_string(), parameters, state, plan.cache_positions, shifts, relevant))
        if key not in traces:
            traces[key] = trace(model, mode, plan, **options)
        return traces[key].clone()  # the caller changes the graph

    return trace_decoder


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
