"""The digests of an artifact: how manifest.json is written, and the checks of a directory against it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from kvexport.errors import ArtifactError, KvexportError
from kvexport.schema.state import CONTRACT_VERSION

FORMAT = "kvexport-artifact"
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 16 << 20
_CHUNK = 4 << 20  # with smaller blocks, a thread beside a busy one mostly waits for the interpreter
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write_manifest(stage: Path, content: dict[str, Any], *, known: Mapping[str, str] | None = None) -> None:
    """Write `manifest.json`: `content` and, added to it, `format`, `contract_version`, `manifest_sha256` and `files`.

    `files` maps every file of the stage, as a relative POSIX path, to {"sha256": hex, "bytes": size}. `known` gives
    digests of files hashed while they were written (`HashingWriter`); those are not read again. `content` holds what
    JSON can, without NaN.
    Call it last: a file written later is not listed and the stage is refused. Raises KvexportError on a link or an
    unsafe name.
    """
    found = {name: entry for name, entry in scan(stage).items() if name != MANIFEST}
    known = dict(known or {})
    for name, entry in found.items():
        if problem := _name_problem(name) or _kind_problem(entry):
            raise KvexportError(f"the build wrote {name!r}, which cannot be part of an artifact: {problem}")
    if wrong := [name for name, digest in known.items() if name not in found or not _SHA256.fullmatch(digest)]:
        raise KvexportError(
            f"a digest was handed over for {wrong[0]!r}, which is not in the stage or whose digest is no SHA-256 in hex"
        )
    own = {"format": FORMAT, "contract_version": CONTRACT_VERSION}
    if clash := [
        key for key in content if key in ("files", "manifest_sha256") or content[key] != own.get(key, content[key])
    ]:
        raise KvexportError(f"the manifest's field '{clash[0]}' is written by write_manifest alone")
    unknown = [name for name in found if name not in known]
    known.update(zip(unknown, file_digests(stage, unknown), strict=True))
    files = {name: {"sha256": known[name], "bytes": entry.st_size} for name, entry in found.items()}
    # Through JSON once, so that tuples and integer keys are what a reader will see before they are sorted and digested.
    manifest = json.loads(json.dumps({**content, **own, "files": files}, allow_nan=False))
    manifest["manifest_sha256"] = _self_digest(manifest)
    text = "".join(_written_form(manifest)).encode()
    if len(text) > MANIFEST_LIMIT:
        raise KvexportError(f"the manifest would be {len(text)} bytes, more than the {MANIFEST_LIMIT} a reader accepts")
    (stage / MANIFEST).unlink(missing_ok=True)
    (stage / MANIFEST).write_bytes(text)


class HashingWriter:
    """Writes to a buffered binary file and keeps the SHA-256 of what was written, for `write_manifest(known=...)`. No
    seeking."""

    def __init__(self, file: BinaryIO) -> None:
        """file: open for writing in binary, buffered, so that a write is never partial."""
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data` (C-contiguous); the number of bytes."""
        count = self._file.write(data)
        self._hash.update(data)
        return count

    def hexdigest(self) -> str:
        """The digest of everything written so far, 64 lowercase hex digits."""
        return self._hash.hexdigest()


def check_artifact(root: Path, verify: bool) -> dict[str, Any]:
    """The manifest of the directory `root`, as JSON gives it. Raises ArtifactError for everything that is wrong; the
    directory is not looked through before its manifest says that it is an artifact."""
    try:
        manifest = _read_manifest(root)
        found = scan(root)
        for name, entry in found.items():
            if problem := _kind_problem(entry):
                raise damaged(root, f"{name!r} is {problem}")
        found.pop(MANIFEST, None)
        files = _listed(root, manifest)
        for name, (_, size) in files.items():
            if name not in found:
                raise damaged(root, f"{name!r} is listed in the manifest and missing")
            if found[name].st_size != size:
                raise damaged(root, f"{name!r} has {found[name].st_size} bytes, the manifest says {size}")
        if unlisted := [name for name in found if name not in files]:
            raise damaged(root, f"{unlisted[0]!r} is not listed in the manifest")
        if verify:
            for (name, (expected, _)), digest in zip(files.items(), file_digests(root, files), strict=True):
                if digest != expected:
                    raise damaged(root, f"{name!r} has SHA-256 {digest}, the manifest says {expected}")
    except OSError as error:
        raise damaged(root, f"{error.filename or 'a file'} cannot be read: {error.strerror}") from error
    return manifest


def read_verified(root: Path, name: str, expected: str) -> bytes:
    """A listed file, its bytes held to the manifest's digest `expected`: what is then used is what was checked, not
    what may lie there since. For files that are code. Raises ArtifactError."""
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
        expected, found = str(manifest.get("manifest_sha256"))[:64], _self_digest(manifest)
        if found != expected:
            raise damaged(root, f"{MANIFEST} has SHA-256 {found} and says {expected} of itself")
        # The digest is of the meaning; this finds a changed blank, a repeated key, another spelling of a number.
        if not _spells(manifest, raw):
            raise damaged(root, f"{MANIFEST} is not written the way kvexport writes it")
    except (ValueError, RecursionError) as error:
        raise damaged(root, f"{MANIFEST} is not valid JSON: {str(error)[:200]}") from error
    return manifest


def _listed(root: Path, manifest: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """The manifest's files: name -> (digest, bytes), every name safe to join to `root`."""
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
    """The error for something wrong with the artifact `root`."""
    return ArtifactError(
        f"the artifact {root} is damaged: {problem}",
        f"remove it and run kvexport build --recipe NAME --out {shlex.quote(str(root))} again",
    )


def no_artifact(root: Path, problem: str) -> ArtifactError:
    """The error for a directory without an artifact's manifest. It does not advise to remove anything."""
    return ArtifactError(
        f"{root} is no artifact: {problem}",
        "name the directory of an artifact; kvexport build --recipe NAME --out DIR makes one",
    )


def _of_another_version(root: Path, manifest: dict[str, Any], version: str) -> ArtifactError:
    recipe = manifest.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    known = name if isinstance(name, str) and re.fullmatch(r"[\w.-]{1,100}", name) else "NAME"
    return ArtifactError(
        f"the artifact {root} has contract version {version}, this kvexport reads {CONTRACT_VERSION} alone",
        f"kvexport build --recipe {known} --out {shlex.quote(str(root))}, which builds it again",
    )


def _name_problem(name: str) -> str:
    """Why a listed name is refused, or "": only plain relative POSIX paths, the same to every reader."""
    if name == MANIFEST:
        return "the manifest does not list itself"
    if "\\" in name or not name.isprintable():
        return "a name holds no backslash, control character or byte that is not UTF-8"
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        return "a name is relative to the artifact"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "a name has no empty, '.' or '..' part"
    return ""


def _kind_problem(entry: os.stat_result) -> str:
    if stat.S_ISLNK(entry.st_mode):
        return "a symbolic link"
    return "" if stat.S_ISREG(entry.st_mode) else "not an ordinary file"


def scan(root: Path) -> dict[str, os.stat_result]:
    """Everything under `root` but directories, by relative POSIX path in order; a link is listed, never followed."""
    found, pending = {}, [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{prefix}{entry.name}/")
                else:
                    found[prefix + entry.name] = entry.stat(follow_symlinks=False)
    return dict(sorted(found.items()))


# Is given the blocks of a file as they are read, each with its offset in the file.
Seen = Callable[[int, memoryview], None]


def file_digests(root: Path, names: Iterable[str], seen: Iterable[Seen | None] | None = None) -> Iterator[str]:
    """SHA-256 of files under `root` in the order given, a few at a time: hashlib lets other threads run. seen: of each
    file one that looks at it too; what it raises is raised here."""
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    try:
        yield from pool.map(lambda name, look: _digest(root / name, look), names, seen or itertools.repeat(None))
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(path: Path, seen: Seen | None) -> str:
    digest, chunk, offset = hashlib.sha256(), memoryview(bytearray(_CHUNK)), 0
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            if seen:
                seen(offset, chunk[:count])
            offset += count
    return digest.hexdigest()


def _self_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON (sorted, compact, ASCII) of everything but the field that holds it."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _written_form(manifest: dict[str, Any]) -> Iterator[str]:
    yield from json.JSONEncoder(sort_keys=True, indent=1, allow_nan=False).iterencode(manifest)
    yield "\n"


def _spells(manifest: dict[str, Any], raw: bytes) -> bool:
    """Whether `raw` is the written form; piece by piece, because the indents of hostile nesting would fill the
    memory."""
    offset = 0
    for piece in _written_form(manifest):
        if not raw.startswith(piece.encode(), offset):
            return False
        offset += len(piece)
    return offset == len(raw)


def _parse_int(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
