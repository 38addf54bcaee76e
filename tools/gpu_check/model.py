"""Decode steps with the shape of a whole model, Llama-2-7B: the part `model` of `gpu_check`.

The weights are random, in float16. PyTorch computes the linear layers, the kernels compute attention and merging. A
step and a merge are one CUDA graph each. The time in which the step's bytes are copied is the floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.conformance.cuda_library import State, merge_cache_call, vote_attention_call
from tools.gpu_check.parts import MERGE_EVERY, SLACK, bandwidth, flash
from tools.gpu_check.target import Figures, Row, Target

BUDGETS, BATCHES, METHODS = (512, 1024, 2048, 4096), (1, 8, 32), ("h2o", "keepkv", "ballot")
LARGEST_BATCH = 256
# The share of free memory for the state; the rest is for workspaces, graphs and activations.
FILLED = 0.85


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama without groups of query heads."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 11008
    heads: int = 32
    vocabulary: int = 32000

    @property
    def size(self) -> int:
        return self.hidden // self.heads

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a step reads: all except the embedding."""
        return 2 * (
            self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden
        )

    def slot_bytes(self) -> int:
        """Return the bytes of the keys and values of one slot in all layers."""
        return self.layers * self.heads * 4 * self.size


ON_HOST = Shape(layers=2, hidden=32, intermediate=48, heads=2, vocabulary=50)


def before(hidden: Any, delta: Any, norm: Any, weight: Any, position: Any, heads: int) -> tuple[Any, ...]:
    """Compute the part of a layer before attention.

    Returns:
        hidden + delta [B, E]; query, key and value [B, H, 1, D], the first two rotated.
    """
    import torch
    from torch.nn.functional import linear, rms_norm

    hidden = hidden + delta
    size = hidden.shape[1] // heads
    query, key, value = linear(rms_norm(hidden, hidden.shape[1:], norm), weight).view(-1, 3, heads, size).unbind(1)
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=hidden.device, dtype=torch.float32) / size)
    angle = (position.to(torch.float32) * frequency).unsqueeze(1)  # [B, 1, D / 2]
    cosine, sine = angle.cos(), angle.sin()

    def rotated(x: Any) -> Any:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype).unsqueeze(2)

    return hidden, rotated(query), rotated(key), value.contiguous().unsqueeze(2)


def after(hidden: Any, attended: Any, out: Any, norm: Any, gate_up: Any, down: Any) -> tuple[Any, Any]:
    """Compute the part of a layer after attention; return hidden, and the delta that the next layer adds to it."""
    from torch.nn.functional import linear, rms_norm, silu

    hidden = hidden + linear(attended.reshape(hidden.shape), out)
    gate, up = linear(rms_norm(hidden, hidden.shape[1:], norm), gate_up).chunk(2, dim=-1)
    return hidden, linear(silu(gate) * up, down)


class Model:
    """The weights, and the functions around attention, compiled by PyTorch if possible."""

    def __init__(self, target: Target, shape: Shape) -> None:
        import torch

        self.shape, self.target = shape, target
        self.where: dict[str, Any] = {"device": "cpu" if target.on_host else "cuda", "dtype": torch.float16}

        def matrix(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, **self.where).mul_(columns**-0.5)

        hidden, inner = shape.hidden, shape.intermediate
        self.embedding, self.head = matrix(shape.vocabulary, hidden), matrix(shape.vocabulary, hidden)
        self.norm = torch.ones(hidden, **self.where)
        sizes = ((3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        self.layers = [[matrix(*size) for size in sizes] for _ in range(shape.layers)]
        self.before, self.after, self.harness = before, after, "eager"

    def compile(self) -> None:
        """Compile the functions, so that fewer launches come between products.

        If that fails, they run uncompiled, and `harness` has the reason.
        """
        import torch

        try:
            self.before, self.after = (torch.compile(function, dynamic=True) for function in (before, after))
            for batch in (1, 2):
                hidden = torch.zeros(batch, self.shape.hidden, **self.where)
                position = torch.zeros(batch, 1, device=self.where["device"], dtype=torch.int64)
                qkv, out, gate_up, down = self.layers[0]
                hidden, query, _, _ = self.before(hidden, hidden, self.norm, qkv, position, self.shape.heads)
                self.after(hidden, query, out, self.norm, gate_up, down)
            self.harness = "torch.compile"
        except Exception as error:
            self.before, self.after, self.harness = before, after, f"eager: {type(error).__name__}: {error}"[:200]


class Slots:
    """Attention and merging by the kernels, with every layer's state in place."""

    def __init__(self, model: Model, batch: int, slots: int, method: str) -> None:
        import torch

        from kvexport.methods import all_methods
        from kvexport.ops.merge_cache import MergeCacheAttributes
        from kvexport.ops.vote_attention import VoteAttentionAttributes

        shape, compression = model.shape, all_methods()[method]()
        self.target, self.slots = model.target, slots
        capacity, device = slots + SLACK, model.where["device"]
        dims = (batch, shape.heads, capacity)
        centre = torch.randn(64, shape.size, **model.where)
        used = torch.arange(capacity, device=device, dtype=torch.int32)
        self.votes, self.positions = (used < slots).float().expand(dims).contiguous(), used.expand(dims).contiguous()
        self.length = torch.ones(batch, 1, dtype=torch.int64, device=device)
        attention = VoteAttentionAttributes(shape.size**-0.5, compression.vote_exponent, compression.statistics)
        merging = MergeCacheAttributes(compression, slots, 4, slots // 2)
        self.held, self.attends, self.merges = [], [], []
        for _ in range(shape.layers):
            # Keys in bundles, so that some of them merge.
            key = centre[torch.randint(64, dims, device=device)]
            key += 0.3 * torch.randn(*dims, shape.size, **model.where)
            state = [key, torch.randn(*dims, shape.size, **model.where), self.votes.clone()]
            state.append(torch.rand(batch, shape.heads, len(compression.statistics), capacity, device=device) + 0.1)
            state.append(self.positions.clone())
            call = vote_attention_call(
                attention, "float16", (batch, shape.heads, 1, shape.size), (*dims, shape.size), shape.size
            )
            merge = merge_cache_call(merging, "float16", (*dims, shape.size), shape.size, len(compression.statistics))
            for each in (call, merge):
                each.past = each.present = State(*(x.data_ptr() for x in state))
            call.query_length = self.length.data_ptr()
            self.held.append(state), self.attends.append(call), self.merges.append(merge)
        # The workspace grows now, since a graph keeps using the workspace with which it was captured.
        self.target.caller.prepared("vote_attention", call), self.target.caller.prepared("merge_cache", merge)

    @staticmethod
    def bytes_of(shape: Shape, slots: int) -> int:
        return (slots + SLACK) * (shape.slot_bytes() + shape.layers * shape.heads * 16)

    def __call__(self, layer: int, query: Any, key: Any, value: Any, position: Any) -> Any:
        """Store the token's key and value in a layer and return its attention [B, H, 1, D]."""
        import torch

        call, output = self.attends[layer], torch.empty_like(query)
        for name, x in (("query", query), ("key", key), ("value", value), ("position", position), ("output", output)):
            assert x.is_contiguous(), name
            setattr(call, name, x.data_ptr())
        self.target.caller.prepared("vote_attention", call)()
        return output

    def merge(self) -> None:
        for call in self.merges:
            self.target.caller.prepared("merge_cache", call)()

    def reset(self) -> None:
        """Fill as many slots as the budget has, in order of position."""
        for state in self.held:
            state[2].copy_(self.votes)
            state[4].copy_(self.positions)


class FlashCache:
    """The full cache with PyTorch's flash attention, which reads all slots at every step."""

    def __init__(self, model: Model, batch: int, slots: int) -> None:
        import torch

        dims = (batch, model.shape.heads, slots, model.shape.size)
        self.held = [[torch.randn(dims, **model.where) for _ in range(2)] for _ in range(model.shape.layers)]
        self.last = torch.tensor([slots - 1], device=model.where["device"])
        self.attention = flash()

    @staticmethod
    def bytes_of(shape: Shape, slots: int) -> int:
        return slots * shape.slot_bytes()

    def __call__(self, layer: int, query: Any, key: Any, value: Any, position: Any) -> Any:
        """Return the token's attention as `Slots` does."""
        for held, new in zip(self.held[layer], (key, value), strict=True):
            held.index_copy_(2, self.last, new)
        return self.attention(query, *self.held[layer])

    def reset(self) -> None:
        """Do nothing: there is no state to reset."""


class Nothing:
    """No attention, for the time of the rest of a step."""

    def __call__(self, layer: int, query: Any, key: Any, value: Any, position: Any) -> Any:
        return query

    def reset(self) -> None:
        """Do nothing: there is no state."""


class Decoder:
    """The decode steps of a batch with one kind of attention, each from the token of the step before."""

    def __init__(self, model: Model, batch: int, slots: int, attention: Any) -> None:
        import torch

        device = model.where["device"]
        self.model, self.attention, self.slots = model, attention, slots
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, 1, dtype=torch.int64, device=device)

    def step(self) -> None:
        import torch
        from torch.nn.functional import embedding, linear, rms_norm

        model = self.model
        hidden = embedding(self.ids, model.embedding)
        delta = torch.zeros_like(hidden)
        for i, (qkv, out, gate_up, down) in enumerate(model.layers):
            hidden, query, key, value = model.before(hidden, delta, model.norm, qkv, self.position, model.shape.heads)
            attended = self.attention(i, query, key, value, self.position)
            hidden, delta = model.after(hidden, attended, out, model.norm, gate_up, down)
        hidden = hidden + delta
        self.ids.copy_(linear(rms_norm(hidden, hidden.shape[1:], model.norm), model.head).argmax(-1))
        self.position.add_(1)

    def reset(self) -> None:
        """Restore the state before the first step."""
        self.attention.reset()
        self.ids.zero_()
        self.position.fill_(self.slots)

    @cached_property
    def replayed(self) -> Callable[[], Any]:
        """A step as a CUDA graph."""
        self.reset()
        return self.model.target.captured(self.step)

    def seconds(self, *, merging: bool = False) -> float:
        """Return the seconds of a step, over MERGE_EVERY steps (on the host 4), with or without their merge."""
        target, step = self.model.target, self.replayed
        steps = target.scaled(MERGE_EVERY, 4)
        if merging:
            self.reset()
            merge = target.captured(self.attention.merge)

        def run() -> None:
            for _ in range(steps):
                step()
            if merging:
                merge()

        return statistics.median(target.spans(run, self.reset, rounds=3, warm=1)) / steps


def model(target: Target) -> Figures:
    """Measure the milliseconds of a step with and without merging, by method, and tokens per second of full batches.

    Each row also has the time in which the step's bytes are copied.
    """
    copied = bandwidth(target)["bytes per second"]
    llama = Model(target, ON_HOST if target.small else Shape())
    if not target.on_host:
        llama.compile()
    steps, lengths = StepTimes(target, llama, copied), (160,) if target.small else (4096, 32768)
    budgets, batches = ((64,), (2,)) if target.small else (BUDGETS, BATCHES)
    figures = {"harness": llama.harness, "bytes per second": copied, "weight bytes": llama.shape.weight_bytes}
    figures |= {"methods": [], "largest batch": []}
    # The figures that every version needs come first: methods beside one another, then budgets and batches, then full
    # batches.
    cases: list[tuple[str, str, int, int]] = [
        ("methods", name, target.scaled(1024, 64), batch) for batch in batches[::-1] for name in METHODS
    ]
    cases += [("rows", "keepkv", budget, batch) for batch in batches for budget in budgets]
    cases += [("largest batch", "keepkv", target.scaled(1024, 64), 0)]
    cases += [("largest batch", kind, slots, 0) for slots in lengths for kind in ("full", "flash")]

    def measure(case: tuple[str, str, int, int]) -> list[Row]:
        kind, method, slots, batch = case
        row = steps.row(method, slots, batch) if batch else steps.fullest(method, slots)
        if kind == "rows":
            return [row]
        figures[kind].append(row)
        return []

    return target.rows(cases, figures, measure)


class StepTimes:
    """The rows of figures. The state of each row is freed before the next."""

    def __init__(self, target: Target, llama: Model, copied: float) -> None:
        self.target, self.llama, self.copied = target, llama, copied
        self.bare: dict[int, float] = {}

    def floor(self, batch: int, slots: int) -> float:
        """Return the seconds in which the weights and a batch's keys and values are copied."""
        return (self.llama.shape.weight_bytes + batch * slots * self.llama.shape.slot_bytes()) / self.copied

    def fits(self, each: int) -> int:
        """Return how many sequences of `each` bytes fit next to the weights."""
        if self.target.small:
            return 2
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
        return min(int(torch.cuda.mem_get_info()[0] * FILLED / each), LARGEST_BATCH)

    def decoder(self, kind: str, batch: int, slots: int) -> Decoder:
        """Return a decoder; `kind` is a method, or "flash"."""
        attention = FlashCache(self.llama, batch, slots) if kind == "flash" else Slots(self.llama, batch, slots, kind)
        return Decoder(self.llama, batch, slots, attention)

    def row(self, method: str, budget: int, batch: int) -> Figures:
        row: Figures = {"method": method, "batch": batch, "budget": budget}
        if self.fits(Slots.bytes_of(self.llama.shape, budget)) < batch:
            return row | {"why": "it does not fit into this GPU's memory"}
        if batch not in self.bare:
            self.bare[batch] = Decoder(self.llama, batch, budget, Nothing()).seconds()
        decoder = self.decoder(method, batch, budget)
        plain, merging, floor = decoder.seconds(), decoder.seconds(merging=True), self.floor(batch, budget)
        row |= {
            "ms": plain * 1e3,
            "floor ms": floor * 1e3,
            "over the floor": plain / floor,
            "ms with merging": merging * 1e3,
        }
        row |= {"merging over without": merging / plain, "ms without attention": self.bare[batch] * 1e3}
        return row | {"tokens per second": batch / merging}

    def fullest(self, kind: str, slots: int) -> Figures:
        each = (FlashCache if kind == "flash" else Slots).bytes_of(self.llama.shape, slots)
        batch, row = self.fits(each), {"cache": kind, "slots": slots}
        if batch == 0:
            return row | {"batch": 0, "why": "not one sequence fits into this GPU's memory"}
        merging = kind not in ("flash", "full")
        seconds, floor = self.decoder(kind, batch, slots).seconds(merging=merging), self.floor(batch, slots)
        row |= {"batch": batch, "ms": seconds * 1e3, "floor ms": floor * 1e3, "over the floor": seconds / floor}
        return row | {"tokens per second": batch / seconds}


PARTS: dict[str, Callable[[Target], Figures]] = {"model": model}
