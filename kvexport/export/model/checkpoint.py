"""A checkpoint on disk: found, checked and described without reading a weight.

Only safetensors and GGUF files are read, never a pickle, and no code of the checkpoint is run. This module does not
check whether the tensors are those that the model needs; `kvexport.export.weights.write` compares their shapes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.added_tokens import OLDER
from kvexport.export.model import wheel
from kvexport.export.model.gguf import read_gguf
from kvexport.export.model.gguf_model import cached_texts, tensors_of
from kvexport.export.model.gguf_vision import with_encoder
from kvexport.export.model.hub import download
from kvexport.export.model.quantized.methods import quantization_of, read_quantized
from kvexport.export.model.tensors import Checkpoint
from kvexport.tensor_files.shards import (
    INDEX,
    TensorEntry,
    is_present,
    list_shards,
    parse_object,
    read_file,
    read_shard,
    refuse_link,
    some_names,
)

GGUF = ".gguf"
_HUB_ID = re.compile(r"\b[\w.-]+\b/\b[\w.-]{1,96}\b", re.ASCII)
# Files that an artifact contains as they are in the checkpoint
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def open_checkpoint(path: str, revision: str | None, *, weights: bool = True, mmproj: str | None = None) -> Checkpoint:
    """Find a checkpoint, check its files, and read its headers.

    `mmproj` is a GGUF file with the image encoder of a model in a GGUF file.

    Without `weights`, the weights of a hub model are not downloaded unless they are quantized: only headers tell the
    size of packed weights.
    """
    folder = resolve_checkpoint(path, revision, weights=weights)
    if mmproj is not None and folder.suffix != GGUF:
        raise UsageError(
            f"model.mmproj is {mmproj}, and {path} is no GGUF file",
            "leave it out: a checkpoint's folder has its own image encoder",
        )
    here = Path(path).is_dir() or is_gguf(path) or path.startswith(wheel.WHEEL)
    checkpoint = _from_gguf(folder, Path(mmproj)) if mmproj else read_checkpoint(folder, weights=weights or here)
    if not (weights or here) and quantization_of(folder, checkpoint.config):
        checkpoint = read_checkpoint(resolve_checkpoint(path, revision))
    return checkpoint


def resolve_checkpoint(path: str, revision: str | None, *, weights: bool = True) -> Path:
    local = Path(path)
    try:
        if path and local.is_dir():
            return local
        if path and is_gguf(path):
            return local
        if path and local.exists():
            raise UsageError(
                f"model.path {path!r} is a file, expected a directory or a .gguf file",
                f"--set model.path={shlex.quote(str(local.parent))}",
            )
    except OSError as error:
        raise UsageError(
            f"cannot look up model.path {path!r}: {error.strerror}", "--set model.path=DIRECTORY"
        ) from error
    if path.startswith(wheel.WHEEL):
        return wheel.resolve(path.removeprefix(wheel.WHEEL))
    if not _HUB_ID.fullmatch(path) or "--" in path or ".." in path or path.endswith(".git"):
        raise UsageError(
            f"model.path {path!r} is neither a directory nor a Hugging Face hub id (org/name)",
            "--set model.path=DIRECTORY or --set model.path=ORG/NAME",
        )
    return download(path, revision or None, weights=weights)


def is_gguf(path: str) -> bool:
    return path.endswith(GGUF) and Path(path).is_file()


def read_checkpoint(path: Path, *, weights: bool = True) -> Checkpoint:
    """Check a checkpoint's headers; without `weights`, read only config.json and the tokenizer's files of a folder."""
    if path.suffix == GGUF and path.is_file():
        return _from_gguf(path)
    if not path.is_dir():
        raise UsageError(f"checkpoint {path} is not a directory", "--set model.path=DIRECTORY")
    refuse_link(path / "config.json")
    config_bytes = read_file(path / "config.json")
    config = parse_object(path / "config.json", config_bytes)
    if not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"{path / 'config.json'} has model_type {config.get('model_type')!r}, expected a name",
            'add "model_type", for example "llama"',
        )
    quantization = quantization_of(path, config)
    refuse_remote_code(config)
    generation = path / "generation_config.json"
    refuse_link(generation)
    generation_config = parse_object(generation, read_file(generation)) if is_present(generation) else {}

    texts = _texts(path)
    if not weights:
        return Checkpoint(path, config, {}, generation_config, "", texts=texts)

    digest = hashlib.sha256()
    tensors: dict[str, TensorEntry] = {}
    home: dict[str, str] = {}
    _update(digest.update, config_bytes)
    refuse_link(path / INDEX)
    shards = list_shards(path)
    for shard_name, promised in sorted(shards.items()):
        refuse_link(path / shard_name)
        shard = read_shard(path / shard_name)
        _update(digest.update, shard_name.encode(), str(shard.size).encode(), shard.header)
        for name in shard.tensors:
            if name in home:
                raise UsageError(
                    f"tensor {name!r} is in two shards of {path}, {home[name]} and {shard_name}",
                    "download the checkpoint again",
                )
            home[name] = shard_name
        if promised is not None and (missing := promised - shard.tensors.keys()):
            raise UsageError(
                f"{path / shard_name} lacks {some_names(missing)}, which {INDEX} says it holds",
                f"download {shard_name} and {INDEX} again",
            )
        tensors.update((name, entry) for name, entry in shard.tensors.items() if promised is None or name in promised)
    files = tuple((path / name).resolve() for name in shards)
    if quantization is None:
        return Checkpoint(path, config, tensors, generation_config, digest.hexdigest(), files=files, texts=texts)
    computed, used, notes = read_quantized(quantization, tensors)
    rest = {name: entry for name, entry in tensors.items() if name not in used}
    return Checkpoint(path, config, rest, generation_config, digest.hexdigest(), computed, tuple(notes), files, texts)


def _from_gguf(path: Path, mmproj: Path | None = None) -> Checkpoint:
    gguf = read_gguf(path)
    digest, files = gguf.digest, gguf.files
    if mmproj is None:
        tensors, computed = tensors_of(gguf)
        texts = cached_texts(gguf)
    else:
        texts, tensors, computed, digest = with_encoder(gguf, mmproj)
        files = (*files, mmproj)
    config, generation = (
        parse_object(texts / name, read_file(texts / name)) for name in ("config.json", "generation_config.json")
    )
    return Checkpoint(texts, config, tensors, generation, digest, computed, files=files, texts=_texts(texts))


def _texts(path: Path) -> tuple[Path, ...]:
    refuse_link(path / OLDER)
    texts = [path / name for name in TOKENIZER_FILES if os.path.lexists(path / name)]
    for file in texts:
        if not file.is_file():  # a link that loops or leads nowhere, a folder, a device
            raise UsageError(f"{file} is no file", f"download the files of {path} again")
        refuse_link(file)
    return tuple(texts)


def refuse_remote_code(config: Mapping[str, Any]) -> None:
    """Raise UsageError if config.json needs Python code of the checkpoint.

    Such a config.json has an `auto_map`, and transformers has no class for its `model_type`. transformers is imported
    only for a config with an `auto_map`, which official checkpoints of supported models often keep.
    """
    if not config.get("auto_map"):
        return
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise EnvironmentProblem(f"transformers cannot be imported: {error}", "pip install transformers") from error
    if config.get("model_type") not in CONFIG_MAPPING:
        raise UsageError(
            f"model_type {config.get('model_type')!r} is unknown to transformers: config.json's auto_map asks to run "
            "the checkpoint's own code, which kvexport never does",
            "pip install --upgrade transformers, or choose a checkpoint whose model_type transformers supports",
        )


def _update(update: Callable[[bytes], object], *chunks: bytes) -> None:
    for chunk in chunks:
        # The length in front keeps two different splits of the same bytes apart.
        update(len(chunk).to_bytes(8, "little") + chunk)
