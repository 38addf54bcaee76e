"""The form that a request wants its answer in, in the several ways in which clients say it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvexport.language.grammar import Grammar
from kvexport.serve.errors import ApiError

_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")


def response_form(given: Mapping[str, Any] | None, where: str = "response_format") -> Grammar | None:
    """Of OpenAI's response_format ({"type": "json_schema", "json_schema": {"schema": {...}}}), of the flat one of
    responses and of Anthropic ({"type": "json_schema", "schema": {...}}); besides, the types `regex` with a `pattern`,
    and `grammar` with a `grammar`. None where the answer is free. Raises ApiError, and UsageError as `Grammar`."""
    kind = (given or {"type": "text"}).get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ApiError(400, f"{where}: a json_schema needs a schema, which is an object", param=where)
        return Grammar.json_schema(schema)
    if kind == "regex" and isinstance(given.get("pattern"), str):
        return Grammar("regex", given["pattern"])
    if kind == "grammar" and isinstance(given.get("grammar"), str):
        return Grammar("lark", given["grammar"])
    said = f"{where}.type: it is text, json_object, json_schema, regex with a pattern, or grammar with a grammar"
    raise ApiError(400, said, param=f"{where}.type")


def structured_form(given: Mapping[str, Any] | None) -> Grammar | None:
    """Of vLLM's structured_outputs: one of `json` (a schema, or its JSON), `regex`, `choice` (a list of texts),
    `grammar` and `json_object`. Raises as `response_form`."""
    found = {key: given[key] for key in _STRUCTURED if given.get(key) is not None} if given else {}
    if not found:
        return None
    if len(found) > 1:
        raise ApiError(400, f"structured_outputs: {' and '.join(found)} at once", param="structured_outputs")
    (key, value), *_ = found.items()
    if key == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(400, "structured_outputs.json: no JSON", param="structured_outputs.json") from None
    if key == "json" and isinstance(value, Mapping):
        return Grammar.json_schema(value)
    if key == "json_object" and isinstance(value, bool):
        return Grammar.json_object() if value else None
    if key == "choice" and isinstance(value, list) and value and all(isinstance(x, str) and x for x in value):
        return Grammar("regex", "|".join(map(_quoted, value)))
    if key in ("regex", "grammar") and isinstance(value, str):
        return Grammar("regex" if key == "regex" else "lark", value)
    raise ApiError(400, f"structured_outputs.{key}: of a wrong type", param=f"structured_outputs.{key}")


def _quoted(text: str) -> str:
    """A regular expression, in Rust's syntax, that is this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
