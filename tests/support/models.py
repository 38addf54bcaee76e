"""Small random models, artifacts of them, and Hugging Face's logits, for several test files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from kvexport.engine.engine import Engine
from kvexport.recipe.fields import Recipe

# All families have the same attention shape, so that they share the operators' traced functions.
SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **changes})


def save_checkpoint(
    folder: Path, config: Any, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", scale: float = 0.15
) -> Path:
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
                tensor.add_(torch.rand_like(tensor) * 0.5)  # trained buffers
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


def hugging_face_logits(checkpoint: Path, sequences: Sequence[Ids]) -> list[Logits]:
    """Return Hugging Face's float32 logits [length, vocabulary] of whole sequences, loaded from the checkpoint."""
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


def assert_logits_of_transformers(engine: Engine, checkpoint: Path, share: float = 1e-5) -> None:
    """Compare the logits of two sequences, read in chunks and then token by token, with those of transformers."""
    ids = random_ids(0, 90, 60)
    actual, right = given_tokens_logits(engine, ids, (50, 20)), hugging_face_logits(checkpoint, ids)
    for mine, theirs in zip(actual, right, strict=True):
        assert np.abs(mine - theirs).max() <= share * np.abs(theirs).max()
