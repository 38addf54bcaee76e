"""The gain of fitting values to recent queries after ballot's merge: KL to the full cache, simulated in PyTorch.

    python benchmarks/fit_simulation.py [--slots 128,51] [--queries 64] [--ridges 0.02,0.1,0.5,2]   # "": no fits

Texts of 1,024 tokens of Python's manual are read in chunks of 32 with a merge after each. KL is in nats per token of
the second half, text by text. The result is an upper bound of the gain: queries take no slots, and values may change
without a bound. Rows are added to those of earlier runs.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import ballot_fitted
import numpy as np
from common import RESULTS, save
from numpy.typing import NDArray

from kvexport.cache_planning import plan_cache
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import Text
from kvexport.evaluate.reference import log_softmax
from kvexport.export.build import read_model
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.load import load_recipe
from kvexport.validate.reference import Arrays, TorchReference

CHUNK = 32


def recipe_of(name: str, length: int, budget: int, method: str, parameters: dict[str, Any]) -> Any:
    changes = {"cache.method": method, "cache.budget": budget, "limits.max_length": length, "cache.merge_every": CHUNK}
    changes |= {"export.prefill_chunk": CHUNK, "export.logits": "all", "limits.max_batch": 8}
    changes |= {f"cache.parameters.{key}": value for key, value in parameters.items()}
    return load_recipe(name, [f"{key}={value}" for key, value in changes.items()]).recipe


def predictions(reference: TorchReference, tokens: NDArray[np.int64]) -> NDArray[Any]:
    """Return log-probabilities [texts, second half, vocabulary] with a merge after every chunk."""
    texts, length = tokens.shape
    state: Arrays = {
        past: np.zeros(layer.shapes(texts)[kind], layer.dtypes()[kind])
        for past, _, layer, kind in reference.plan.state_names()
    }
    there = {present: past for past, present, _, _ in reference.plan.state_names()}
    rows = []
    for first in range(0, length, CHUNK):
        lengths = {"query_length": CHUNK, "past_length": first}
        feed = {name: np.full((texts, 1), x, np.int64) for name, x in lengths.items()}
        result = reference.decode({"input_ids": tokens[:, first : first + CHUNK], **feed, **state})
        if first >= length // 2:
            rows.append(log_softmax(result["logits"]).astype(np.float32))
        state |= {there[name]: x for name, x in result.items() if name in there}
        state |= {there[name]: x for name, x in reference.merge(state).items()}
    return np.concatenate(rows, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-135m-base")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--slots", default="128,51")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--ridges", default="0.02,0.1,0.5,2")
    options = parser.parse_args()
    ballot_fitted.register()
    full = recipe_of(options.recipe, options.length, options.length, "full", {})
    shape = read_model(full)
    reference = TorchReference(shape.checkpoint, shape.plan, shape.geometry, full.cache.build_method(), full)
    language = Text(Tokenizer.from_folder(shape.checkpoint.path), manual())
    rng = np.random.default_rng(0)
    tokens = np.array([language.text(rng, options.length)[0] for _ in range(options.texts)], np.int64)
    right = predictions(reference, tokens)
    path = RESULTS / "fit-simulation.json"
    kl: dict[str, list[float]] = json.loads(path.read_text())["kl"] if path.exists() else {}
    fits: list[tuple[str, str, dict[str, Any]]] = [("ballot", "ballot", {})]
    for ridge in filter(None, options.ridges.split(",")):
        label = f"ballot_fitted, {options.queries} queries, ridge {ridge}"
        fits.append((label, "ballot_fitted", {"queries": options.queries, "ridge": ridge, "change_max": 1e6}))
    for slots in options.slots.split(","):
        for label, method, parameters in fits:
            recipe = recipe_of(options.recipe, options.length, int(slots), method, parameters)
            reference.plan, reference.method = plan_cache(recipe, shape.geometry), recipe.cache.build_method()
            divergences = (np.exp(right) * (right - predictions(reference, tokens))).sum(-1, dtype=np.float64).mean(-1)
            kl[f"{slots} slots, {label}"] = [round(float(x), 6) for x in divergences]
            print(f"{slots} slots, {label}: {divergences.mean():.5f}", flush=True)
            save("fit-simulation", {"texts": options.texts, "length": options.length, "kl": kl})


if __name__ == "__main__":
    main()
