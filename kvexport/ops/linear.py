"""The operator Linear: products of one input with weights in a checkpoint's layout, and the steps around them.

ONNX Runtime's CPU provider computes a MatMul with a transposed weight from a float32 copy of that weight, whatever the
weight's type. The provider runs every small operator around the product as a separate node, each of which takes as long
as the product of one token's input. A kernel of Linear reads weights in the layout of checkpoints, [outputs, inputs]
(``torch.nn.functional.linear``). It computes the steps around a product while the product's outputs are in the
processor's cache: the norm before it, a bias, SiLU's gate, a residual, splitting or joining heads, and the rotary
embedding. A runtime without the kernel runs the ONNX function. `kvexport.export.passes` decides which nodes of an ONNX
graph become a Linear.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.parser

from kvexport.ops.onnx_function import DOMAIN
from kvexport.ops.packed import SUPER

# The inputs that follow a weight, by the lowest three bits of the number in `Form.packed`.
_PACKED: tuple[tuple[str, ...], ...] = (
    (),
    ("scale",),
    ("scale", "zero"),
    ("scale", "minimum"),
    ("scale", "table"),
    ("exponent", "table"),
)
PACKED_ATTRIBUTES = ("packed", "group", "float_input")
# multiply(form, weight, i, rows, result): the ONNX nodes of result = rows x weight^T, with weight number i of a form.
Multiply = Callable[["Form", str, int, str, str], list[str]]


def parts_after(kind: int) -> tuple[str, ...]:
    """Return the names of the inputs that follow a packed weight, by the number of its format (`PackedFormat.kind`).

    The format numbers 0 to 5 are combinations of scale, zero point, minimum and table. The format number is larger by 8
    if scales have super-scales, by 16 or 32 if the upper 1 or 2 bits of the weight's integer codes are stored apart,
    and by 64 if a code has 2 lower bits in place of 4 or 8.
    """
    parts = _PACKED[kind & 7]
    supers = [f"super_{name}" for name in parts if name in ("scale", "minimum")] if kind & 8 else []
    return (*parts, *supers, *["high"] * (_high_bits(kind) > 0))


def _high_bits(kind: int) -> int:
    return kind >> 4 & 3


@dataclass(frozen=True)
class Form:
    """The steps that a Linear node computes beside its matrix products; 0 or False stands for a step that it lacks.

    Attributes:
        input_heads: The number of heads in the input, if heads are a dimension of their own.
        norm: Whether the input vectors of tokens are normalised first (RMSNorm).
        epsilon: The epsilon of the norm.
        output_heads: For each product, the number of heads that its output is split into.
        bias: For each product, whether it has a bias.
        rotated: For each product, whether its heads are rotated (RoPE).
        gate: Whether the product is multiplied with silu of a gate. Only a node with one product has a gate.
        residual: Whether a residual is added. Only a node with one product has a residual.
        packed: For each weight (the gate's comes last), the number of its packed format (`PackedFormat.kind`) or 0;
            empty if no weight is packed.
        group: For each weight (the gate's comes last), the number of inputs that share a scale; empty if no weight is
            packed.
        float_input: Whether kernels multiply packed weights with the unrounded input, instead of rounding it to int8.
        adapted: For each weight (the gate's comes last), whether it takes LoRA adapters; empty if none does.
    """

    input_heads: int = 0
    norm: int = 0
    epsilon: float = 0.0
    output_heads: tuple[int, ...] = (0,)
    bias: tuple[int, ...] = (0,)
    rotated: tuple[int, ...] = (0,)
    gate: int = 0
    residual: int = 0
    packed: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    float_input: int = 0
    adapted: tuple[int, ...] = ()

    @property
    def op_type(self) -> str:
        """The ONNX operator of the node: AdaptedLinear if the node takes LoRA adapters, otherwise Linear."""
        return "AdaptedLinear" if self.adapted else "Linear"

    @property
    def count(self) -> int:
        """The number of matrix products of the node, without the product for SiLU's gate."""
        return len(self.output_heads)

    @property
    def weights(self) -> int:
        """The number of weight matrices of the node: one for each product, and one for the gate if there is a gate."""
        return self.count + self.gate

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs of a Linear node, in the node's order."""
        names = ["input", *["norm"] * self.norm, *["adapter_rows"] * any(self.adapted)]
        for i, bias in enumerate(self.bias):
            names += [*self.weight_inputs(f"weight{i}", i), *[f"bias{i}"] * bias, *self.adapter_inputs(i)]
        gate = [*self.weight_inputs("gate", self.count), *self.adapter_inputs(self.count)] if self.gate else []
        return [*names, *gate, *["residual"] * self.residual, *["cosine", "sine"] * any(self.rotated)]

    def weight_inputs(self, weight: str, i: int) -> list[str]:
        """Return the node inputs for weight matrix number i, by name: the weight, then its scales and other parts."""
        return [weight, *(f"{weight}_{suffix}" for suffix in parts_after(self.packed[i] if self.packed else 0))]

    def adapter_inputs(self, i: int) -> list[str]:
        """Return the node inputs for the LoRA matrices of weight number i, by name; empty if it takes no adapters."""
        return [f"adapter_first{i}", f"adapter_second{i}"] if self.adapted and self.adapted[i] else []

    @property
    def attributes(self) -> dict[str, Any]:
        """The ONNX attributes of a Linear node with these steps, by name."""
        left_out = [*(() if self.packed else PACKED_ATTRIBUTES), *(() if self.adapted else ("adapted",))]
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def overload(self) -> str:
        """The overload name of the node's ONNX function, made of its attributes; equal nodes share one."""
        words = {
            "norm": f"norm{self.epsilon:.6g}" * self.norm,
            "epsilon": "",
            "count": f"{self.count}" * (self.count > 1),
        }
        for name, value in vars(self).items():
            numbers = value if isinstance(value, tuple) else (value,)
            words.setdefault(name, name + ".".join(map(str, numbers)) if any(numbers) else "")
        return "_".join(word for word in words.values() if word)


def multiply(form: Form, weight: str, i: int, rows: str, result: str) -> list[str]:
    """Return ONNX nodes that multiply with one weight by standard operators; a packed weight is dequantized first."""
    lines, dense = _dequantized(form, weight, i)
    turned = result.replace("product", "transposed")
    return [*lines, f"{turned} = Transpose <perm = [1, 0]> ({dense})", f"{result} = MatMul ({rows}, {turned})"]


def linear_function(form: Form, multiply: Multiply = multiply) -> onnx.FunctionProto:
    """Return the ONNX function of a Linear node.

    All tensors have one dtype, except those of packed weights. The inputs and outputs are:

    - input: [..., inputs], or [B, input_heads, T, inputs / input_heads].
    - norm: [inputs], the scale of an RMSNormalization of each token's input vector x.
    - for each product a weight [outputs, inputs] and a bias [outputs]. A packed weight has integers and a scale, with a
      zero point or a minimum, [outputs, inputs / group] each. It stands for (weight - zero) scale or weight scale +
      minimum, computed in float32 and rounded once to the input's type. With a table [16] of int8, a weight of uint4
      stands for table[weight] scale, where an exponent e (uint8) in place of the scale stands for 2^(e - 128).
    - gate: [outputs, inputs]. The product is multiplied with silu(x gate^T).
    - residual: [..., outputs], added last.
    - cosine, sine: [B, T, half a head's size], for heads rotated in planes (f, f + half), like RotaryEmbedding.
    - for each product an output: [..., outputs], or [B, output_heads, T, outputs / output_heads].
    - for a weight that takes LoRA adapters, the matrices of all adapters one below the other: adapter_first [R, inputs]
      and adapter_second [R, outputs], where R is the sum of the adapters' ranks. To the product with this weight the
      node adds ((x adapter_first^T) adapter_rows) adapter_second, where adapter_rows [B, 1, R] is 1 at the ranks of a
      sequence's adapter, and 0 at all others.

    Args:
        form: The steps of the node.
        multiply: Returns the nodes of a product.
    """
    lines, rows, outputs = [], "input", []
    if form.input_heads:
        lines += [
            "tokens_first = Transpose <perm = [0, 2, 1, 3]> (input)",
            "flat = Constant <value_ints = [0, 0, -1]> ()",
            "rows = Reshape (tokens_first, flat)",
        ]
        rows = "rows"
    if form.norm:
        lines += [f"normalized = RMSNormalization <axis = -1, epsilon = {form.epsilon!r}> ({rows}, norm)"]
        rows = "normalized"
    if any(form.rotated):
        lines += ["before_tokens = Constant <value_ints = [1]> ()"]
        lines += [f"{name}_of_heads = Unsqueeze ({name}, before_tokens)" for name in ("cosine", "sine")]
    for i in range(form.count):
        product, output = _product(form, i, rows, multiply)
        lines += product
        outputs.append(output)
    body = "\n".join(lines)
    signature = f"{form.op_type} ({', '.join(form.inputs)}) => ({', '.join(outputs)})"
    function = onnx.parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["": 23]>\n{signature}\n{{\n{body}\n}}')
    function.overload = form.overload
    return function


def _product(form: Form, i: int, rows: str, multiply: Multiply) -> tuple[list[str], str]:
    lines = multiply(form, f"weight{i}", i, rows, f"product{i}")
    changes, last = _adapted(form, i, rows, f"product{i}")
    lines += changes
    if form.bias[i]:
        lines += [f"biased{i} = Add ({last}, bias{i})"]
        last = f"biased{i}"
    if form.gate:
        lines += multiply(form, "gate", form.count, rows, "gate_product")
        changes, gate = _adapted(form, form.count, rows, "gate_product")
        lines += [
            *changes,
            f"sigmoid = Sigmoid ({gate})",
            f"silu = Mul ({gate}, sigmoid)",
            f"gated = Mul (silu, {last})",
        ]
        last = "gated"
    if form.residual:
        lines += [f"sum = Add (residual, {last})"]
        last = "sum"
    if form.output_heads[i]:
        lines += [
            f"apart{i} = Constant <value_ints = [0, 0, {form.output_heads[i]}, -1]> ()",
            f"heads{i} = Reshape ({last}, apart{i})",
            f"heads_first{i} = Transpose <perm = [0, 2, 1, 3]> (heads{i})",
        ]
        last = f"heads_first{i}"
    if form.rotated[i]:
        # In single operators, because a runtime without a kernel of Linear may lack RotaryEmbedding in some type too.
        lines += [
            f"first{i}, second{i} = Split <axis = -1, num_outputs = 2> ({last})",
            f"first_cosine{i} = Mul (first{i}, cosine_of_heads)",
            f"second_sine{i} = Mul (second{i}, sine_of_heads)",
            f"second_cosine{i} = Mul (second{i}, cosine_of_heads)",
            f"first_sine{i} = Mul (first{i}, sine_of_heads)",
            f"rotated_first{i} = Sub (first_cosine{i}, second_sine{i})",
            f"rotated_second{i} = Add (second_cosine{i}, first_sine{i})",
            f"rotated{i} = Concat <axis = -1> (rotated_first{i}, rotated_second{i})",
        ]
        last = f"rotated{i}"
    return lines, last


def _adapted(form: Form, i: int, rows: str, result: str) -> tuple[list[str], str]:
    if not form.adapter_inputs(i):
        return [], result
    return [
        f"narrow_transposed{i} = Transpose <perm = [1, 0]> (adapter_first{i})",
        f"narrow{i} = MatMul ({rows}, narrow_transposed{i})",
        f"selected{i} = Mul (narrow{i}, adapter_rows)",
        f"change{i} = MatMul (selected{i}, adapter_second{i})",
        f"adapted{i} = Add ({result}, change{i})",
    ], f"adapted{i}"


def _dequantized(form: Form, weight: str, i: int) -> tuple[list[str], str]:
    if not form.packed:
        return [], weight
    return dequantized(form.weight_inputs(weight, i), form.packed[i], form.group[i], axis=1, like="input")


def dequantized(parts: Sequence[str], kind: int, group: int, *, axis: int, like: str = "") -> tuple[list[str], str]:
    """Return the ONNX nodes that dequantize a packed weight, and the result's name; no nodes if it is not packed.

    Args:
        parts: The names of the weight and of the inputs that follow it.
        kind: The packed format of the weight, a `PackedFormat.kind`.
        group: The number of consecutive inputs that share a scale.
        axis: The dimension of the inputs, which is the weight's last.
        like: The name of a value whose type the result has; empty for float32.
    """
    weight = parts[0]
    if not kind:
        return [], weight
    inputs = dict(zip(parts_after(kind), parts[1:], strict=True))
    kept = ", ".join(["0"] * axis)
    flat = f"{weight}_flat"
    lines = [
        f"{weight}_by_group = Constant <value_ints = [{kept}, -1, {group}]> ()",
        f"{weight}_last = Constant <value_ints = [-1]> ()",
        f"{flat} = Constant <value_ints = [{kept}, -1]> ()",
    ]
    numbers = weight
    if kind & 64:
        lines += _fields(weight, 2, kept, flat)
        numbers = f"{weight}_numbers"
    for name in ("scale", "minimum"):
        if part := inputs.get(f"super_{name}"):
            block = f"axis = {axis}, block_size = {SUPER // group}"
            operands = [inputs[name], f"{part}_float"]
            if kind & 64 and _high_bits(kind):
                lines += _sixes(inputs[name], kept, flat, part)
                operands = [f"{inputs[name]}_numbers", f"{part}_float", f"{inputs[name]}_zero"]
            lines += [
                f"{part}_float = Cast <to = 1> ({part})",
                f"{inputs[name]}_scaled = DequantizeLinear <{block}> ({', '.join(operands)})",
            ]
            inputs[name] = f"{inputs[name]}_scaled"
    if "table" in inputs:
        looked_up, result = _looked_up(weight, inputs)
        lines += looked_up
    else:
        operands = [numbers, inputs["scale"], *([inputs["zero"]] if "zero" in inputs else [])]
        if _high_bits(kind):
            with_high, operands = _with_high(weight, numbers, kind, inputs, kept)
            lines += with_high
        block = f"axis = {axis}, block_size = {group}, output_dtype = 1"
        result = f"{weight}_float"
        lines.append(f"{result} = DequantizeLinear <{block}> ({', '.join(operands)})")
    if "minimum" in inputs:
        lines += [
            f"{weight}_groups = Reshape ({result}, {weight}_by_group)",
            f"{weight}_minima = Unsqueeze ({inputs['minimum']}, {weight}_last)",
            f"{weight}_least = Cast <to = 1> ({weight}_minima)",
            f"{weight}_above_least = Add ({weight}_groups, {weight}_least)",
            f"{weight}_float_sum = Reshape ({weight}_above_least, {weight}_flat)",
        ]
        result = f"{weight}_float_sum"
    if not like:
        return lines, result
    return [*lines, f"{weight}_cast = CastLike ({result}, {like})"], f"{weight}_cast"


def _fields(name: str, bits: int, kept: str, flat: str) -> list[str]:
    """Return the nodes that unpack a tensor as `packed.unpack_fields` does; the result is called `name`_numbers."""
    fields = range(0, 8, bits)
    return [
        f"{name}_bytes = Constant <value_ints = [{kept}, -1, 1, 4]> ()",
        f"{name}_apart = Reshape ({name}, {name}_bytes)",
        f"{name}_fields = Constant <value = uint8[{len(fields)}, 1] {{{', '.join(map(str, fields))}}}> ()",
        f'{name}_shifted = BitShift <direction = "RIGHT"> ({name}_apart, {name}_fields)',
        f"{name}_mask = Constant <value = uint8[1] {{{(1 << bits) - 1}}}> ()",
        f"{name}_bits = BitwiseAnd ({name}_shifted, {name}_mask)",
        f"{name}_numbers = Reshape ({name}_bits, {flat})",
    ]


def _sixes(name: str, kept: str, flat: str, like: str) -> list[str]:
    """Return the nodes that unpack a tensor which `packed.pack_sixes` packed; the result is called `name`_numbers.

    The nodes also compute `name`_zero, a zero point of 32 for each element of the tensor `like`.
    """
    return [
        f"{name}_bytes = Constant <value_ints = [{kept}, -1, 3]> ()",
        f"{name}_apart = Reshape ({name}, {name}_bytes)",
        f"{name}_mask = Constant <value = uint8[1] {{63}}> ()",
        f"{name}_three = BitwiseAnd ({name}_apart, {name}_mask)",
        f"{name}_six = Constant <value = uint8[1] {{6}}> ()",
        f'{name}_highest = BitShift <direction = "RIGHT"> ({name}_apart, {name}_six)',
        f"{name}_twos = Cast <to = 1> ({name}_highest)",
        f"{name}_powers = Constant <value = float[3, 1] {{1, 4, 16}}> ()",
        f"{name}_sum = MatMul ({name}_twos, {name}_powers)",
        f"{name}_fourth = Cast <to = 2> ({name}_sum)",
        f"{name}_four = Concat <axis = -1> ({name}_three, {name}_fourth)",
        f"{name}_numbers = Reshape ({name}_four, {flat})",
        f"{name}_half = Constant <value = uint8[1] {{32}}> ()",
        f"{name}_shape = Shape ({like})",
        f"{name}_zero = Expand ({name}_half, {name}_shape)",
    ]


def _with_high(
    weight: str, numbers: str, kind: int, inputs: Mapping[str, str], kept: str
) -> tuple[list[str], list[str]]:
    high, bits = inputs["high"], 2 if kind & 64 else 4
    lines = [
        *_fields(high, _high_bits(kind), kept, f"{weight}_flat"),
        f"{high}_shift = Constant <value = uint8[1] {{{bits}}}> ()",
        f'{high}_upper = BitShift <direction = "LEFT"> ({high}_numbers, {high}_shift)',
        f"{weight}_low = Cast <to = 2> ({numbers})",
        f"{weight}_joined = BitwiseOr ({weight}_low, {high}_upper)",
    ]
    operands = [f"{weight}_joined", inputs["scale"]]
    if "minimum" in inputs:
        return lines, operands
    lines += [
        f"{weight}_half = Constant <value = uint8[1] {{{1 << (bits + _high_bits(kind) - 1)}}}> ()",
        f"{weight}_shape = Shape ({inputs['scale']})",
        f"{weight}_zero = Expand ({weight}_half, {weight}_shape)",
    ]
    return lines, [*operands, f"{weight}_zero"]


def _looked_up(weight: str, inputs: Mapping[str, str]) -> tuple[list[str], str]:
    scale = inputs.get("scale") or inputs["exponent"]
    lines = [f"{scale}_float = Cast <to = 1> ({scale})"]
    factor = f"{scale}_float"
    if "exponent" in inputs:
        lines += [
            f"{scale}_bias = Constant <value_float = 128.0> ()",
            f"{scale}_power = Sub ({scale}_float, {scale}_bias)",
            f"{scale}_two = Constant <value_float = 2.0> ()",
            f"{scale}_factor = Pow ({scale}_two, {scale}_power)",
        ]
        factor = f"{scale}_factor"
    lines += [
        f"{weight}_indices = Cast <to = 6> ({weight})",
        f"{weight}_numbers = Gather ({inputs['table']}, {weight}_indices)",
        f"{weight}_values = Cast <to = 1> ({weight}_numbers)",
        f"{weight}_groups = Reshape ({weight}_values, {weight}_by_group)",
        f"{weight}_factors = Unsqueeze ({factor}, {weight}_last)",
        f"{weight}_products = Mul ({weight}_groups, {weight}_factors)",
        f"{weight}_float = Reshape ({weight}_products, {weight}_flat)",
    ]
    return lines, f"{weight}_float"
