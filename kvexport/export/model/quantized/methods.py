"""The quantization that a checkpoint declares, and the choice of a reader for its layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexport.errors import UsageError
from kvexport.export.model.quantized.bitsandbytes import read_bitsandbytes
from kvexport.export.model.quantized.columns import read_columns
from kvexport.export.model.quantized.float4 import read_mxfp4, read_nvfp4
from kvexport.export.model.quantized.reading import Read, Tensors, refused
from kvexport.export.model.quantized.rows import read_compressed, read_float8

MODELOPT_FILE = "hf_quant_config.json"
_READERS = {
    "gptq": read_columns, "awq": read_columns, "compressed-tensors": read_compressed, "fp8": read_float8,
    "modelopt fp8": read_float8, "modelopt nvfp4": read_nvfp4, "bitsandbytes": read_bitsandbytes, "mxfp4": read_mxfp4,
}  # fmt: skip


def quantization_of(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization settings in config.json or ModelOpt's own file; None if weights are not quantized."""
    section: Any = None
    for own in (config.get("quantization"), config.get("quantization_config")):  # mlx-lm writes one or both
        if isinstance(own, Mapping) and {"group_size", "bits"} <= own.keys() and "quant_method" not in own:
            raise refused(f"MLX of {str(own['bits'])[:40]} bits")
    for candidate in (config, config.get("text_config")):
        if isinstance(candidate, Mapping):
            section = section or candidate.get("quantization_config") or candidate.get("compression_config")
    if not section and (file := path / MODELOPT_FILE).is_file():
        try:
            section = {"quant_method": "modelopt", **json.loads(file.read_text(encoding="utf-8"))["quantization"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{file} cannot be read: {type(error).__name__}: {error}", f"download {file.name} again"
            ) from error
    if not section:
        return None
    method = str(section.get("quant_method") or "unnamed").lower() if isinstance(section, Mapping) else str(section)
    if method == "modelopt":
        method = f"modelopt {str(section.get('quant_algo')).lower()}"
    if method not in _READERS or not isinstance(section, Mapping):
        raise refused(method)
    return {**section, "quant_method": method}


def read_quantized(config: Mapping[str, Any], tensors: Tensors) -> Read:
    computed, used, notes = _READERS[config["quant_method"]](config, tensors)
    if not computed:
        raise UsageError(
            f"config.json says that weights are quantized ({config['quant_method']}), and no tensor is",
            "take quantization_config out of config.json, or download the checkpoint again",
        )
    return computed, used, notes
