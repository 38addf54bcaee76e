"""Loading of the engine that a command runs, from an artifact or from a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvexport.errors import UsageError

if TYPE_CHECKING:
    from kvexport.engine.engine import Engine


def load_engine(
    source: str,
    budget: int | None = None,
    max_length: int | None = None,
    overrides: Sequence[str] = (),
    calibrate: bool | None = None,
    **options: Any,
) -> Engine:
    """Load an artifact as an engine, and show the progress; a model is first built into the user's cache folder."""
    from kvexport.engine.load import load
    from kvexport.models import find_artifact
    from kvexport.terminal import show

    path, built = find_artifact(
        source, budget, max_length=max_length, overrides=overrides, calibrate=calibrate, progress=show
    )
    with show(f"loading {path}"):
        return load(path, verify=not built, **options)


def adapters_of(options: Sequence[str]) -> dict[str, str]:
    """Return the folder of each LoRA adapter by its name, from values NAME=FOLDER of the option --adapter."""
    adapters: dict[str, str] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not name or not folder or name in adapters:
            problem = f"names {name!r} twice" if name in adapters else f"is {option!r}, expected a name and a folder"
            raise UsageError(f"--adapter {problem}", "--adapter NAME=FOLDER")
        adapters[name] = folder
    return adapters
