"""A Sphinx extension that writes the command-line reference from the options of the program `kvexport`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from kvexport.commands.app import app as program


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("builder-inited", lambda sphinx: write(Path(sphinx.srcdir) / "_generated"))
    return {"parallel_read_safe": True}


def write(folder: Path) -> None:
    """Write `cli.md` into a folder. Do not touch a file that is current, because Sphinx would read it again."""
    folder.mkdir(exist_ok=True)
    text, path = commands(), folder / "cli.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def commands() -> str:
    """Return a Markdown section for each command, with its arguments and options as a table."""
    return "\n".join(_section(typer.main.get_command(program), "kvexport"))


def _section(command: Any, name: str) -> list[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    lines = []
    subcommands = getattr(command, "commands", None)
    if subcommands is None or name != "kvexport":
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        lines += [f"## `{name}`", "", _escaped(command.help or ""), "", "```text", usage, "```", ""]
        panels: dict[str, list[str]] = {}
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                panel = getattr(parameter, "rich_help_panel", None) or "argument or option"
                panels.setdefault(panel, []).append(_row(parameter, context))
        for panel, rows in panels.items():
            lines += [f"| {panel} | meaning |", "|---|---|", *rows, ""]
    for child, subcommand in (subcommands or {}).items():
        lines += _section(subcommand, f"{name} {child}")
    return lines


def _row(parameter: Any, context: Any) -> str:
    record = parameter.get_help_record(context)
    names = record[0] if record else parameter.make_metavar(context)
    meaning = record[1] if record else getattr(parameter, "help", "") or ""
    return f"| `{names.replace('|', chr(92) + '|')}` | {_escaped(' '.join(meaning.split()))} |"


def _escaped(text: str) -> str:
    """Return help text as Markdown that shows the same characters. An example is a command, which is code."""
    text = re.sub(r"([\\|<>*_\[\]])", r"\\\1", text)
    return re.sub(r"^Example: (.+)$", lambda match: f"Example: `{match[1].replace(chr(92), '')}`", text, flags=re.M)
