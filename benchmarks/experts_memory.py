"""Memory and time of building artifacts of a mixture of experts: a few layers in the shape of Qwen3-30B-A3B.

    python benchmarks/experts_memory.py [--layers 1 2] [--work DIR]

The checkpoint is a sparse file. Its header has float16 matrices of 128 experts, and its weights are a hole, which reads
as zeros. `float16` writes the experts unchanged, `int4` rounds them to 4 bits in groups of 32. Each build runs in a
process of its own. Peak memory is the kernel's figure for the finished process, mapped files included. The memory of a
build does not depend on the values of the weights. Rows of other numbers of layers in the result stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, save, write_tokenizer
from export import measured

CASES = {"float16": "", "int4": "weights: {bits: 4, group: 32}\n"}


def sparse_checkpoint(folder: Path, layers: int) -> int:
    """Write the checkpoint into `folder` and return the bytes of its weights."""
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
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvexport-benchmark")
    options = parser.parse_args()
    file = RESULTS / "experts_memory.json"
    previous = json.loads(file.read_text()) if file.exists() else {}
    results: dict[str, Any] = {name: row for name, row in previous.items() if " layers, " in name}
    for layers in options.layers:
        folder = options.work / f"experts-{layers}"
        folder.mkdir(parents=True, exist_ok=True)
        held = sparse_checkpoint(folder, layers)
        for case, weights in CASES.items():
            recipe, out = options.work / "experts.yaml", options.work / "out"
            model = f"model: {{path: {folder.absolute()}, dtype: float16}}\n"
            recipe.write_text(f"{model}cache: {{method: keepkv, budget: 512}}\n{weights}")
            build = [sys.executable, "-m", "kvexport", "build", "--recipe", str(recipe), "--out", str(out)]
            figures: dict[str, Any] = measured(build, dict(os.environ))
            size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            figures |= {"artifact_megabytes": size / 1e6, "checkpoint_megabytes": held / 1e6}
            results[f"{layers} layers, {case}"] = figures
            print(f"{layers} layers, {case}", json.dumps(figures), flush=True)
            shutil.rmtree(out)
        shutil.rmtree(folder)
    print(save("experts_memory", results))


if __name__ == "__main__":
    main()
