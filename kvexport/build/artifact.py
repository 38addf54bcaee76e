"""An artifact: a directory of files and `manifest.json`, published whole or not at all (docs/contract.md, section 5).

Beside a target `name`, on the same file system, live `.name.lock` (held by the build under way), `.name.stage-*` (what it writes,
or what a killed one left) and, only where two directories cannot be exchanged in one step, for an instant `.name.old`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kvexport.cache import CONTRACT_VERSION
from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError, UsageError

FORMAT = "kvexport-artifact"
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 16 << 20
_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@contextmanager
def stage(target: Path) -> Iterator[Path]:
    """A fresh directory to write an artifact into; it becomes `target` when the block ends, in one step and after a sync.

    The block must end with `write_manifest`. An artifact already at `target` stays readable until it is exchanged for the new one
    and is then deleted, with whatever else was put into its directory. When the block raises, the stage is removed and `target`
    is as it was; after a kill -9 it is absent, the old artifact or the new one, and the next call removes what was left beside it.

    Raises UsageError where `target` cannot be used (something else is there, its parent is missing or read-only, another build
    holds it), EnvironmentProblem on a full disk or quota, KvexportError where the block wrote no manifest for what it left.
    """
    target = _place(Path(target))
    _refuse_foreign(target)
    lock = _acquire_or_refuse(target)
    try:
        _tidy(target)
        _refuse_foreign(target)
        work = _stage_name(target)
        try:
            work.mkdir()
            yield work
            _require_manifest(work)
            _sync_tree(work)
            _publish(work, target)
        except BaseException as error:
            try:
                # Asked before the stage is removed: afterwards there is room again.
                full = _disk_full(error, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            if full is not None:
                raise full from error
            raise
        # After an exchange the old artifact is here. Failing to delete it does not undo the build; the next one tries again.
        shutil.rmtree(work, ignore_errors=True)
    finally:
        _release(target, lock)


def write_manifest(stage: Path, content: dict[str, Any], *, known: Mapping[str, str] | None = None) -> None:
    """Write `manifest.json`: `content` and, added to it, `format`, `contract_version`, `manifest_sha256` and `files`.

    `files` maps every file of the stage, as a relative POSIX path, to {"sha256": hex, "bytes": size}. `known` gives digests of files
    hashed while they were written (`HashingWriter`); those are not read again. `content` holds what JSON can, without NaN.
    Call it last: a file written later is not listed and the stage is refused. Raises KvexportError on a link or an unsafe name.
    """
    found = {name: entry for name, entry in _scan(stage).items() if name != MANIFEST}
    known = dict(known or {})
    for name, entry in found.items():
        if problem := _name_problem(name) or _kind_problem(entry):
            raise KvexportError(f"the build wrote {name!r}, which cannot be part of an artifact: {problem}")
    if wrong := [name for name, digest in known.items() if name not in found or not _SHA256.fullmatch(digest)]:
        raise KvexportError(f"a digest was handed over for {wrong[0]!r}, which is not in the stage or whose digest is no SHA-256 in hex")
    own = {"format": FORMAT, "contract_version": CONTRACT_VERSION}
    if clash := [key for key in content if key in ("files", "manifest_sha256") or content[key] != own.get(key, content[key])]:
        raise KvexportError(f"the manifest's field '{clash[0]}' is written by write_manifest alone")
    unknown = [name for name in found if name not in known]
    known.update(zip(unknown, _digests(stage, unknown), strict=True))
    files = {name: {"sha256": known[name], "bytes": entry.st_size} for name, entry in found.items()}
    # Through JSON once, so that tuples and integer keys are what a reader will see before they are sorted and digested.
    manifest = json.loads(json.dumps({**content, **own, "files": files}, allow_nan=False))
    manifest["manifest_sha256"] = _self_digest(manifest)
    text = "".join(_written_form(manifest)).encode()
    if len(text) > MANIFEST_LIMIT:
        raise KvexportError(f"the manifest would be {len(text)} bytes, more than the {MANIFEST_LIMIT} a reader accepts")
    (stage / MANIFEST).unlink(missing_ok=True)
    (stage / MANIFEST).write_bytes(text)


def load_manifest(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of the artifact at `path`, after checking it and every file it lists.

    verify: False leaves out the SHA-256 of the files, not the rest: the manifest's own digest, names, sizes, nothing unlisted, no links.
    An artifact that is replaced during the check is checked again. `path` itself may be a link to an artifact.

    The digests find damage: a truncated download, a flipped bit, an edit, a file added by mistake. They do **not** tell who made the
    artifact: whoever can write the directory can write a matching manifest, and can change a file after this check. Load artifacts
    only from directories that nobody untrusted can write.

    Raises UsageError where nothing is at `path`, ArtifactError for everything that is wrong with what is there.
    """
    for _ in range(10):
        if (manifest := _checked_unless_replaced(_existing(Path(path)), verify)) is not None:
            return manifest
    raise ArtifactError(f"{path} was replaced ten times while it was being checked", "wait until the builds that write it have ended")


class HashingWriter:
    """Writes to a buffered binary file and keeps the SHA-256 of what was written, for `write_manifest(known=...)`. No seeking."""

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


# Where an artifact may go, and the lock of a target.


def _place(target: Path) -> Path:
    """`target` with its parent resolved, so that two spellings of one place share one lock."""
    if target.name in ("", ".."):
        target = target.resolve()
    try:
        parent = target.parent.resolve(strict=True)
    except (OSError, RuntimeError):
        raise UsageError(
            f"{target.parent}, where {target.name} is to be written, does not exist", f"mkdir -p {_quoted(target.parent)}"
        ) from None
    if not target.name or not parent.is_dir():
        raise UsageError(f"{target} cannot be written: {parent} is not a directory that can hold it", "choose another --out")
    if len(os.fsencode(target.name)) > 220:
        raise UsageError(f"the name of {target} is longer than 220 bytes", "choose a shorter --out")
    return parent / target.name


def _refuse_foreign(target: Path) -> None:
    """Raises UsageError unless `target` is absent, an empty directory or an artifact, and can be replaced by a rename."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        kind = "a symbolic link" if target.is_symlink() else "not a directory"
        raise UsageError(f"{target} exists and is {kind}; an artifact is a directory", "choose another --out")
    if _is_mount_point(target) or target.samefile("."):
        kind = "a mount point" if _is_mount_point(target) else "the current directory"
        raise UsageError(f"{target} is {kind}, which cannot be replaced in one step", f"--out {_quoted(target / 'artifact')}")
    try:
        foreign = any(target.iterdir()) and not _is_artifact(target)
    except OSError as error:
        raise UsageError(f"{target} exists and cannot be read: {error.strerror}", "choose another --out") from error
    if foreign:
        raise UsageError(f"{target} exists, is not empty and is no artifact; it was left alone", "choose another --out, or remove it first")


def _is_artifact(path: Path) -> bool:
    """Whether a directory says it is an artifact; a damaged one counts, so that it can be built again."""
    manifest = path / MANIFEST
    if path.is_symlink() or manifest.is_symlink() or not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return f'"{FORMAT}"'.encode() in file.read(MANIFEST_LIMIT)


def _is_mount_point(path: Path) -> bool:
    """Also of a bind mount on the same file system, which os.path.ismount does not see."""
    if os.path.ismount(path):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    return str(path) in (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4]) for line in lines)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


def _stage_name(target: Path) -> Path:
    return _beside(target, f"stage-{secrets.token_hex(8)}")


def _acquire(target: Path) -> int:
    """The locked descriptor of the target's lock file, which names this process. Raises BlockingIOError while a build holds it."""
    path = _beside(target, "lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder removes its file when it is done: between open and flock the name may have come to mean another file.
            if _identity(lock) == _identity(path):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _acquire_or_refuse(target: Path) -> int:
    try:
        return _acquire(target)
    except BlockingIOError:
        holder = ""
        with suppress(OSError):
            holder = _beside(target, "lock").read_bytes()[:20].decode(errors="replace").strip()
        by = f"process {holder}" if holder.isdigit() else "a process that has just begun or ended"
        raise UsageError(f"{target} is being written by another build, {by}", "wait until it has ended, or choose another --out") from None
    except OSError as error:
        if full := _disk_full(error, target):
            raise full from error
        raise UsageError(f"{target.parent} cannot be written: {error.strerror}", "choose an --out in a directory you may write") from error


def _release(target: Path, lock: int) -> None:
    """Removes the lock file before it unlocks, so that nobody can lock a name that is about to go."""
    try:
        path = _beside(target, "lock")
        if _identity(lock) == _identity(path):
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _identity(path: Path | int) -> tuple[int, int] | None:
    """Which file or directory a path or descriptor means at this moment; None where there is none."""
    try:
        entry = os.fstat(path) if isinstance(path, int) else path.stat()
    except OSError:
        return None
    return entry.st_dev, entry.st_ino


# Publishing, and what a killed build left.


def _tidy(target: Path) -> None:
    """Puts back an artifact that a killed build had moved aside, and removes stages. The caller holds the lock."""
    old = _beside(target, "old")
    stages = re.compile(re.escape(f".{target.name}.stage-") + "[0-9a-f]{16}")
    try:
        _restore(target)
        if _is_artifact(old) and _is_artifact(target):
            # Only whole artifacts bear the old name: one to be deleted takes the name of a stage first.
            old.rename(_stage_name(target))
        with os.scandir(target.parent) as entries:
            stale = [entry.path for entry in entries if stages.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
        for path in stale:
            shutil.rmtree(path)
    except OSError as error:
        fix = f"rm -r {_quoted(_beside(target, 'stage-'))}*"
        raise UsageError(f"what a killed build left beside {target} cannot be cleared away: {error}", fix) from error


def _restore(target: Path) -> None:
    """Ends a replacement that a kill cut between its two renames. The caller holds the lock."""
    old = _beside(target, "old")
    if not os.path.lexists(target) and _is_artifact(old):
        old.rename(target)


def _require_manifest(work: Path) -> None:
    try:
        _checked(work, verify=False)
    except ArtifactError as error:
        raise KvexportError(f"the build did not finish its artifact, nothing was written: {error.problem}") from error


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory and say so with EINVAL.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _publish(work: Path, target: Path) -> None:
    """Make the synced stage the target. What was there is at `work` afterwards."""
    _refuse_foreign(target)
    try:
        if not (os.path.lexists(target) and any(target.iterdir())):
            work.rename(target)
        elif not _exchange(work, target):
            _replace_in_two_steps(work, target)
        _sync(target.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise EnvironmentProblem(f"the artifact cannot be moved to {target}: {error.strerror}", "build elsewhere with --out") from error


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step (Linux, renameat2 with RENAME_EXCHANGE); False where the C library or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, ctypes.c_char_p(os.fsencode(a)), here, ctypes.c_char_p(os.fsencode(b)), ctypes.c_uint(swap)) == 0:
        return True
    number = ctypes.get_errno()
    # EPERM is what a container's system call filter answers to a call that it does not know.
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(b))


def _replace_in_two_steps(work: Path, target: Path) -> None:
    """Exchange by way of `.name.old`, which `_tidy` puts back where a kill falls between the two renames."""
    old = _beside(target, "old")
    try:
        target.rename(old)
        work.rename(target)
    except BaseException:
        if not os.path.lexists(target):
            old.rename(target)
        raise
    _sync(target.parent)
    old.rename(work)


def _disk_full(error: BaseException, work: Path) -> EnvironmentProblem | None:
    """The error to show where a full disk or quota is behind `error`, else None."""
    cause: BaseException | None = None if isinstance(error, KvexportError) or not isinstance(error, Exception) else error
    while cause is not None:
        # Writers in other languages (safetensors, protobuf) hand over only the words of it.
        if (isinstance(cause, OSError) and cause.errno in _FULL) or any(os.strerror(number) in str(cause) for number in _FULL):
            break
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    name = cause.filename if isinstance(cause, OSError) else None
    written = Path(os.fsdecode(name)) if isinstance(name, (str, bytes)) else _newest(work)
    where = next(parent for parent in [written, *written.absolute().parents] if parent.is_dir())
    quota = os.strerror(errno.EDQUOT) in str(cause)
    shown = written.relative_to(work) if written != work and written.is_relative_to(work) else written
    return EnvironmentProblem(
        f"{'disk quota used up' if quota else 'disk full'} while writing {shown}: {shutil.disk_usage(where).free} bytes free",
        f"free space on the file system of {where if where != work else work.parent}, or build elsewhere with --out",
    )


def _newest(work: Path) -> Path:
    """The file being written when an error names none: the one changed last."""
    with suppress(OSError):
        if times := {name: entry.st_mtime_ns for name, entry in _scan(work).items()}:
            return work / max(times, key=lambda name: times[name])
    return work


# Checking.


def _existing(path: Path) -> Path:
    """The resolved directory at `path`, put back first where a killed build had moved it aside."""
    deadline = time.monotonic() + 1.0
    while not path.is_dir():
        waits = path.parent.is_dir() and not path.is_symlink() and time.monotonic() < deadline and _comes_back(_place(path))
        if not waits and not path.is_dir():
            what = f"{path} is not a directory, so no artifact" if os.path.lexists(path) else f"there is no artifact at {path}"
            raise UsageError(what, f"kvexport build RECIPE --out {_quoted(path)}, or name the directory of an artifact")
    return path.resolve()


def _comes_back(target: Path) -> bool:
    """Whether to look again for a target that was absent a moment ago: it is put back here, or a build may be between its two renames."""
    old = _beside(target, "old")
    if not _is_artifact(old) and not os.path.lexists(_beside(target, "lock")):
        return False
    try:
        lock = _acquire(target)
    except BlockingIOError:
        time.sleep(0.005)
        return True
    except OSError as error:
        if os.path.lexists(target) or not _is_artifact(old):
            return False
        fix = f"mv {_quoted(old)} {_quoted(target)}"
        raise UsageError(f"a killed build left {target} at {old}, and it cannot be put back: {error.strerror}", fix) from error
    try:
        _restore(target)
        return target.is_dir()
    finally:
        _release(target, lock)


def _checked_unless_replaced(root: Path, verify: bool) -> dict[str, Any] | None:
    """The checked manifest; None where another artifact took this one's place meanwhile, so that a finding means nothing."""
    try:
        # Held open, so that its inode number cannot go to the artifact that replaces it.
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(root, f"it cannot be read: {error.strerror}") from error
    try:
        manifest = _checked(root, verify)
        return manifest if _identity(held) == _identity(root) else None
    except ArtifactError:
        if _identity(held) == _identity(root):
            raise
        return None
    finally:
        os.close(held)


def _checked(root: Path, verify: bool) -> dict[str, Any]:
    """The manifest of the directory `root`. Raises ArtifactError for everything that is wrong."""
    try:
        found = _scan(root)
        for name, entry in found.items():
            if problem := _kind_problem(entry):
                raise _damaged(root, f"{name!r} is {problem}")
        manifest = _read_manifest(root, found.pop(MANIFEST, None))
        files = _listed(root, manifest)
        for name, (_, size) in files.items():
            if name not in found:
                raise _damaged(root, f"{name!r} is listed in the manifest and missing")
            if found[name].st_size != size:
                raise _damaged(root, f"{name!r} has {found[name].st_size} bytes, the manifest says {size}")
        if unlisted := [name for name in found if name not in files]:
            raise _damaged(root, f"{unlisted[0]!r} is not listed in the manifest")
        if verify:
            for (name, (expected, _)), digest in zip(files.items(), _digests(root, files), strict=True):
                if digest != expected:
                    raise _damaged(root, f"{name!r} has SHA-256 {digest}, the manifest says {expected}")
    except OSError as error:
        raise _damaged(root, f"{error.filename or 'a file'} cannot be read: {error.strerror}") from error
    return manifest


def _read_manifest(root: Path, entry: os.stat_result | None) -> dict[str, Any]:
    if entry is None:
        raise _damaged(root, f"it has no {MANIFEST}")
    with (root / MANIFEST).open("rb") as file:
        raw = file.read(MANIFEST_LIMIT + 1)
    if len(raw) > MANIFEST_LIMIT:
        raise _damaged(root, f"{MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
    try:
        manifest = json.loads(raw.decode(), parse_int=_parse_int)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise _damaged(root, f"{MANIFEST} is not the manifest of a kvexport artifact")
        version = manifest.get("contract_version")
        if type(version) is not int or version != CONTRACT_VERSION:
            raise _damaged(root, f"its contract_version is {str(version)[:40]}, this kvexport reads {CONTRACT_VERSION}")
        expected, found = str(manifest.get("manifest_sha256"))[:64], _self_digest(manifest)
        if found != expected:
            raise _damaged(root, f"{MANIFEST} has SHA-256 {found} and says {expected} of itself")
        # The digest is of the meaning; this finds a changed blank, a repeated key, another spelling of a number.
        if not _spells(manifest, raw):
            raise _damaged(root, f"{MANIFEST} is not written the way kvexport writes it")
    except (ValueError, RecursionError) as error:
        raise _damaged(root, f"{MANIFEST} is not valid JSON: {str(error)[:200]}") from error
    return manifest


def _listed(root: Path, manifest: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """The manifest's files: name -> (digest, bytes), every name safe to join to `root`."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise _damaged(root, f"{MANIFEST} lists no files")
    for name, entry in files.items():
        if problem := _name_problem(name):
            raise _damaged(root, f"{MANIFEST} lists {name[:200]!r}: {problem}")
        size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise _damaged(root, f"{MANIFEST} has no digest and size for {name!r}")
    return {name: (entry["sha256"], entry["bytes"]) for name, entry in files.items()}


def _damaged(root: Path, problem: str) -> ArtifactError:
    return ArtifactError(
        f"the artifact {root} is damaged: {problem}", f"remove it and run kvexport build RECIPE --out {_quoted(root)} again"
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


def _scan(root: Path) -> dict[str, os.stat_result]:
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


def _digests(root: Path, names: Iterable[str]) -> Iterator[str]:
    """SHA-256 of files in the order given, a few at a time: hashlib lets other threads run."""
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    try:
        yield from pool.map(lambda name: _digest(root / name), names)
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(path: Path) -> str:
    digest, chunk = hashlib.sha256(), bytearray(_CHUNK)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        while count := file.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def _self_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON (sorted, compact, ASCII) of everything but the field that holds it."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _written_form(manifest: dict[str, Any]) -> Iterator[str]:
    yield from json.JSONEncoder(sort_keys=True, indent=1, allow_nan=False).iterencode(manifest)
    yield "\n"


def _spells(manifest: dict[str, Any], raw: bytes) -> bool:
    """Whether `raw` is the written form; piece by piece, because the indents of hostile nesting would fill the memory."""
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


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
