"""Links of the pages lead to files and headings that exist, and every page is reached from the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, anchors, links
from tests.support.paths import ROOT

SOURCES = {".py", ".h", ".cuh", ".cpp", ".cu", ".yaml", ".Dockerfile", ".txt"}
OTHER_PROJECTS = {"docs/gguf.md"}  # a page of llama.cpp


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


def test_every_page_that_the_sources_name_exists() -> None:
    folders = ("kvexport", "plugins", "recipes", "docker", "tests", "benchmarks", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    assert len(files) > 500
    for path in files:
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8", errors="replace")):
            known = (ROOT / name).is_file() or name in OTHER_PROJECTS
            assert known, f"{path.relative_to(ROOT)} names {name}, which does not exist"
