"""Snapshots: the state of one sequence (KV cache, tokens, sampler) as a value, and as bytes for another process.

The bytes are `MAGIC`, the format's version and the header's length (4 bytes each, little endian), the SHA-256 of the
header, the header (JSON), then the tensors in the order of the header's list, each checked against its own SHA-256. The
bytes contain no code. The digests find damage, but anybody can compute them. The content is therefore also checked
against the artifact, so that no snapshot can exceed the capacity of a cache.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from kvexport.artifact.manifest import Manifest
from kvexport.backends.lane_state import slot_places, used_slots
from kvexport.bounded_json import read_json
from kvexport.errors import KvexportError, SnapshotError
from kvexport.files import json_digest
from kvexport.language.settings import GenerationSettings
from kvexport.plan.cache import CachePlan, slots_of
from kvexport.schema.state import RING
from kvexport.state.lane import Counters, Saved, joined, pinned
from kvexport.state.periodic import READ

MAGIC = b"kvexsnap"
VERSION = 1
_FIXED = struct.Struct("<8sII32s")
MARK = _FIXED.size  # bytes at the beginning, with the header's digest: they differ between any two snapshots
_HEADER_LIMIT = 64 << 20
_HEADER_VALUES = 500_000  # each token of an answer is one
_ALIGNMENT = 64  # bytes; the first tensor is aligned to it
_AGAIN = "make the snapshot again, with this artifact"


@dataclass(frozen=True)
class Origin:
    model: str  # checkpoint and its weights
    # Recipe without the parts that may differ between machines (backend, largest batch, speculation, bounds of
    # adapters)
    recipe: str
    contract: str  # contract's version, the cache plan, chunks, merge intervals, and the entries that decode steps read

    @classmethod
    def of(cls, manifest: Manifest) -> Origin:
        recipe = manifest.recipe.model_dump(
            mode="json",
            exclude={
                "backend": True,
                "limits": {"max_batch"},
                "speculate": True,
                "adapters": True,
                "cache": {"periodic"},
            },
        )
        weights = {name: entry.sha256 for name, entry in manifest.files.items() if name.endswith(".weights")}
        limits = manifest.limits
        contract = [
            manifest.contract_version,
            manifest.cache.to_json(),
            *([manifest.cache.recurrent_json()] if manifest.cache.states else []),
            limits.prefill_chunk,
            limits.merge_every,
            manifest.model.vocabulary,
        ]
        if (periodic := manifest.recipe.cache.periodic).slots is not None:
            contract.append([periodic.slots, periodic.every])
        return cls(*(json_digest(content) for content in ([manifest.model.fingerprint, weights], recipe, contract)))

    def check(self, origin: Origin) -> None:
        for field in fields(self):
            digest, expected = getattr(origin, field.name), getattr(self, field.name)
            if digest != expected:
                raise SnapshotError(
                    f"the snapshot is of another {field.name} ({digest[:12]}) than the artifact ({expected[:12]})",
                    _AGAIN,
                )


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of one sequence at a moment, which is never changed: tokens, KV cache, sampler and settings."""

    origin: Origin  # digests of its artifact
    # Tokens of prompt and answer [n] int64. The cache contains the first `counters.length` of them, never the last
    # token of an answer.
    ids: NDArray[np.int64]
    state: Mapping[str, NDArray[Any]]  # lane's tensors (see `ModelState.read`)
    counters: Counters  # lane's counters
    sampler: Mapping[str, Any] | None = None  # state that `Sampler.state` returned
    # State that `TextStream.state` returned. None if the answer has ended, or there is no tokenizer.
    text: Mapping[str, Any] | None = None
    settings: GenerationSettings | None = None  # settings of the answer
    adapter: str | None = None  # digest of the LoRA adapter that computed the state; None for the model without one
    images: tuple[str, ...] = ()  # digests of the images among the tokens, in order (`PromptImages.digests`)

    @property
    def length(self) -> int:
        return self.counters.length

    @property
    def saved(self) -> Saved:
        return Saved(self.state, self.counters)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + sum(array.nbytes for array in self.state.values())

    def to_bytes(self) -> bytes:
        arrays = {"ids": self.ids, **self.state}
        contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
        header = {
            **{field.name: getattr(self.origin, field.name) for field in fields(self.origin)},
            "counters": self.counters._asdict(),
            "sampler": self.sampler,
            "text": self.text,
            "settings": None if self.settings is None else _settings().dump_python(self.settings, mode="json"),
            "adapter": self.adapter,
            "images": self.images,
            "tensors": [
                {"name": name, "dtype": x.dtype.str, "shape": x.shape, "sha256": _sha256(x)}
                for name, x in contiguous.items()
            ],
        }
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
        text += b" " * (-(_FIXED.size + len(text)) % _ALIGNMENT)
        fixed = _FIXED.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest())
        return b"".join([fixed, text, *(_raw(x) for x in contiguous.values())])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, manifest: Manifest) -> Snapshot:
        """Return the snapshot that `to_bytes` serialized, after checks that it is undamaged and fits the artifact."""
        header, rest = _read_header(memoryview(data).cast("B"))
        try:
            origin = Origin(*(str(header[field.name]) for field in fields(Origin)))
            Origin.of(manifest).check(origin)
            arrays = _read_tensors(header["tensors"], rest)
            counts = header["counters"]
            pins = tuple((_count(first), _count(end)) for first, end in counts["pins"])
            counters = Counters(
                tuple(map(_count, counts["held"])), _count(counts["added"]), _count(counts["length"]), pins
            )
            settings = header["settings"]
            generation = None if settings is None else _settings().validate_python(settings)
            adapter, images = header["adapter"], header["images"]
            if not (adapter is None or isinstance(adapter, str)):
                raise damaged("its adapter is no text")
            if not (isinstance(images, list) and all(isinstance(digest, str) for digest in images)):
                raise damaged("its images are no digests")
            ids, sampler, text = arrays.pop("ids"), header["sampler"], header["text"]
            snapshot = cls(origin, ids, arrays, counters, sampler, text, generation, adapter, tuple(images))
            _check(snapshot, manifest)
            return snapshot
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, ValidationError) as error:
            raise damaged(f"its header cannot be used ({type(error).__name__}: {error})"[:300]) from error
        except SnapshotError:
            raise
        except KvexportError as error:
            raise damaged(error.problem) from error


def damaged(problem: str) -> SnapshotError:
    return SnapshotError(f"the snapshot is damaged: {problem}", _AGAIN)


def _read_header(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(data) < _FIXED.size:
        raise damaged(f"it has {len(data)} bytes, its beginning alone has {_FIXED.size}")
    magic, version, size, digest = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise damaged("it does not begin with the mark of a snapshot")
    if version != VERSION:
        raise SnapshotError(f"the snapshot has the format {version}, this kvexport reads {VERSION}", _AGAIN)
    text = data[_FIXED.size : _FIXED.size + size]
    if size > _HEADER_LIMIT or len(text) != size:
        raise damaged(f"its header should have {size} bytes, {len(text)} are there")
    if hashlib.sha256(text).digest() != digest:
        raise damaged("its header does not have its digest")
    try:
        header = read_json(bytes(text), most=_HEADER_VALUES)
    except ValueError as error:
        raise damaged("its header is not JSON") from error
    if not isinstance(header, dict):
        raise damaged("its header is no object")
    return header, data[_FIXED.size + size :]


def _read_tensors(entries: Any, data: memoryview) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for entry in entries:
        name, dtype, shape = str(entry["name"]), np.dtype(str(entry["dtype"])), tuple(map(_count, entry["shape"]))
        if dtype.kind not in "fiu" or name in arrays:
            raise damaged(f"its tensor {name[:80]!r} is there twice, or holds no numbers")
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if size > len(data):
            raise damaged(f"it is cut off: {name[:80]!r} should have {size} bytes, {len(data)} are left")
        array = np.frombuffer(data[:size], dtype=dtype).reshape(shape)
        if _sha256(array) != entry["sha256"]:
            raise damaged(f"the tensor {name[:80]!r} does not have its digest")
        arrays[name], data = array, data[size:]
    if len(data):
        raise damaged(f"{len(data)} bytes follow its last tensor")
    return arrays


def _check(snapshot: Snapshot, manifest: Manifest) -> None:
    plan, ids, counters = manifest.cache, snapshot.ids, snapshot.counters
    if ids.dtype != np.int64 or ids.ndim != 1 or not 0 <= counters.length <= len(ids):
        raise damaged(f"{counters.length} tokens seen of ids {ids.dtype} {list(ids.shape)}")
    if ids.size and not 0 <= ids.min() <= ids.max() < manifest.model.vocabulary:
        raise damaged(f"an id is out of range: the vocabulary has {manifest.model.vocabulary}")
    generated = [] if snapshot.sampler is None else snapshot.sampler["generated"]
    if not isinstance(generated, list) or generated != ids[len(ids) - len(generated) :].tolist():
        raise damaged("the tokens of its answer are not the last of its ids")
    expected = dict.fromkeys(name for name, *_ in plan.state_names())
    expected |= _check_selections(snapshot, manifest)
    if snapshot.state.keys() != expected.keys():
        wrong = sorted(snapshot.state.keys() ^ expected.keys())[0]
        raise damaged(f"the tensor {wrong[:80]!r} is missing, or of no layer")
    count, room = pinned(counters.pins), manifest.recipe.cache.pinned
    if counters.pins != joined(counters.pins) or count > room or any(end > len(ids) for _, end in counters.pins):
        raise damaged(f"it pins {count} tokens that are no ranges of its {len(ids)} ids, or are more than {room}")
    if len(counters.held) != (heads := len(plan.heads("capacity"))):
        raise damaged(f"counters of {len(counters.held)} KV heads, there are {heads}")
    _check_tensors(snapshot, plan)
    _check_states(snapshot, plan)


def _check_selections(snapshot: Snapshot, manifest: Manifest) -> dict[str, None]:
    """Check the positions of the selected cache entries (`cache.periodic`); return the names of their tensors."""
    most = manifest.recipe.cache.periodic.slots
    layers = {f"past_key_values.{i}.{READ}": layer for i, layer in enumerate(manifest.cache.caches)}
    if most is None or not layers.keys() & snapshot.state.keys():
        return {}
    for name, layer in layers.items():
        array = snapshot.state.get(name)
        if array is None or array.dtype != np.int32 or array.ndim != 2 or len(array) != layer.kv_heads:
            raise damaged(f"{name} is no int32 [{layer.kv_heads}, slots]")
        count = array.shape[1]
        ordered = count and (np.diff(array) > 0).all() and array.min() >= 0 and array.max() < snapshot.length
        if count > most or not ordered:
            raise damaged(f"{name} holds {count} numbers that are no positions of a selection of at most {most} slots")
    return dict.fromkeys(layers)


def _check_tensors(snapshot: Snapshot, plan: CachePlan) -> None:
    places, counters = slot_places(plan), snapshot.counters
    for i, (layer, held) in enumerate(zip(plan.caches, plan.by_layer(counters.held), strict=True)):
        votes = snapshot.state[f"past_key_values.{i}.votes"]
        slots, rows = _extent(votes), _extent(snapshot.state.get(f"past_key_values.{i}.{RING[1]}", votes))
        if (most := layer.most_of(slots)) < 0:
            raise damaged(
                f"past_key_values.{i} has {slots} slots, which are not the first of {layer.kv_heads} KV heads"
            )
        shapes, dtypes = layer.shapes(1), layer.dtypes()
        for tensor in layer.state:
            name = tensor.past(i)
            array, shape = snapshot.state[name], list(shapes[tensor.name][1:])
            if (axis := places[name].axis) is not None:
                shape[axis] = slots
            elif tensor.name in RING:
                shape[1] = min(shape[1], rows)
            _check_array(name, array, dtypes[tensor.name], shape)
        if not (np.isfinite(votes) & (votes >= 0)).all():
            raise damaged(f"past_key_values.{i}.votes holds numbers that are no votes")
        for head, part in enumerate(slots_of(layer.first_slots(most))):
            used, expected = used_slots(votes[part], (part.stop - part.start,)), held[head] + counters.added
            if not used <= expected <= layer.capacity[head]:
                raise damaged(
                    f"past_key_values.{i} uses {used} slots of {layer.capacity[head]} in KV head {head}, its counters "
                    f"say {held[head]} and {counters.added} more"
                )


def _check_states(snapshot: Snapshot, plan: CachePlan) -> None:
    for layer in plan.states:
        shapes, dtypes = layer.shapes(1), layer.dtypes()
        for tensor in layer.state:
            name, shape = tensor.past(layer.place), list(shapes[tensor.name][1:])
            _check_array(name, snapshot.state[name], dtypes[tensor.name], shape)


def _check_array(name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: list[int]) -> None:
    if array.dtype != dtype or list(array.shape) != shape:
        raise damaged(f"{name} is {array.dtype} {list(array.shape)}, the artifact has {dtype} {shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise damaged(f"{name} holds NaN or infinity, from which every token of the answer would be wrong")


def _extent(array: NDArray[Any]) -> int:
    return array.shape[-1] if array.ndim else -1


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return value


def _raw(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(_raw(array)).hexdigest()


@cache
def _settings() -> TypeAdapter[GenerationSettings]:
    return TypeAdapter(GenerationSettings)
