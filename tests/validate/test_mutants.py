"""A wrong kernel must not pass validation."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.correctness.mutants import PLUGINS, TABLES, Library, build_engines, verdict
from tests.support.paths import ROOT

EXAMINED = 3  # heads that are examined in float64: with a bug nearly every head differs, and each takes 40 ms
PLANTED = ("lost vote", "wrong group of query heads", "stale score", "recent off by one", "epsilon")
MUTANTS = [mutant for mutant in TABLES["validate"] if mutant.name in PLANTED]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Library, dict[str, Path]]]:
    if shutil.which("g++") is None:
        pytest.skip("not reached: g++ is missing")
    folder = tmp_path_factory.mktemp("mutants")
    engines = build_engines(sorted({m.where for m in MUTANTS}), folder)
    yield Library(folder, made=ROOT / "build-cache" / "native"), engines


@pytest.mark.parametrize("kind", TABLES)
def test_every_mutant_changes_its_file(kind: str) -> None:
    for mutant in TABLES[kind]:
        assert mutant.old in (PLUGINS / mutant.file).read_text(), mutant.name
    assert len({mutant.name for mutant in TABLES[kind]}) == len(TABLES[kind]) >= 20


def test_the_kernels_as_they_are_pass_and_planted_bugs_do_not(planted: tuple[Library, dict[str, Path]]) -> None:
    library, engines = planted
    for name, artifact in engines.items():
        assert verdict(library.path, artifact, EXAMINED)["passed"], name
    assert len(MUTANTS) == len(PLANTED)
    for mutant in MUTANTS:
        library.change(mutant)
        result = verdict(library.path, engines[mutant.where], EXAMINED)
        library.restore()
        assert not result["passed"], mutant.name
        assert "crashed" not in result, result
