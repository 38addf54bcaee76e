"""Structured output: grammars (JSON schema, regular expression, Lark) from the request fields of several APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvexport.bounded_json import read_json
from kvexport.errors import UsageError
from kvexport.language.grammar import Grammar, gbnf

_EXAMPLE = 'pass {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}'
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
# Fields of earlier versions of vLLM and of llama.cpp, and the key of `structured_outputs` that means the same.
OLDER_FORMS = {
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    "grammar": "grammar",
    "json_schema": "json",
}


def response_form(fields: Any, where: str = "response_format") -> Grammar | None:
    """Return the grammar of a request's `response_format`; None for free text."""
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise UsageError(f"{where}: expected an object with a type", _EXAMPLE)
    kind = fields.get("type", None if fields else "text")
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's clients send a schema with it
        schema = fields.get("schema")
        return Grammar.json_object() if schema is None else structured_form({"json": schema}, f"{where}.schema")
    if kind == "json_schema":
        inner = fields.get("json_schema", fields)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise UsageError(f"{where}: a json_schema needs a schema, which is an object", _EXAMPLE)
        return Grammar.json_schema(schema)
    if kind == "regex" and isinstance(fields.get("pattern"), str):
        return Grammar("regex", fields["pattern"])
    if kind == "grammar" and isinstance(fields.get("grammar"), str):
        return _grammar(fields["grammar"])
    raise UsageError(
        f"{where}.type: expected text, json_object, json_schema, regex with a pattern, or grammar with a grammar",
        _EXAMPLE,
    )


def structured_form(fields: Mapping[str, Any] | None, where: str = "structured_outputs") -> Grammar | None:
    """Return the grammar of vLLM's request field `structured_outputs`; None for free text."""
    for key, value in (fields or {}).items():
        if key not in _STRUCTURED and value is not None and value is not False:  # it would change the answer
            raise UsageError(f"{where}: {key[:40]} is not supported", f"give one of {', '.join(_STRUCTURED)}")
    values = {key: fields[key] for key in _STRUCTURED if fields.get(key) is not None} if fields else {}
    if not values:
        return None
    if len(values) > 1:
        raise UsageError(f"{where}: {' and '.join(values)} at once", "give one of them")
    (key, value), *_ = values.items()
    if key == "json" and isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError as error:
            raise UsageError(f"{where}: no JSON: {error}"[:300], _EXAMPLE) from None
    if key == "json" and isinstance(value, Mapping):
        return Grammar.json_schema(value)
    if key == "json_object" and isinstance(value, bool):
        return Grammar.json_object() if value else None
    if key == "choice" and isinstance(value, list) and value and all(isinstance(x, str) and x for x in value):
        return Grammar("regex", "|".join(map(_quoted, value)))
    if key == "regex" and isinstance(value, str):
        return Grammar("regex", value)
    if key == "grammar" and isinstance(value, str):
        return _grammar(value)
    raise UsageError(f"{where}.{key}: of a wrong type", "kvexport docs tasks/structured-answers lists their types")


def older_form(fields: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that one of vLLM's older request fields (`OLDER_FORMS`) sets; None for free text."""
    named = {name: fields[name] for name in OLDER_FORMS if fields.get(name) is not None}
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} at once", "give one of them")
    return next((structured_form({OLDER_FORMS[name]: value}, name) for name, value in named.items()), None)


def _grammar(text: str) -> Grammar:
    """Return a grammar object for a text in Lark's syntax, or in llama.cpp's (GBNF, recognized by ::= in rules)."""
    return gbnf(text) if "::=" in text else Grammar("lark", text)


_SPECIAL = str.maketrans({character: f"\\{character}" for character in r"\.+*?()|[]{}^$#&-~/"})


def _quoted(text: str) -> str:
    return text.translate(_SPECIAL)
