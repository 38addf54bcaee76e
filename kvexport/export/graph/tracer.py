"""The decoder graph: a Hugging Face decoder traced without its weights, its attention replaced by VoteAttention
nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from onnxscript import optimizer, values
from onnxscript.rewriter import onnx_fusions
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from kvexport.cache import STATE, CachePlan, LayerGeometry
from kvexport.errors import UsageError
from kvexport.export.graph.layers import Layers, find_layers, left_out, wrapped
from kvexport.export.graph.replicate import BORDER, replicate_layers
from kvexport.export.model.attention_hook import PassThroughCache, TokenLogits, attending
from kvexport.methods.base import Method
from kvexport.ops.onnx_function import (
    DOMAIN,
    VERSION,
    VOTE_ATTENTION_INPUTS,
    VOTE_ATTENTION_OUTPUTS,
)
from kvexport.ops.to_onnx import to_onnx
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.quiet import quiet_exporter


def layer_attributes(method: Method, layer: LayerGeometry) -> VoteAttentionAttributes:
    """A layer's VoteAttention: what the model fixes and what the method chooses."""
    return VoteAttentionAttributes(
        layer.scale, method.vote_exponent, method.statistics, layer.sliding_window, layer.softcap
    )


# Placeholders that only ever stand in a trace: one for a layer's attention, one for the place where the hidden state
# enters or leaves a layer of which copies will be made.
torch.library.define(
    "kvexport::vote_attention",
    f"({', '.join(f'Tensor {name}' for name in VOTE_ATTENTION_INPUTS)}, Tensor? sink_logits, int layer)"
    f" -> ({', '.join('Tensor' for _ in VOTE_ATTENTION_OUTPUTS)})",
)
torch.library.define("kvexport::layer_border", "(Tensor hidden, *, int layer, int leaves) -> Tensor")


def _attended(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, query_length: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *state, _sink_logits, _layer = rest
    return (query.new_empty(*query.shape[:3], value.shape[3]), *(torch.empty_like(x) for x in state))


torch.library.register_fake("kvexport::vote_attention", _attended)
torch.library.register_fake("kvexport::layer_border", lambda hidden, *, layer, leaves: torch.empty_like(hidden))


class _Tracing:
    """Puts one VoteAttention placeholder per layer into the trace and collects its present state."""

    def __init__(self, position: Tensor, query_length: Tensor, past: dict[int, Sequence[Tensor]]) -> None:
        self.position, self.query_length, self.past = position, query_length, past
        self.present: dict[int, tuple[Tensor, ...]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        result = torch.ops.kvexport.vote_attention(
            query, key, value, self.position, self.query_length, *self.past[layer], options.get("s_aux"), layer
        )
        self.present[layer] = result[1:]
        output: Tensor = result[0]
        return output

    def mask(self, mask_function: Any) -> Any:
        return None


class _Decoder(nn.Module):
    """(input_ids, query_length, past_length, past state...) -> (logits, present_length, present state...), the state
    that of `layers`."""

    def __init__(self, model: Any, last_logits: bool) -> None:
        super().__init__()
        self.model, self.last_logits = model, last_logits
        self.layers: Sequence[int] = ()
        self.token_logits = TokenLogits(model)

    def forward(
        self, input_ids: Tensor, query_length: Tensor, past_length: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        position = past_length + torch.arange(input_ids.shape[1], device=input_ids.device)
        tracing = _Tracing(position, query_length, {i: past[5 * n : 5 * n + 5] for n, i in enumerate(self.layers)})
        self.token_logits.query_length = query_length if self.last_logits else None
        with attending(tracing):
            logits = self.model(
                input_ids=input_ids, position_ids=position, past_key_values=PassThroughCache(), use_cache=True
            ).logits
        present = [x for i in self.layers for x in tracing.present[i]]
        # Computed from `position`, so that whoever binds both lengths to one buffer cannot have it overwritten before
        # it is read.
        return (logits.float(), position[:, :1] + query_length, *present)


def initializer_names(model: Any) -> dict[str, str]:
    """{parameter of `model`: initializer of its trace}."""
    return {name: f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}


def trace_decoder(model: Any, mode: FakeTensorMode, plan: CachePlan, *, last_logits: bool) -> ir.Model:
    """`decoder.onnx` as an optimized ONNX IR model with one VoteAttention node per layer, carrying only its layer's
    number. Initializers without data are those of `initializer_names`. Layers that do the same are traced once, and
    once more to be sure. Raises UsageError where the model cannot be traced."""
    decoder = _Decoder(model, last_logits).eval()
    layers = find_layers(model, mode)
    if layers and len(layers.traced()) < len(plan.layers):
        with contextlib.suppress(UsageError):  # what cannot be traced at all, the trace of the whole says
            traced = _trace_some(decoder, mode, plan, layers)
            if replicate_layers(traced, layers, plan):
                return traced
    return _trace(decoder, mode, plan, range(len(plan.layers)))


def _trace_some(decoder: _Decoder, mode: FakeTensorMode, plan: CachePlan, layers: Layers) -> ir.Model:
    """The decoder with no layers but `layers.traced()`, each between borders."""
    wanted = layers.traced()
    rest = [i for i in range(len(plan.layers)) if i not in wanted]
    border = torch.ops.kvexport.layer_border

    def between_borders(i: int, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return border(forward(border(hidden, layer=i, leaves=0), *args, **kwargs), layer=i, leaves=1)

    with wrapped({i: layers.modules[i] for i in wanted}, between_borders), left_out(decoder.model, layers, rest):
        return _trace(decoder, mode, plan, wanted)


def _trace(decoder: _Decoder, mode: FakeTensorMode, plan: CachePlan, wanted: Sequence[int]) -> ir.Model:
    """The decoder, which has the layers `wanted`."""
    decoder.layers = wanted
    batch, tokens = Dim("batch"), Dim("tokens")
    with mode:
        ids = torch.zeros(2, 3, dtype=torch.int64)
        query_length, past_length = (torch.zeros(2, 1, dtype=torch.int64) for _ in range(2))
        state = [
            torch.zeros(shape, dtype=getattr(torch, plan.layers[i].dtypes()[kind].name))
            for i in wanted
            for kind, shape in plan.layers[i].shapes(2).items()
        ]
    inputs = (ids, query_length, past_length, *state)
    shapes = ({0: batch, 1: tokens}, {0: batch}, {0: batch}, tuple({0: batch} for _ in state))

    vote_attention = _operator(
        "VoteAttention", [*VOTE_ATTENTION_INPUTS, "sink_logits"], VOTE_ATTENTION_OUTPUTS, ["layer"], "sink_logits"
    )
    translations = {
        torch.ops.kvexport.vote_attention.default: vote_attention,
        torch.ops.kvexport.layer_border.default: _operator(BORDER, ["hidden"], ["same"], ["layer", "leaves"]),
    }
    names = [f"{i}.{kind}" for i in wanted for kind in STATE]
    try:
        with mode:
            graph = to_onnx(
                decoder,
                inputs,
                shapes,
                translations,
                input_names=[
                    "input_ids",
                    "query_length",
                    "past_length",
                    *(f"past_key_values.{name}" for name in names),
                ],
                output_names=["logits", "present_length", *(f"present.{name}" for name in names)],
            )
    except UsageError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"{decoder.model.config.model_type} cannot be traced: {type(error).__name__}: {reason}"
        ) from error
    _optimize(graph, initializer_names(decoder.model).values())
    return graph


def _optimize(model: ir.Model, parameters: Iterable[str]) -> None:
    # Without their data, so that no pass can load them: folding alone would hold every transposed matrix in memory.
    for name in parameters:
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = None
    with quiet_exporter():
        optimizer.optimize(model)
        onnx_fusions.fuse(model)
        optimizer.remove_unused_nodes(model)
        CommonSubexpressionEliminationPass()(model)  # each fused RotaryEmbedding has a sine and cosine of its own


def _operator(
    name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str], optional: str = ""
) -> Any:
    """How a placeholder becomes a node of domain kvexport. Every parameter has a type variable of its own."""
    kinds = ["tensor(float)", "tensor(float16)", "tensor(int32)", "tensor(int64)"]
    option = OpSchema.FormalParameterOption
    formal = [
        OpSchema.FormalParameter(p, f"T_{p}", "", param_option=option.Optional if p == optional else option.Single)
        for p in (*inputs, *outputs)
    ]
    schema = OpSchema(
        name,
        DOMAIN,
        VERSION,
        inputs=formal[: len(inputs)],
        outputs=formal[len(inputs) :],
        type_constraints=[(f"T_{p}", kinds, "") for p in (*inputs, *outputs)],
        attributes=[OpSchema.Attribute(a, OpSchema.AttrType.INT, "") for a in attributes],
    )
    return values.Op(values.Opset(DOMAIN, VERSION), name, schema)
