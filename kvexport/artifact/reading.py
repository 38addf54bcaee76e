"""Loading of an artifact's manifest, after a check of all files that the manifest lists."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvexport.artifact.digests import check_artifact, damaged, instead_of
from kvexport.artifact.manifest import Manifest, parse_manifest
from kvexport.artifact.publish import acquire, beside, identity, is_artifact, place, quoted, release, restore
from kvexport.errors import ArtifactError, UsageError


def load_manifest(path: Path, *, verify: bool = True, later: Collection[str] = ()) -> Manifest:
    path = Path(path)
    return parse_manifest(path, load_checked(path, verify=verify, later=later))


def load_checked(path: Path, *, verify: bool = True, later: Collection[str] = ()) -> dict[str, Any]:
    """Check the artifact at `path` with every file that its manifest lists, and return the manifest as JSON values.

    An artifact that is replaced during the check is checked again. `path` may be a link to an artifact.

    The digests detect damage: a truncated download, a flipped bit, an edit, a file added by mistake. They do **not**
    prove where the artifact comes from. A program that can write the directory can write a matching manifest, and can
    change a file after this check. Load artifacts only from directories that no untrusted user can write.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        problem = f"the path {os.fsencode(path)!r} is not UTF-8, and ONNX Runtime opens no file below it"
        raise UsageError(problem, "mv the artifact to a folder whose path is UTF-8") from error
    for _ in range(10):
        if (manifest := _checked_unless_replaced(_existing(Path(path)), verify, later)) is not None:
            return manifest
    raise ArtifactError(
        f"{path} was replaced ten times while it was being checked", "wait until the builds that write it have ended"
    )


def _existing(path: Path) -> Path:
    """Return the resolved directory of an artifact; if a killed build had moved it aside, it is restored first."""
    deadline = time.monotonic() + 1.0
    while not path.is_dir():
        waits = (
            path.parent.is_dir() and not path.is_symlink() and time.monotonic() < deadline and _comes_back(place(path))
        )
        if not waits and not path.is_dir():
            problem = (
                f"{path} is not a directory, so it is no artifact"
                if os.path.lexists(path)
                else f"there is no artifact at {path}"
            )
            raise UsageError(problem, instead_of(path))
    return path.resolve()


def _comes_back(target: Path) -> bool:
    """Return whether an artifact that was missing may exist by now, so that the caller should look for it again.

    A build replaces an artifact by two renames, between which the artifact is missing. If a killed build left the old
    artifact under its temporary name, this function restores it.
    """
    old = beside(target, "old")
    if not is_artifact(old) and not os.path.lexists(beside(target, "lock")):
        return False
    try:
        lock = acquire(target)
    except BlockingIOError:
        time.sleep(0.005)
        return True
    except OSError as error:
        if os.path.lexists(target) or not is_artifact(old):
            return False
        fix = f"mv {quoted(old)} {quoted(target)}"
        raise UsageError(
            f"a killed build left {target} at {old}, and it cannot be restored: {error.strerror}", fix
        ) from error
    try:
        restore(target)
        return target.is_dir()
    finally:
        release(target, lock)


def _checked_unless_replaced(root: Path, verify: bool, later: Collection[str]) -> dict[str, Any] | None:
    try:
        # The open descriptor keeps the inode number from being given to the artifact that replaces this one.
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(root, f"it cannot be read: {error.strerror}") from error
    try:
        manifest = check_artifact(root, verify, later)
        return manifest if identity(descriptor) == identity(root) else None
    except ArtifactError:
        if identity(descriptor) == identity(root):
            raise
        return None
    finally:
        os.close(descriptor)
