"""The SHA-256 digests of an artifact's files: writing them into manifest.json, and checking a folder against them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvexport.errors import ArtifactError, KvexportError
from kvexport.files import file_digests
from kvexport.recipe.inherit import named_recipes
from kvexport.schema.state import CONTRACT_VERSION

FORMAT = "kvexport-artifact"
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 16 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write_manifest(staging: Path, content: dict[str, Any], *, known: Mapping[str, str] | None = None) -> None:
    """Write an artifact's `manifest.json`: `content`, and the SHA-256 and size of every file in the staging folder.

    Write the manifest last: an artifact with a file that its manifest does not list is refused.
    """
    entries = {name: entry for name, entry in scan(staging).items() if name != MANIFEST}
    known = dict(known or {})
    for name, entry in entries.items():
        if problem := _name_problem(name) or _kind_problem(entry):
            raise KvexportError(f"the build wrote {name!r}, which cannot be part of an artifact: {problem}")
    if wrong := [name for name, digest in known.items() if name not in entries or not _SHA256.fullmatch(digest)]:
        raise KvexportError(
            f"`known` has an entry for {wrong[0]!r}, which is not in the staging folder or whose digest is no SHA-256"
        )
    header = {"format": FORMAT, "contract_version": CONTRACT_VERSION}
    if clash := [
        key for key in content if key in ("files", "manifest_sha256") or content[key] != header.get(key, content[key])
    ]:
        raise KvexportError(
            f"the manifest's field '{clash[0]}' is reserved for write_manifest: leave it out of the content"
        )
    unknown = [name for name in entries if name not in known]
    known.update(zip(unknown, file_digests(staging, unknown), strict=True))
    files = {name: {"sha256": known[name], "bytes": entry.st_size} for name, entry in entries.items()}
    # A round trip through JSON gives tuples and integer keys the form that a reader sees, before the manifest is sorted
    # and digested.
    manifest = json.loads(json.dumps({**content, **header, "files": files}, allow_nan=False))
    manifest["manifest_sha256"] = _self_digest(manifest)
    text = (json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    if len(text) > MANIFEST_LIMIT:
        raise KvexportError(f"the manifest would be {len(text)} bytes, more than the {MANIFEST_LIMIT} a reader accepts")
    (staging / MANIFEST).unlink(missing_ok=True)
    (staging / MANIFEST).write_bytes(text)


def check_artifact(root: Path, verify: bool, later: Collection[str] = ()) -> dict[str, Any]:
    """Check the files of an artifact against its manifest, and return the manifest as plain JSON values.

    The folder is listed only after its manifest shows that it is an artifact.
    """
    try:
        manifest = _read_manifest(root)
        entries = scan(root)
        for name, entry in entries.items():
            if problem := _kind_problem(entry):
                raise damaged(root, f"{name!r} is {problem}")
        entries.pop(MANIFEST, None)
        files = _listed(root, manifest)
        for name, (_, size) in files.items():
            if name not in entries:
                raise damaged(root, f"{name!r} is listed in the manifest but missing")
            if entries[name].st_size != size:
                raise damaged(root, f"{name!r} has {entries[name].st_size} bytes, the manifest says {size}")
        if unlisted := [name for name in entries if name not in files]:
            raise damaged(root, f"{unlisted[0]!r} is not listed in the manifest")
        if verify:
            now = {name: expected for name, (expected, _) in files.items() if name not in later}
            for (name, expected), digest in zip(now.items(), file_digests(root, now), strict=True):
                if digest != expected:
                    raise damaged(root, f"{name!r} has SHA-256 {digest}, the manifest says {expected}")
    except OSError as error:
        raise damaged(root, f"{error.filename or 'a file'} cannot be read: {error.strerror}") from error
    return manifest


def read_verified(root: Path, name: str, expected: str) -> bytes:
    """Return the bytes of an artifact's file after comparing them with the SHA-256 in the manifest.

    The returned bytes are the checked bytes, even if the file changes afterwards. Files that contain code must be read
    by this function.
    """
    try:
        data = (root / name).read_bytes()
    except OSError as error:
        raise damaged(root, f"{name!r} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != expected:
        raise damaged(root, f"{name!r} has SHA-256 {digest}, the manifest says {expected}")
    return data


def _read_manifest(root: Path) -> dict[str, Any]:
    try:
        entry = (root / MANIFEST).lstat()
    except FileNotFoundError:
        raise no_artifact(root, f"it has no {MANIFEST}") from None
    if problem := _kind_problem(entry):
        raise no_artifact(root, f"its {MANIFEST} is {problem}")
    with (root / MANIFEST).open("rb") as file:
        raw = file.read(MANIFEST_LIMIT + 1)
    if len(raw) > MANIFEST_LIMIT:
        raise no_artifact(root, f"its {MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
    if f'"{FORMAT}"'.encode() not in raw:
        raise no_artifact(root, f"its {MANIFEST} is not the manifest of a kvexport artifact")
    try:
        manifest = json.loads(raw.decode(), parse_int=_parse_int)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise no_artifact(root, f"its {MANIFEST} is not the manifest of a kvexport artifact")
        version = manifest.get("contract_version")
        if type(version) is not int or version != CONTRACT_VERSION:
            raise _of_another_version(root, manifest, str(version)[:40])
        expected, digest = str(manifest.get("manifest_sha256"))[:64], _self_digest(manifest)
        if digest != expected:
            raise damaged(root, f"{MANIFEST} has SHA-256 {digest}, but contains {expected}")
    except (ValueError, RecursionError) as error:
        raise damaged(root, f"{MANIFEST} is not valid JSON: {str(error)[:200]}") from error
    return manifest


def _listed(root: Path, manifest: dict[str, Any]) -> dict[str, tuple[str, int]]:
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise damaged(root, f"{MANIFEST} lists no files")
    for name, entry in files.items():
        if problem := _name_problem(name):
            raise damaged(root, f"{MANIFEST} lists {name[:200]!r}: {problem}")
        size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise damaged(root, f"{MANIFEST} has no digest and size for {name!r}")
    return {name: (entry["sha256"], entry["bytes"]) for name, entry in files.items()}


def damaged(root: Path, problem: str) -> ArtifactError:
    return ArtifactError(f"the artifact {root} is damaged: {problem}", built_again(root))


def built_again(root: Path) -> str:
    """Return advice on how to build an artifact again whose manifest is damaged, so that its model is unknown."""
    return f"kvexport build MODEL --out {shlex.quote(str(root))}, or with --recipe NAME if it was built from a recipe"


def no_artifact(root: Path, problem: str) -> ArtifactError:
    """Return the error for a directory that has no manifest. The error never advises to remove the directory."""
    return ArtifactError(f"{root} is no artifact: {problem}", instead_of(root))


def instead_of(path: Path) -> str:
    """Return advice for a user who names a path that is no artifact. The advice never overwrites the path."""
    is_model = path.suffix == ".gguf" if path.is_file() else (path / "config.json").is_file()
    if is_model and not (path / "decoder.onnx").exists():  # an artifact that lost its manifest has a config.json too
        return f"kvexport build {shlex.quote(str(path))} --out ARTIFACT, and name ARTIFACT here"
    return "kvexport list shows the artifacts in the cache folder; kvexport build MODEL --out ARTIFACT"


def _of_another_version(root: Path, manifest: dict[str, Any], version: str) -> ArtifactError:
    recipe = manifest.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    known = name if name in named_recipes() else ""
    versions = manifest.get("versions")
    builder = versions.get("kvexport") if isinstance(versions, dict) else None
    shown = isinstance(builder, str) and re.fullmatch(r"[\w.+!-]{1,100}", builder)
    built = f", which kvexport {builder} built," if shown else ""
    return ArtifactError(
        f"the artifact {root}{built} has contract version {version}, but this kvexport reads only {CONTRACT_VERSION}",
        f"kvexport build --recipe {known} --out {shlex.quote(str(root))}" if known else built_again(root),
    )


def _name_problem(name: str) -> str:
    """Return why a file name in a manifest is refused, or "" if it is allowed.

    Only plain relative POSIX paths are allowed, because they have the same meaning for every reader.
    """
    if name == MANIFEST:
        return "the manifest does not list itself"
    if "\\" in name or not name.isprintable():
        return "a name holds no backslash, control character or byte that is not UTF-8"
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        return "a name is relative to the artifact"
    if any(component in ("", ".", "..") for component in name.split("/")):
        return "a name has no empty, '.' or '..' part"
    return ""


def _kind_problem(entry: os.stat_result) -> str:
    if stat.S_ISLNK(entry.st_mode):
        return "a symbolic link"
    return "" if stat.S_ISREG(entry.st_mode) else "not an ordinary file"


def scan(root: Path) -> dict[str, os.stat_result]:
    """Return all entries under `root` except directories, sorted by relative POSIX path.

    A link is listed and never followed.
    """
    listing, pending = {}, [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{prefix}{entry.name}/")
                else:
                    listing[prefix + entry.name] = entry.stat(follow_symlinks=False)
    return dict(sorted(listing.items()))


def _self_digest(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _parse_int(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
