"""Output of a command's results: text or JSON on stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.errors import UsageError

if TYPE_CHECKING:
    from kvexport.report import Section


def print_result(as_json: bool, data: Callable[[], Any], sections: Callable[[], Sequence[Section]]) -> None:
    """Print a command's result on stdout: `data` as JSON, or `sections` as text."""
    if as_json:
        print_json(data())
        return
    from kvexport.report import render_text

    print(render_text(sections()).rstrip("\n"))


def print_json(data: Any) -> None:
    """Print data as JSON on stdout, with null for NaN and infinity."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_text(path: Path) -> str:
    """Return the content of the file that the option `--text` names; raise UsageError if it is not readable text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read as text: {error}", "--text FILE with UTF-8 text that you may read"
        ) from error
