"""The operator LinearAttention: attention with one matrix as the state of each head, instead of a KV cache.

The state S [dk, dv] of a head, for keys of size dk and values of size dv, starts at zero. For the query q, key k and
value v of every token t the operator computes

    S   = exp(decay_t) S                         update rules gated and gated_delta; decay is a logarithm, at most 0
    v'  = beta_t (v_t - k_t S)                   update rules delta and gated_delta; otherwise v' = v_t
    S   = S + k_t^T v'
    out = scale q_t S

Tokens beyond the length of a sequence are padding: they change no state, and their outputs are 0. Consecutive heads may
share a query and a key. `linear_attention` defines the operator in PyTorch, and plugins/cpu/recurrence/ implements it.
Without a native kernel, the ONNX functions of `linear_attention_functions` run.

The ONNX function of kvexport's operator calls LinearAttention of ONNX opset 27, which supports neither padding nor
shared keys. ONNX Runtime's CPU and CUDA providers have a kernel for the operator of opset 27; a second ONNX function
defines it for other runtimes.
"""

from typing import Any, Literal

import onnx
import onnx.parser
import torch
from torch import Tensor

from kvexport.ops.onnx_function import DOMAIN

OPERATOR = "LinearAttention"
INNER_DOMAIN = "com.microsoft"  # of ONNX Runtime's kernel
ATTRIBUTES = {"heads": "int", "key_heads": "int", "update_rule": "str", "scale": "float"}
"""The attributes of a LinearAttention node and their types."""
INPUTS = ("query", "key", "value", "past_state", "query_length", "decay", "beta")
OUTPUTS = ("output", "present_state")
OPTIONAL = ("decay", "beta")  # inputs that only some update rules have
UpdateRule = Literal["linear", "gated", "delta", "gated_delta"]


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor,
    query_length: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    *,
    heads: int,
    key_heads: int,
    update_rule: UpdateRule,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, T, heads dv] of T tokens, and each head's state matrix [B, heads, dk, dv] after them.

    dk and dv are the sizes of a head's key and value.

    Args:
        query: [B, T, key_heads dk] float32.
        key: [B, T, key_heads dk] float32.
        value: [B, T, heads dv] float32.
        past_state: [B, heads, dk, dv] float32.
        query_length: [B, 1] int64, the tokens of each sequence that are not padding.
        decay: [B, T, heads], or [B, T, heads dk] for a decay of each channel; only for the gated rules.
        beta: [B, T, heads]; only for the delta rules.
        heads: The number of heads, a multiple of `key_heads`.
        key_heads: The number of heads of queries and keys.
        update_rule: The update rule of the state, which uses `decay`, `beta`, both or neither.
        scale: The factor of the outputs.
    """
    batch, tokens, _ = query.shape
    q, k = (x.reshape(batch, tokens, key_heads, -1).repeat_interleave(heads // key_heads, 2) for x in (query, key))
    v = value.reshape(batch, tokens, heads, -1)
    assert (decay is not None, beta is not None) == ("gated" in update_rule, "delta" in update_rule)
    state, outputs = past_state, []
    for t in range(tokens):
        after = state if decay is None else state * torch.exp(decay[:, t].reshape(batch, heads, -1, 1))
        row = v[:, t, :, None]  # [B, heads, 1, dv]
        if beta is not None:
            row = (row - k[:, t, :, None] @ after) * beta[:, t, :, None, None]
        after = after + k[:, t, :, :, None] @ row
        real = (t < query_length)[:, :, None, None]
        state = torch.where(real, after, state)
        outputs.append(torch.where(real, q[:, t, :, None] @ state * scale, 0.0).reshape(batch, 1, -1))
    return torch.cat(outputs, 1), state


def update_rules(graph: onnx.GraphProto) -> list[UpdateRule]:
    """Return the update rules of the LinearAttention nodes of an ONNX graph; empty without such nodes."""
    rules: dict[Any, None] = {
        attribute.s.decode(): None
        for node in graph.node
        if (node.domain, node.op_type) == (DOMAIN, OPERATOR)
        for attribute in node.attribute
        if attribute.name == "update_rule"
    }
    assert len(rules) <= 1, f"layers have the update rules {', '.join(rules)}"
    return list(rules)


def linear_attention_functions(update_rule: UpdateRule) -> list[onnx.FunctionProto]:
    """Return the ONNX functions of kvexport's LinearAttention, and of ONNX's own, which kvexport's function calls."""
    return [_own_function(update_rule), _inner_function(update_rule)]


def _own_function(update_rule: UpdateRule) -> onnx.FunctionProto:
    lines = [
        "axis = Constant <value_ints = [-1]> ()", "two = Constant <value_ints = [2]> ()",
        "three = Constant <value_ints = [3]> ()", "zero = Constant <value_float = 0.0> ()",
        "none = Constant <value_int = 0> ()", "one = Constant <value_int = 1> ()",
        "count_number = Constant <value_int: int = @heads> ()",
        "key_count_number = Constant <value_int: int = @key_heads> ()", "count = Reshape (count_number, axis)",
        "key_count = Reshape (key_count_number, axis)", "shared = Div (count, key_count)",
        "ones = Constant <value_ints = [1, 1, 1]> ()", "last_one = Constant <value_ints = [1]> ()",
        "same = Constant <value_ints = [0, 0]> ()", "flat = Constant <value_ints = [0, 0, -1]> ()",
        "split = Concat <axis = 0> (same, key_count, axis)", "repeats = Concat <axis = 0> (ones, shared, last_one)",
        "tokens = Shape <start = 1, end = 2> (query)", "last = Squeeze (tokens)", "numbers = Range (none, last, one)",
        "is_real = Less (numbers, query_length)", "real = Unsqueeze (is_real, two)",
        "value_real = Where (real, value, zero)",
    ]  # fmt: skip
    for name in ("query", "key"):
        lines += [
            f"{name}_split = Reshape ({name}, split)",
            f"{name}_column = Unsqueeze ({name}_split, three)",
            f"{name}_wide = Expand ({name}_column, repeats)",
            f"{name}_heads = Reshape ({name}_wide, flat)",
        ]
    inputs = ["query_heads", "key_heads", "value_real", "past_state"]
    for name, rule in (("decay", "gated"), ("beta", "delta")):
        if rule in update_rule:
            lines.append(f"{name}_real = Where (real, {name}, zero)")
        inputs.append(f"{name}_real" if rule in update_rule else "")
    while not inputs[-1]:
        inputs.pop()
    lines += [
        f"all, state = {INNER_DOMAIN}.{OPERATOR} <q_num_heads: int = @heads, kv_num_heads: int = @heads, "
        f"update_rule: string = @update_rule, scale: float = @scale> ({', '.join(inputs)})",
        "output = Where (real, all, zero)",
        "some = Greater (query_length, none)",
        "trailing = Constant <value_ints = [2, 3]> ()",
        "moves = Unsqueeze (some, trailing)",
        # Sequences without a token keep their state, whatever number their padding computes.
        "present_state = Where (moves, state, past_state)",
    ]
    text = (
        f'<domain: "{DOMAIN}", opset_import: ["": 23, "{INNER_DOMAIN}": 1]>\n'
        f"{OPERATOR} <{', '.join(ATTRIBUTES)}> ({', '.join(INPUTS)}) => ({', '.join(OUTPUTS)})\n"
        "{\n" + "\n".join(lines) + "\n}"
    )
    return onnx.parser.parse_function(text)


def _inner_function(update_rule: UpdateRule) -> onnx.FunctionProto:
    gated, delta = "gated" in update_rule, "delta" in update_rule
    more = [name for name, used in (("decay", gated), ("beta", delta)) if used]
    lines = [
        "kv_count = Constant <value_int: int = @kv_num_heads> ()",
        "kv_axis = Constant <value_ints = [-1]> ()",
        "kv_heads = Reshape (kv_count, kv_axis)",
        "kv_factor = Constant <value_float: float = @scale> ()",
        "kv_same = Constant <value_ints = [0, 0]> ()",
        "kv_rest = Constant <value_ints = [-1]> ()",
        "kv_split = Concat <axis = 0> (kv_same, kv_heads, kv_rest)",
    ]
    scanned = []
    for name in ("query", "key", "value", *more):
        lines.append(f"{name}_heads = Reshape ({name}, kv_split)")
        scanned.append(f"{name}_heads")
    shapes = ", ".join(f"float[b, h, {name}_n] {name}_t" for name in ("query", "key", "value", *more))
    inside = ["last = Constant <value_ints = [-1]> ()", "before_last = Constant <value_ints = [-2]> ()"]
    state = "state_in"
    if gated:
        inside += [
            "factor = Exp (decay_t)",
            "factor_column = Unsqueeze (factor, last)",
            "decayed = Mul (state_in, factor_column)",
        ]
        state = "decayed"
    inside += ["value_row = Unsqueeze (value_t, before_last)", "key_column = Unsqueeze (key_t, last)"]
    row = "value_row"
    if delta:
        inside += [
            "key_row = Unsqueeze (key_t, before_last)",
            f"known = MatMul (key_row, {state})",
            "difference = Sub (value_row, known)",
            "beta_column = Unsqueeze (beta_t, last)",
            "step = Mul (difference, beta_column)",
        ]
        row = "step"
    inside += [
        f"added = MatMul (key_column, {row})",
        f"state_out = Add ({state}, added)",
        "query_row = Unsqueeze (query_t, before_last)",
        "output_row = MatMul (query_row, state_out)",
        "output_t = Squeeze (output_row, before_last)",
    ]
    axes = ", ".join("1" for _ in scanned)
    body = "\n".join(inside)
    lines.append(
        f"present_state, rows = Scan <num_scan_inputs = {len(scanned)}, scan_input_axes = [{axes}], "
        f"scan_output_axes = [1], body = token (float[b, h, k, v] state_in, {shapes}) => "
        f"(float[b, h, k, v] state_out, float[b, h, v] output_t) {{\n{body}\n}}> "
        f"(past_state, {', '.join(scanned)})"
    )
    lines += [
        "kv_flat = Constant <value_ints = [0, 0, -1]> ()",
        "joined = Reshape (rows, kv_flat)",
        "output = Mul (joined, kv_factor)",
    ]
    text = (
        f'<domain: "{INNER_DOMAIN}", opset_import: ["": 23]>\n'
        "LinearAttention <q_num_heads, kv_num_heads, update_rule, scale> (query, key, value, past_state, decay, beta) "
        "=> (output, present_state)\n{\n" + "\n".join(lines) + "\n}"
    )
    return onnx.parser.parse_function(text)
