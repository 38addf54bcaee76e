"""The commands `kvexport list` and `kvexport rm`: what kvexport keeps in the user's cache folder."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvexport.commands.options import JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import EnvironmentProblem, UsageError


class Entry(NamedTuple):
    """A folder in kvexport's cache: an artifact, or the files of a model that it was built from."""

    name: str
    kind: str
    bytes: int
    path: Path


def list_cached(as_json: JsonOption = False) -> None:
    """List the artifacts and models in kvexport's cache folder, with their sizes."""
    from kvexport.report.sections import Table
    from kvexport.units import format_bytes

    entries = _entries()
    rows = [(one.name, one.kind, format_bytes(one.bytes), str(one.path)) for one in entries]
    print_result(
        as_json,
        lambda: [{**one._asdict(), "path": str(one.path)} for one in entries],
        lambda: [Table("Cache folder", ("name", "kind", "size", "folder"), rows)],
    )


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names that `kvexport list` shows.")],
) -> None:
    """Remove artifacts or models from kvexport's cache folder. A later command builds or fetches them again."""
    from kvexport.terminal import say
    from kvexport.units import format_bytes

    known = {one.name: one for one in _entries()}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {name!r} in the cache folder", "kvexport list shows the names")
    for name in dict.fromkeys(names):
        one = known[name]
        try:
            shutil.rmtree(one.path)
        except OSError as error:
            raise EnvironmentProblem(
                f"{one.path} cannot be removed: {error.strerror}", f"rm -r {shlex.quote(str(one.path))}"
            ) from error
        say(f"removed {name} ({format_bytes(one.bytes)})")


def _entries() -> list[Entry]:
    from kvexport.export.model.cached import cache_folder

    root = cache_folder("")
    entries = []
    for kind in sorted(root.iterdir()) if root.is_dir() else ():
        for folder in sorted(kind.iterdir()) if kind.is_dir() else ():
            if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("."):
                entries.append(Entry(folder.name, kind.name, _size(folder), folder))
    return entries


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
