"""Merged latents against merged keys and values of every head, at equal bytes, on a small model with latent attention.

    python benchmarks/latent.py --work DIR [--steps 30] [--texts 3] [--budgets 96,256] [--threads 1]

The model is that of latent_model.py, which --work keeps. A text is a row of 1,024 tokens that the model was not trained
on: source of held-out modules, or a document of statements with questions at its end. It is read in chunks of 16. The
figure is KL(full cache || this one) over the second half of a text, in nats. The forms of the cache are:

- `latent`: one KV head, whose key is the latent and the rotated key, and whose value is a copy of the latent.
- `expanded`: the keys and values of every head, with as many slots as fit into the bytes of `latent`.
- `expanded, equal slots`: the same with the slots of `latent`, in more bytes.

Bytes count votes, scores, positions and slack, with keys and values in float16. PyTorch computes the figures with the
operators' reference functions in float32, which `validate` compares engines with. Writes
benchmarks/results/latent.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from latent_model import MAX_LENGTH, code_row, load_data, make_model, train
from simulated_cache import SimulatedCache, kl
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from kvexport.evaluate.statistics import mean
from kvexport.export.hooks.attention import IMPLEMENTATION
from kvexport.plan.cache import LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.fields import Recipe

EXPANDED = "kvexport-expanded"  # an attention function that receives the keys and values of every head
CHUNK = 16
METHODS = ("keepkv", "ballot")
FORMS = ("latent", "expanded", "expanded, equal slots")


class Reader(SimulatedCache):
    """The model over a cache of latents, or of the keys and values of every head."""

    def __init__(self, folder: Path) -> None:
        AttentionInterface.register(EXPANDED, self._attend_expanded)
        AttentionMaskInterface.register(EXPANDED, lambda *args, **options: None)
        self.folder = folder
        self.models: dict[bool, Any] = {
            latent: AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, attn_implementation=IMPLEMENTATION if latent else EXPANDED
            ).eval()
            for latent in (True, False)
        }
        config = self.models[True].config
        heads, turned = config.num_attention_heads, config.qk_rope_head_dim
        plain, value, rank = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        scale = self.models[True].model.layers[0].self_attn.scaling
        sizes = {True: (1, rank + turned, rank), False: (heads, plain + turned, value)}
        self.geometry = {
            latent: [LayerGeometry(heads, *size, scale=scale)] * config.num_hidden_layers
            for latent, size in sizes.items()
        }

    def recipe(self, method: str, slots: int, dtype: str = "float32") -> Recipe:
        """Return the recipe of a budget of `slots`."""
        return Recipe.model_validate(
            {
                "model": {"path": str(self.folder), "dtype": dtype},
                "cache": {"method": method, "budget": slots, "sinks": 4, "recent": 0.5, "merge_every": CHUNK},
                "export": {"prefill_chunk": CHUNK},
                "limits": {"max_length": MAX_LENGTH, "max_batch": 1},
            }
        )

    def bytes(self, latent: bool, method: str, slots: int) -> int:
        """Return the bytes of the cache of a sequence, with keys and values in float16."""
        return plan_cache(self.recipe(method, slots, "float16"), self.geometry[latent]).bytes()

    def expanded_slots(self, method: str, slots: int) -> int:
        """Return the most slots of expanded keys and values that fit into the bytes of `slots` latents."""
        most = self.bytes(True, method, slots)
        while self.bytes(False, method, slots) > most:
            slots -= 1
        return slots

    def _attend_expanded(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        options["layer"] = module.layer_idx
        return self.attend(module, query, key, value, options).transpose(1, 2), None

    def read(self, ids: list[int], latent: bool, method: str, slots: int) -> Tensor:
        """Return the logits [tokens, vocabulary] of every token of a text."""
        return self.logits(self.models[latent], ids, self.recipe(method, slots), self.geometry[latent])


def texts(count: int) -> dict[str, list[list[int]]]:
    """Return `count` rows of source, and as many documents with questions."""
    data, rng = load_data(), np.random.default_rng(4321)
    source = [code_row(data, rng, MAX_LENGTH, data.held_out)[0] for _ in range(count)]
    recall = [train.recall_row(data, rng, MAX_LENGTH, data.held_out, 0.0)[0] for _ in range(count)]
    return {"source": source, "recall": recall}


def trained_model(folder: Path, steps: int, threads: int) -> dict[str, Any]:
    """Return the figures of the model in `folder`; the model is made if it is missing."""
    figures = folder / "figures.json"
    if not figures.exists():
        figures.write_text(json.dumps(make_model(folder, steps, threads)))
    result: dict[str, Any] = json.loads(figures.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=30, help="training steps of 2,048 tokens")
    parser.add_argument("--texts", type=int, default=3, help="texts of each kind")
    parser.add_argument("--budgets", default="96,256", help="slots of the latent cache")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    folder = options.work / f"latent-{options.steps}"
    folder.mkdir(parents=True, exist_ok=True)
    model = trained_model(folder, options.steps, options.threads)
    torch.set_num_threads(options.threads)
    reader, rows = Reader(folder), texts(options.texts)
    full: dict[tuple[str, int], Tensor] = {}
    apart = 0.0  # the largest difference of the two forms of a full cache
    for kind, several in rows.items():
        for i, ids in enumerate(several):
            full[kind, i], expanded = (reader.read(ids, latent, "full", MAX_LENGTH) for latent in (True, False))
            apart = max(apart, float((full[kind, i] - expanded).abs().max()))
    results = []
    for method in METHODS:
        for slots in map(int, options.budgets.split(",")):
            few = reader.expanded_slots(method, slots)
            for form, own in zip(FORMS, (slots, few, slots), strict=True):
                row: dict[str, Any] = {"method": method, "form": form, "slots": own}
                row["bytes"] = reader.bytes(form == "latent", method, own)
                for kind, several in rows.items():
                    each = [
                        kl(full[kind, i], reader.read(x, form == "latent", method, own)) for i, x in enumerate(several)
                    ]
                    figure = mean(each)
                    row[kind] = [round(x, 5) for x in (figure.value, figure.low, figure.high)]
                    row[f"{kind} of each text"] = [round(x, 5) for x in each]
                print(json.dumps(row), flush=True)
                results.append(row)
    heads = {"latent": reader.geometry[True][0], "expanded": reader.geometry[False][0]}
    sizes = {name: [x.kv_heads, x.key_size, x.value_size] for name, x in heads.items()}
    save(
        "latent",
        {
            "model": model,
            "kv_heads, key_size, value_size": sizes,
            "largest logit difference of the two full caches": apart,
            "rows": results,
        },
    )


if __name__ == "__main__":
    main()
