"""An artifact of two ranks, for the tests of both devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def artifact(tiny_checkpoint: Path, tmp_path_factory: Any) -> Path:
    from tests.ranks.test_ranks import built, recipe

    return built(recipe(tiny_checkpoint, 2), tmp_path_factory.mktemp("ranks") / "two")
