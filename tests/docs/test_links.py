"""Links of the pages lead to files and headings that exist, and every page is reached from the index."""

import ast
import re
from pathlib import Path

import pytest

from kvexport.commands.docs import pages
from kvexport.recipe.inherit import recipe_folder
from tests.docs.pages import PAGES, anchors, links
from tests.support.paths import ROOT

SOURCES = {".py", ".h", ".cuh", ".cpp", ".cu", ".yaml", ".Dockerfile", ".txt"}
OTHERS = {"docs/gguf.md", "kvexport/1/model.py"}  # a page of llama.cpp; a file in a folder that Triton reads
NAMED = re.compile(r"\b(?:docs/[\w/-]+\.md|(?:kvexport|tests|tools)/[a-z\d_/]+\.py)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in links(page):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}, a heading that does not exist"


def test_a_broken_link_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, *twice*\n\n# A title, twice\n\n[x](other.md#there) `[code](is/no/link)` [y](https://x.y)\n"
    )
    assert list(links(page)) == [("other.md", "there")]
    assert anchors(page) == {"a-title-twice", "a-title-twice-1"}


def test_every_page_is_in_a_table_of_contents() -> None:
    listed: set[Path] = set()
    for page in PAGES:
        for body in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in filter(None, (line.strip() for line in body.splitlines() if not line.startswith(":"))):
                entry = re.sub(r".*<(.+)>", r"\1", line)
                listed |= set(page.parent.glob(f"{entry}.md"))
    documents = {page for page in PAGES if (ROOT / "docs") in page.parents} - {ROOT / "docs" / "index.md"}
    assert documents == listed


def test_the_program_prints_every_page_that_is_complete_as_markdown() -> None:
    rendered = {ROOT / "docs" / name for name in ("index.md", "reference/cli.md", "reference/python.md")}
    assert set(pages().values()) == {page for page in PAGES if (ROOT / "docs") in page.parents} - rendered


def test_texts_of_the_program_name_pages_as_an_installed_program_prints_them() -> None:
    """A user of a wheel has no folder docs, so texts name pages as `kvexport docs FOLDER/NAME`."""
    shown = {path: "\n".join(texts(path)) for path in (ROOT / "kvexport").rglob("*.py")}
    shown |= {path: path.read_text(encoding="utf-8") for path in recipe_folder().glob("*.yaml")}
    assert [path for path, text in shown.items() if re.search(r"docs/\S+\.md", text)] == []
    names = {name for text in shown.values() for name in re.findall(r"kvexport docs ([a-z][\w-]+/[\w-]+)", text)}
    assert len(names) > 5 and names <= pages().keys()


def texts(path: Path) -> list[str]:
    """Return the strings of a source file. Docstrings are among them only in the folder of commands, as their help."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and path.parent.name != "commands"}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in strings if isinstance(node.value, str)]


def test_every_page_and_python_file_that_pages_and_sources_name_exists() -> None:
    folders = ("kvexport", "plugins", "recipes", "docker", "tests", "benchmarks", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    files = [path for path in files if "third_party" not in path.parts]  # which names pages of its own project
    assert len(files) > 500
    for path in (*files, *PAGES):
        for name in NAMED.findall(path.read_text(encoding="utf-8", errors="replace")):
            known = (ROOT / name).is_file() or name in OTHERS
            assert known, f"{path.relative_to(ROOT)} names {name}, which does not exist"
