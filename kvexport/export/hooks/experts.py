"""The experts hook: one function that turns the experts of a Hugging Face decoder into Experts nodes.

transformers calls a registered function for the experts of a layer, with the tokens' hidden states, the experts that
the router chose, and their weights. Routers are traced as ordinary nodes. The function registered here calls a
placeholder operator, which becomes the Experts node of a trace. `experts_form` finds out what an expert computes
between its two matrix products.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kvexport.errors import UsageError
from kvexport.ops.experts import ExpertsForm
from kvexport.schema.operators import EXPERTS_ACTIVATIONS as ACTIVATIONS

IMPLEMENTATION = "kvexport"
TOLERANCE = 1e-10  # in float64, relative to the largest value on the grid
FIRST = {True: "gate_up_proj", False: "up_proj"}  # the experts' first weight, with and without a gate
UNDECLARED: dict[str, dict[str, bool]] = {}  # by class, attributes of experts that do not declare their layout
_forms: WeakKeyDictionary[Any, ExpertsForm] = WeakKeyDictionary()
_chosen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # experts that the module's router picks for a token
ATTRIBUTES = {"activation": "str", "gate": "int", "slope": "float", "limit": "float", "up_offset": "float",
              "bias": "int"}  # fmt: skip
"""The attributes of the placeholder operator of Experts, with their types: fields of `ExpertsForm`."""

torch.library.define(
    "kvexport::experts",
    "(Tensor input, Tensor indices, Tensor weights, Tensor first, Tensor? first_bias, Tensor down, Tensor? down_bias, "
    f"*, {', '.join(f'{kind} {name}' for name, kind in ATTRIBUTES.items())}) -> Tensor",
)
torch.library.register_fake("kvexport::experts", lambda input, *rest, **attributes: torch.empty_like(input))
EXPERTS: Any = torch.ops.kvexport.experts.default


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor of expert weights in a module of transformers.

    An Experts node takes [experts, outputs, inputs], with the outputs of the gate before those of the up projection.
    """

    transposed: bool  # whether the module has [experts, inputs, outputs]
    interleaved: bool  # whether rows of the gate and the up projection alternate, as in gpt-oss

    def artifact_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1]) if self.transposed else shape

    def to_artifact(self, x: Tensor) -> Tensor:
        """Return a tensor of expert weights [experts, ...] from transformers in the layout of an artifact."""
        if self.transposed:
            x = x.transpose(1, 2)
        return torch.cat([x[:, 0::2], x[:, 1::2]], 1) if self.interleaved else x

    def to_module(self, x: Tensor) -> Tensor:
        if self.interleaved:
            x = torch.stack(x.chunk(2, 1), 2).flatten(1, 2)
        return x.transpose(1, 2) if self.transposed else x


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        for attribute, value in UNDECLARED.get(type(module).__name__, {}).items():
            setattr(module, attribute, value)
        if hasattr(module, "is_concatenated") and hasattr(module, "has_gate"):
            yield name, module


def expert_layouts(model: nn.Module) -> dict[str, Layout]:
    """Return the layout of every tensor of expert weights that an Experts node reads, by the parameter's name."""
    layouts = {}
    for prefix, module in expert_modules(model):
        interleaved = module.has_gate and not module.is_concatenated
        first = FIRST[bool(module.has_gate)]
        layouts[f"{prefix}.{first}"] = Layout(module.is_transposed, interleaved)
        layouts[f"{prefix}.down_proj"] = Layout(module.is_transposed, False)
        if module.has_bias:
            layouts[f"{prefix}.{first}_bias"] = Layout(False, interleaved)
            layouts[f"{prefix}.down_proj_bias"] = Layout(False, False)
    return layouts


def chosen_shares(model: nn.Module) -> dict[str, float]:
    """Return the fraction of each parameter of experts that a decode step reads; 1 where no probe ran."""
    shares: dict[str, float] = {}
    for prefix, module in expert_modules(model):
        experts = module.down_proj.shape[0]
        share = _chosen.get(module, experts) / experts
        shares |= {f"{prefix}.{name}": share for name, _ in module.named_parameters(recurse=False)}
    return shares


def find_forms(model: nn.Module) -> None:
    for _, module in expert_modules(model):
        _forms[module] = experts_form(module)


def experts_form(module: Any) -> ExpertsForm:
    """Return what an expert of `module` computes between its products, by trying forms on a grid of values."""
    kind = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise UsageError(f"{kind} normalizes the output of every expert, which the operator Experts does not do")
    with torch.no_grad():
        points = torch.cat([torch.linspace(-12, 12, 97, dtype=torch.float64), torch.tensor([-40.0, 40.0]).double()])
        gate, up = (x.reshape(-1) for x in torch.meshgrid(points, points, indexing="ij"))
        try:
            # Each row has one gate and one up value, so that it is the same in every layout.
            rows = torch.stack([gate, up], 1)
            if module.has_gate and hasattr(module, "_apply_gate"):
                expected = module._apply_gate(rows)[:, 0]
            else:
                expected = module.act_fn(gate) * (up if module.has_gate else 1)
        except Exception as error:
            raise UsageError(f"the activation of {kind} cannot be run on its own: {error}") from error
        for form in _candidates(module):
            value = form.inner(torch.stack([gate, up], 1))[:, 0] if form.gate else form.inner(gate)
            if (value - expected).abs().max() <= TOLERANCE * expected.abs().max():
                return form
    activation = getattr(module, "act_fn", None)
    raise UsageError(
        f"{kind} has an activation ({type(activation).__name__ if activation is not None else '_apply_gate'}) that the "
        f"operator Experts does not have; it has {', '.join(ACTIVATIONS)}, gated or not, with clamps before them"
    )


def _candidates(module: Any) -> Iterator[ExpertsForm]:
    numbers = {float(x) for name, x in vars(module).items() if isinstance(x, (int, float)) and not name.startswith("_")}
    gate, bias = int(module.has_gate), int(module.has_bias)
    for activation in ACTIVATIONS:
        yield ExpertsForm(activation, gate, bias=bias)
    if not gate:
        return
    limits = sorted(x for x in numbers if x > 0)
    for limit in limits:
        for activation in ACTIVATIONS:
            yield ExpertsForm(activation, gate, limit=limit, bias=bias)
        for slope in limits:
            yield ExpertsForm("silu", gate, slope=slope, limit=limit, up_offset=1.0, bias=bias)


def call_experts(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor, chosen: int = 0) -> Tensor:
    """Call the placeholder of an Experts node: hidden states [N, hidden], the chosen experts and weights [N, k].

    `chosen` is the number of experts of a token if it differs from k, because a token has several of the N hidden
    states.
    """
    first = FIRST[bool(module.has_gate)]
    biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in (first, "down_proj")]
    _chosen[module] = chosen or int(indices.shape[-1])
    output: Tensor = EXPERTS(
        hidden, indices, weights, getattr(module, first), biases[0], module.down_proj, biases[1],
        **_forms[module].attributes,
    )  # fmt: skip
    return output


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, call_experts)
