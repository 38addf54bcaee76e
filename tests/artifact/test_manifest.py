"""Tests of the manifest as typed values: a missing field, one of another type, and a contradiction are named."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvexport.artifact import digests
from kvexport.artifact.manifest import parse_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.errors import ArtifactError
from kvexport.schema.state import CONTRACT_VERSION
from tests.support.artifacts import rewrite

# The writer adds these fields. A reader uses all others.
UNREAD = {"format", "manifest_sha256"}
OPTIONAL = {"engines", "contract_version", "recipe.name", "cache.0.extra"}
ROTARY = {"rotary", "key_shift"}  # the rotary embedding of a layer, of which every field has a default


@pytest.fixture(scope="module")
def raw(tiny_artifact: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((tiny_artifact / "manifest.json").read_text())
    return manifest


def copied(raw: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(raw))
    return copy


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every item in a JSON value, in lists only of the first item."""
    if above:
        yield above
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*above, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*above, 0))


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for part in place:
        value = value[part]
    return value


def test_writing_and_reading_give_the_same_values(tiny_artifact: Path, raw: dict[str, Any]) -> None:
    manifest = load_manifest(tiny_artifact)
    assert manifest.name == "tiny"
    assert manifest.limits.max_batch == raw["limits"]["max_batch"]
    assert list(manifest.cache.caches[1].budget) == raw["cache"][1]["budget"]
    assert manifest.files["decoder.onnx"].bytes == (tiny_artifact / "decoder.onnx").stat().st_size
    assert manifest.bytes == sum(entry["bytes"] for entry in raw["files"].values())
    written = json.loads(json.dumps(manifest.to_json()))
    assert written == {key: value for key, value in raw.items() if key not in (*UNREAD, "files")}


def test_keys_that_earlier_versions_wrote_are_passed_over(tmp_path: Path, raw: dict[str, Any]) -> None:
    changed = copied(raw)
    changed["recipe"]["backend"]["tensorrt"] |= {"version_compatible": False, "hardware_compatible": "none"}
    parse_manifest(tmp_path, changed)


@pytest.mark.parametrize("name", ["max_length", "max_batch", "prefill_chunk", "merge_every"])
def test_limits_are_those_of_the_recipe(tmp_path: Path, raw: dict[str, Any], name: str) -> None:
    changed = {**raw, "limits": {**raw["limits"], name: raw["limits"][name] * 8}}
    with pytest.raises(ArtifactError, match=rf"limits\.{name}.* should be {raw['limits'][name]} as in its recipe"):
        parse_manifest(tmp_path, changed)


def test_every_field_of_another_type_is_an_artifact_error_that_names_it(raw: dict[str, Any]) -> None:
    checked = 0
    for place in places(raw):
        if place[0] in (*UNREAD, "engines"):
            continue
        number = isinstance(at(raw, place), int | float)
        for new in ({"?": [[]]}, [[{}]], *(("1", None) if number else ())):
            # A layer may have no rotary tables. Method parameters may be texts, and counts may be null.
            if ROTARY & set(place) or (new in ("1", None) and place[0] == "recipe"):
                continue
            changed = copied(raw)
            at(changed, place[:-1])[place[-1]] = new
            with pytest.raises(ArtifactError) as caught:
                parse_manifest(Path("/artifact"), changed)
            assert place[0] in caught.value.problem, (place, new)
            assert "kvexport build" in caught.value.fix
            checked += 1
    assert checked > 200


def test_every_field_that_is_missing_is_named(raw: dict[str, Any]) -> None:
    named = 0
    for place in places(raw):
        name = ".".join(map(str, place))
        in_mapping = place[0] in ("recipe", "operators", "versions", "engines") and len(place) > 1
        if (
            isinstance(place[-1], int)
            or place[0] in UNREAD
            or place[0] == "files"
            or in_mapping
            or name in OPTIONAL
            or ROTARY & set(place)
        ):
            continue
        changed = copied(raw)
        del at(changed, place[:-1])[place[-1]]
        with pytest.raises(ArtifactError) as caught:
            parse_manifest(Path("/artifact"), changed)
        assert f": {name} is missing" in caught.value.problem, caught.value.problem
        named += 1
    assert named > 25
    for name in ("path", "name"):
        changed = copied(raw)
        del (changed["recipe"]["model"] if name == "path" else changed["recipe"])[name]
        with pytest.raises(ArtifactError, match=rf"recipe\.(model\.)?{name} is missing"):
            parse_manifest(Path("/artifact"), changed)


@pytest.mark.parametrize("file", ["../outside.onnx", "/etc/hostname", "absent.onnx", "", "manifest.json"])
@pytest.mark.parametrize("graph", ["decoder", "merge", "top_logits"])
def test_graphs_are_files_that_were_digested(tiny_artifact: Path, tmp_path: Path, graph: str, file: str) -> None:
    path = tmp_path / "artifact"
    shutil.copytree(tiny_artifact, path)
    shutil.copyfile(path / "decoder.onnx", tmp_path / "outside.onnx")
    rewrite(path, lambda manifest: manifest["graphs"].update({graph: file}))
    with pytest.raises(ArtifactError, match=rf"graphs\.{graph} should be a file of the artifact, found"):
        load_manifest(path)


@pytest.mark.parametrize("change", [
    lambda manifest: manifest["cache"].pop(), lambda manifest: manifest["model"]["query_heads"].pop(),
    lambda manifest: manifest["model"].update(layers=3),
])  # fmt: skip
def test_layers_are_as_many_everywhere(tiny_artifact: Path, raw: dict[str, Any], change: Any) -> None:
    changed = copied(raw)
    change(changed)
    with pytest.raises(ArtifactError, match=r"(cache|query_heads) has \d entries, model.layers is \d"):
        parse_manifest(tiny_artifact, changed)


@pytest.mark.parametrize(("key", "value"), [
    ("key_size", -1), ("capacity", [2**31, 64]), ("capacity", [2**30, 2**30]), ("capacity", [64, 31]), ("capacity", []),
    ("budget", [48, 0]), ("budget", [48]), ("budget", 48), ("sinks", -4), ("recent", [2, 2**62]),
    ("dtype", "complex128"), ("dtype", "no type"),
    ("extra", [{"name": "x", "dims": ["B", "nothing"], "dtype": "int32", "meaning": ""}]),
    ("extra", [{"name": "x", "dims": ["B"], "dtype": "object", "meaning": ""}]),
])  # fmt: skip
def test_a_layer_that_no_memory_could_hold_is_refused(raw: dict[str, Any], key: str, value: Any) -> None:
    changed = copied(raw)
    changed["cache"][1][key] = value
    with pytest.raises(ArtifactError, match=rf"cache\.1\.{key}"):
        parse_manifest(Path("/artifact"), changed)


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"value_size": 4096}], ids=["quantized", "larger"])
def test_values_that_cannot_be_a_part_of_their_keys_are_refused(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    changed = copied(raw)
    changed["cache"][1] |= {"value_in_key": True, **changes}
    with pytest.raises(ArtifactError, match=r"cache\.1\.value_in_key should be false"):
        parse_manifest(Path("/artifact"), changed)


def test_another_contract_version_is_refused_with_the_line_that_builds_it_again(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    path = tmp_path / "artifact"
    shutil.copytree(tiny_artifact, path)
    rewrite(path, lambda manifest: manifest.update(contract_version=CONTRACT_VERSION - 1))
    with pytest.raises(
        ArtifactError, match=f"which kvexport .* built, has contract version {CONTRACT_VERSION - 1}, but this"
    ) as caught:
        load_manifest(path)
    assert caught.value.fix.startswith(f"kvexport build MODEL --out {path}")
    rewrite(path, lambda manifest: manifest["recipe"].update(name="x; rm -r ~"))
    rewrite(path, lambda manifest: manifest.update(versions={"kvexport": "\x1b[2J"}))
    with pytest.raises(ArtifactError, match=r"artifact has contract version") as caught:
        load_manifest(path)
    assert "rm -r" not in caught.value.fix


@pytest.mark.parametrize("manifest", [None, b"{}", b'{"name": "an extension", "manifest_version": 3}', b"\xff"])
def test_a_directory_that_is_no_artifact_is_not_to_be_removed(tmp_path: Path, manifest: bytes | None) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    if manifest is not None:
        (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(ArtifactError, match=r"is no artifact: it.*manifest\.json") as caught:
        load_manifest(tmp_path)
    assert "damaged" not in caught.value.problem
    assert "remove" not in str(caught.value)


def test_a_directory_is_listed_only_after_its_manifest_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is not scanned before its manifest is read: `kvexport inspect /` would read the whole machine."""

    def untouched(*_: Any) -> None:
        raise AssertionError("the directory was looked through")

    monkeypatch.setattr(digests, "scan", untouched)
    monkeypatch.setattr(os, "scandir", untouched)
    with pytest.raises(ArtifactError, match="is no artifact"):
        load_manifest(tmp_path)
