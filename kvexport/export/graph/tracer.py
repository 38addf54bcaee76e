"""The trace of a Hugging Face decoder without its weights as an ONNX graph, with VoteAttention nodes as attention."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from onnxscript import optimizer, values
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from kvexport.errors import UsageError
from kvexport.export.graph.layers import Layers, find_layers, left_out, wrapped
from kvexport.export.graph.replicate import BORDER, replicate_layers
from kvexport.export.hooks.attention import ImageRows, TokenLogits, attending
from kvexport.export.hooks.complex_pairs import complex_as_pairs
from kvexport.export.hooks.experts import ATTRIBUTES as EXPERTS_ATTRIBUTES
from kvexport.export.hooks.experts import EXPERTS, expert_layouts
from kvexport.export.hooks.key_shift import shifted
from kvexport.export.hooks.recurrence import LINEAR_ATTENTION, RecurrentCache, recurring
from kvexport.methods.base import Method
from kvexport.ops import linear_attention
from kvexport.ops.experts import ExpertsForm
from kvexport.ops.layer_state import ImageLanes, layer_read_attention
from kvexport.ops.onnx_function import DOMAIN, VERSION
from kvexport.ops.to_onnx import optimize, to_onnx
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.plan.cache import CachePlan, LayerGeometry
from kvexport.quiet import quiet_exporter
from kvexport.schema.operators import VOTE_ATTENTION, Operator
from kvexport.schema.state import ROTARY_OFFSET, STATE, StateTensor, scales_of


def layer_attributes(method: Method, layer: LayerGeometry, value_prefix: int = 0) -> VoteAttentionAttributes:
    return VoteAttentionAttributes(
        scale=layer.scale,
        vote_exponent=method.vote_exponent,
        statistics=method.statistics,
        sliding_window=layer.sliding_window,
        softcap=layer.softcap,
        method=method if method.extra_state else None,
        value_prefix=value_prefix,
    )


def used_slots(votes: Tensor, heads: int) -> Tensor:
    """Return how many slots a KV head occupies, [B, 1] int64, from the votes [B, S] (each slot's token count)."""
    return torch.div((votes > 0).to(torch.int64).sum(-1, keepdim=True), heads, rounding_mode="floor")


OFFSET = (0, ROTARY_OFFSET.name)  # the place of the state tensor among recurrent states
# PyTorch operators that exist only in traces: one stands for a layer's attention. Another marks where the hidden state
# enters or leaves a layer that will be copied.
torch.library.define("kvexport::layer_border", "(Tensor hidden, *, int layer, int end) -> Tensor")
torch.library.register_fake("kvexport::layer_border", lambda hidden, *, layer, end: torch.empty_like(hidden))


def _attention_placeholder(operator: Operator) -> Any:
    inputs = tuple((x.name, x.optional) for x in operator.inputs)
    return _placeholder(inputs, tuple(x.name for x in operator.outputs))


@cache
def _placeholder(inputs: tuple[tuple[str, bool], ...], outputs: tuple[str, ...]) -> Any:
    # PyTorch knows one operator of a name, so the name contains those inputs that only some methods have.
    names = [name for name, _ in inputs]
    name = "_".join(["kvexport::vote_attention", *names[len(VOTE_ATTENTION.inputs) :]])
    declared = [f"Tensor{'?' if optional else ''} {each}" for each, optional in inputs]
    torch.library.define(name, f"({', '.join(declared)}, *, int layer) -> ({', '.join('Tensor' for _ in outputs)})")

    def attended(*tensors: Tensor, layer: int) -> tuple[Tensor, ...]:
        inputs = dict(zip(names, tensors, strict=True))
        output = inputs["query"].new_empty(*inputs["query"].shape[:3], inputs["value"].shape[3])
        state = (each.replace("present_", "past_") for each in outputs[1:])
        return (output, *(torch.empty_like(inputs[each]) for each in state))

    torch.library.register_fake(name, attended)
    return getattr(torch.ops.kvexport, name.partition("::")[2]).default


class CachedAttention:
    """The attention of a decoder's layers: a layer appends to its KV cache, or reads that of another layer.

    `append` of a subclass is VoteAttention, which puts a cache's new state into `present`.
    """

    def __init__(
        self,
        plan: CachePlan,
        attributes: Sequence[VoteAttentionAttributes],
        position: Tensor,
        query_length: Tensor,
        images: ImageLanes | None,
        capacity: Sequence[Sequence[int]],
    ) -> None:
        self.plan, self.attributes, self.images, self.capacity = plan, attributes, images, capacity
        self.position, self.query_length = position, query_length
        self.present: dict[int, list[Tensor]] = {}

    def append(self, cache: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        raise NotImplementedError

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        reads, sinks = options["reads"], options.get("s_aux")
        cache = self.plan.cache_of(options["layer"] if reads is None else reads)
        plan = self.plan.caches[cache]
        output = None
        if reads is None:
            output = self.append(cache, query, shifted(module, key, plan.key_shift), value, sinks)
        if output is not None and self.images is None:
            return output
        state = self.present[cache][: len(STATE) + len(scales_of(plan.dtype))]
        reading = (query, self.position, self.query_length, state, sinks)
        named: Any = {"attributes": self.attributes[cache], "capacity": self.capacity[cache]}
        if output is None:
            output = layer_read_attention(*reading, **named)
        return output if self.images is None else self.images.attend(output, *reading, **named)


class _Tracing(CachedAttention):
    def __init__(self, operator: Operator, past: dict[int, dict[str, Tensor]], *options: Any) -> None:
        super().__init__(*options)
        self.operator, self.placeholder, self.past = operator, _attention_placeholder(operator), past

    def append(self, cache: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        inputs = {
            "query": query, "key": key, "value": value, "position": self.position, "query_length": self.query_length,
            "sink_logits": None if sinks is None else sinks.float(), **self.past[cache],
        }  # fmt: skip
        output: Tensor
        output, *self.present[cache] = self.placeholder(
            *(inputs[name] for name in self.operator.input_names), layer=cache
        )
        return output


class _Decoder(nn.Module):
    """The PyTorch module that is traced as decoder.onnx.

    The module maps (input_ids, query_length, past_length, past cache state) to (logits, present_length, present cache
    state). If image vectors have `row_size` elements, the inputs of `CallImages` (kvexport/images/rows.py) follow
    past_length.
    """

    def __init__(
        self,
        model: Any,
        plan: CachePlan,
        attributes: Sequence[VoteAttentionAttributes],
        last_logits: bool,
        row_size: int = 0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.model, self.plan, self.attributes, self.last_logits = model, plan, attributes, last_logits
        self.operator = VOTE_ATTENTION.with_state(plan.caches[0].extra if plan.caches else ())
        self.layers: Sequence[int] = ()
        self.token_logits = TokenLogits(model)
        self.image_rows = ImageRows(model, row_size) if row_size else None

    def forward(
        self, input_ids: Tensor, query_length: Tensor, past_length: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        step = torch.arange(input_ids.shape[1], device=input_ids.device)
        position = rotated_by = past_length + step
        past_tensors = iter(past)
        if self.image_rows is not None:
            self.image_rows.rows, self.image_rows.places = next(past_tensors), next(past_tensors)
        offsets = next(past_tensors) if self.plan.rotary_offset else None
        images = None
        if self.bidirectional:
            assert self.image_rows is not None and self.image_rows.places is not None
            images = ImageLanes.of(next(past_tensors), self.image_rows.places, position)
        state = {i: {f"past_{x.name}": next(past_tensors) for x in self.plan.caches[i].state} for i in self.layers}
        places = [(x.layer, tensor.name) for x in self.plan.states for tensor in x.state]
        recurrent = dict(zip(places, past_tensors, strict=True))
        past_offset = recurrent.pop(OFFSET, None)
        states = RecurrentCache(self.model.config.model_type, recurrent, query_length)
        if offsets is not None and past_offset is not None:
            rotated_by = position + past_offset
            # This too is computed from what was read before it is overwritten (see below).
            added = offsets[:, 3].gather(1, torch.clamp(query_length - 1, min=0))
            states.present[OFFSET] = ((rotated_by - position)[:, :1] + added).to(past_offset.dtype)
            rotated_by = rotated_by + offsets[:, :3].transpose(0, 1)
        fitting = query_length
        if self.plan.cache_positions:
            first = self.plan.caches[0]
            used = used_slots(state[self.layers[0]]["past_votes"], first.kv_heads)
            rotated_by = used + step
            # No caller brings more tokens than there is room for. The minimum makes this value depend on the votes, so
            # that the graph reads the votes before it overwrites them.
            fitting = torch.minimum(query_length, first.capacity[0] - used)
        capacity = [cache.capacity for cache in self.plan.caches]
        cached = (self.plan, self.attributes, position, fitting, images, capacity)
        tracing = _Tracing(self.operator, state, *cached)
        self.token_logits.query_length = query_length if self.last_logits else None
        with attending(tracing, position), recurring(self.model, states), complex_as_pairs():
            logits = self.model(input_ids=input_ids, position_ids=rotated_by, **states.as_arguments(self.model)).logits
        present = [x for i in self.layers for x in tracing.present[i]]
        present += [states.present[place] for place in places]
        # This is computed from `position`, because both lengths may be bound to one buffer, which must be read before
        # it is overwritten.
        return (logits.float(), position[:, :1] + query_length, *present)


def initializer_names(model: Any) -> dict[str, str]:
    return {name: f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}


def trace_decoder(
    model: Any,
    mode: FakeTensorMode,
    plan: CachePlan,
    *,
    last_logits: bool,
    attributes: Sequence[VoteAttentionAttributes] = (),
    row_size: int = 0,
    bidirectional: bool = False,
) -> ir.Model:
    """Trace decoder.onnx as an optimized ONNX IR model with one VoteAttention node for each layer that has a KV cache.

    The VoteAttention nodes have only the number of their layer as an attribute. Initializers have no data;
    `initializer_names` returns their names. If several layers compute the same function, only the first two are traced.
    All later layers are copies of the first; the second is compared with a copy, to check the copying.
    """
    decoder = _Decoder(model, plan, attributes, last_logits, row_size, bidirectional).eval()
    deep = decoder.image_rows is not None and decoder.image_rows.deep  # the first layers compute another function
    alike = not plan.attention_layers and not deep and len({cache.key_shift for cache in plan.caches}) == 1
    layers = find_layers(model, mode) if alike else None
    if layers and len(layers.traced()) < len(plan.caches):
        with contextlib.suppress(UsageError):  # the trace of the whole model below raises the error again
            traced = _trace_some(decoder, mode, plan, layers)
            if replicate_layers(traced, layers, plan):
                return traced
    return _trace(decoder, mode, plan, range(len(plan.caches)))


def _trace_some(decoder: _Decoder, mode: FakeTensorMode, plan: CachePlan, layers: Layers) -> ir.Model:
    numbers = layers.traced()
    rest = [i for i in range(len(plan.caches)) if i not in numbers]
    border = torch.ops.kvexport.layer_border

    def between_borders(i: int, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return border(forward(border(hidden, layer=i, end=0), *args, **kwargs), layer=i, end=1)

    with wrapped({i: layers.modules[i] for i in numbers}, between_borders), left_out(decoder.model, layers, rest):
        return _trace(decoder, mode, plan, numbers)


def _trace(decoder: _Decoder, mode: FakeTensorMode, plan: CachePlan, layers: Sequence[int]) -> ir.Model:
    decoder.layers = layers
    batch, tokens = Dim("batch"), Dim("tokens")
    with mode:
        ids = torch.zeros(2, 3, dtype=torch.int64)
        query_length, past_length = (torch.zeros(2, 1, dtype=torch.int64) for _ in range(2))
        state = [
            torch.zeros(shape, dtype=getattr(torch, plan.caches[i].dtypes()[kind].name))
            for i in layers
            for kind, shape in plan.caches[i].shapes(2).items()
        ]
        state += [
            torch.zeros(shape, dtype=getattr(torch, x.dtypes()[name].name))
            for x in plan.states
            for name, shape in x.shapes(2).items()
        ]
        images: dict[str, tuple[Tensor, dict[int, Any]]] = {}  # as in `CallImages`
        if decoder.image_rows is not None:
            images["image_rows"] = torch.zeros(4, decoder.image_rows.size), {0: Dim("rows")}
            images["image_places"] = torch.zeros(2, 3, dtype=torch.int64), {0: batch, 1: tokens}
        if plan.rotary_offset:
            images["image_offsets"] = torch.zeros(2, 4, 3, dtype=torch.int64), {0: batch, 2: tokens}
        if decoder.bidirectional:
            lanes = Dim("lanes", min=3)  # the graph takes fewer too
            images["image_lanes"] = torch.zeros(5, dtype=torch.int64), {0: lanes}
    inputs = (ids, query_length, past_length, *(x for x, _ in images.values()), *state)
    image_shapes = [shape for _, shape in images.values()]
    shapes = ({0: batch, 1: tokens}, {0: batch}, {0: batch}, (*image_shapes, *({0: batch} for _ in state)))

    operator = decoder.operator
    optional = [x.name for x in operator.inputs if x.optional]
    translations = {
        _attention_placeholder(operator): onnx_operator(
            operator.name, operator.input_names, operator.output_names, ["layer"], optional
        ),
        LINEAR_ATTENTION: onnx_operator(
            linear_attention.OPERATOR,
            linear_attention.INPUTS,
            linear_attention.OUTPUTS,
            linear_attention.ATTRIBUTES,
            linear_attention.OPTIONAL,
        ),
        torch.ops.kvexport.layer_border.default: onnx_operator(BORDER, ["hidden"], ["same"], ["layer", "end"]),
        EXPERTS: onnx_operator(
            "Experts", ExpertsForm(bias=1).inputs, ["output"], EXPERTS_ATTRIBUTES, ["first_bias", "down_bias"]
        ),
    }
    tensors: list[tuple[int | str, StateTensor]] = [(i, x) for i in layers for x in plan.caches[i].state]
    tensors += [(layer.place, x) for layer in plan.states for x in layer.state]
    try:
        with mode:
            graph = to_onnx(
                decoder,
                inputs,
                shapes,
                translations,
                input_names=[*("input_ids", "query_length", "past_length"), *images, *(x.past(i) for i, x in tensors)],
                output_names=["logits", "present_length", *(x.present(i) for i, x in tensors)],
            )
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{decoder.model.config.model_type} cannot be traced: {_reason(error)}") from error
    _optimize(graph, initializer_names(decoder.model).values())
    _shape_experts(graph, decoder.model)
    return graph


def _reason(error: Exception) -> str:
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    if "complex" in str(first).lower() or "complex" in str(error).lower():
        return "it computes with complex numbers (as some rotary embeddings do), which ONNX operators do not take"
    return f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}"


def _shape_experts(graph: ir.Model, model: Any) -> None:
    names = initializer_names(model)
    for name, layout in expert_layouts(model).items():
        value = graph.graph.initializers.get(names.get(name, ""))  # None for the experts of an image encoder
        if value is not None:
            assert value.shape is not None
            value.shape = ir.Shape(layout.artifact_shape(value.shape.numpy()))


def _optimize(model: ir.Model, parameters: Iterable[str]) -> None:
    # Parameters lose their data before the passes, because constant folding would hold every transposed matrix in
    # memory.
    for name in parameters:
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = None
    optimize(model)
    with quiet_exporter():
        optimizer.remove_unused_nodes(model)
        CommonSubexpressionEliminationPass()(model)  # else each fused RotaryEmbedding has its own sines and cosines


def onnx_operator(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Sequence[str] | Mapping[str, str],
    optional: Sequence[str] = (),
    domain: str = DOMAIN,
) -> Any:
    """Return the ONNX operator for a custom PyTorch operator; `optional` names the inputs that may be absent."""
    types = {"int": OpSchema.AttrType.INT, "float": OpSchema.AttrType.FLOAT, "str": OpSchema.AttrType.STRING}
    typed = attributes if isinstance(attributes, Mapping) else dict.fromkeys(attributes, "int")
    kinds = ["tensor(float)", "tensor(float16)", "tensor(int32)", "tensor(int64)"]
    option = OpSchema.FormalParameterOption
    formal = [
        OpSchema.FormalParameter(p, f"T_{p}", "", param_option=option.Optional if p in optional else option.Single)
        for p in (*inputs, *outputs)
    ]
    schema = OpSchema(
        name,
        domain,
        VERSION,
        inputs=formal[: len(inputs)],
        outputs=formal[len(inputs) :],
        type_constraints=[(f"T_{p}", kinds, "") for p in (*inputs, *outputs)],
        attributes=[OpSchema.Attribute(a, types[kind], "") for a, kind in typed.items()],
    )
    return values.Op(values.Opset(domain, VERSION), name, schema)
