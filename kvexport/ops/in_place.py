"""Replacement of operators that change a tensor in place, in a program exported by torch.export.

torch.onnx translates an operator in place only after a decomposition, which traces the whole program a second time.
Most programs change only tensors that they have just computed, or a slice of such a tensor. There an operator that
returns a new tensor gives the same values, and later nodes read the new tensor.
"""

import itertools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten: Any = torch.ops.aten
SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}


def without_changes_in_place(exported: ExportedProgram) -> bool:
    """Replace the operators of an exported program that change a tensor in place; return whether all were replaced.

    An in-place operator is not replaced if its tensor is an input or a weight, is a view other than a slice or a single
    index, or has another view that is read later.
    """
    graphs: list[Graph] = [module.graph for module in exported.graph_module.modules() if hasattr(module, "graph")]
    calls = [(g, node) for g in graphs for node in g.nodes if isinstance(node.target, torch._ops.OpOverload)]
    changes = [(graph, node) for graph, node in calls if node.target._schema.is_mutable]
    before = _outputs(exported)
    replaced = [_replaced(graph, node) for graph, node in changes]  # all of them, even after one that stays
    for old, new in zip(before, _outputs(exported), strict=True):
        exported.graph_signature.replace_all_uses(old, new)
    return all(replaced)


def _outputs(exported: ExportedProgram) -> list[str]:
    (returned,) = exported.graph.output_node().args
    return [node.name for node in returned if isinstance(node, Node)]


def _changes_first(node: Node) -> bool:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return [bool(each.alias_info and each.alias_info.is_write) for each in arguments] == [
        each is arguments[0] for each in arguments
    ]


def _replaced(graph: Graph, node: Node) -> bool:
    chain = _chain(node.args[0]) if _changes_first(node) else []
    places = {each: i for i, each in enumerate(graph.nodes)}
    if not chain or _is_read_later(chain, places, places[node]):
        return False
    with graph.inserting_before(node):
        new = _new_value(graph, node)
        if new is None:
            return False
        values = [new]
        for view, base in itertools.pairwise(chain):
            scatter = SCATTERS[view.target]
            values.append(graph.call_function(scatter, (base, values[-1], *view.args[1:]), dict(view.kwargs)))
    for old, value in zip(chain, values, strict=True):
        value.meta["val"] = old.meta["val"]
        for user in [user for user in old.users if places.get(user, -1) > places[node]]:
            user.replace_input_with(old, value)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return True


def _chain(changed: Any) -> list[Node]:
    """Return the slices between a changed tensor and the tensor that they are parts of, and last that tensor.

    The list is empty for an input or a weight, and for a view that is neither a slice nor a single index.
    """
    chain = []
    while isinstance(changed, Node) and changed.op == "call_function":
        chain.append(changed)
        if not _is_view(changed):
            return chain
        if changed.target not in SCATTERS:
            break
        changed = changed.args[0]
    return []


def _is_view(node: Node) -> bool:
    target = node.args[0].target if node.target is operator.getitem else node.target  # type: ignore[union-attr]
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return any(returned.alias_info is not None for returned in target._schema.returns)


def _is_read_later(chain: list[Node], places: dict[Node, int], place: int) -> bool:
    def is_read(view: Node) -> bool:
        readers = [user for user in view.users if user in places]
        later = any(places[user] > place for user in readers)
        return later or any(_is_view(user) and places[user] < place and is_read(user) for user in readers)

    users = [user for tensor in chain for user in tensor.users if user not in chain]
    others = [user for user in users if places.get(user, place) < place]
    return any(_is_view(view) and is_read(view) for view in others)


def _new_value(graph: Graph, node: Node) -> Node | None:
    changed, *others = node.args
    if node.target is aten.copy_.default:
        return _like(graph, others[0], changed.meta["val"])  # type: ignore[union-attr]
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    functional: Any = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    if functional is None:
        return None
    new = graph.call_function(functional, tuple(node.args), dict(node.kwargs))
    # In place, a tensor keeps its type, whatever the other operand's is.
    arguments, named = map_arg((node.args, node.kwargs), _example)
    old = changed.meta["val"]  # type: ignore[union-attr]
    if (dtype := functional(*arguments, **named).dtype) == old.dtype:
        return new
    new.meta["val"] = old.to(dtype)
    return graph.call_function(aten.to.dtype, (new, old.dtype))


def _example(node: Node) -> Any:
    value = node.meta["val"]
    return torch.empty([1] * value.dim(), dtype=value.dtype, device="meta") if isinstance(value, Tensor) else 1


def _like(graph: Graph, value: Any, old: Tensor) -> Node | None:
    """Add operators that convert a value to the dtype and shape of the tensor `old`; return None if they cannot.

    torch.onnx's own translation of `copy_` would not repeat a row that is copied into several rows.
    """
    new = value.meta["val"]
    sizes = [size if isinstance(size, int) else str(size) for size in old.shape]
    given = [size if isinstance(size, int) else str(size) for size in new.shape]
    added = len(sizes) - len(given)
    repeated = [-1 if i >= added and given[i - added] == size else size for i, size in enumerate(sizes)]
    if added < 0 or not all(isinstance(size, int) for size in repeated):
        return None
    if new.dtype != old.dtype:
        value = graph.call_function(aten.to.dtype, (value, old.dtype))
        value.meta["val"] = new.to(old.dtype)
    if any(size != -1 for size in repeated):
        value = graph.call_function(aten.expand.default, (value, repeated))
    return value  # type: ignore[no-any-return]
