"""Reading an artifact: finding its directory, and its manifest once everything that it lists was checked."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvexport.artifact.digests import check_artifact, damaged
from kvexport.artifact.manifest import Manifest, parse_manifest
from kvexport.artifact.publish import acquire, beside, identity, is_artifact, place, quoted, release, restore
from kvexport.errors import ArtifactError, UsageError


def load_manifest(path: Path, *, verify: bool = True) -> Manifest:
    """The manifest of the artifact at `path`, after checking it and every file it lists; see `load_checked`. Raises
    ArtifactError too where a field is missing, of another type, or names a file that is not of the artifact."""
    path = Path(path)
    return parse_manifest(path, load_checked(path, verify=verify))


def load_checked(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of the artifact at `path` as JSON gives it, after checking it and every file it lists.

    verify: False leaves out the SHA-256 of the files, not the rest: the manifest's own digest, names, sizes, nothing
    unlisted, no links. An artifact that is replaced during the check is checked again. `path` itself may be a link to
    an artifact.

    The digests find damage: a truncated download, a flipped bit, an edit, a file added by mistake. They do **not** tell
    where the artifact comes from: a program that can write the directory can write a matching manifest, and can change
    a file after this check. Load artifacts only from directories that no untrusted user can write.

    Raises UsageError where nothing is at `path`, ArtifactError for everything that is wrong with what is there.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        problem = f"the path {os.fsencode(path)!r} is not UTF-8, and ONNX Runtime opens no file below it"
        raise UsageError(problem, "mv the artifact to a folder whose path is UTF-8") from error
    for _ in range(10):
        if (manifest := _checked_unless_replaced(_existing(Path(path)), verify)) is not None:
            return manifest
    raise ArtifactError(
        f"{path} was replaced ten times while it was being checked", "wait until the builds that write it have ended"
    )


def _existing(path: Path) -> Path:
    """The resolved directory at `path`, put back first where a killed build had moved it aside."""
    deadline = time.monotonic() + 1.0
    while not path.is_dir():
        waits = (
            path.parent.is_dir() and not path.is_symlink() and time.monotonic() < deadline and _comes_back(place(path))
        )
        if not waits and not path.is_dir():
            what = (
                f"{path} is not a directory, so no artifact"
                if os.path.lexists(path)
                else f"there is no artifact at {path}"
            )
            raise UsageError(
                what, f"kvexport build --recipe NAME --out {quoted(path)}, or name the directory of an artifact"
            )
    return path.resolve()


def _comes_back(target: Path) -> bool:
    """Whether to look again for a target that was absent a moment ago: it is put back here, or a build may be between
    its two renames."""
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
            f"a killed build left {target} at {old}, and it cannot be put back: {error.strerror}", fix
        ) from error
    try:
        restore(target)
        return target.is_dir()
    finally:
        release(target, lock)


def _checked_unless_replaced(root: Path, verify: bool) -> dict[str, Any] | None:
    """The checked manifest; None where another artifact took this one's place meanwhile, so that a finding means
    nothing."""
    try:
        # Held open, so that its inode number cannot go to the artifact that replaces it.
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(root, f"it cannot be read: {error.strerror}") from error
    try:
        manifest = check_artifact(root, verify)
        return manifest if identity(held) == identity(root) else None
    except ArtifactError:
        if identity(held) == identity(root):
            raise
        return None
    finally:
        os.close(held)
