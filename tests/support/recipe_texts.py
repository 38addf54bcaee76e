"""Functions that write recipes into the fixture `recipe_dir`, and that list the mistakes in a recipe."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvexport.errors import UsageError
from kvexport.recipe.load import load_recipe

SMALL = "model:\n  path: some/model\n"


def write(recipe_dir: Path, **files: str) -> None:
    for name, text in files.items():
        (recipe_dir / f"{name}.yaml").write_text(text, encoding="utf-8")


def problems(name: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_recipe(str(name), overrides)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value.problem.splitlines()


def one_problem(name: str | Path, *overrides: str) -> str:
    lines = problems(name, overrides)
    assert len(lines) == 1, lines
    return lines[0]
