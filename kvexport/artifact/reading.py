"""Loading of an artifact's manifest, after a check of all files that the manifest lists."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvexport.artifact.digests import check_artifact, damaged, instead_of
from kvexport.artifact.manifest import Manifest, parse_manifest
from kvexport.artifact.publish import identity
from kvexport.errors import ArtifactError, UsageError


def load_manifest(path: Path, *, verify: bool = True, later: Collection[str] = ()) -> Manifest:
    path = Path(path)
    return parse_manifest(path, load_checked(path, verify=verify, later=later))


def load_checked(path: Path, *, verify: bool = True, later: Collection[str] = ()) -> dict[str, Any]:
    """Check the artifact at `path` with every file that its manifest lists, and return the manifest as JSON values.

    An artifact that is replaced during the check is checked again. `path` may be a link to an artifact.

    The digests detect damage: a truncated download, a flipped bit, an edit, a file added by mistake. The digests do
    **not** prove where the artifact comes from. A program that can write the directory can write a matching manifest,
    and can change a file after this check. Load artifacts only from directories that no untrusted user can write.
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
    if path.is_dir():
        return path.resolve()
    is_file = os.path.lexists(path)
    problem = f"{path} is not a directory, so it is no artifact" if is_file else f"there is no artifact at {path}"
    raise UsageError(problem, instead_of(path))


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
