"""Linear: products of one input with weights as checkpoints hold them (``torch.nn.functional.linear``), as one node.

ONNX Runtime's CPU provider computes a MatMul with a transposed weight from a copy of that weight, in float32 whatever
its type, and runs every small operator around it as a node that costs as much as the product of one row. A kernel of
this node reads weights as checkpoints hold them, [outputs, inputs], and computes the steps around a product while its
rows are in cache: the norm before it, a bias, SiLU's gate, a residual, heads set apart or put together again, rotary
embedding. A runtime without the kernel takes the function. Which nodes of an ONNX graph become one:
`kvexport.export.passes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx
import onnx.parser

from kvexport.ops.onnx_function import DOMAIN

PACKED: tuple[tuple[str, ...], ...] = ((), ("scale",), ("scale", "zero"), ("scale", "minimum"))
"""What follows a weight, by the number in `Form.packed`."""
OF_PACKED = ("packed", "group", "float_input")


@dataclass(frozen=True)
class Form:
    """The steps of a Linear beside its products, 0 where there is none.

    input_heads: heads of the input, where they are a dimension of their own. norm: whether rows are normalised first,
    with `epsilon`. An entry for each product: output_heads, the heads set apart in its output; bias, whether it has
    one; rotated, whether its heads are rotated. gate, residual: whether there is one; only of a single product.
    An entry for each weight, that of the gate last, or none where no weight is packed: packed, one of `PACKED`; group,
    the inputs that share a scale. float_input: whether kernels multiply packed weights with the input as it is.
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

    @property
    def count(self) -> int:
        """How many products."""
        return len(self.output_heads)

    @property
    def weights(self) -> int:
        """How many weights, that of the gate among them."""
        return self.count + self.gate

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs, in their order."""
        named = ["input", *["norm"] * self.norm]
        for i, bias in enumerate(self.bias):
            named += [*self.parts(f"weight{i}", i), *[f"bias{i}"] * bias]
        gate = self.parts("gate", self.count) if self.gate else []
        return [*named, *gate, *["residual"] * self.residual, *["cosine", "sine"] * any(self.rotated)]

    def parts(self, weight: str, i: int) -> list[str]:
        """The names of a weight, the `i`th, and of what it is packed with."""
        return [weight, *(f"{weight}_{part}" for part in PACKED[self.packed[i] if self.packed else 0])]

    @property
    def attributes(self) -> dict[str, Any]:
        """Of a node, by their names."""
        given = {name: value for name, value in vars(self).items() if self.packed or name not in OF_PACKED}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @property
    def overload(self) -> str:
        """The name of its function."""
        shown = {
            "norm": f"norm{self.epsilon:.6g}" * self.norm,
            "epsilon": "",
            "count": f"{self.count}" * (self.count > 1),
        }
        for name, value in vars(self).items():
            given = value if isinstance(value, tuple) else (value,)
            shown.setdefault(name, name + ".".join(map(str, given)) if any(given) else "")
        return "_".join(part for part in shown.values() if part)


def linear_function(form: Form) -> onnx.FunctionProto:
    """The function of a Linear; all tensors of one dtype but those of packed weights.

    input: [..., inputs], or [B, input_heads, T, inputs / input_heads]
    norm: [inputs], the scale of an RMSNormalization of the rows
    for each product: weight [outputs, inputs], bias [outputs]; a packed weight is of integers, and its scale and its
        zero point or minimum are [outputs, inputs / group]: (weight - zero) scale or weight scale + minimum, in
        float32, rounded once to the input's type
    gate: [outputs, inputs]; the product is multiplied with silu(rows x gate^T)
    residual: [..., outputs], added last
    cosine, sine: [B, T, half a head's size], for heads rotated in planes (f, f + half), as RotaryEmbedding does
    for each product an output: [..., outputs], or [B, output_heads, T, outputs / output_heads]
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
        made, last = _product(form, i, rows)
        lines += made
        outputs.append(last)
    body = "\n".join(lines)
    signature = f"Linear ({', '.join(form.inputs)}) => ({', '.join(outputs)})"
    function = onnx.parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["": 23]>\n{signature}\n{{\n{body}\n}}')
    function.overload = form.overload
    return function


def _product(form: Form, i: int, rows: str) -> tuple[list[str], str]:
    """The nodes of one product, and the name of its output."""
    lines, weight = _dequantized(form, f"weight{i}", i)
    lines += [f"transposed{i} = Transpose <perm = [1, 0]> ({weight})", f"product{i} = MatMul ({rows}, transposed{i})"]
    last = f"product{i}"
    if form.bias[i]:
        lines += [f"biased{i} = Add ({last}, bias{i})"]
        last = f"biased{i}"
    if form.gate:
        made, weight = _dequantized(form, "gate", form.count)
        lines += [
            *made,
            f"gate_transposed = Transpose <perm = [1, 0]> ({weight})",
            f"gate_product = MatMul ({rows}, gate_transposed)",
            "sigmoid = Sigmoid (gate_product)",
            "silu = Mul (gate_product, sigmoid)",
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
        # Written out: a runtime without a kernel of Linear may lack RotaryEmbedding in some type as well.
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


def _dequantized(form: Form, weight: str, i: int) -> tuple[list[str], str]:
    """The nodes that make a weight, the `i`th, of the input's type, and the name of what they make."""
    if not form.packed or not form.packed[i]:
        return [], weight
    parts, group = form.parts(weight, i), form.group[i]
    minimum = parts.pop() if PACKED[form.packed[i]][-1] == "minimum" else ""
    lines = [
        f"{weight}_float = DequantizeLinear <axis = 1, block_size = {group}, output_dtype = 1> ({', '.join(parts)})"
    ]
    if minimum:
        lines += [
            f"{weight}_by_group = Constant <value_ints = [0, -1, {group}]> ()",
            f"{weight}_groups = Reshape ({weight}_float, {weight}_by_group)",
            f"{weight}_last = Constant <value_ints = [-1]> ()",
            f"{weight}_minima = Unsqueeze ({minimum}, {weight}_last)",
            f"{weight}_least = Cast <to = 1> ({weight}_minima)",
            f"{weight}_sum = Add ({weight}_groups, {weight}_least)",
            f"{weight}_flat = Constant <value_ints = [0, -1]> ()",
            f"{weight}_float_sum = Reshape ({weight}_sum, {weight}_flat)",
        ]
    made = f"{weight}_float_sum" if minimum else f"{weight}_float"
    return [*lines, f"{weight}_cast = CastLike ({made}, input)"], f"{weight}_cast"
