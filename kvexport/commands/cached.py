"""The commands `kvexport list` and `rm`: the models and artifacts in the user's cache folder."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import EnvironmentProblem, UsageError


def list_cached(as_json: JsonOption = False) -> None:
    """List the artifacts and models in kvexport's cache folder, with their sizes."""
    from kvexport.report import Table
    from kvexport.units import format_bytes

    entries = [(folder.name, folder.parent.name, _size(folder), str(folder)) for folder in _folders()]
    rows = [(name, kind, format_bytes(size), path) for name, kind, size, path in entries]
    print_result(
        as_json,
        lambda: [dict(zip(("name", "kind", "bytes", "path"), entry, strict=True)) for entry in entries],
        lambda: [Table("Cache folder", ("name", "kind", "size", "folder"), rows)],
    )


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names that `kvexport list` shows.")],
) -> None:
    """Remove artifacts or models from the cache folder. A later command builds or fetches them again."""
    from kvexport.terminal import say
    from kvexport.units import format_bytes

    known = {folder.name: folder for folder in _folders()}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {name!r} in the cache folder", "kvexport list shows the names")
    for name in dict.fromkeys(names):
        size = _size(known[name])
        try:
            shutil.rmtree(known[name])
        except OSError as error:
            raise EnvironmentProblem(
                f"{known[name]} cannot be removed: {error.strerror}", f"rm -r {shlex.quote(str(known[name]))}"
            ) from error
        say(f"removed {name} ({format_bytes(size)})")


def _folders() -> list[Path]:
    from kvexport.export.model.cached import cache_folder

    found = sorted(cache_folder("").glob("*/*"))
    return [path for path in found if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")]


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
