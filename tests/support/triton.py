"""A reader of Triton's model configurations."""

import json
import re
from collections.abc import Iterator
from typing import Any


def parsed(text: str) -> dict[str, list[Any]]:
    """Parse a protobuf message in text format into a list of values for each field."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return _message(lines)


def _message(lines: Iterator[str]) -> dict[str, list[Any]]:
    fields: dict[str, list[Any]] = {}
    for line in lines:
        if line.strip() == "}":
            return fields
        if opened := re.fullmatch(r"\s*(\w+) \{", line):
            fields.setdefault(opened[1], []).append(_message(lines))
        else:
            name, value = re.fullmatch(r"\s*(\w+): (.+)", line).groups()  # type: ignore[union-attr]
            fields.setdefault(name, []).append(
                value if re.fullmatch(r"[A-Z_0-9]*[A-Z]\w*", value) else json.loads(value)
            )
    return fields
