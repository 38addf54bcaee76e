"""LoRA adapters of random numbers for the tiny Llama, in the files of PEFT's save_pretrained()."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvexport.tensor_files.peft import read_adapter

RANK = 3
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj")
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "use_dora": False}


def adapter(
    folder: Path, base: Path, modules: tuple[str, ...] = MODULES, *, rank: int = RANK, seed: int = 1, **config: Any
) -> Path:
    """Write a random adapter of a checkpoint into a new folder, and return the folder."""
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        outputs, inputs = weights[f"{module}.weight"].shape
        for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{module}.lora_{factor}.weight"] = torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def with_adapter(folder: Path, base: Path, adapter: Path) -> Path:
    """Write a checkpoint whose weights have an adapter's products added, and return its folder."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    read = read_adapter(adapter, "--adapter one")
    factors = load_file(adapter / "adapter_model.safetensors")
    for module in read.pairs:
        first, second = (factors[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
        weights[f"{module}.weight"] += read.scale(module) * (second @ first)
    save_file(weights, folder / "model.safetensors")
    return folder
