"""LinearAttention's CUDA kernels through their C ABI: random calls, and the operator's definition for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from kvexport.ops.linear_attention import UpdateRule, linear_attention
from tests.conformance.cuda_library import Caller, LinearAttention

Arrays = dict[str, np.ndarray]
RULES: tuple[UpdateRule, ...] = ("linear", "gated", "delta", "gated_delta")
SCALE = 0.4


class Recurrence(NamedTuple):
    """The sizes of a call: tokens of each sequence that are not padding, heads, and sizes of keys and values."""

    lengths: tuple[int, ...]
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    by_channel: bool = False

    @property
    def tokens(self) -> int:
        return max(self.lengths)


@dataclass
class RecurrenceCase:
    """A call of LinearAttention with its float32 arrays."""

    rule: UpdateRule
    sizes: Recurrence
    feeds: Arrays
    offset: int = 0  # bytes between an aligned address and a tensor
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the call that are set last

    def run(self, caller: Caller, *, in_place: bool = False) -> Arrays:
        """Return the output and the present state. Both are full of other numbers before the call."""
        memory, kept = caller.memory, []

        def put(x: np.ndarray) -> Any:
            offset = 0 if x.dtype == np.int64 else self.offset  # integers of 64 bits are always aligned
            kept.append(memory.bytes(x.nbytes + offset, 0)[offset:][: x.nbytes].view(x.dtype))
            kept[-1][...] = x.reshape(-1)
            return kept[-1]

        held = {name: put(x) for name, x in self.feeds.items()}
        s = self.sizes
        call = LinearAttention(batch=len(s.lengths), tokens=s.tokens, heads=s.heads, key_heads=s.key_heads)
        call.key_size, call.value_size, call.by_channel, call.scale = s.key_size, s.value_size, s.by_channel, SCALE
        for name, x in held.items():
            setattr(call, {"past_state": "past", "query_length": "length"}.get(name, name), memory.address(x))
        present = held["past_state"] if in_place else put(np.full_like(self.feeds["past_state"], 77))
        output = put(np.full_like(self.feeds["value"], 77))
        call.present, call.output = memory.address(present), memory.address(output)
        for name, value in self.changes.items():
            setattr(call, name, value)
        caller._run("linear_attention", call)
        return {
            "output": memory.get(output).reshape(self.feeds["value"].shape),
            "present_state": memory.get(present).reshape(self.feeds["past_state"].shape),
        }

    def meaning(self) -> Arrays:
        """Return the operator's definition of the result, in float64."""
        terms = {name: torch.from_numpy(x) for name, x in self.feeds.items()}
        numbers = {name: x.double() if x.is_floating_point() else x for name, x in terms.items()}
        output, state = linear_attention(
            **{"decay": None, "beta": None, **numbers},  # type: ignore[arg-type]
            heads=self.sizes.heads,
            key_heads=self.sizes.key_heads,
            update_rule=self.rule,
            scale=SCALE,
        )
        return {"output": output.numpy(), "present_state": state.numpy()}


def recurrence(rule: UpdateRule, sizes: Recurrence, seed: int = 0) -> RecurrenceCase:
    """Return a call with random tensors, whose padding is not a number."""
    rng, batch, tokens = np.random.default_rng(seed), len(sizes.lengths), sizes.tokens
    keys = (batch, tokens, sizes.key_heads * sizes.key_size)
    feeds = {
        "query": rng.standard_normal(keys),
        "key": rng.standard_normal(keys) * sizes.key_size**-0.5,
        "value": rng.standard_normal((batch, tokens, sizes.heads * sizes.value_size)),
        "past_state": rng.standard_normal((batch, sizes.heads, sizes.key_size, sizes.value_size)),
    }
    if "gated" in rule:
        of_head = sizes.key_size if sizes.by_channel else 1
        feeds["decay"] = -np.abs(rng.standard_normal((batch, tokens, sizes.heads * of_head)))
    if "delta" in rule:
        feeds["beta"] = 1 / (1 + np.exp(-rng.standard_normal((batch, tokens, sizes.heads))))
    for name, x in feeds.items():
        for i, length in enumerate(sizes.lengths if name != "past_state" else ()):
            x[i, max(length, 0) :] = np.nan
    stored = {name: x.astype(np.float32) for name, x in feeds.items()}
    return RecurrenceCase(rule, sizes, stored | {"query_length": np.array([[x] for x in sizes.lengths], np.int64)})
