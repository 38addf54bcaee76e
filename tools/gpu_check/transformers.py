"""A step of transformers with a static cache under torch.compile: the part `transformers` of `gpu_check`.

The model has the shape of Llama-2-7B and random weights. The part is skipped if transformers is not installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from tools.gpu_check.model import ON_HOST, Shape
from tools.gpu_check.target import Figures, Skipped, Target

STEPS = 24
# Seconds after which no further length begins: a model that compiles for a minute must still leave its figures in time.
BEGIN_WITHIN = 45.0


def transformers(target: Target) -> Figures:
    """Measure milliseconds per step and tokens per second for two lengths of the cache.

    The batch has as many sequences as fit.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    import torch

    began, rows = time.monotonic(), []
    shape = ON_HOST if target.on_host else Shape()
    model = random_llama(shape, "cpu" if target.on_host else "cuda")
    for slots in (64,) if target.on_host else (4096, 32768):
        row: Figures = {"cache": "transformers, static", "slots": slots}
        if rows and time.monotonic() - began > BEGIN_WITHIN:
            rows.append(row | {"batch": 0, "why": "no time was left"})
            continue
        # Attention over a static cache needs a mask, and a step needs more activations than the benchmark's own, so the
        # cache gets less of the memory.
        batch = (
            2 if target.on_host else min(int(torch.cuda.mem_get_info()[0] * 0.7 / (slots * shape.slot_bytes())), 256)
        )
        if batch == 0:
            rows.append(row | {"batch": 0, "why": "not one sequence fits into this GPU's memory"})
            continue
        try:
            seconds = step_seconds(target, model, batch, slots)
            row |= {"batch": batch, "ms": seconds * 1e3, "tokens per second": batch / seconds}
        except Exception as error:  # a peer's error is not a failure of the kernels
            row |= {"batch": batch, "why": f"{type(error).__name__}: {error}"[:200]}
        rows.append(row)
        torch._dynamo.reset()
    return {"largest batch": rows}


def random_llama(shape: Shape, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=1 << 16,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def step_seconds(target: Target, model: Any, batch: int, slots: int) -> float:
    """Return the seconds of a step, over STEPS steps; the reads of a static cache do not depend on how full it is."""
    import torch
    from transformers import StaticCache

    from kvexport.export.hooks.attention import cache_name

    device = model.device
    cache = StaticCache(
        config=model.config, max_cache_len=slots, max_batch_size=batch, device=device, dtype=torch.float16
    )
    named: Any = {cache_name(model): cache}
    ids = torch.ones(batch, 1, dtype=torch.int64, device=device)

    def step(forward: Callable[..., Any]) -> None:
        out = forward(input_ids=ids, use_cache=True, **named)
        ids.copy_(out.logits[:, -1:].argmax(-1))

    with torch.inference_mode():
        step(model)  # makes the cache, which is not to be compiled
        forward = model if target.on_host else torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for _ in range(3):
            step(forward)

        def run() -> None:
            for _ in range(STEPS):
                step(forward)

        return min(target.spans(run, lambda: None, rounds=1, warm=0)) / STEPS


PARTS: dict[str, Callable[[Target], Figures]] = {"transformers": transformers}
