"""The operator LinearAttention: attention whose memory is one matrix for each head, not a cache of tokens.

The operator has the inputs, outputs and meaning of LinearAttention in ONNX opset 27. The state S [dk, dv] of a head
starts at zero, and every token t computes

    S   = exp(decay_t) S                         update rules gated and gated_delta; decay is a logarithm, at most 0
    v'  = beta_t (v_t - k_t S)                   update rules delta and gated_delta; otherwise v' = v_t
    S   = S + k_t^T v'
    out = scale q_t S

A token with decay 0 and value 0 (or, with a delta rule, beta 0) changes no state; this is how padding is left out.
`linear_attention` defines the operator in PyTorch. `linear_attention_function` is its ONNX function, which runs where a
runtime has no kernel; ONNX Runtime has a kernel of this name for float32 on the CPU.
"""

from __future__ import annotations

from typing import Any, Literal

import onnx
import onnx.parser
import torch
from torch import Tensor

DOMAIN = "com.microsoft"  # of ONNX Runtime's kernel
UpdateRule = Literal["linear", "gated", "delta", "gated_delta"]


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    *,
    heads: int,
    update_rule: UpdateRule,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, T, heads dv] of T tokens, and the state [B, heads, dk, dv] after them.

    Args:
        query: [B, T, heads dk] float32.
        key: [B, T, heads dk] float32.
        value: [B, T, heads dv] float32.
        past_state: [B, heads, dk, dv] float32.
        decay: [B, T, heads], or [B, T, heads dk] for a decay of each channel; for the gated rules.
        beta: [B, T, heads]; for the delta rules.
        heads: The number of heads.
        update_rule: The update rule.
        scale: The factor of the outputs.
    """
    batch, tokens, _ = query.shape
    q, k, v = (x.reshape(batch, tokens, heads, -1) for x in (query, key, value))
    state, outputs = past_state, []
    for t in range(tokens):
        if decay is not None:
            state = state * torch.exp(decay[:, t].reshape(batch, heads, -1, 1))
        row = v[:, t, :, None]  # [B, heads, 1, dv]
        if beta is not None:
            row = (row - k[:, t, :, None] @ state) * beta[:, t, :, None, None]
        state = state + k[:, t, :, :, None] @ row
        outputs.append((q[:, t, :, None] @ state).reshape(batch, 1, -1) * scale)
    return torch.cat(outputs, 1), state


def update_rules(graph: onnx.GraphProto) -> list[UpdateRule]:
    """Return the update rules of a graph's LinearAttention nodes: one, or none without such nodes.

    A node of ONNX Runtime's operator has no overload that could name one of several functions.
    """
    rules: dict[Any, None] = {
        attribute.s.decode(): None
        for node in graph.node
        if (node.domain, node.op_type) == (DOMAIN, "LinearAttention")
        for attribute in node.attribute
        if attribute.name == "update_rule"
    }
    assert len(rules) <= 1, f"layers have the update rules {', '.join(rules)}"
    return list(rules)


def linear_attention_function(update_rule: UpdateRule) -> onnx.FunctionProto:
    """Return the ONNX function of LinearAttention with an update rule: a Scan over the tokens."""
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
        f'<domain: "{DOMAIN}", opset_import: ["": 23]>\n'
        "LinearAttention <q_num_heads, kv_num_heads, update_rule, scale> (query, key, value, past_state, decay, beta) "
        "=> (output, present_state)\n{\n" + "\n".join(lines) + "\n}"
    )
    return onnx.parser.parse_function(text)
