"""The manifest of an artifact as typed values: what was built, from which recipe, and which files hold it.

How it is written, digested and checked against the files is in `kvexport.artifact.digests`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import Field, TypeAdapter, ValidationError

from kvexport.cache import CachePlan, LayerCache
from kvexport.errors import ArtifactError
from kvexport.recipe.cache import CacheSection
from kvexport.recipe.fields import MOST, MOST_LANES, ModelSection, Recipe
from kvexport.schema.state import CONTRACT_VERSION, scales_of, types_of

Count = Annotated[int, Field(ge=1, le=MOST)]
T = TypeVar("T")


@dataclass(frozen=True)
class FileEntry:
    """A file of the artifact: its SHA-256 in hex, and its size."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """The checkpoint's model. type: as its config calls it. fingerprint: of the checkpoint's headers. query_heads: of
    every layer. packed: how many weights are packed, by their format."""

    type: str
    fingerprint: str
    vocabulary: Count
    layers: Count
    query_heads: tuple[Count, ...]
    packed: Mapping[str, Count]


@dataclass(frozen=True)
class Graphs:
    """Files of the ONNX graphs. merge: None where no layer merges. top_logits: artifacts that were built before there
    was one have none. ranks: the decoders of ranks 1 and on, where the model is split; `decoder` is that of rank 0."""

    decoder: str
    merge: str | None
    top_logits: str | None = None
    ranks: tuple[str, ...] = ()

    @property
    def rank_count(self) -> int:
        """Processes that run the model together."""
        return 1 + len(self.ranks)

    def files(self) -> Iterator[tuple[str, str]]:
        """(name, file) of those that there are."""
        named = ((name, getattr(self, name)) for name in ("decoder", "merge", "top_logits"))
        yield from ((name, file) for name, file in named if file is not None)
        yield from ((f"ranks.{i}", file) for i, file in enumerate(self.ranks))


@dataclass(frozen=True)
class Limits:
    """What the ONNX graphs were made for: tokens of a sequence, sequences of a batch, tokens of a sequence in one call,
    and decoded tokens between merges."""

    max_length: Count
    max_batch: Annotated[int, Field(ge=1, le=MOST_LANES)]
    prefill_chunk: Count
    merge_every: Count


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An artifact's manifest.

    name: of the recipe. top_logits: how many of a row's largest logits top_logits.onnx finds. operators: what runs each
    operator of the contract, None where the artifact does not need it. versions: of the packages that built it, None
    where one is not installed. engines: what each backend prepared beside the ONNX graphs, by the backend's name and in
    its own terms. files: every file but the manifest itself, by its relative POSIX path; empty until they are digested.
    """

    name: str
    recipe: Recipe
    model: ModelFacts
    cache: CachePlan
    graphs: Graphs
    top_logits: Annotated[int, Field(ge=0)] = 0
    limits: Limits
    operators: Mapping[str, str | None]
    versions: Mapping[str, str | None]
    engines: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    contract_version: int = CONTRACT_VERSION

    def rank_plan(self, rank: int) -> Manifest:
        """What one rank runs: its decoder, over its KV heads."""
        ranks, model = self.graphs.rank_count, self.model
        return replace(
            self,
            graphs=replace(self.graphs, decoder=(self.graphs.decoder, *self.graphs.ranks)[rank]),
            model=replace(model, query_heads=tuple(heads // ranks for heads in model.query_heads)),
            cache=self.cache.rank_plan(ranks),
        )

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """For `write_manifest`: everything but the files, which it digests itself."""
        return {
            "recipe": {"name": self.name, **self.recipe.model_dump(mode="json")},
            "model": asdict(self.model),
            "cache": self.cache.to_json(),
            "graphs": asdict(self.graphs),
            "top_logits": self.top_logits,
            "limits": asdict(self.limits),
            "operators": dict(self.operators),
            "versions": dict(self.versions),
            "engines": dict(self.engines),
            "contract_version": self.contract_version,
        }


def parse_manifest(root: Path, raw: Mapping[str, Any]) -> Manifest:
    """The manifest of the artifact `root` from its checked JSON. Raises ArtifactError naming the first field that is
    missing, of another type, or contradicts another."""
    data = dict(raw)
    if isinstance(recipe := data.get("recipe"), dict):
        data |= {"recipe": {key: value for key, value in recipe.items() if key != "name"}, "name": recipe.get("name")}
    if "cache" in data:
        data["cache"] = {"caches": data["cache"]}
    manifest = parse_fields(root, Manifest, data)
    for name, file in manifest.graphs.files():
        require_file(root, manifest, f"graphs.{name}", file)
    for i, layer in enumerate(manifest.cache.caches):
        _check_layer(root, f"cache.{i}", layer)
    layers, caches, of_heads = manifest.model.layers, len(manifest.cache.caches), len(manifest.model.query_heads)
    if caches != layers and (caches < layers or any(x.kv_heads != 1 for x in manifest.cache.caches)):
        raise unusable(root, "cache", f"has {caches} entries, model.layers is {layers}")
    if of_heads != caches:
        raise unusable(root, "model.query_heads", f"has {of_heads} entries, model.layers is {layers}")
    _check_ranks(root, manifest)
    return manifest


def _check_ranks(root: Path, manifest: Manifest) -> None:
    """Raises ArtifactError where there are not as many decoders as ranks, or heads that they cannot share."""
    ranks = manifest.recipe.backend.tensor_parallel
    if manifest.graphs.rank_count != ranks:
        raise unusable(root, "graphs.ranks", f"should name {ranks - 1} files, found {len(manifest.graphs.ranks)}")
    for i, layer in enumerate(manifest.cache.caches):
        if layer.kv_heads % ranks or manifest.model.query_heads[i] % ranks:
            raise unusable(root, f"cache.{i}.kv_heads", f"should be a multiple of {ranks}, found {layer.kv_heads}")


def _check_layer(root: Path, place: str, layer: LayerCache) -> None:
    """Raises ArtifactError where no memory could be laid out for the layer."""
    for size in fields(layer):
        value = getattr(layer, size.name)
        least = 1 if size.name in ("kv_heads", "key_size", "value_size", "budget", "capacity") else 0
        if type(value) is int and not least <= value <= MOST:
            raise unusable(root, f"{place}.{size.name}", f"should be from {least} to {MOST}, found {value}")
    if layer.capacity < layer.budget:
        raise unusable(
            root, f"{place}.capacity", f"should be at least the budget {layer.budget}, found {layer.capacity}"
        )
    types = (get_args(section.model_fields["dtype"].annotation) for section in (ModelSection, CacheSection))
    if layer.dtype not in set().union(*types) - {"model"}:
        raise unusable(root, f"{place}.dtype", f"should be a type that a recipe can name, found {_shown(layer.dtype)}")
    scales = scales_of(layer.dtype)
    if layer.extra[: len(scales)] != scales:
        raise unusable(root, f"{place}.extra", f"should begin with the scales of a cache in {layer.dtype}")
    for name, dtype in types_of(layer.dtype).items():
        if dtype == "int4" and (size_of := getattr(layer, f"{name}_size")) % 2:
            raise unusable(root, f"{place}.{name}_size", f"should be even, found {size_of}: a byte holds two numbers")


def parse_fields(root: Path, kind: type[T], data: Any, above: str = "") -> T:
    """`data`, as JSON gives it, as the dataclass `kind`, strictly: no text is a number. above: where in the manifest it
    stands. Raises ArtifactError naming the first field that is wrong."""
    try:
        value: T = TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
        return value
    except ValidationError as error:
        first = next((e for e in error.errors(include_url=False) if e["loc"] != ("name",)), error.errors()[0])
        place = ".".join(map(str, (*filter(None, [above]), *first["loc"]))) or "content"
        place = place.replace("cache.caches", "cache", 1)
        # pydantic speaks of a lifted field where the manifest has it inside the recipe.
        place = "recipe.name" if place == "name" and kind is Manifest else place
        missing = first["type"] == "missing" or (first["input"] is None and place == "recipe.name")
        said = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "should be", 1)
        raise unusable(root, place, "is missing" if missing else f"{said}, found {_shown(first['input'])}") from error


def require_file(root: Path, manifest: Manifest, field: str, name: str) -> None:
    """Raises ArtifactError unless `name`, the value of a field, is a file that the manifest lists with its digest."""
    if name not in manifest.files:
        raise unusable(root, field, f"should be a file of the artifact, found {_shown(name)}, which is not listed")


def unusable(root: Path, place: str, problem: str) -> ArtifactError:
    """The error for a field of the manifest that this kvexport cannot use."""
    return ArtifactError(
        f"the manifest of {root} cannot be used: {place[:200]} {problem}",
        f"kvexport build --recipe NAME --out {shlex.quote(str(root))}, which builds the artifact again",
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
