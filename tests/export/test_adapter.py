"""Tests of the files of LoRA adapters: scales are PEFT's, and what kvexport does not implement is refused."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvexport.errors import UsageError
from kvexport.tensor_files.peft import read_adapter
from tests.support.adapters import CONFIG, MODULES, adapter


def scales_of(folder: Path) -> dict[str, float]:
    read = read_adapter(folder, "--adapter one")
    return {module: read.scale(module) for module in read.pairs}


@pytest.mark.parametrize(("config", "scales"), [
    ({}, (2.0, 2.0, 2.0)), ({"use_rslora": True}, (6 / math.sqrt(3),) * 3),
    ({"alpha_pattern": {"v_proj": 9, "layers.1.mlp.down_proj": 3}}, (2.0, 3.0, 1.0)),
])  # fmt: skip
def test_products_have_pefts_scales(
    tmp_path: Path, tiny_checkpoint: Path, config: dict[str, Any], scales: tuple[float, ...]
) -> None:
    read = scales_of(adapter(tmp_path / "adapter", tiny_checkpoint, **config))
    assert [read[module] for module in MODULES] == pytest.approx(scales)


def lacking(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def large(folder: Path) -> None:
    os.truncate(folder / "adapter_config.json", 5 << 30)


def half(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[f"base_model.model.{MODULES[0]}.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")


def embedding(folder: Path) -> None:
    save_file(
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2)}, folder / "adapter_model.safetensors"
    )


def with_config(**config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))

    return write


CHANGE_THE_BASE = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lacking, "is no folder with adapter_config.json"),
        (large, "adapter_config.json has more than 4194304 bytes"),
        (pickled, r"holds a pickle \(adapter_model.bin\)"),
        (half, "lacks lora_A or lora_B of 'model.layers.0.self_attn.q_proj'"),
        (embedding, "which is no matrix A or B of a linear layer"),
        (with_config(peft_type="IA3"), "peft_type 'IA3'; only adapters with peft_type 'LORA'"),
        (with_config(use_dora=True), "use_dora True"),
        (with_config(modules_to_save=["lm_head"]), "modules_to_save"),
        *((with_config(init_lora_weights=kind), f"init_lora_weights '{kind}'") for kind in CHANGE_THE_BASE),
        (with_config(layer_replication=[[0, 2], [0, 1]]), "layer_replication"),
        (with_config(use_qalora=True), "use_qalora"),
        (with_config(arrow_config={"arrow_top_k": 1}), "arrow_config"),
        (with_config(lora_alpha="6"), "lora_alpha 6, expected a number"),
        (with_config(lora_alpha=float("inf")), "lora_alpha inf, expected a number"),
        (with_config(lora_alpha=10**400), r"lora_alpha 10+, expected a number"),
        (with_config(alpha_pattern={"q_proj": float("nan")}), "lora_alpha nan, expected a number"),
        (with_config(alpha_pattern={"(a+)+$": 3}), "that is no plain name of a module"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, tiny_checkpoint: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint)
    damage(folder)
    with pytest.raises(UsageError, match=words):
        scales_of(folder)


@pytest.mark.parametrize("kind", [True, False, "gaussian", "eva", "orthogonal"])
def test_beginnings_that_leave_the_base_as_it_is_are_read(tmp_path: Path, tiny_checkpoint: Path, kind: Any) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint, init_lora_weights=kind)
    assert scales_of(folder).keys() == {*MODULES}


def test_an_adapter_in_the_cache_of_the_hub_is_read(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = adapter(tmp_path / "adapter", tiny_checkpoint)
    hub = tmp_path / "models--org--lora"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "0123abcd").mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(hub / "blobs" / str(i))
        (hub / "snapshots" / "0123abcd" / file.name).symlink_to(f"../../blobs/{i}")
    assert scales_of(hub / "snapshots" / "0123abcd").keys() == {*MODULES}
