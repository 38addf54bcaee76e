"""Expensive steps of torch.export, torch.onnx and onnxscript that do not change an ONNX model, and are skipped.

Context managers replace one attribute of these packages for each skipped step. If a version of a package lacks the
attribute, the step is not skipped.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import onnxscript
import torch


@contextlib.contextmanager
def steps_skipped() -> Iterator[None]:
    with (
        # The cache keys operators by symbolic shapes, and a lookup takes longer than the computation.
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        # No one reads where in a definition an operator of a trace was called.
        _replaced("torch.fx.config", "do_not_emit_stack_traces", lambda _: True),
        _sources_unread(),
        _values_kept(),
        _registry_kept(),
        _signatures_kept(),
        _code_unwritten(),
        _replaced("torch.fx.experimental.proxy_tensor", "_extract_tensor_metadata", lambda _: lambda *_, **__: None),
    ):
        yield


@contextlib.contextmanager
def decompositions_skipped() -> Iterator[None]:
    """Within this context, keep torch.onnx from decomposing a program, which would trace it a second time."""
    steps = "torch.onnx._internal.exporter._fx_passes"
    with _replaced(steps, "decompose_with_registry", lambda _: lambda program, *_, **__: program):
        yield


@contextlib.contextmanager
def mismatches_skipped() -> Iterator[None]:
    """Within this context, keep onnxscript from trying its 100 rewrite rules at nodes that match none of them."""
    matcher: Any = getattr(onnxscript.rewriter._matcher, "SimplePatternMatcher", None)

    def only_first(original: Any) -> Any:
        def try_rewrite(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
            first = self._target_pattern.output_nodes[0].op if type(self._matcher) is matcher else None
            if first is not None and not first.matches(node.op_type):
                return None
            return original(self, model, graph, node, **options)

        return try_rewrite

    with _replaced("onnxscript.rewriter._rewrite_rule:RewriteRule", "try_rewrite", only_first):
        yield


@contextlib.contextmanager
def _replaced(owner: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    module, _, inner = owner.partition(":")
    holder: Any
    try:
        holder = importlib.import_module(module)
    except ImportError:
        holder = None
    if inner:
        holder = getattr(holder, inner, None)
    original = getattr(holder, "__dict__", {}).get(name)
    if original is None:
        yield
        return
    setattr(holder, name, make(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


class _Signature:
    def __init__(self, translation: Any, make: Callable[[Any], Any]) -> None:
        self.domain: str = translation.opset.domain
        self._make = functools.partial(make, translation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


@contextlib.contextmanager
def _sources_unread() -> Iterator[None]:
    """Keep torch.onnx from parsing the sources of 500 operator translations only to learn the operators' domains."""

    def unread(original: Any) -> Any:
        make = functools.partial(_Signature, make=original.fget)
        return property(make) if isinstance(original, property) and original.fget is not None else original

    with _replaced("onnxscript.values:TracedOnnxFunction", "function_ir", unread):
        yield


@contextlib.contextmanager
def _registry_kept() -> Iterator[None]:
    """Let torch.onnx reuse one registry of operator translations for all programs."""

    def kept(original: Any) -> Any:
        def from_torchlib(cls: Any, *args: Any, **named: Any) -> Any:
            key = (cls, args, tuple(named.items()))
            if key not in _registries:
                _registries[key] = original.__func__(cls, *args, **named)
            registry = cls()
            vars(registry).update(vars(_registries[key]))
            registry.functions = {target: list(each) for target, each in registry.functions.items()}
            return registry

        return classmethod(from_torchlib) if isinstance(original, classmethod) else original

    with _replaced("torch.onnx._internal.exporter._registration:ONNXRegistry", "from_torchlib", kept):
        yield


_registries: dict[Any, Any] = {}


@contextlib.contextmanager
def _signatures_kept() -> Iterator[None]:
    """Keep torch.onnx from reading an ONNX operator's schema again for every node."""

    def kept(original: Any) -> Any:
        def from_op_schema(cls: Any, schema: Any) -> Any:
            if schema.domain:  # kvexport has several schemas of one name
                return original.__func__(cls, schema)
            key = (cls, schema.name, schema.since_version)
            if key not in _signatures:
                _signatures[key] = original.__func__(cls, schema)
            return _signatures[key]

        return classmethod(from_op_schema) if isinstance(original, classmethod) else original

    with _replaced("onnx_ir.schemas:OpSignature", "from_op_schema", kept):
        yield


_signatures: dict[Any, Any] = {}


@contextlib.contextmanager
def _code_unwritten() -> Iterator[None]:
    """Keep torch.fx from writing and compiling Python code for graphs that are never run as Python."""
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazily
    except ImportError:
        yield
        return
    with lazily(True):
        yield


@contextlib.contextmanager
def _values_kept() -> Iterator[None]:
    """Keep torch.onnx from computing all shapes again while it makes type promotion explicit; no shape changes."""
    promotion: Any = importlib.import_module("torch.onnx._internal.fx.passes.type_promotion")
    rule_of: Any = getattr(promotion, "get_type_promotion_rule", None)
    interpreter: Any = getattr(promotion, "_TypePromotionInterpreter", None)
    if rule_of is None or not {"_maybe_promote_node", "_set_current_node"} <= set(dir(interpreter)):
        yield  # another version of torch
        return

    def kept(original: Any) -> Any:
        def run_node(self: Any, node: Any) -> Any:
            if node.op != "call_function" or "val" not in node.meta:
                return original(self, node)
            if rule := rule_of(node, self.type_promotion_table):
                with self._set_current_node(node):
                    self._maybe_promote_node(node, rule)
            return node.meta["val"]

        return run_node

    with _replaced("torch.onnx._internal.fx.passes.type_promotion:_TypePromotionInterpreter", "run_node", kept):
        yield
