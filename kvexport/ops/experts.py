"""The operator Experts: the expert MLPs of a mixture-of-experts layer as one ONNX node.

Each token runs only the experts that the router picked for it. A router picks `k` experts for every token and gives
each a weight. The router stays outside of the operator Experts: it is traced as ordinary nodes, so any router fits. For
a token x the operator computes

    first  = W_first[e] x + b_first[e]                     gate rows, then up rows, where experts have a gate
    inner  = activation(first)                             see `ExpertsForm`
    output = sum over the chosen e of weight[e] (W_down[e] inner + b_down[e])

`experts` defines the operator in PyTorch. `experts_function` is the ONNX function that a runtime without a kernel runs.
A kernel reads only the weights of the chosen experts. Weights may be packed (2 to 8 bits) like those of Linear
(`kvexport.ops.linear`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.parser
import torch
from torch import Tensor
from torch.nn import functional

from kvexport.ops.linear import PACKED_ATTRIBUTES, dequantized, parts_after
from kvexport.ops.onnx_function import DOMAIN

# multiply(weight, data, result): the ONNX nodes of the product of one expert, whose number is the value `expert`.
Multiply = Callable[[str, str, str], list[str]]
WEIGHTS = ("first", "down")
"""The weights of an Experts node, in their order."""


@dataclass(frozen=True)
class ExpertsForm:
    """The computation of a layer's experts between their two matrix products.

    Attributes:
        activation: The function that is applied to the gate, or to the first product if experts have no gate.
        gate: Whether the first product has outputs of a gate and of an up projection: ``inner = activation(gate) (up +
            up_offset)``.
        slope: The factor s of ``silu(x) = x sigmoid(s x)``.
        limit: Before the activation, gates are clamped to at most `limit`, and ups to [-limit, limit]; 0: no clamp.
        up_offset: A constant that is added to the clamped ups.
        bias: Whether both products have biases.
        packed: For the weights `first` and `down`, the number of the packed format (`PackedFormat.kind`) or 0; empty if
            no weight is packed.
        group: For the weights `first` and `down`, the number of inputs that share a scale; empty if no weight is
            packed.
        float_input: Whether kernels multiply packed weights with the unrounded input, instead of rounding it to int8.
    """

    activation: str = "silu"
    gate: int = 1
    slope: float = 1.0
    limit: float = 0.0
    up_offset: float = 0.0
    bias: int = 0
    packed: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    float_input: int = 0

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs of an Experts node, in the node's order."""
        names = ["input", "indices", "weights"]
        for weight in WEIGHTS:
            names += [*self.weight_inputs(weight), *[f"{weight}_bias"] * self.bias]
        return names

    def weight_inputs(self, weight: str) -> list[str]:
        """Return the node's inputs for the weight ``first`` or ``down``: the weight, its scales and other parts."""
        kind = self.packed[WEIGHTS.index(weight)] if self.packed else 0
        return [weight, *(f"{weight}_{suffix}" for suffix in parts_after(kind))]

    @property
    def attributes(self) -> dict[str, Any]:
        """The ONNX attributes, by name, of a node Experts with this activation, gate and layout of weights."""
        values = {name: value for name, value in vars(self).items() if self.packed or name not in PACKED_ATTRIBUTES}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def overload(self) -> str:
        """The overload name of the node's ONNX function: it tells functions for different attributes apart."""
        numbers = {"slope": (self.slope, 1.0), "limit": (self.limit, 0.0), "offset": (self.up_offset, 0.0)}
        named = [f"{name}{value:.6g}" for name, (value, default) in numbers.items() if value != default]
        for name in PACKED_ATTRIBUTES if self.packed else ():
            value = getattr(self, name)
            numbers_of = value if isinstance(value, tuple) else (value,)
            named += [name + ".".join(map(str, numbers_of))] if any(numbers_of) else []
        return "_".join([self.activation, *["gate"] * self.gate, *["bias"] * self.bias, *named])

    def inner(self, first: Tensor) -> Tensor:
        """Return the activation of the first product: [..., n] from [..., n], or from [..., 2n] (gate and up)."""
        if not self.gate:
            return self._activated(first)
        gate, up = first.chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self._activated(gate) * (up + self.up_offset if self.up_offset else up)

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "silu":
            return x * torch.sigmoid(x if self.slope == 1.0 else self.slope * x)
        if self.activation == "relu_squared":
            return functional.relu(x).square()
        if self.activation == "relu":
            return functional.relu(x)
        return functional.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


def experts(
    input: Tensor,
    indices: Tensor,
    weights: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    form: ExpertsForm,
) -> Tensor:
    """Return the outputs of the experts that a router chose for each token, summed with the router's weights.

    Args:
        input: [N, hidden], a vector for each of N tokens.
        indices: [N, k] int64, the k experts of each token; no expert twice.
        weights: [N, k], the router's factors of these experts.
        first: [E, 2 inner, hidden], the first weights of E experts, the gate's outputs before the ups'; [E, inner,
            hidden]
            without a gate.
        first_bias: [E, 2 inner] or [E, inner], where the form has biases.
        down: [E, hidden, inner], the second weights of the experts.
        down_bias: [E, hidden], where the form has biases.
        form: The computation between the two products.

    Returns:
        [N, hidden] in the type of `input`; the sum over experts is computed in float32 (in float64 for float64).
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    total = torch.zeros_like(input, dtype=wide)
    for e in range(down.shape[0]):
        tokens, places = torch.nonzero(indices == e, as_tuple=True)
        if not len(tokens):
            continue
        product = functional.linear(input[tokens], first[e], None if first_bias is None else first_bias[e])
        output = functional.linear(form.inner(product), down[e], None if down_bias is None else down_bias[e])
        total.index_add_(0, tokens, output.to(wide) * weights[tokens, places].to(wide)[:, None])
    return total.to(input.dtype)


def experts_function(form: ExpertsForm, multiply: Multiply | None = None) -> onnx.FunctionProto:
    """Return the ONNX function of an Experts node; its inputs and outputs are those of `experts`.

    The function loops over the experts and skips experts that no token chose. Each expert multiplies only the inputs of
    its own tokens. ONNX cannot index tensors of 4 bits, so packed weights of all experts are dequantized before the
    loop. All floating-point tensors have one type. If `multiply` is given, this function makes the nodes for products
    with packed weights, and no weight is dequantized.
    """
    before: list[str] = []
    dense = {weight: weight for weight in WEIGHTS}
    for weight in () if multiply else WEIGHTS:
        i = WEIGHTS.index(weight)
        kind, group = (form.packed[i], form.group[i]) if form.packed else (0, 0)
        lines, dense[weight] = dequantized(form.weight_inputs(weight), kind, group, axis=2, like="input")
        before += lines
    unpacked = "\n".join(before)
    body = f"""
        {unpacked}
        shape = Shape (input)
        zeros = ConstantOfShape <value = float[1] {{0}}> (shape)
        experts_1 = Shape <start = 0, end = 1> ({dense["down"]})
        first_axis = Constant <value_ints = [0]> ()
        last_axis = Constant <value_ints = [1]> ()
        trips = Squeeze (experts_1, first_axis)
        always = Constant <value = bool {{1}}> ()
        number_type = Constant <value_int = 0> ()
        numbers = CastLike (indices, number_type)
        factors = Cast <to = 1> (weights)
        no_factor = Constant <value = float {{0}}> ()
        total = Loop (trips, always, zeros) <body = each_expert (int64 expert, bool go, float[n, h] sum_in)
            => (bool go_on, float[n, h] sum_out) {{
            go_on = Identity (go)
            chosen = Equal (numbers, expert)
            chosen_number = Cast <to = 6> (chosen)
            chosen_by = ReduceMax <keepdims = 0> (chosen_number, last_axis)
            chosen_by_any = ReduceMax <keepdims = 0> (chosen_by)
            is_chosen = Cast <to = 9> (chosen_by_any)
            sum_out = If (is_chosen) <
                then_branch = run () => (float[n, h] sum_then) {{
                    tokens_1 = NonZero (chosen_by)
                    tokens = Squeeze (tokens_1, first_axis)
                    rows = Gather <axis = 0> (input, tokens)
                    chosen_factors = Where (chosen, factors, no_factor)
                    all_factors = ReduceSum <keepdims = 1> (chosen_factors, last_axis)
                    own_factors = Gather <axis = 0> (all_factors, tokens)
                    {_product("rows", "first", dense["first"], form, multiply)}
                    {_inner(form)}
                    {_product("inner", "down", dense["down"], form, multiply)}
                    wide = Cast <to = 1> (down_sum)
                    weighted = Mul (wide, own_factors)
                    places = Unsqueeze (tokens, last_axis)
                    sum_then = ScatterND <reduction = "add"> (sum_in, places, weighted)
                }},
                else_branch = skip () => (float[n, h] sum_else) {{ sum_else = Identity (sum_in) }}
            >
        }}>
        output = CastLike (total, input)"""
    signature = f"Experts ({', '.join(form.inputs)}) => (output)"
    function = onnx.parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["": 23]>\n{signature}\n{{{body}\n}}')
    function.overload = form.overload
    return function


def _product(data: str, weight: str, dense: str, form: ExpertsForm, multiply: Multiply | None) -> str:
    result = f"{weight}_product" if form.bias else f"{weight}_sum"
    lines = (
        multiply(weight, data, result)
        if multiply
        else [
            f"{weight}_one = Gather <axis = 0> ({dense}, expert)",
            f"{weight}_turned = Transpose <perm = [1, 0]> ({weight}_one)",
            f"{result} = MatMul ({data}, {weight}_turned)",
        ]
    )
    if not form.bias:
        return "\n".join(lines)
    lines += [
        f"{weight}_own_bias = Gather <axis = 0> ({weight}_bias, expert)",
        f"{weight}_sum = Add ({weight}_product, {weight}_own_bias)",
    ]
    return "\n".join(lines)


def _inner(form: ExpertsForm) -> str:
    lines, gate = [], "first_sum"

    def constant(name: str, value: float) -> None:
        lines.append(f"{name}_float = Constant <value_float = {value!r}> ()")
        lines.append(f"{name} = CastLike ({name}_float, input)")

    if form.gate:
        lines.append("gate, up = Split <axis = -1, num_outputs = 2> (first_sum)")
        gate, up = "gate", "up"
        if form.limit:
            constant("most", form.limit)
            constant("least", -form.limit)
            lines += ["low_gate = Min (gate, most)", "low_up = Min (up, most)", "near_up = Max (low_up, least)"]
            gate, up = "low_gate", "near_up"
        if form.up_offset:
            constant("up_offset", form.up_offset)
            lines.append(f"raised_up = Add ({up}, up_offset)")
            up = "raised_up"
    activated = "activated" if form.gate else "inner"
    if form.activation == "silu":
        inside = gate
        if form.slope != 1.0:
            constant("slope", form.slope)
            lines.append(f"sloped = Mul ({gate}, slope)")
            inside = "sloped"
        lines += [f"sigmoid = Sigmoid ({inside})", f"{activated} = Mul ({gate}, sigmoid)"]
    elif form.activation == "relu_squared":
        lines += [f"positive = Relu ({gate})", f"{activated} = Mul (positive, positive)"]
    elif form.activation == "relu":
        lines.append(f"{activated} = Relu ({gate})")
    else:
        approximate = "tanh" if form.activation == "gelu_tanh" else "none"
        lines.append(f'{activated} = Gelu <approximate = "{approximate}"> ({gate})')
    if form.gate:
        lines.append(f"inner = Mul (activated, {up})")
    return "\n".join(lines)
