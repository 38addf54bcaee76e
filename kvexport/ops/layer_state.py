"""VoteAttention and MergeCache over a layer's state, in which the slots of its KV heads lie one after another.

KV heads may differ in capacity, budget and recent window. KV heads that are all equal are computed together, by one
call of `vote_attention` or `merge_cache` over views [B, H, C, ...] of the state (B sequences, H heads, C slots).
Otherwise each head is computed by a call of its own. The ONNX functions of the two operators do the same: they call the
functions for equal heads that `kvexport.ops.onnx_function` traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
import torch
from onnx import helper
from torch import Tensor

from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.onnx_function import (
    DOMAIN,
    VERSION,
    heads_merge_cache_function,
    heads_vote_attention_function,
    merge_cache_node_attributes,
    overload_of,
)
from kvexport.ops.to_onnx import OPSET
from kvexport.ops.vote_attention import VoteAttentionAttributes, read_attention, vote_attention
from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION, Operator
from kvexport.schema.state import STATE, StateTensor, scales_of

NEW = {"query": 1, "key": 1, "value": 1, "sink_logits": 0}  # the dimension that counts heads


def split_state(
    state: Sequence[Tensor], tensors: Sequence[StateTensor], capacity: Sequence[int], *, together: bool
) -> list[tuple[Tensor, ...]]:
    """Return views [B, H, C, ...] of a layer's cache state: one view of all KV heads, or one of each if they differ."""
    if together:
        return [tuple(_view(x, tensor, len(capacity)) for x, tensor in zip(state, tensors, strict=True))]
    parts = [
        torch.split(x, 1 if tensor.slot_axis is None else list(capacity), _axis(tensor))
        for x, tensor in zip(state, tensors, strict=True)
    ]
    return [tuple(map(_view, own, tensors, [1] * len(tensors))) for own in zip(*parts, strict=True)]


def join_state(views: Sequence[Sequence[Tensor]], tensors: Sequence[StateTensor]) -> list[Tensor]:
    flat = [list(map(_flat, own, tensors)) for own in views]
    if len(flat) == 1:
        return flat[0]
    return [torch.cat([own[i] for own in flat], _axis(tensor)) for i, tensor in enumerate(tensors)]


def _axis(tensor: StateTensor) -> int:
    return tensor.dims.index("H") if tensor.slot_axis is None else tensor.slot_axis


def _view(x: Tensor, tensor: StateTensor, heads: int) -> Tensor:
    axis = tensor.slot_axis
    if axis is None:
        return x
    shape = (*x.shape[:axis], heads, x.shape[axis] // heads, *x.shape[axis + 1 :])
    return x.reshape(shape).movedim(axis, 1)


def _flat(x: Tensor, tensor: StateTensor) -> Tensor:
    axis = tensor.slot_axis
    return x if axis is None else x.movedim(1, axis).flatten(axis, axis + 1)


def state_of(dtype: str | torch.dtype, extra: Iterable[StateTensor]) -> tuple[StateTensor, ...]:
    small = dtype in (torch.int8, torch.uint8) if isinstance(dtype, torch.dtype) else bool(scales_of(dtype))
    return (*STATE, *(scales_of("int8") if small else ()), *extra)


def layer_vote_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    query_length: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    past_votes: Tensor,
    past_score: Tensor,
    past_position: Tensor,
    sink_logits: Tensor | None = None,
    *past_extra: Tensor,
    attributes: VoteAttentionAttributes,
    capacity: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """Compute VoteAttention for one layer; KV head h has `capacity[h]` slots (empty: all heads have equally many).

    The arguments are those of `vote_attention`, but the state has the slots of all heads in one dimension: key [B, S,
    D], value [B, S, Dv] ([B, S, 0] with `value_prefix`), votes (token counts) [B, S], score [B, K, S], position [B, S]
    and scales [B, S]. The result is the attention output [B, Hq, T, Dv] and the new state tensors, in the order of the
    old ones.
    """
    past = (past_key, past_value, past_votes, past_score, past_position, *past_extra)
    tensors = state_of(past_key.dtype, attributes.method.extra_state if attributes.method else ())
    capacity = capacity or [past_votes.shape[1] // key.shape[1]] * key.shape[1]
    parts = split_state(past, tensors, capacity, together=len({*capacity}) == 1)
    queries, keys, values = (x.chunk(len(parts), 1) for x in (query, key, value))
    sinks: Sequence[Tensor | None] = [None] * len(parts)
    if sink_logits is not None:
        sinks = sink_logits.chunk(len(parts), 0)
    outputs, presents = [], []
    for q, k, v, sink, own in zip(queries, keys, values, sinks, parts, strict=True):
        inputs = (q, k, v, position, query_length, *own[: len(STATE)], sink, *own[len(STATE) :])
        output, *present = vote_attention(*inputs, attributes=attributes)  # type: ignore[arg-type]
        outputs.append(output)
        presents.append(present)
    return (torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], *join_state(presents, tensors))


class ImageLanes(NamedTuple):
    """The batch lanes of a model call that have images, whose tokens see all tokens of the same image, also later ones.

    Attributes:
        lanes: [L] int64, the indices of these lanes in the batch. In other lanes a token sees no later token.
        last: [L, T] int64, for each token of these lanes, the position of the last token that it sees.
    """

    lanes: Tensor
    last: Tensor

    @classmethod
    def of(cls, lanes: Tensor, places: Tensor, position: Tensor) -> ImageLanes:
        """Return the sequences that have images. A token belongs to an image where `places` [B, T] is above 0.

        Neighbouring tokens with `places` above 0 belong to one image. The first element of `lanes` [1 + L] is a dummy.
        """
        texts = (places == 0).to(torch.int64).cumsum(1)  # equal within an image, and more from its end on
        # Of all lanes: ONNX Runtime sums no tensor of 0 lanes.
        ends = (texts[:, None, :] <= texts[:, :, None]).to(torch.int64).sum(-1) - 1
        last = torch.where(places > 0, position[:, :1] + ends, position)
        return cls(lanes[1:], last.index_select(0, lanes[1:]))

    def of_these(self, *tensors: Tensor) -> list[Tensor]:
        return [x.index_select(0, self.lanes) for x in tensors]

    def attend(
        self,
        output: Tensor,
        query: Tensor,
        position: Tensor,
        query_length: Tensor,
        state: Sequence[Tensor],
        sink_logits: Tensor | None,
        **layer: Any,
    ) -> Tensor:
        """Recompute a layer's attention output for sequences with images, whose tokens see later ones.

        `output` is the result of VoteAttention, in which no token sees a later one. The cache keeps VoteAttention's
        statistics, so VoteAttention's kernels need no code for images. `layer_read_attention` explains the arguments.
        """
        query, position, query_length = self.of_these(query, position, query_length)
        seen = layer_read_attention(query, position, query_length, state, sink_logits, **layer, images=self)
        return output.index_put((self.lanes,), seen)


def layer_read_attention(
    query: Tensor,
    position: Tensor,
    query_length: Tensor,
    state: Sequence[Tensor],
    sink_logits: Tensor | None = None,
    *,
    attributes: VoteAttentionAttributes,
    capacity: Sequence[int],
    images: ImageLanes | None = None,
) -> Tensor:
    """Return the attention output of queries over a layer's KV cache. `read_attention` explains the arguments.

    `state` has the layer's state tensors after the new tokens were appended, without the tensors that a method adds. KV
    head h has `capacity[h]` slots. With `images` the queries are only those of sequences that have images.
    """
    parts = split_state(state, state_of(state[0].dtype, ()), capacity, together=len({*capacity}) == 1)
    queries = query.chunk(len(parts), 1) if len(parts) > 1 else (query,)
    sinks: Sequence[Tensor | None] = [sink_logits] * len(parts)
    if sink_logits is not None and len(parts) > 1:
        sinks = sink_logits.chunk(len(parts), 0)
    outputs = []
    for q, own, sink in zip(queries, parts, sinks, strict=True):
        # The state is split before lanes are selected, because `open_slots` looks for its views.
        views, last = (own, None) if images is None else (tuple(images.of_these(*own)), images.last)
        outputs.append(read_attention(q, position, query_length, views, sink, attributes=attributes, last=last))
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def layer_merge_cache(
    *state: Tensor, attributes: Sequence[MergeCacheAttributes], capacity: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    heads = len(attributes)
    capacity = capacity or [state[2].shape[1] // heads] * heads
    tensors = state_of(state[0].dtype, attributes[0].method.extra_state)
    parts = split_state(state, tensors, capacity, together=are_equal(attributes, capacity))
    merged = [merge_cache(*own, attributes=each) for own, each in zip(parts, attributes, strict=False)]
    return tuple(join_state(merged, tensors))


def are_equal(attributes: Sequence[MergeCacheAttributes], capacity: Sequence[int]) -> bool:
    """Return whether the KV heads of a layer have equal capacities (or none is given), budgets and recent windows."""
    return len({*capacity}) < 2 and len({(x.budget, x.recent) for x in attributes}) == 1


def vote_attention_functions(
    attributes: VoteAttentionAttributes,
    *,
    heads: tuple[int, int],
    head_sizes: tuple[int, int],
    dtype: torch.dtype,
    cache_type: str = "",
    sinks: bool = False,
    capacity: Sequence[int] = (),
) -> list[onnx.FunctionProto]:
    query_heads, count = heads
    stored = cache_type or str(dtype).removeprefix("torch.")
    tensors = state_of(stored, attributes.method.extra_state if attributes.method else ())
    apart = len({*capacity}) > 1
    parts = count if apart else 1
    inner = heads_vote_attention_function(
        attributes, heads=(query_heads // parts, count // parts), head_sizes=head_sizes, dtype=dtype,
        cache_type=cache_type, sinks=sinks,
    )  # fmt: skip
    sizes = {"D": head_sizes[0], "Dv": head_sizes[1], "K": len(attributes.statistics)}
    body = _Body(tensors, stored, sizes, capacity if apart else (), count // parts, bool(attributes.value_prefix))
    new = {name: [name] for name in NEW if sinks or name != "sink_logits"}
    if apart:
        for name in new:
            new[name] = [f"{name}.{i}" for i in range(parts)]
            body.add("Split", [name], new[name], axis=NEW[name], num_outputs=parts)
    past, present = body.split("past_"), []
    outputs = ["output"] if not apart else [f"output.{i}" for i in range(parts)]
    for i in range(parts):
        values = past[i] | {name: own[i] for name, own in new.items()}
        values |= {"position": "position", "query_length": "query_length"}
        present.append(body.call(inner, values, {"output": outputs[i]}, i))
    if apart:
        body.add("Concat", outputs, ["output"], axis=1)
    body.join(present, "past_")
    return [body.function(VOTE_ATTENTION.with_state(tensors[len(STATE) :]), inner, sinks=sinks), inner]


def merge_cache_functions(
    attributes: Sequence[MergeCacheAttributes],
    *,
    head_sizes: tuple[int, int],
    cache_type: str,
    capacity: Sequence[int] = (),
) -> list[onnx.FunctionProto]:
    first, equal = attributes[0], are_equal(attributes, capacity)
    if not equal and not capacity:
        raise ValueError("KV heads of several budgets need their capacities")
    statistics = len(first.method.statistics)
    tensors = state_of(cache_type, first.method.extra_state)
    count = len(attributes) if equal else 1
    inner = heads_merge_cache_function(
        first, kv_heads=count, head_sizes=head_sizes, statistics=statistics, cache_type=cache_type
    )
    sizes = {"D": head_sizes[0], "Dv": head_sizes[1], "K": statistics}
    body = _Body(tensors, cache_type, sizes, () if equal else capacity, count, bool(first.value_prefix))
    past, present = body.split(""), []
    for i, values in enumerate(past):
        own = attributes[i]
        if capacity and own.budget >= capacity[i] and not own.sliding_window:
            present.append({f"present_{name}": value for name, value in values.items()})  # nothing is ever evicted
        else:
            present.append(body.call(inner, values, {}, i, budget=own.budget, recent=own.recent))
    body.join(present, "")
    node = merge_cache_node_attributes(attributes, capacity)
    meaning = {name: node[name] for name in ("budget", "recent")}
    return [body.function(MERGE_CACHE.with_state(tensors[len(STATE) :]), inner, **meaning), inner]


class _Body:
    def __init__(
        self,
        tensors: Sequence[StateTensor],
        cache_type: str,
        sizes: Mapping[str, int],
        capacity: Sequence[int],
        heads: int,
        value_in_key: bool,
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors = [x for x in tensors if not (value_in_key and x.name == "value")]
        self.capacity, self.heads, self.value_in_key = capacity, heads, value_in_key
        self.shapes = {x.name: _fixed(x, cache_type, sizes) for x in self.tensors}

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0]

    def numbers(self, name: str, values: Sequence[int]) -> str:
        return self.add("Constant", [], [name], value_ints=list(values))

    def split(self, prefix: str) -> list[dict[str, str]]:
        calls: list[dict[str, str]] = [{} for _ in self.capacity or (0,)]
        for x in self.tensors:
            name, axis = prefix + x.name, _axis(x)
            parts = [name]
            if self.capacity:
                parts = [f"{name}.{i}" for i in range(len(self.capacity))]
                own = self.capacity if x.slot_axis is not None else [1] * len(self.capacity)
                self.add("Split", [name, self.numbers(f"{name}.slots", own)], parts, axis=axis)
            if x.slot_axis is not None:
                before, after = self.shapes[x.name]
                plain = all(size == 1 for size in before)  # then no element moves
                shape = [0, self.heads, *before, -1, *after] if plain else [0, *before, self.heads, -1, *after]
                shape_name = self.numbers(f"{name}.shape", shape)
                for i, part in enumerate(parts):
                    view = self.add("Reshape", [part, shape_name], [f"{name}.view.{i}"])
                    if not plain:
                        order = [0, axis, *range(1, axis), *range(axis + 1, len(shape))]
                        view = self.add("Transpose", [view], [f"{name}.heads.{i}"], perm=order)
                    parts[i] = view
            for own_inputs, part in zip(calls, parts, strict=True):
                own_inputs[name] = part
        return calls

    def call(
        self,
        inner: onnx.FunctionProto,
        values: Mapping[str, str],
        outputs: Mapping[str, str],
        i: int,
        **attributes: int,
    ) -> dict[str, str]:
        names = {name: outputs.get(name, f"{name}.result.{i}") for name in inner.output}
        self.add(inner.name, [values[name] for name in inner.input], list(names.values()), domain=DOMAIN, **attributes)
        return names

    def join(self, calls: Sequence[Mapping[str, str]], prefix: str) -> None:
        for x in self.tensors:
            name, axis = f"present_{x.name}", _axis(x)
            parts = [own[name] for own in calls]
            if x.slot_axis is not None:
                before, after = self.shapes[x.name]
                plain = all(size == 1 for size in before)
                shape = self.numbers(f"{name}.shape", [0, *before, -1, *after])
                for i, part in enumerate(parts):
                    if not plain:
                        order = [0, *range(2, axis + 1), 1, *range(axis + 1, 2 + len(before) + 1 + len(after))]
                        part = self.add("Transpose", [part], [f"{name}.slots.{i}"], perm=order)
                    parts[i] = self.add("Reshape", [part, shape], [f"{name}.flat.{i}" if len(calls) > 1 else name])
            elif len(calls) == 1:
                parts[0] = self.add("Identity", parts, [name])
            if len(calls) > 1:
                self.add("Concat", parts, [name], axis=axis)
        if self.value_in_key:
            self.add("Identity", [f"{prefix}value"], ["present_value"])

    def function(self, operator: Operator, inner: onnx.FunctionProto, **meaning: Any) -> onnx.FunctionProto:
        meaning |= {"op": operator.name, "of": inner.name, "capacity": list(self.capacity)}
        inputs = operator.input_names
        if inputs[-1] == "sink_logits" and not meaning["sinks"]:
            inputs.pop()
        return helper.make_function(
            DOMAIN,
            operator.name,
            inputs,
            operator.output_names,
            self.nodes,
            [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
            overload=overload_of(meaning),
        )


def _fixed(tensor: StateTensor, cache_type: str, sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
    if tensor.slot_axis is None:
        return [], []
    shape = tensor.stored_shape(cache_type, {"B": 1, "S": 1, **sizes})
    return list(shape[1 : tensor.slot_axis]), list(shape[tensor.slot_axis + 1 :])
