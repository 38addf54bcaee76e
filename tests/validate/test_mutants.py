"""A wrong kernel must not pass validation.

These bugs test each part of the validation. `benchmarks/mutants.py` plants many more.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_mutants
import kernel_mutants
import pytest
from mutants import MUTANTS, PLUGINS, ROOT, Library, build_engines, verdict

EXAMINED = 3  # heads that are examined in float64: with a bug nearly every head differs, and each takes 40 ms
PLANTED = ("lost vote", "wrong group of query heads", "stale score", "recent off by one", "epsilon")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Library, dict[str, Path]]]:
    if shutil.which("g++") is None or not list((ROOT / "build-cache").rglob("onnxruntime_cxx_api.h")):
        pytest.skip("not reached: g++ or ONNX Runtime's headers are missing (make native)")
    folder = tmp_path_factory.mktemp("mutants")
    engines = build_engines(sorted({m.engine for m in MUTANTS if m.name in PLANTED}), folder)
    yield Library(folder, made=ROOT / "build-cache" / "native"), engines


@pytest.mark.parametrize(
    "mutants", [MUTANTS, kernel_mutants.MUTANTS, cuda_mutants.MUTANTS], ids=["validate", "kernels", "cuda"]
)
def test_every_mutant_changes_its_file(mutants: tuple[Any, ...]) -> None:
    for mutant in mutants:
        assert mutant.old in (PLUGINS / mutant.file).read_text(), mutant.name
    assert len({m.name for m in mutants}) == len(mutants) >= 20


def test_the_kernels_as_they_are_pass_and_planted_bugs_do_not(planted: tuple[Library, dict[str, Path]]) -> None:
    library, engines = planted
    for name, artifact in engines.items():
        assert verdict(library.path, artifact, EXAMINED)["passed"], name
    for mutant in MUTANTS:
        if mutant.name not in PLANTED:
            continue
        library.change(mutant)
        verdict_of_mutant = verdict(library.path, engines[mutant.engine], EXAMINED)
        library.restore()
        assert not verdict_of_mutant["passed"], mutant.name
        assert "crashed" not in verdict_of_mutant, verdict_of_mutant
