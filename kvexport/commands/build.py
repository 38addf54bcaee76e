"""What the verb `build` does: a recipe, or an artifact without engines for this machine, becomes an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from kvexport.errors import UsageError


class Stage(str, Enum):
    """How far a build goes."""

    onnx = "onnx"
    all = "all"


def build_artifact(
    recipe: str | None,
    overrides: Sequence[str],
    out: Path | None,
    backend: str | None,
    stage: Stage,
    source: Path | None,
) -> Path:
    """Build from the recipe, or engines from `source`, and return the artifact's directory."""
    from kvexport.terminal import show

    if source is not None and (recipe is not None or stage is Stage.onnx):
        raise UsageError("--from takes an artifact's own recipe and graphs", "--from DIR alone, or --recipe NAME")
    changes = [*overrides, *([f"backend.name={backend}"] if backend else [])]
    if source is not None:
        from kvexport.backends.tensorrt.rebuild import rebuild

        return rebuild(source, out, changes, progress=show)
    assert recipe is not None
    from kvexport.commands.doctor import require
    from kvexport.recipe.files import load_recipe

    loaded = load_recipe(recipe, changes)
    require("build")
    from kvexport.export.build import build

    if out is None:
        out = Path("artifacts") / loaded.name
        out.parent.mkdir(exist_ok=True)
    return build(loaded.recipe, out, name=loaded.name, graphs_only=stage is Stage.onnx, progress=show)
