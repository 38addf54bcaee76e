"""Small random models, artifacts of them, and Hugging Face's answers: what several test files share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from kvexport.engine.engine import Engine
from kvexport.export.build import build
from kvexport.export.graph import tracer
from kvexport.recipe.fields import Recipe

# One shape of attention for all families, so that they share the operators' functions.
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **changes})


def save_checkpoint(
    folder: Path, config: Any, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", scale: float = 0.15
) -> Path:
    """Random weights of a size at which attention is neither flat nor a single peak, biases and norms included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, scale)
        for name, tensor in model.state_dict().items():
            if name not in dict(model.named_parameters(remove_duplicate=False)) and tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.5)  # buffers that were trained
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def make_recipe(
    checkpoint: Path,
    *,
    dtype: str = "float32",
    cache: Any = None,
    export: Any = None,
    speculate: Any = None,
    limits: Any = None,
    weights: Any = None,
) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": str(checkpoint), "dtype": dtype},
            "cache": cache or {},
            "export": export or {},
            "speculate": speculate or {},
            "limits": limits or {},
            "weights": weights or {},
        }
    )


def build_shared(recipe: Recipe, out: Path, **options: Any) -> Path:
    """`build`, but traces that an earlier build made of the same arguments are taken again: most of a build's time goes
    into them."""
    with _remembered_traces():
        return build(recipe, out, **options)


def hugging_face_logits(checkpoint: Path, sequences: Sequence[Ids]) -> list[Logits]:
    """Logits [length, vocabulary] of whole sequences, in float32, by the model's own code and checkpoint loading."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy() for ids in sequences]


def random_ids(seed: int, *lengths: int, vocabulary: int = SIZES["vocab_size"]) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, length) for length in lengths]


def given_tokens_logits(
    engine: Engine,
    sequences: Sequence[Ids],
    prompt_lengths: Sequence[int],
    after_call: Callable[[Any], None] | None = None,
) -> list[Logits]:
    """Logits of every token (the artifact gives all of them) of given sequences in one batch: the prompts in chunks,
    the rest token by token; a sequence that ended is an idle lane. after_call(lanes) is called after each call."""
    lanes = engine.lanes(len(sequences))
    rows: list[list[Logits]] = [[] for _ in sequences]

    def append(parts: list[Ids], prefill: bool) -> None:
        logits = lanes.append(parts, prefill=prefill)
        for lane, part in enumerate(parts):
            rows[lane].append(logits[lane, : len(part)].copy())
        if after_call:
            after_call(lanes)

    chunk = lanes.prefill_chunk
    for start in range(0, max(prompt_lengths), chunk):
        append([s[:n][start : start + chunk] for s, n in zip(sequences, prompt_lengths, strict=True)], True)
    answers = [s[n:] for s, n in zip(sequences, prompt_lengths, strict=True)]
    for step in range(max(map(len, answers))):
        append([a[step : step + 1] for a in answers], False)
    return [np.concatenate(r) for r in rows]


@contextlib.contextmanager
def _remembered_traces() -> Iterator[None]:
    with mock.patch.object(tracer, "trace_decoder", _trace_decoder):
        yield


_real_trace_decoder = tracer.trace_decoder
_traces: dict[str, Any] = {}


def _trace_decoder(model: Any, mode: Any, plan: Any, *, last_logits: bool) -> Any:
    shapes = [(layer.shapes(1), layer.dtype) for layer in plan.caches]
    key = repr((model.config.to_json_string(), model.dtype, shapes, plan.cache_positions, last_logits))
    if key not in _traces:
        _traces[key] = _real_trace_decoder(model, mode, plan, last_logits=last_logits)
    # Finishing a decoder changes its graph.
    return _traces[key].clone()
