"""Descriptions of every field of a recipe and every parameter of a compression method.

The descriptions come from the definitions of the fields. Listings, messages and the table of docs/reference/recipe.md
use them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvexport.recipe.fields import MOST

BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<=", "minLength": "length >="}
# An entry of a docstring's section "Attributes": its name, and its text with continuation lines.
ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class ParameterInfo:
    """The description of a field of a recipe (`name` is its dotted key), or of a parameter of a compression method."""

    name: str
    type: str
    default: Any
    constraint: str  # allowed values, such as ">= 0, < 1" or "key | vote | mean"; "" if only the type restricts them
    required: bool = False
    meaning: str = ""


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of each field of a pydantic model, by the field's name.

    The description stands in the field's definition, or in the section "Attributes" of the docstring of the class or of
    a base class.
    """
    entries: dict[str, str] = {}
    for base in reversed(model.__mro__):
        docstring = inspect.cleandoc(vars(base).get("__doc__") or "")
        attributes = docstring.partition("\nAttributes:\n")[2]
        entries |= {name: " ".join(text.split()) for name, text in ENTRY.findall(attributes)}
    return {name: field.description or entries.get(name, "") for name, field in model.model_fields.items()}


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    kind = model.model_fields[name].annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def describe_fields(model: type[BaseModel], above: str = "") -> Iterator[ParameterInfo]:
    schema, meaning = model.model_json_schema(), meanings(model)
    for name, prop in schema["properties"].items():
        if section := section_of(model, name):
            yield from describe_fields(section, f"{above}{name}.")
            continue
        options = prop.get("anyOf", [prop])
        kind = " or ".join(dict.fromkeys(str(option.get("type", "any")) for option in options))
        bounds = {str(option.get("type")): allowed for option in options if (allowed := _allowed(option))}
        constraint = " or ".join(bounds.values() if len(bounds) < 2 else (f"{k} {v}" for k, v in bounds.items()))
        required = name in schema.get("required", [])
        yield ParameterInfo(f"{above}{name}", kind, prop.get("default"), constraint, required, meaning[name])


def _allowed(option: dict[str, Any]) -> str:
    if "enum" in option:
        return " | ".join(map(str, option["enum"]))
    return ", ".join(f"{sign} {option[word]:g}" for word, sign in BOUNDS.items() if option.get(word, MOST) != MOST)
