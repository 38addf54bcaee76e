"""Every field of a recipe and of the methods in words, from the fields themselves: for listings, for the table of
docs/recipes.md, for messages, and as a JSON schema for editors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvexport.methods import all_methods
from kvexport.recipe.fields import MOST, Recipe

BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<=", "minLength": "length >="}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = "Another recipe's name, or a relative path: this recipe goes over it, mapping by mapping."


@dataclass(frozen=True)
class ParameterInfo:
    """A field of a recipe (its dotted key) or a parameter of a method. constraint: ">= 0, < 1" or "key | vote | mean",
    "" where only the type binds; required: no default; meaning: what it says or does."""

    name: str
    type: str
    default: Any
    constraint: str
    required: bool = False
    meaning: str = ""


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """What each field means: its own description, or its entry "name: ..." in the docstring of the class or a base."""
    names = "|".join(map(re.escape, model.model_fields))
    written: dict[str, str] = {}
    for base in reversed(model.__mro__):
        text = " ".join((vars(base).get("__doc__") or "").split())
        parts = re.split(rf"(?:^|(?<=[.:;)] ))({names}): ", text) if names else [text]
        written |= {name: said.strip() for name, said in zip(parts[1::2], parts[2::2], strict=True)}
    return {name: field.description or written.get(name, "") for name, field in model.model_fields.items()}


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section that the field is, None for a value."""
    kind = model.model_fields[name].annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def describe_fields(model: type[BaseModel], above: str = "") -> Iterator[ParameterInfo]:
    """The values of a model, those of its sections by their dotted keys."""
    schema, said = model.model_json_schema(), meanings(model)
    for name, prop in schema["properties"].items():
        if section := section_of(model, name):
            yield from describe_fields(section, f"{above}{name}.")
            continue
        options = prop.get("anyOf", [prop])
        kind = " or ".join(dict.fromkeys(str(option.get("type", "any")) for option in options))
        bounds = {str(option.get("type")): allowed for option in options if (allowed := _allowed(option))}
        constraint = " or ".join(bounds.values() if len(bounds) < 2 else (f"{k} {v}" for k, v in bounds.items()))
        required = name in schema.get("required", [])
        yield ParameterInfo(f"{above}{name}", kind, prop.get("default"), constraint, required, said[name])


def _allowed(option: dict[str, Any]) -> str:
    if "enum" in option:
        return " | ".join(map(str, option["enum"]))
    return ", ".join(f"{sign} {option[word]:g}" for word, sign in BOUNDS.items() if option.get(word, MOST) != MOST)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe's file. Nothing is required: what a file leaves out may come from what it extends."""
    schema = Recipe.model_json_schema()
    sections = schema["$defs"]
    cache = sections["CacheSection"]
    cache["allOf"] = []
    for name, method in all_methods().items():
        sections[name] = {**method.model_json_schema(), "description": method.summary}
        for parameter, said in meanings(method).items():
            sections[name]["properties"][parameter]["description"] = said
        chosen = {"properties": {"method": {"const": name}}, "required": ["method"]}
        cache["allOf"].append({"if": chosen, "then": {"properties": {"parameters": {"$ref": f"#/$defs/{name}"}}}})
    for section in (schema, *sections.values()):
        section.pop("required", None)
        for prop in (section, *section.get("properties", {}).values()):
            prop.pop("title", None)
    schema["properties"] = {"extends": {"type": "string", "description": EXTENDS}, **schema["properties"]}
    return {"$schema": DIALECT, "title": "A recipe of kvexport", **schema}
