"""LoRA adapters in the format of PEFT: their files, read and checked.

A LoRA adapter changes some weights W [outputs, inputs] of a model. For each of them the adapter has two matrices A
[rank, inputs] and B [outputs, rank]. The changed weight is W + s B A, where s is `lora_alpha / r`, or `lora_alpha /
sqrt(r)` with `use_rslora` (PEFT, `LoraLayer.update_layer`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexport.errors import UsageError
from kvexport.files import file_digests, json_digest
from kvexport.tensor_files.shards import TensorEntry, is_present, parse_object, read_file, read_shard, some_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
MERGE = "merge it with PEFT: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(DIRECTORY)"
_MOST_ALPHA = 1e6
_MOST_BYTES = 4 << 20  # of adapter_config.json, which has one line for each module that it names
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
# Settings of PEFT that change what an adapter computes, and their values that kvexport implements.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None, []),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "arrow_config": (None,),
    # The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take the adapter's first value from the base model's weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class AdapterFiles:
    folder: Path
    config: Mapping[str, Any]  # content of adapter_config.json
    # Matrices A [rank, inputs] and B [outputs, rank] of each module that the adapter changes
    pairs: Mapping[str, tuple[TensorEntry, TensorEntry]]
    digest: str  # SHA-256 of the settings and the matrices, in hexadecimal

    def __str__(self) -> str:
        base = self.base
        return f"the adapter {self.folder}" + (f", trained on {base}," if base else "")

    @property
    def base(self) -> str:
        """The model that a LoRA adapter was trained on, as PEFT names it: a hub id or a folder; "" if none is named."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) else ""

    def scale(self, module: str) -> float:
        rank, alpha = self.pairs[module][0].shape[0], self._alpha(module)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _alpha(self, module: str) -> float:
        file = self.folder / CONFIG
        alpha, patterns = self.config.get("lora_alpha", 8), self.config.get("alpha_pattern") or {}
        for name, value in patterns.items() if isinstance(patterns, dict) else ():
            if not re.fullmatch(r"[\w.]+", name):  # a regular expression of a stranger may run for ever
                raise UsageError(f"{file} has an alpha_pattern {name!r} that is no plain name of a module", MERGE)
            if f".{module}".endswith(f".{name}"):
                alpha = value
                break
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < _MOST_ALPHA:
            raise UsageError(
                f"{file} has lora_alpha {str(alpha)[:40]}, expected a number below {_MOST_ALPHA:g}",
                f"download {CONFIG} again",
            )
        return float(alpha)


def read_adapter(folder: Path, setting: str) -> AdapterFiles:
    config = _read_config(folder, setting)
    pairs = _pairs(folder, read_shard(folder / WEIGHTS).tensors)
    weights = (folder / WEIGHTS).resolve()  # in the hub's cache a link to a blob
    digest = json_digest([*file_digests(weights.parent, [weights.name]), config])
    return AdapterFiles(folder, config, pairs, digest)


def matching_name(module: str, names: Iterable[str]) -> str | None:
    """Return the model's module, one of `names`, that a LoRA adapter's module name means; None if it is not clear.

    The prefixes of the two names may differ: they depend on whether a checkpoint is of a wrapper, a text model or a
    base model.
    """
    names = list(names)
    if module in names:
        return module
    close = [name for name in names if name.endswith(f".{module}") or module.endswith(f".{name}")]
    return close[0] if len(close) == 1 else None


def _read_config(folder: Path, setting: str) -> dict[str, Any]:
    if not is_present(folder / WEIGHTS) and is_present(folder / _PICKLE):
        script = (
            "import torch; from safetensors.torch import save_file; "
            f"save_file(torch.load('{_PICKLE}', weights_only=True), '{WEIGHTS}')"
        )
        raise UsageError(
            f"{setting} {str(folder)!r} holds a pickle ({_PICKLE}), which can run code when read; expected {WEIGHTS}",
            f'convert it in its folder: python -c "{script}"',
        )
    if not is_present(folder / CONFIG) or not is_present(folder / WEIGHTS):
        raise UsageError(
            f"{setting} {str(folder)!r} is no folder with {CONFIG} and {WEIGHTS}",
            f"{setting}=FOLDER that PEFT's save_pretrained() wrote",
        )
    config = parse_object(folder / CONFIG, read_file(folder / CONFIG, _MOST_BYTES))
    for key, values in _ONLY.items():
        if config.get(key) not in values and key in config:
            raise UsageError(
                f"{folder / CONFIG} has {key} {config[key]!r}; only adapters with {key} {values[0]!r} are supported",
                MERGE,
            )
    return config


def _pairs(folder: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    factors: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None or len(entry.shape) != 2 or 0 in entry.shape:
            raise UsageError(
                f"{folder / WEIGHTS} holds {name!r}, which is no matrix A or B of a linear layer",
                "train the adapter on linear layers alone, or merge it with PEFT's merge_and_unload()",
            )
        factors.setdefault(match["module"], {})[match["factor"]] = entry
    halves = [module for module, pair in factors.items() if len(pair) < 2]
    if halves or not factors:
        raise UsageError(
            f"{folder / WEIGHTS} lacks lora_A or lora_B of {some_names(halves)}"
            if halves
            else f"{folder / WEIGHTS} holds no matrices",
            f"download {WEIGHTS} again",
        )
    return {module: (factor["A"], factor["B"]) for module, factor in sorted(factors.items())}
