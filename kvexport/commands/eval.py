"""The options of `kvexport eval`, from the words of a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvexport.errors import UsageError
from kvexport.evaluate.candidates import parse_budgets
from kvexport.evaluate.runner import ALL_TASKS, Options
from kvexport.evaluate.suites import Item, read_longbench, read_ruler


def make_options(
    methods: str,
    budgets: str,
    tasks: str | None,
    text: Path | None,
    longbench: Path | None,
    ruler: Path | None,
    **numbers: Any,
) -> Options:
    """Options of comma-separated words and files. With a suite and no tasks named, the suite alone. Raises
    UsageError."""
    suites: dict[str, list[Item]] = {}
    for folder, read in ((longbench, read_longbench), (ruler, read_ruler)):
        if folder is not None:
            suites |= read(folder)
    names = _words(tasks) if tasks is not None else () if suites else ALL_TASKS
    return Options(
        methods=_words(methods),
        budgets=tuple(parse_budgets(budgets)),
        tasks=names,
        source=_read(text),
        suites=suites,
        **numbers,
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _read(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read as text: {error}", "--text FILE with UTF-8 text that you may read"
        ) from error
