"""Memory and time of builds, beside the model builder of onnxruntime-genai.

    python benchmarks/speed/export.py [--cases float16 gptq ...] [--shapes 1b 7b] [--layers 1 2] [--rounds 3]
                                      [--work DIR] [--keep] [--genai DIR]

Each build runs in a process of its own. Peak memory is the kernel's figure for the finished process: maximum resident
set, mapped files included. Rows of other shapes and cases stay in the results. Checkpoints are of random weights, and
are removed unless --keep is given. Cases, with the result that holds them:

    float16            a float16 Llama of a shape, in turn with the builder if --genai (the target of
                       `pip install --no-deps --target DIR onnxruntime-genai==0.18.0`) is given: medians of the rounds'
                       seconds and ratios, and the largest peaks. The builder, which holds the whole checkpoint, is not
                       measured for 7b (export.json)
    gptq, act-order    a GPTQ checkpoint of a shape, of 4 bits in groups of 128 (7B: 3.9 GB), whose packed weights are
                       kept, with columns in their own order or with act-order (quantized_memory.json)
    rounded            a float16 Llama of a shape, rounded to 4 bits by the build (quantized_memory.json)
    experts            --layers layers in the shape of Qwen3-30B-A3B, unchanged and rounded to 4 bits. The checkpoint is
                       a sparse file, whose weights are a hole that reads as zeros: the memory of a build does not
                       depend on their values (experts_memory.json)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import SHAPES, WORK, earlier, make_checkpoint_apart, options_of, ratio, save, write_tokenizer

GENAI = "onnxruntime-genai"
GROUP = 128
SHARD_BYTES = 1 << 30
CASES = ("float16", "gptq", "act-order", "rounded", "experts")
EXPERTS = {"float16": "", "int4": "weights: {bits: 4, group: 32}\n"}


def measured(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command and return its wall seconds and its peak resident megabytes.

    A shell runs in between, since a child starts with the peak of its parent.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@"', "sh", *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()[-2000:]}")
    return {"seconds": time.perf_counter() - start, "peak_megabytes": usage.ru_maxrss / 1024}


def build_of(checkpoint: Path, work: Path, name: str, settings: str) -> list[str]:
    recipe = work / f"{name}.yaml"
    model = f"model: {{path: {checkpoint.absolute()}, dtype: float16}}\n"
    recipe.write_text(f"{model}cache: {{method: keepkv, budget: 512}}\n{settings}")
    return [sys.executable, "-m", "kvexport", "build", "--recipe", str(recipe), "--out", str(work / "out")]


def built(checkpoint: Path, work: Path, name: str, settings: str) -> dict[str, float]:
    """Build a checkpoint once and return the figures, with the megabytes of artifact and checkpoint."""
    figures = measured(build_of(checkpoint, work, name, settings), dict(os.environ))
    size = sum(file.stat().st_size for file in (work / "out").rglob("*") if file.is_file())
    read = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    shutil.rmtree(work / "out")
    return {**figures, "artifact_megabytes": size / 1e6, "checkpoint_megabytes": read / 1e6}


def beside_genai(shape: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Build a float16 checkpoint in turn by all sides, and return their figures."""
    work, out = options.work, str(options.work / "out")
    sides: dict[str, tuple[list[str], dict[str, str]]] = {}
    sides["kvexport"] = build_of(checkpoint, work, shape, ""), dict(os.environ)
    if shape != "7b" and options.genai:
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(checkpoint), "-o", out]
        builder += ["-p", "fp16", "-e", "cuda", "-c", str(work / "cache")]
        sides[GENAI] = builder, {**os.environ, "PYTHONPATH": options.genai}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, side in sides.items():
            rounds[name].append(measured(*side))
            shutil.rmtree(out)
    results: dict[str, Any] = {}
    for name, runs in rounds.items():
        peak = max(run["peak_megabytes"] for run in runs)
        results[name] = {"seconds": median(run["seconds"] for run in runs), "peak_megabytes": peak, "rounds": runs}
        for figure in ("seconds", "peak_megabytes") if GENAI in sides and name != GENAI else ():
            pair = ([run[figure] for run in rounds[side]] for side in (name, GENAI))
            results[name][f"{figure}_ratio"] = ratio(*pair)
    return results


def make_gptq(shape: str, folder: Path, act_order: bool) -> Path:
    """Write a checkpoint in the layout of `make_checkpoint` whose projections are in GPTQ's packed format."""
    from safetensors.numpy import save_file
    from transformers import LlamaConfig

    if (folder / "complete").exists():
        return folder
    floats = make_checkpoint_apart("M", folder / "of-M", "float16")
    folder.mkdir(exist_ok=True)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=131072, tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": act_order, "sym": True}
    description = {**config.to_dict(), "quantization_config": quantization, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(description))
    for file in floats.glob("token*.json"):
        shutil.copy(file, folder / file.name)
    rng = np.random.default_rng(0)
    block = rng.integers(-(1 << 31), 1 << 31, 1 << 20).astype(np.int32)
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_size = hidden // config.num_attention_heads * config.num_key_value_heads
    orders = {size: rng.permutation(np.arange(size) // GROUP).astype(np.int32) for size in (hidden, inner)}
    tensors: dict[str, Any] = {
        f"{name}.weight": np.full((config.vocab_size, hidden), 0.01, np.float16)
        for name in ("model.embed_tokens", "lm_head")
    }
    tensors["model.norm.weight"] = np.ones(hidden, np.float16)
    weight_map: dict[str, str] = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float16)
        for name, n, k in (
            *(("self_attn.q_proj", hidden, hidden), ("self_attn.o_proj", hidden, hidden)),
            *(("self_attn.k_proj", kv_size, hidden), ("self_attn.v_proj", kv_size, hidden)),
            *(("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner)),
        ):
            own = f"{prefix}.{name}"
            tensors[f"{own}.qweight"] = np.resize(block, (k // 8, n))
            tensors[f"{own}.qzeros"] = np.full((k // GROUP, n // 8), 0x77777777, np.int32)
            tensors[f"{own}.scales"] = np.full((k // GROUP, n), 0.002, np.float16)
            tensors[f"{own}.g_idx"] = orders[k] if act_order else (np.arange(k) // GROUP).astype(np.int32)
        last = layer == config.num_hidden_layers - 1
        if last or sum(x.nbytes for x in tensors.values()) > SHARD_BYTES:
            shard = f"model-{layer:05d}.safetensors"
            save_file(tensors, folder / shard, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, shard)
            tensors = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shutil.rmtree(folder / "of-M")
    (folder / "complete").touch()
    return folder


def make_experts(folder: Path, layers: int) -> Path:
    """Write a checkpoint of float16 matrices of 128 experts, whose weights are a hole of the file."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144, vocab_size=151936,
        max_position_embeddings=40960, bos_token_id=1, eos_token_id=2, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.named_parameters():
        stem, _, own = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(own, ()) if stem else ()
        for expert in range(tensor.shape[0] if parts else 0):
            for part in parts:
                rows = tensor.shape[1] // len(parts)
                shapes[f"{stem}.experts.{expert}.{part}.weight"] = (rows, tensor.shape[2])
        if not parts:
            shapes[name] = tuple(tensor.shape)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def keep(result: str, name: str, figures: dict[str, Any]) -> None:
    """Put the figures of a case into a result."""
    run = ("date", "command", "commit", "machine")
    print(name, json.dumps(figures), flush=True)
    save(result, {key: row for key, row in earlier(result).items() if key not in run} | {name: figures})


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--shapes", nargs="+", default=["1b", "7b"])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--keep", action="store_true", help="do not remove the checkpoints")
    parser.add_argument("--genai", default="", help="a folder with onnxruntime_genai, for its builder alone")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for case in options.cases:
        for which in options.layers if case == "experts" else options.shapes:
            folder = options.work / f"{which}-{case}"
            if case == "float16":
                keep("export", which, beside_genai(which, make_checkpoint_apart(which, folder, "float16"), options))
            elif case == "experts":
                make_experts(folder, which)
                for rounded, settings in EXPERTS.items():
                    name = f"{which} layers, {rounded}"
                    keep("experts_memory", name, built(folder, options.work, "experts", settings))
            else:
                settings = "weights: {bits: 4, group: 32, head: 8}\n" if case == "rounded" else ""
                if case == "rounded":
                    make_checkpoint_apart(which, folder, "float16")
                else:
                    make_gptq(which, folder, case == "act-order")
                name = f"{which} {'gptq, act-order' if case == 'act-order' else case}"
                keep("quantized_memory", name, built(folder, options.work, f"{which}-{case}", settings))
            if not options.keep:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
