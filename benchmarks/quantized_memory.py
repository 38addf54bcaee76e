"""Memory and time of building artifacts with packed weights.

    python benchmarks/quantized_memory.py [--shapes 1b 7b] [--cases gptq] [--work DIR] [--keep]

The checkpoints are Llamas of 1.1B and 7B random weights in the usual layout of shards. Each build runs in a process of
its own. Cases:

- `gptq` and `gptq, act-order`: a GPTQ checkpoint of 4 bits in groups of 128 (7B: 3.9 GB) whose packed weights are kept,
  with columns in their own order or with act-order
- `rounded`: a float16 checkpoint (7B: 13.5 GB), rounded to 4 bits in groups of 32 by the build

Peak memory is the kernel's figure for the finished process, mapped files included. The checkpoints are removed unless
--keep is given. Rows of other shapes and cases stay in the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, SHAPES, make_checkpoint, save
from export import measured

GROUP = 128
SHARD_BYTES = 1 << 30
CASES = ("gptq", "gptq, act-order", "rounded")


def make_gptq(shape: str, folder: Path, act_order: bool) -> None:
    """Write a checkpoint in the layout of `make_checkpoint` whose projections are in GPTQ's packed format."""
    from safetensors.numpy import save_file
    from transformers import LlamaConfig

    if (folder / "complete").exists():
        return
    floats = make_checkpoint("M", folder / "of-M", "float16")
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
    floats_of = {
        name: np.full((config.vocab_size, hidden), 0.01, np.float16) for name in ("model.embed_tokens", "lm_head")
    }
    tensors: dict[str, Any] = {f"{name}.weight": x for name, x in floats_of.items()}
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


def made(case: str, shape: str, folder: Path) -> str:
    """Write the checkpoint of a case in a process of its own, which keeps this process small; return its recipe."""
    rounded = case == "rounded"
    code = f"import sys, pathlib, quantized_memory as q; q.{'make_checkpoint' if case == 'rounded' else 'make_gptq'}"
    last = "'float16'" if rounded else str("act-order" in case)
    subprocess.run(
        [sys.executable, "-c", f"{code}(sys.argv[1], pathlib.Path(sys.argv[2]), {last})", shape, str(folder)],
        check=True,
        cwd=Path(__file__).parent,
    )
    weights = "weights: {bits: 4, group: 32, head: 8}\n" if rounded else ""
    return f"model: {{path: {folder}, dtype: float16}}\ncache: {{method: keepkv, budget: 512}}\n{weights}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1b", "7b"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvexport-benchmark")
    parser.add_argument("--keep", action="store_true", help="do not remove the checkpoints")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "quantized_memory.json"
    previous = json.loads(file.read_text()) if file.exists() else {}
    results: dict[str, Any] = {name: row for name, row in previous.items() if name.split()[0] in SHAPES}
    for shape in options.shapes:
        for case in options.cases:
            name = f"{shape}-{case.replace(', ', '-')}"
            recipe, out = options.work / f"{name}.yaml", options.work / "out"
            recipe.write_text(made(case, shape, (options.work / name).absolute()))
            build = [sys.executable, "-m", "kvexport", "build", "--recipe", str(recipe), "--out", str(out)]
            figures = measured(build, dict(os.environ))
            size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            read = sum(file.stat().st_size for file in (options.work / name).glob("*.safetensors"))
            results[f"{shape} {case}"] = {
                **figures,
                "artifact_megabytes": size / 1e6,
                "checkpoint_megabytes": read / 1e6,
            }
            print(f"{shape} {case}", json.dumps(results[f"{shape} {case}"]), flush=True)
            shutil.rmtree(out)
            if not options.keep:
                shutil.rmtree(options.work / name)
            print(save("quantized_memory", results))


if __name__ == "__main__":
    main()
