"""Prediction of the next scores by averages of past ones: KeepKV's moving average, means of windows, the mean of all.

    python benchmarks/predict.py [--recipe tiny-base] [--texts 8] [--length 512]

The comparison is that of the KeepKV paper's Figure 2d. The uncompressed model reads texts. At steps of 32 tokens every
slot's score is predicted for the next query and for the mean of the next 32. The score is the mean of exp(logit) over
the query heads of a KV head. A figure is ``|ln predicted - ln measured|``, weighted by the probability that the slot
then has, as a mean over slots, heads, layers and steps. Its interval is the bootstrap's over texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvexport.evaluate.language import language_of
from kvexport.evaluate.statistics import Estimate, mean
from kvexport.evaluate.tasks import TASKS
from kvexport.export.build import read_model
from kvexport.export.hooks.attention import IMPLEMENTATION, PassThroughCache, attending
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.load import load_recipe

STEP = 32
EMA, WINDOW = (0.8, 0.9, 0.95, 0.98), (1, 8, 32, 64)


class Logits:
    """Causal attention that records ln of every score, [H, T, T] for each layer."""

    def __init__(self, kv_heads: int, scale: float) -> None:
        self.kv_heads, self.scale = kv_heads, scale
        self.layers: list[Tensor] = []

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute attention and record the scores; see `attending`."""
        group = query.shape[1] // self.kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        logits = query @ key.transpose(-1, -2) * self.scale
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:]).tril().bool(), -torch.inf)
        self.layers.append(logits[0].unflatten(0, (self.kv_heads, group)).logsumexp(1) - np.log(group))
        return torch.softmax(logits, -1) @ value

    def mask(self, mask_function: Any) -> Any:
        """Return None: `attend` masks by itself."""
        return None


def predictions(past: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield ln of every prediction [H, slots] from ln scores [H, queries, slots].

    A score is -inf if its query came before the slot.
    """
    queries = past.shape[1]
    back = torch.arange(queries - 1, -1, -1)[:, None].float()

    def weighted(log_weight: Tensor) -> Tensor:
        shares = torch.where(past > -torch.inf, log_weight.expand(past.shape), -torch.inf)
        return (past + torch.where(past > -torch.inf, log_weight, 0.0)).logsumexp(1) - shares.logsumexp(1)

    for decay in EMA:
        yield f"average, a = {decay}", weighted(back * np.log(decay))
    for width in WINDOW:
        yield f"mean of the last {width}", weighted(torch.where(back < width, 0.0, -torch.inf))
    yield "mean of all", weighted(torch.zeros_like(back))


def errors(layers: list[Tensor]) -> dict[str, dict[str, float]]:
    """Return the figures of one text: prediction -> horizon -> figure."""
    errors: dict[str, dict[str, list[float]]] = {}
    for scores in layers:
        for now in range(4 * STEP, scores.shape[1] - STEP, STEP):
            held = now - STEP  # slots that every window sees
            past, future = scores[:, :now, :held], scores[:, now : now + STEP, :held]
            truths = {"next": future[:, 0], f"next {STEP}": future.logsumexp(1) - np.log(STEP)}
            for name, predicted in predictions(past):
                for horizon, truth in truths.items():
                    error = (torch.softmax(truth, -1) * (predicted - truth).abs()).sum(-1).mean()
                    errors.setdefault(name, {}).setdefault(horizon, []).append(float(error))
    return {name: {horizon: float(np.mean(x)) for horizon, x in by.items()} for name, by in errors.items()}


@torch.no_grad()
def measure(recipe_name: str, texts: int, length: int) -> dict[str, dict[str, Estimate]]:
    """Return prediction -> horizon -> estimate over texts."""
    recipe = load_recipe(recipe_name, [f"limits.max_length={length}"]).recipe
    shape = read_model(recipe)
    checkpoint: Path = shape.checkpoint.path
    model = AutoModelForCausalLM.from_pretrained(
        str(checkpoint), attn_implementation=IMPLEMENTATION, dtype=torch.float32
    ).eval()
    by_text = []
    for sample in TASKS["text"].samples(language_of(Tokenizer.from_folder(checkpoint)), texts, length, 0):
        logits = Logits(shape.geometry[0].kv_heads, shape.geometry[0].scale)
        ids = torch.tensor([sample.ids])
        with attending(logits):
            model(
                input_ids=ids,
                position_ids=torch.arange(ids.shape[1])[None],
                **PassThroughCache().as_arguments(model),
            )
        by_text.append(errors(logits.layers))
    return {n: {h: mean(np.array([text[n][h] for text in by_text])) for h in by} for n, by in by_text[0].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny-base")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, NDArray[np.float64]]] = {}
    for name, by in measure(arguments.recipe, arguments.texts, arguments.length).items():
        print(f"{name:24}" + "  ".join(f"{horizon}: {estimate}" for horizon, estimate in by.items()), flush=True)
        rows[name] = {horizon: [e.value, e.low, e.high] for horizon, e in by.items()}  # type: ignore[misc]
    print(
        save(
            f"predict-{Path(arguments.recipe).stem}",
            {"recipe": arguments.recipe, "texts": arguments.texts, "length": arguments.length, "rows": rows},
        )
    )


if __name__ == "__main__":
    main()
