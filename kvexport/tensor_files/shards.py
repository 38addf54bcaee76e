"""The safetensors shards of a checkpoint and their headers, read and checked without reading a weight."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kvexport.errors import UsageError

HEADER_LIMIT = 100_000_000
"""Most bytes of a safetensors header, the limit of the safetensors library itself."""

DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one element of each safetensors dtype (safetensors 0.8)."""

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LARGEST_COUNT = 1 << 62
_OWN: set[Path] = set()  # see `own_links`


@dataclass(frozen=True)
class TensorEntry:
    name: str
    file: Path  # real file, symlinks resolved
    dtype: str  # safetensors name of the type ("BF16")
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    nbytes: int  # bytes at that offset, row-major and little-endian


@dataclass(frozen=True)
class Shard:
    """One safetensors file of a checkpoint: its header as bytes, its size in bytes, and its tensors by name."""

    header: bytes
    size: int
    tensors: dict[str, TensorEntry]


def list_shards(path: Path) -> dict[str, frozenset[str] | None]:
    """Return, by file name, the tensors that a checkpoint takes from each safetensors shard; None means all tensors."""
    for name in ("model.safetensors", INDEX):
        if is_present(path / name):
            return {name: None} if name != INDEX else _read_index(path / name)
    raise _no_weights(path)


def _no_weights(path: Path) -> UsageError:
    files = sorted(file.name for file in path.iterdir() if file.is_file())
    pickles = sorted({file.name for pattern in _PICKLES for file in path.glob(pattern)})
    if "adapter_config.json" in files:
        return UsageError(f"{path} is an adapter, not a model", "--set model.path=BASE_MODEL --set adapters.count=1")
    # The hub's cache holds models--org--name/snapshots/COMMIT; pickles are never downloaded there, so the id is what
    # can be converted.
    cached = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    source = path.parent.parent.name.removeprefix("models--").replace("--", "/") if cached else str(path)
    if pickles or cached or not any(name.endswith(".safetensors") for name in files):
        script = (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"M.from_pretrained({source!r}).save_pretrained('converted', safe_serialization=True); "
            f"T.from_pretrained({source!r}).save_pretrained('converted')"
        )
        formats = (
            f"only pickled weights ({some_names(pickles)}), which can run code when read"
            if pickles
            else f"no weights ({some_names(files)})"
        )
        return UsageError(
            f"{path} holds {formats}; expected model.safetensors or {INDEX}", f'convert it: python -c "{script}"'
        )
    return UsageError(
        f"{path} holds {some_names(files)}, but neither model.safetensors nor {INDEX}", f"download {INDEX} again"
    )


def _read_index(file: Path) -> dict[str, frozenset[str] | None]:
    weight_map = parse_object(file, read_file(file)).get("weight_map")
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


def read_shard(file: Path) -> Shard:
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
    return Shard(header, size, tensors)


def _read_header(file: Path, header: bytes) -> tuple[dict[str, TensorEntry], int]:
    again = f"download {file.name} again"
    table = parse_object(file, header, unique=True)
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


@contextmanager
def own_links(folder: Path) -> Iterator[None]:
    """Allow links out of the checkpoint `folder` within this context, for checkpoints that kvexport itself writes."""
    real = folder.resolve()
    _OWN.add(real)
    try:
        yield
    finally:
        _OWN.discard(real)


def refuse_link(file: Path) -> None:
    """Raise UsageError if a file of a checkpoint is a link that leads elsewhere or back to itself.

    A link out of the checkpoint could copy any file of the machine into an artifact. Links within the checkpoint are
    allowed, and so are those of the Hugging Face hub's cache, from snapshots/COMMIT to blobs.
    """
    loop = UsageError(f"{file} is a link that leads back to itself", f"download {file.name} again")
    try:
        folder, real = file.parent.resolve(), file.resolve()
    except (OSError, RuntimeError) as error:
        raise loop from error
    if real.is_symlink():  # Python 3.13 resolves a circle to one of its links
        raise loop
    if folder in _OWN:
        return
    hub = folder.parent.parent if folder.parent.name == "snapshots" else None
    if not any(real.is_relative_to(own) for own in (folder, *([hub / "blobs"] if hub else []))):
        raise UsageError(
            f"{file} is a link out of the checkpoint, to {real}",
            f"where that is meant: cp --remove-destination {shlex.quote(str(real))} {shlex.quote(str(file))}",
        )


def is_present(file: Path) -> bool:
    """Return whether a path is a file or a dangling link, which a broken download leaves."""
    return file.exists() or file.is_symlink()


def read_file(file: Path, most: int | None = None) -> bytes:
    if not file.is_file():
        raise UsageError(
            f"{file} is missing", f"download {file.name} again, or set model.path to the directory that holds it"
        )
    try:
        if most is not None and file.stat().st_size > most:
            raise UsageError(f"{file} has more than {most} bytes", f"download {file.name} again")
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", f"make {file} readable") from error


def parse_object(file: Path, data: bytes, unique: bool = False) -> dict[str, Any]:
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


def some_names(names: Iterable[str]) -> str:
    """Return the first three names and how many more there are; names from downloaded files are escaped."""
    shown = [repr(name) for name in sorted(names)]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "") or "nothing"
