"""The command `kvexport docs`: the pages of the documentation, which are part of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvexport import paths
from kvexport.errors import UsageError

FOLDERS = ("start", "tasks", "concepts", "reference", "measurements")
FROM_DOCSTRINGS = "```{"  # start of a block that only the documentation's website renders, such as tables of options


def docs(
    page: Annotated[
        str | None,
        typer.Argument(metavar="PAGE", help="The name of a page, such as tasks/serve. [default: list the pages]"),
    ] = None,
) -> None:
    """Print a page of the documentation as Markdown, or list the pages.

    Example: kvexport docs tasks/serve
    """
    known = pages()
    if page is None:
        for name, path in known.items():
            print(f"{name:32} {_title(path)}")
        return
    named = page.removeprefix("docs/").removesuffix(".md")
    found = [name for name in known if named in (name, name.partition("/")[2])]
    if len(found) != 1:
        problem = f"the pages {' and '.join(found)} have this name" if found else f"there is no page {page!r}"
        raise UsageError(problem, "kvexport docs FOLDER/NAME; `kvexport docs` lists the pages")
    print(known[found[0]].read_text(encoding="utf-8"), end="")


def pages() -> dict[str, Path]:
    """Return the files of all documentation pages that this command can print, by page name, such as "tasks/serve"."""
    installed = paths.PACKAGE / "_docs"
    root = installed if installed.is_dir() else paths.PACKAGE.parent / "docs"
    return {
        f"{folder}/{path.stem}": path
        for folder in FOLDERS
        for path in sorted((root / folder).glob("*.md"))
        if FROM_DOCSTRINGS not in path.read_text(encoding="utf-8")
    }


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()
