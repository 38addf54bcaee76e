"""Gain of AWQ's scales: KL of SmolLM2-135M-Instruct with 4-bit weights to the float32 model.

    python benchmarks/awq_scales.py [--texts 2] [--length 512]

Weights have groups of 32; the head has 8 bits. They are rounded by the least errors of the weights or of the products
(`importance`), each with AWQ's scales and without. All sides take the same bytes.

AWQ (arXiv 2306.00978) multiplies the weights of input j by s_j = mean |x_j|^alpha and its input by 1 / s_j, in the norm
or the projection before. For all projections of one input, alpha is the value of a grid with the least squared error of
the products on a text. A model then computes with `round(W diag(s)) diag(1 / s)`, and this product replaces its weights
here. Folding s into other weights would change only the last bits. Inputs of the output projection come from the
values. Each head of these serves several query heads, so the same scales are used for all of them. Text and pieces are
those of `weights.method: importance`; products are in float32, inputs are not rounded. KL is measured on texts of
Python's library. Writes benchmarks/results/awq.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import RESULTS, save
from torch import Tensor, nn

from kvexport.evaluate.language import language_of
from kvexport.evaluate.tasks import TASKS
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.wheel import SMOLLM2, fetch
from kvexport.export.weights import importance
from kvexport.export.weights.quantize import BLOCK_BYTES, round_groups
from kvexport.language.tokenizer import Tokenizer
from kvexport.ops.packed import PackedFormat
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.casting import row_blocks

FOUR, HEAD = PackedFormat(4, True, 32), PackedFormat(8, True, 32)
ALPHAS = tuple(i / 10 for i in range(10))
# (whether errors are weighted by importance, which inputs have AWQ's scales: none, those of norms, all)
SIDES = {
    "rtn": (False, ""),
    "importance": (True, ""),
    "awq": (False, "all"),
    "awq, importance": (True, "all"),
    "awq of norms, importance": (True, "norms"),
}


class Inputs:
    """Statistics of the inputs x of projections: mean x^2, mean |x| and mean x x^T over all tokens."""

    def __init__(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        self.square, self.size = rows.square().mean(0), rows.abs().mean(0)
        self.product = rows.T @ rows / len(rows)

    @property
    def importance(self) -> Tensor:
        """The importance of the inputs, as a build computes it."""
        return torch.clamp(self.square / self.square.mean(), min=float(importance.LEAST))


def rounded(weight: Tensor, packing: PackedFormat, counted: Tensor | None) -> Tensor:
    """Return the rounded weight [outputs, inputs]; `counted` [inputs] weights squared errors."""
    values, groups = weight.numpy(), weight.shape[1] // packing.group
    matter = None if counted is None else counted.numpy().reshape(groups, packing.group)
    result = np.empty_like(values)
    for rows in row_blocks(len(values), 4 * values.shape[1], BLOCK_BYTES):
        block = values[rows.start : rows.stop].reshape(len(rows), groups, packing.group)
        numbers, parts = round_groups(block, packing, matter)
        result[rows.start : rows.stop] = (numbers * parts["scale"][..., None].astype(np.float32)).reshape(len(rows), -1)
    return torch.from_numpy(result)


def scaled(weights: list[Tensor], of: Inputs, size: Tensor, weighed: bool) -> tuple[list[Tensor], float]:
    """Return the weights of one input with AWQ's scales, and alpha; `size` [inputs] is mean |x|."""

    def rounded_by(alpha: float) -> list[Tensor]:
        scale = size.clamp(min=1e-4) ** alpha
        scale = scale / (scale.max() * scale.min()).sqrt()
        counted = of.importance / scale.square() if weighed else None
        return [rounded(w * scale, FOUR, counted) / scale for w in weights]

    def error(alpha: float) -> float:
        errors = [m - w for m, w in zip(rounded_by(alpha), weights, strict=True)]
        return sum(float(((e @ of.product) * e).sum()) for e in errors)

    alpha = min(ALPHAS, key=error)
    return rounded_by(alpha), alpha


def projections(model: Any) -> Iterator[list[nn.Linear]]:
    """Yield the projections that share an input, layer by layer."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield [attention.q_proj, attention.k_proj, attention.v_proj]
        yield [attention.o_proj]
        yield [mlp.gate_proj, mlp.up_proj]
        yield [mlp.down_proj]


def inputs_of(model: Any, ids: Tensor) -> dict[nn.Module, Inputs]:
    """Return the statistics of inputs, by the first projection of each input, and by the head."""
    inputs_of: dict[nn.Module, Inputs] = {}

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs_of[module] = Inputs(args[0])

    hooks = [m.register_forward_pre_hook(look) for m in [model.lm_head, *(of[0] for of in projections(model))]]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs_of


def shared_by_query_heads(size: Tensor, config: Any) -> Tensor:
    """Return the mean over the query heads of each KV head."""
    heads = size.reshape(config.num_key_value_heads, -1, size.numel() // config.num_attention_heads)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)


def quantize(model: Any, inputs: dict[nn.Module, Inputs], weighed: bool, awq: str) -> list[float]:
    """Quantize the model in place and return the alphas of each group of projections."""
    alphas, outputs = [], [layer.self_attn.o_proj for layer in model.model.layers]
    for of in projections(model):
        stats, weights = inputs[of[0]], [m.weight.data for m in of]
        if awq == "all" or (awq == "norms" and len(of) > 1):
            size = shared_by_query_heads(stats.size, model.config) if of[0] in outputs else stats.size
            replaced, alpha = scaled(weights, stats, size, weighed)
            alphas.append(alpha)
        else:
            replaced = [rounded(w, FOUR, stats.importance if weighed else None) for w in weights]
        for module, values in zip(of, replaced, strict=True):
            module.weight.data = values
    head = model.lm_head  # shares its weight with the embedding
    head.weight.data = rounded(head.weight.data, HEAD, inputs[head].importance if weighed else None)
    return alphas


@torch.no_grad()
def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    source = fetch(SMOLLM2)
    model: Any = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32).eval()
    floats = {name: p.data for name, p in model.named_parameters()}
    recipe = Recipe.model_validate(
        {"model": {"path": str(source)}, "weights": {"bits": 4, "method": "importance"}, "limits": {"max_length": 1024}}
    )
    inputs = inputs_of(model, torch.tensor(importance._pieces(read_checkpoint(source), recipe)))
    samples = TASKS["text"].samples(language_of(Tokenizer.from_folder(source)), options.texts, options.length, 0)

    def log_probabilities() -> list[Tensor]:
        rows = [model(input_ids=torch.tensor([list(s.ids)])).logits[0, s.counted] for s in samples]
        return [torch.log_softmax(x, -1) for x in rows]

    conditions = {"texts": options.texts, "length": options.length, "alphas": list(ALPHAS)}
    file = RESULTS / "awq.json"
    previous = json.loads(file.read_text()) if file.exists() else {}
    rows = previous.get("rows", {}) if conditions.items() <= previous.items() else {}
    full = log_probabilities()
    for side, (weighed, awq) in SIDES.items():
        if side in rows:
            continue
        start = time.monotonic()
        for name, parameter in model.named_parameters():
            parameter.data = floats[name]
        alphas = quantize(model, inputs, weighed, awq)
        kl = [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(full, log_probabilities(), strict=True)]
        row = {"kl": float(np.mean(kl)), "kl_of_texts": kl, "seconds": time.monotonic() - start}
        if awq:
            row["alpha"] = float(np.mean(alphas))
        rows[side] = row
        print(side, row, file=sys.stderr, flush=True)
        save("awq", {**conditions, "rows": rows})


if __name__ == "__main__":
    main()
