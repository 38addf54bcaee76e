"""The decoder graph: a Hugging Face decoder traced without its weights, its attention replaced by VoteAttention nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript import values
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from kvexport.cache import CachePlan, LayerGeometry
from kvexport.errors import UsageError
from kvexport.export.attention_hook import PassThroughCache, TokenLogits, attending
from kvexport.methods.base import Method
from kvexport.ops.onnx_function import (
    DOMAIN,
    OPSET,
    VERSION,
    VOTE_ATTENTION_INPUTS,
    VOTE_ATTENTION_OUTPUTS,
)
from kvexport.ops.vote_attention import VoteAttentionAttributes
from kvexport.quiet import quiet_exporter


def layer_attributes(method: Method, layer: LayerGeometry) -> VoteAttentionAttributes:
    """A layer's VoteAttention: what the model fixes and what the method chooses."""
    return VoteAttentionAttributes(layer.scale, method.vote_exponent, method.statistics, layer.sliding_window, layer.softcap)


@torch.library.custom_op("kvexport::vote_attention", mutates_args=())
def _vote_attention_op(
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
    sink_logits: Tensor | None,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    raise AssertionError("a placeholder that only ever stands in a trace")


@_vote_attention_op.register_fake
def _(
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
    sink_logits: Tensor | None,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    output = query.new_empty(*query.shape[:3], value.shape[3])
    state = (past_key, past_value, past_votes, past_score, past_position)
    return (output, *(torch.empty_like(x) for x in state))  # type: ignore[return-value]


class _Tracing:
    """Puts one VoteAttention placeholder per layer into the trace and collects its present state."""

    def __init__(self, position: Tensor, query_length: Tensor, past: Sequence[Tensor]) -> None:
        self.position, self.query_length, self.past = position, query_length, past
        self.present: dict[int, tuple[Tensor, ...]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        state = self.past[5 * layer : 5 * layer + 5]
        result = _vote_attention_op(query, key, value, self.position, self.query_length, *state, options.get("s_aux"), layer)
        self.present[layer] = result[1:]
        output: Tensor = result[0]
        return output

    def mask(self, mask_function: Any) -> Any:
        return None


class _Decoder(nn.Module):
    """(input_ids, query_length, past_length, past state...) -> (logits, present_length, present state...)."""

    def __init__(self, model: Any, layers: int, last_logits: bool) -> None:
        super().__init__()
        self.model, self.layers, self.last_logits = model, layers, last_logits
        self.token_logits = TokenLogits(model)

    def forward(self, input_ids: Tensor, query_length: Tensor, past_length: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        position = past_length + torch.arange(input_ids.shape[1], device=input_ids.device)
        tracing = _Tracing(position, query_length, past)
        self.token_logits.query_length = query_length if self.last_logits else None
        with attending(tracing):
            logits = self.model(input_ids=input_ids, position_ids=position, past_key_values=PassThroughCache(), use_cache=True).logits
        present = [x for i in range(self.layers) for x in tracing.present[i]]
        # Computed from `position`, so that whoever binds both lengths to one buffer cannot have it overwritten before it is read.
        return (logits.float(), position[:, :1] + query_length, *present)


@dataclass(frozen=True)
class TracedDecoder:
    """The graph, whose initializers named in `parameters` still have no data: {initializer name: checkpoint tensor name}, and their
    shapes."""

    model: ir.Model
    parameters: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


def trace_decoder(model: Any, mode: FakeTensorMode, plan: CachePlan, *, last_logits: bool) -> TracedDecoder:
    """`decoder.onnx` as an ONNX IR model with one VoteAttention node per layer, carrying only its layer's number."""
    batch, tokens = Dim("batch"), Dim("tokens")
    with mode:
        ids = torch.zeros(2, 3, dtype=torch.int64)
        query_length, past_length = (torch.zeros(2, 1, dtype=torch.int64) for _ in range(2))
        state = [
            torch.zeros(shape, dtype=getattr(torch, layer.dtypes()[kind].name))
            for layer in plan.layers
            for kind, shape in layer.shapes(2).items()
        ]
    names = [name for name, *_ in plan.state_names()]
    present = [name for _, name, *_ in plan.state_names()]
    decoder = _Decoder(model, len(plan.layers), last_logits).eval()
    inputs = (ids, query_length, past_length, *state)
    shapes = ({0: batch, 1: tokens}, {0: batch}, {0: batch}, tuple({0: batch} for _ in state))
    try:
        with quiet_exporter(), torch.no_grad(), mode:
            exported = torch.export.export(
                decoder, inputs, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
            )
            program = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                custom_translation_table={torch.ops.kvexport.vote_attention.default: _translation()},
                input_names=["input_ids", "query_length", "past_length", *names],
                output_names=["logits", "present_length", *present],
            )
    except UsageError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{model.config.model_type} cannot be traced: {type(error).__name__}: {reason}") from error
    assert program is not None
    parameters = _parameters(exported, program.model)
    return TracedDecoder(program.model, parameters, {name: tuple(exported.state_dict[name].shape) for name in parameters})


def _parameters(exported: Any, model: ir.Model) -> dict[str, str]:
    """Initializers that the checkpoint must fill. Their names are the module's, less the wrapper's own prefix."""
    fake = torch._subclasses.FakeTensor
    return {name: name.removeprefix("model.") for name in model.graph.initializers if isinstance(exported.state_dict.get(name), fake)}


def _translation() -> Any:
    """How the placeholder becomes a node of domain kvexport."""
    inputs = [OpSchema.FormalParameter(name, "T", "") for name in VOTE_ATTENTION_INPUTS]
    sink = OpSchema.FormalParameter("sink_logits", "T", "", param_option=OpSchema.FormalParameterOption.Optional)
    outputs = [OpSchema.FormalParameter(name, "T", "") for name in VOTE_ATTENTION_OUTPUTS]
    kinds = ["tensor(float)", "tensor(float16)", "tensor(int32)", "tensor(int64)"]
    schema = OpSchema(
        "VoteAttention",
        DOMAIN,
        VERSION,
        inputs=[_loose(p, i) for i, p in enumerate([*inputs, sink])],
        outputs=[_loose(p, 100 + i) for i, p in enumerate(outputs)],
        type_constraints=[(f"T{i}", kinds, "") for i in [*range(11), *range(100, 106)]],
        attributes=[OpSchema.Attribute("layer", OpSchema.AttrType.INT, "")],
    )
    return values.Op(values.Opset(DOMAIN, VERSION), "VoteAttention", schema)


def _loose(parameter: Any, i: int) -> Any:
    """The same parameter with a type variable of its own."""
    return OpSchema.FormalParameter(parameter.name, f"T{i}", "", param_option=parameter.option)
