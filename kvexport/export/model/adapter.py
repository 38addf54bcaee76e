"""LoRA adapters in the format of PEFT, added to the weights of a checkpoint when an artifact is built.

An adapter holds, for each weight W [outputs, inputs] that it changes, two matrices A [rank, inputs] and B [outputs,
rank]. The build writes W + s B A, where s is `lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora` (PEFT,
`LoraLayer.update_layer`). Weights are added block by block of rows, so no weight is in memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.digests import file_digests
from kvexport.errors import UsageError
from kvexport.export.model.checkpoint import Checkpoint, read_checkpoint, refuse_link
from kvexport.export.model.shards import is_present, parse_object, read_file, read_shard, some_names
from kvexport.export.model.tensors import Source, TensorEntry
from kvexport.export.weights.casting import load_tensor, read_rows, row_blocks
from kvexport.recipe.fields import Recipe

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
# Settings of PEFT that change what an adapter computes, and their values that this module implements.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None, []),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
}


@dataclass(frozen=True)
class Adapted:
    """A weight of a checkpoint with an adapter's change added.

    Attributes:
        base: The weight without the change, in floats.
        first: A [rank, inputs].
        second: B [outputs, rank].
        scale: The factor s of B A.
        transposed: Whether the checkpoint stores the weight as [inputs, outputs] (`fan_in_fan_out`).
    """

    base: TensorEntry | Source
    first: TensorEntry
    second: TensorEntry
    scale: float
    transposed: bool = False
    packing: None = None

    @property
    def name(self) -> str:
        """The name of the weight's tensor in the checkpoint."""
        return self.base.name

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight as the checkpoint stores it."""
        rows, columns = self.base.shape
        return rows, columns

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the rows of the changed weight in float32, block by block.

        Raises:
            UsageError: A value of the weight or of the adapter is infinite or NaN.
        """
        left, right = load_tensor(self.second, "float32"), load_tensor(self.first, "float32")
        if self.transposed:
            left, right = right.T, left.T
        begin = 0
        for rows in self._base_rows():
            change = left[begin : begin + len(rows)] @ right
            yield {"weight": rows + np.float32(self.scale) * change}
            begin += len(rows)

    def _base_rows(self) -> Iterator[NDArray[np.float32]]:
        rows, columns = self.shape
        if isinstance(self.base, TensorEntry):
            yield from (read_rows(self.base, block) for block in row_blocks(rows, 4 * columns))
        else:
            yield from (block["weight"] for block in self.base.blocks())

    def order(self) -> NDArray[np.int64]:
        """Raise NotImplementedError: the columns of floats are in the order of the input features."""
        raise NotImplementedError


def read_recipe_checkpoint(folder: Path, recipe: Recipe) -> Checkpoint:
    """Read the headers of a recipe's checkpoint in `folder`, with the adapter of `weights.merge_adapter` added.

    Raises:
        UsageError: See `kvexport.export.model.checkpoint.read_checkpoint` and `merge_adapter`.
    """
    checkpoint, adapter = read_checkpoint(folder), recipe.weights.merge_adapter
    return checkpoint if adapter is None else merge_adapter(checkpoint, Path(adapter))


def merge_adapter(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a checkpoint whose weights are those of `checkpoint` with an adapter added.

    Args:
        checkpoint: The base model of the adapter.
        folder: The folder of the adapter, with adapter_config.json and adapter_model.safetensors.

    Returns:
        The checkpoint. Its fingerprint is of the base model and the adapter, the adapter's weights included.

    Raises:
        UsageError: A file of the adapter is missing or damaged, the adapter is none of LoRA's plain form, changes a
            weight that the checkpoint does not have or has packed, or has matrices that do not fit the weight.
    """
    config = _read_config(folder)
    refuse_link(folder / WEIGHTS)
    pairs = _pairs(folder, read_shard(folder / WEIGHTS).tensors)
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)
    for module, (first, second) in pairs.items():
        name = _tensor_name(module, [*tensors, *computed], folder)
        base = tensors.pop(name, None) or computed[name]
        computed[name] = _adapted(base, module, (first, second), config, folder)
    facts = json.dumps([checkpoint.fingerprint, *file_digests(folder, [WEIGHTS]), config], sort_keys=True)
    note = f"the adapter {folder.name} is added to {len(pairs)} weights"
    return replace(
        checkpoint,
        tensors=tensors,
        computed=computed,
        fingerprint=hashlib.sha256(facts.encode()).hexdigest(),
        notes=(*checkpoint.notes, note),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not is_present(folder / CONFIG) or not is_present(folder / WEIGHTS):
        raise UsageError(
            f"weights.merge_adapter {str(folder)!r} is no folder with {CONFIG} and {WEIGHTS}",
            "--set weights.merge_adapter=FOLDER that PEFT's save_pretrained() wrote",
        )
    refuse_link(folder / CONFIG)
    config = parse_object(folder / CONFIG, read_file(folder / CONFIG))
    for key, values in _ONLY.items():
        if config.get(key) not in values and key in config:
            raise UsageError(
                f"{folder / CONFIG} has {key} {config[key]!r}; only adapters with {key} {values[0]!r} can be added to "
                "weights",
                "merge it with PEFT: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(DIRECTORY)",
            )
    return config


def _pairs(folder: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """Return the matrices A and B of each module that an adapter changes."""
    factors: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise UsageError(
                f"{folder / WEIGHTS} holds {name!r}, which is no matrix A or B of a linear layer",
                "train the adapter on linear layers alone, or merge it with PEFT's merge_and_unload()",
            )
        factors.setdefault(match["module"], {})[match["factor"]] = entry
    halves = [module for module, found in factors.items() if len(found) < 2]
    if halves or not factors:
        raise UsageError(
            f"{folder / WEIGHTS} lacks lora_A or lora_B of {some_names(halves)}"
            if halves
            else f"{folder / WEIGHTS} holds no matrices",
            f"download {WEIGHTS} again",
        )
    return {module: (found["A"], found["B"]) for module, found in sorted(factors.items())}


def _tensor_name(module: str, names: list[str], folder: Path) -> str:
    """Return the checkpoint's tensor of a module's weight.

    Checkpoints of a text model inside a wrapper, and of a base model, have a longer or shorter prefix.
    """
    wanted = f"{module}.weight"
    if wanted in names:
        return wanted
    close = [name for name in names if name.endswith(f".{wanted}") or wanted.endswith(f".{name}")]
    if len(close) == 1:
        return close[0]
    raise UsageError(
        f"the adapter {folder} changes {module!r}, and the checkpoint has no tensor {wanted!r} (it has "
        f"{some_names(names)})",
        "--set model.path=CHECKPOINT of the model that the adapter was trained on",
    )


def _adapted(
    base: TensorEntry | Source,
    module: str,
    pair: tuple[TensorEntry, TensorEntry],
    config: Mapping[str, Any],
    folder: Path,
) -> Adapted:
    first, second = pair
    if not isinstance(base, TensorEntry) and base.packing is not None:
        raise UsageError(
            f"the adapter {folder} changes {base.name!r}, which the checkpoint stores packed as {base.packing.label}",
            "--set model.path=CHECKPOINT of the same model in floats, and --set weights.bits=4 to pack the sum",
        )
    transposed = bool(config.get("fan_in_fan_out"))
    shape = tuple(base.shape)[::-1] if transposed else tuple(base.shape)
    if first.shape[1:] != shape[1:] or second.shape[:1] != shape[:1] or first.shape[:1] != second.shape[1:]:
        raise UsageError(
            f"the adapter {folder} has matrices {list(first.shape)} and {list(second.shape)} for {module!r}, whose "
            f"weight is {list(shape)} in the checkpoint",
            "--set model.path=CHECKPOINT of the model that the adapter was trained on",
        )
    rank = first.shape[0]
    alpha = _alpha(config, module, folder)
    return Adapted(base, first, second, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), transposed)


def _alpha(config: Mapping[str, Any], module: str, folder: Path) -> float:
    """Return PEFT's `lora_alpha` of a module: that of the first name in `alpha_pattern` that ends the module's name."""
    alpha, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
    for name, value in patterns.items() if isinstance(patterns, dict) else ():
        if not re.fullmatch(r"[\w.]+", name):  # a regular expression of a stranger may run for ever
            raise UsageError(
                f"{folder / CONFIG} has an alpha_pattern {name!r} that is no plain name of a module",
                "merge it with PEFT: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(DIRECTORY)",
            )
        if f".{module}".endswith(f".{name}"):
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UsageError(f"{folder / CONFIG} has lora_alpha {alpha!r}, expected a number", f"download {CONFIG} again")
    return float(alpha)
