"""The manifest of an artifact as typed values: the model, the recipe that it was built from, and its files.

`kvexport.artifact.digests` writes manifests with the files' digests, and compares manifests with files.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import Field, TypeAdapter, ValidationError

from kvexport.artifact.digests import built_again
from kvexport.backends.sections import without_former_keys
from kvexport.errors import ArtifactError
from kvexport.images.tiles import ImageSpec
from kvexport.plan.cache import CachePlan, LayerCache
from kvexport.recipe.cache import CacheSection
from kvexport.recipe.divergence import Divergence
from kvexport.recipe.fields import MOST, MOST_LANES, ModelSection, Recipe
from kvexport.recipe.inherit import named_recipes
from kvexport.recipe.load import name_of
from kvexport.schema.state import CONTRACT_VERSION, SMALL, scales_of, types_of

HEADS = ("capacity", "budget", "recent")  # fields of a cache with a number for each KV head
Count = Annotated[int, Field(ge=1, le=MOST)]
T = TypeVar("T")


@dataclass(frozen=True)
class FileEntry:
    sha256: str  # SHA-256 in hexadecimal
    bytes: int  # size


@dataclass(frozen=True)
class ModelFacts:
    type: str  # type of the model in its config
    fingerprint: str  # A digest of the checkpoint's headers
    vocabulary: Count  # number of logits
    layers: Annotated[int, Field(ge=0, le=MOST)]  # number of those that have a cache
    query_heads: tuple[Count, ...]  # number of query heads of each layer that has a cache
    packed: Mapping[str, Count]  # number of packed weights by format


@dataclass(frozen=True)
class Graphs:
    decoder: str
    merge: str | None  # merge, or None if no layer merges
    top_logits: str  # graph that finds the largest logits
    vision: str | None = None  # image encoder, or None if the artifact reads no images

    def files(self) -> Iterator[tuple[str, str]]:
        graphs = ((name, getattr(self, name)) for name in ("decoder", "merge", "top_logits", "vision"))
        yield from ((name, file) for name, file in graphs if file is not None)


@dataclass(frozen=True)
class Limits:
    max_length: Count  # largest number of tokens of a sequence
    max_batch: Annotated[int, Field(ge=1, le=MOST_LANES)]  # largest number of sequences of a batch
    prefill_chunk: Count  # largest number of tokens of a sequence in one call
    merge_every: Count  # number of decoded tokens between merges


@dataclass(frozen=True, kw_only=True)
class Manifest:
    name: str  # name of the recipe
    recipe: Recipe
    model: ModelFacts  # checkpoint's model
    cache: CachePlan
    graphs: Graphs  # files of the ONNX graphs
    top_logits: Count  # number of largest logits that top_logits.onnx finds in a row
    limits: Limits  # largest inputs of the graphs
    # Implementation of each operator of the contract, or None if the artifact does not need it
    operators: Mapping[str, str | None]
    # Versions of the packages that built the artifact, or None for one that was not installed
    versions: Mapping[str, str | None]
    # Numbers of inputs and outputs of each projection that takes LoRA adapters, by its module
    adapters: Mapping[str, tuple[Count, Count]] = field(default_factory=dict)
    # How far the cache was from the full one when it was built, if that was measured
    divergence: Divergence | None = None
    images: ImageSpec | None = None  # how images are read; None if the artifact reads none
    no_images: str = ""  # why it reads none, if its model does
    plain_attention: str = ""  # why layers attend to every token, if those of the model may not
    # Additions of each backend to the ONNX graphs, by the backend's name and in its own format
    engines: Mapping[str, Any] = field(default_factory=dict)
    # Every file except the manifest by its relative POSIX path; empty until the files are digested
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    contract_version: int = CONTRACT_VERSION

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def build_command(self, *settings: str) -> str:
        source = "--recipe FILE"
        if self.name in named_recipes():
            source = f"--recipe {self.name}"
        elif self.name == name_of(self.recipe.model.path):  # it had no recipe
            source = f"{shlex.quote(self.recipe.model.path)} --budget {self.recipe.budget}"
            if self.recipe.model.mmproj:
                source += f" --mmproj {shlex.quote(self.recipe.model.mmproj)}"
        return " ".join(["kvexport build", source, *(f"--set {shlex.quote(x)}" for x in settings), "--out ARTIFACT"])

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's fields without `files`, which `write_manifest` computes from the files' bytes."""
        return {
            "recipe": {"name": self.name, **self.recipe.model_dump(mode="json")},
            "model": asdict(self.model),
            "cache": self.cache.to_json(),
            **self.cache.recurrent_json(),
            "graphs": {name: file for name, file in asdict(self.graphs).items() if name != "vision" or file},
            "top_logits": self.top_logits,
            "limits": asdict(self.limits),
            "operators": dict(self.operators),
            "versions": dict(self.versions),
            **({"adapters": {name: list(sizes) for name, sizes in self.adapters.items()}} if self.adapters else {}),
            **({"divergence": asdict(self.divergence)} if self.divergence else {}),
            **({"images": asdict(self.images)} if self.images else {}),
            **({"no_images": self.no_images} if self.no_images else {}),
            **({"plain_attention": self.plain_attention} if self.plain_attention else {}),
            "engines": dict(self.engines),
            "contract_version": self.contract_version,
        }


def parse_manifest(root: Path, raw: Mapping[str, Any]) -> Manifest:
    data = dict(raw)
    if isinstance(recipe := data.get("recipe"), dict):
        data |= {"recipe": {key: value for key, value in recipe.items() if key != "name"}, "name": recipe.get("name")}
        if "backend" in recipe:
            data["recipe"]["backend"] = without_former_keys(recipe["backend"])
    if "cache" in data:
        recurrent = data.pop("recurrent", {})
        data["cache"] = {
            "caches": data["cache"],
            **(recurrent if isinstance(recurrent, dict) else {"states": recurrent}),
        }
    manifest = parse_fields(root, Manifest, data)
    for name, file in manifest.graphs.files():
        require_file(root, manifest, f"graphs.{name}", file)
    for i, cache in enumerate(manifest.cache.caches):
        _check_cache(root, f"cache.{i}", cache)
    layers, caches, query_heads = manifest.model.layers, len(manifest.cache.caches), len(manifest.model.query_heads)
    if caches != layers:
        raise unusable(root, "cache", f"has {caches} entries, model.layers is {layers}")
    if query_heads != caches:
        raise unusable(root, "model.query_heads", f"has {query_heads} entries, model.layers is {layers}")
    if (manifest.images is None) != (manifest.graphs.vision is None):
        raise unusable(root, "images", "should be there if graphs.vision is, and only then")
    if bool(manifest.adapters) != bool(manifest.recipe.adapters.count):
        raise unusable(root, "adapters", f"has {len(manifest.adapters)} projections, unlike its recipe")
    _check_limits(root, manifest)
    return manifest


def _check_limits(root: Path, manifest: Manifest) -> None:
    recipe = manifest.recipe
    expected = {
        "max_length": recipe.limits.max_length,
        "max_batch": recipe.limits.max_batch,
        "prefill_chunk": recipe.export.prefill_chunk,
        "merge_every": recipe.cache.merge_every,
    }
    for name, value in asdict(manifest.limits).items():
        if value != expected[name]:
            raise unusable(root, f"limits.{name}", f"should be {expected[name]} as in its recipe, found {value}")


def _check_cache(root: Path, place: str, cache: LayerCache) -> None:
    for size in fields(cache):
        value = getattr(cache, size.name)
        least = 1 if size.name in ("key_size", "value_size", "budget", "capacity") else 0
        for number in value if size.name in HEADS else (value,):
            if type(number) is int and not least <= number <= MOST:
                raise unusable(root, f"{place}.{size.name}", f"should be from {least} to {MOST}, found {number}")
    for name in HEADS:
        if len(getattr(cache, name)) != cache.kv_heads or not cache.kv_heads:
            raise unusable(root, f"{place}.{name}", f"should have a number for each of the {cache.kv_heads} KV heads")
    if cache.slots > MOST:
        raise unusable(root, f"{place}.capacity", f"should be {MOST} in all KV heads at most, found {cache.slots}")
    for head, (budget, capacity) in enumerate(zip(cache.budget, cache.capacity, strict=True)):
        if capacity < budget:
            raise unusable(
                root, f"{place}.capacity.{head}", f"should be at least the budget {budget}, found {capacity}"
            )
    types = (get_args(section.model_fields["dtype"].annotation) for section in (ModelSection, CacheSection))
    if cache.dtype not in set().union(*types) - {"model"}:
        raise unusable(root, f"{place}.dtype", f"should be a type that a recipe can name, found {_shown(cache.dtype)}")
    if cache.value_in_key and (cache.dtype in SMALL or cache.value_size > cache.key_size):
        raise unusable(
            root, f"{place}.value_in_key", "should be false: values are no part of quantized or of smaller keys"
        )
    scales = scales_of(cache.dtype)
    if cache.extra[: len(scales)] != scales:
        raise unusable(root, f"{place}.extra", f"should begin with the scales of a cache in {cache.dtype}")
    for name, dtype in types_of(cache.dtype).items():
        if dtype == "int4" and (size_of := getattr(cache, f"{name}_size")) % 2:
            raise unusable(root, f"{place}.{name}_size", f"should be even, found {size_of}: a byte stores two numbers")


def parse_fields(root: Path, kind: type[T], data: Any, above: str = "") -> T:
    """Return JSON data as a dataclass; types are strict, so text such as "8" is not taken as a number."""
    try:
        value: T = TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
        return value
    except ValidationError as error:
        first = next((e for e in error.errors(include_url=False) if e["loc"] != ("name",)), error.errors()[0])
        place = ".".join(map(str, (*filter(None, [above]), *first["loc"]))) or "content"
        place = place.replace("cache.caches", "cache", 1)
        # The manifest has the name inside the recipe.
        place = "recipe.name" if place == "name" and kind is Manifest else place
        missing = first["type"] == "missing" or (first["input"] is None and place == "recipe.name")
        message = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "should be", 1)
        raise unusable(
            root, place, "is missing" if missing else f"{message}, found {_shown(first['input'])}"
        ) from error


def require_file(root: Path, manifest: Manifest, field: str, name: str) -> None:
    if name not in manifest.files:
        raise unusable(root, field, f"should be a file of the artifact, found {_shown(name)}, which is not listed")


def unusable(root: Path, place: str, problem: str) -> ArtifactError:
    return ArtifactError(f"the manifest of {root} cannot be used: {place[:200]} {problem}", built_again(root))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
