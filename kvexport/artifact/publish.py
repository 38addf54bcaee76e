"""Atomic writing of an artifact: its folder appears complete or not at all (docs/reference/contract.md, section 5).

An artifact is a directory of files and `manifest.json`. A build of the artifact `name` locks the file `.name.lock` and
writes into the directory `.name.stage-*`, both next to `name`. On file systems that cannot exchange two directories in
one step, `name` is absent for an instant.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvexport.artifact.digests import FORMAT, MANIFEST, MANIFEST_LIMIT, check_artifact, scan
from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield a fresh directory to write an artifact into, and publish it as `target` when the block ends.

    The new artifact is flushed to the disk and then appears at `target` in one step. The block must end with
    `write_manifest`. An artifact at `target` stays readable until the new one replaces it, and is then deleted with
    everything else in its directory. If the block raises, the staging folder is removed and `target` stays unchanged.
    After a kill -9 `target` is absent, the old artifact or the new one, and the next build of `target` removes
    everything that was left next to it.
    """
    target = _place(Path(target))
    _refuse_foreign(target)
    lock = _acquire(target)
    try:
        _tidy(target)
        _refuse_foreign(target)
        work = _staging_name(target)
        try:
            work.mkdir()
            yield work
            _require_manifest(work)
            sync_tree(work)
            _publish(work, target)
        except BaseException as error:
            try:
                # Determined before the staging folder is removed, which frees space.
                full = _disk_full(error, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            if full is not None:
                raise full from error
            raise
        # After an exchange the old artifact is here. If it cannot be deleted, the build is still valid, and the next
        # build tries again.
        shutil.rmtree(work, ignore_errors=True)
    finally:
        release(target, lock)


# The place of an artifact, and the lock of a target.


def _place(target: Path) -> Path:
    """Return an artifact's path with its parent folder resolved, so that all spellings of a path share a lock file."""
    if target.name in ("", ".."):
        target = target.resolve()
    try:
        parent = target.parent.resolve(strict=True)
    except (OSError, RuntimeError):
        raise UsageError(
            f"{target.parent}, where {target.name} is to be written, does not exist",
            f"mkdir -p {quoted(target.parent)}",
        ) from None
    if not target.name or not parent.is_dir():
        raise UsageError(
            f"{target} cannot be written: {parent} is not a directory that can hold it", "choose another --out"
        )
    if len(os.fsencode(target.name)) > 220:
        raise UsageError(f"the name of {target} is longer than 220 bytes", "choose a shorter --out")
    return parent / target.name


def _refuse_foreign(target: Path) -> None:
    """Check that a build may replace `target`: it is absent, an empty directory or an artifact on this file system."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        kind = "a symbolic link" if target.is_symlink() else "not a directory"
        raise UsageError(f"{target} exists and is {kind}; an artifact is a directory", "choose another --out")
    if _is_mount_point(target) or target.samefile("."):
        kind = "a mount point" if _is_mount_point(target) else "the current directory"
        raise UsageError(
            f"{target} is {kind}, which cannot be replaced in one step", f"--out {quoted(target / 'artifact')}"
        )
    try:
        foreign = any(target.iterdir()) and not is_artifact(target)
    except OSError as error:
        raise UsageError(f"{target} exists and cannot be read: {error.strerror}", "choose another --out") from error
    if foreign:
        raise UsageError(
            f"{target} exists, is not empty and is no artifact; it was not changed",
            "choose another --out, or remove it first",
        )


def is_artifact(path: Path) -> bool:
    """Return whether a directory has an artifact's manifest, damaged or not, so that it can be built again."""
    manifest = path / MANIFEST
    if path.is_symlink() or manifest.is_symlink() or not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return f'"{FORMAT}"'.encode() in file.read(MANIFEST_LIMIT)


def _is_mount_point(path: Path) -> bool:
    """Return whether a path is a mount point, bind mounts included, which os.path.ismount does not detect."""
    if os.path.ismount(path):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    return str(path) in (
        re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4]) for line in lines
    )


def beside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


def _staging_name(target: Path) -> Path:
    return beside(target, f"stage-{secrets.token_hex(8)}")


def _acquire(target: Path) -> int:
    """Lock an artifact's directory for a build by a lock file beside it, which contains the id of this process."""
    path = beside(target, "lock")
    try:
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The owner of a lock removes its file at the end, so between open and flock the name may have become
                # another file.
                if identity(lock) == identity(path):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
    except BlockingIOError:
        owner = ""
        with suppress(OSError):
            owner = path.read_bytes()[:20].decode(errors="replace").strip()
        by = f"process {owner}" if owner.isdigit() else "a process that has just begun or ended"
        raise UsageError(
            f"{target} is being written by another build, {by}", "wait until it has ended, or choose another --out"
        ) from None
    except OSError as error:
        if full := _disk_full(error, target):
            raise full from error
        raise UsageError(
            f"{target.parent} cannot be written: {error.strerror}", "choose an --out in a directory you may write"
        ) from error


def release(target: Path, lock: int) -> None:
    """Remove a build's lock file before unlocking it, so that no other build locks a file that will disappear."""
    try:
        path = beside(target, "lock")
        if identity(lock) == identity(path):
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def identity(path: Path | int) -> tuple[int, int] | None:
    try:
        entry = os.fstat(path) if isinstance(path, int) else path.stat()
    except OSError:
        return None
    return entry.st_dev, entry.st_ino


# Publishing, and the remains of a killed build.


def _tidy(target: Path) -> None:
    """Remove the staging folders that killed builds left. The caller holds the lock file of `target`."""
    staging_names = re.compile(re.escape(f".{target.name}.stage-") + "[0-9a-f]{16}")
    try:
        with os.scandir(target.parent) as entries:
            left = (entry for entry in entries if staging_names.fullmatch(entry.name))
            stale = [entry.path for entry in left if entry.is_dir(follow_symlinks=False)]
        for path in stale:
            shutil.rmtree(path)
    except OSError as error:
        fix = f"rm -r {quoted(beside(target, 'stage-'))}*"
        raise UsageError(f"the remains of a killed build next to {target} cannot be removed: {error}", fix) from error


def _require_manifest(work: Path) -> None:
    try:
        check_artifact(work, verify=False)
    except ArtifactError as error:
        raise KvexportError(f"the build did not finish its artifact, nothing was written: {error.problem}") from error


def sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory and return EINVAL.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _publish(work: Path, target: Path) -> None:
    """Move a build's complete staging folder `work` to `target`. An old artifact at `target` is moved to `work`."""
    _refuse_foreign(target)
    try:
        if not (os.path.lexists(target) and any(target.iterdir())):
            work.rename(target)
        elif not exchange(work, target):
            _replace_in_two_steps(work, target)
        _sync(target.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise EnvironmentProblem(
            f"the artifact cannot be moved to {target}: {error.strerror}", "build elsewhere with --out"
        ) from error


def exchange(a: Path, b: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if (
        renameat2(here, ctypes.c_char_p(os.fsencode(a)), here, ctypes.c_char_p(os.fsencode(b)), ctypes.c_uint(swap))
        == 0
    ):
        return True
    number = ctypes.get_errno()
    # A container's system call filter answers EPERM to a call that it does not know.
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(b))


def _replace_in_two_steps(work: Path, target: Path) -> None:
    old = _staging_name(target)
    target.rename(old)
    try:
        work.rename(target)
    except BaseException:
        old.rename(target)
        raise
    old.rename(work)


def _disk_full(error: BaseException, work: Path) -> EnvironmentProblem | None:
    cause: BaseException | None = (
        None if isinstance(error, KvexportError) or not isinstance(error, Exception) else error
    )
    while cause is not None:
        # Writers in other languages (safetensors, protobuf) pass on only the text of the error.
        if (isinstance(cause, OSError) and cause.errno in _FULL) or any(
            os.strerror(number) in str(cause) for number in _FULL
        ):
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
        f"{'disk quota used up' if quota else 'disk full'} while writing {shown}: {shutil.disk_usage(where).free} "
        "bytes free",
        f"free space on the file system of {where if where != work else work.parent}, or build elsewhere with --out",
    )


def _newest(work: Path) -> Path:
    with suppress(OSError):
        if times := {name: entry.st_mtime_ns for name, entry in scan(work).items()}:
            return work / max(times, key=lambda name: times[name])
    return work


def quoted(path: Path) -> str:
    return shlex.quote(str(path))
