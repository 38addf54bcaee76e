"""The checks that turn the contents of recipe files into a `Recipe`.

Keys are checked first, then the parameters of the compression method, then values. Each check ignores entries that an
earlier one has rejected, so that one mistake of the user gives one message.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError

from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.recipe.cache import CacheSection
from kvexport.recipe.describe import meanings, section_of
from kvexport.recipe.fields import Recipe
from kvexport.recipe.parse import Entry, Findings, Leaf, Tree, plain, shown_key

Key: TypeAlias = "tuple[str, ...]"
PATH: Key = ("model", "path")
ENCODER: Key = ("model", "mmproj")  # a path relative to the recipe's file
METHOD: Key = ("cache", "method")
PARAMETERS: Key = ("cache", "parameters")


def check_recipe(tree: Tree, label: str, findings: Findings) -> Recipe | None:
    """Return the recipe that the contents of recipe files describe; None, and problems in `findings`, for mistakes."""
    data = _known_only(tree, Recipe, (), findings)
    path = get(tree, PATH)
    if isinstance(path, Leaf):
        data["model"]["path"] = _local(path)
    encoder = get(tree, ENCODER)
    if isinstance(encoder, Leaf) and isinstance(encoder.value, str) and encoder.value:
        data["model"]["mmproj"] = os.path.normpath(encoder.origin.folder / encoder.value)
    cache = data.get("cache", {})
    method = None
    if isinstance(cache, dict) and isinstance(cache.get("parameters", {}), dict):
        method = _check_parameters(tree, cache, findings)
        data["cache"] = {**cache, "parameters": method.model_dump(mode="json") if method else {}}
    recipe: Recipe | None
    recipe, errors = _validate(Recipe, data)
    for key, messages in errors.items():
        if key in ((), ("model",), PATH) and messages[0]["type"] == "missing":
            if not findings.lost:
                findings.problems.append(
                    f"model.path is missing: {label} names no checkpoint; it is a base that other recipes extend"
                )
        elif key:
            findings.problems.append(_wording(tree, key, messages))
    for text in _across(data, errors) if not findings.lost else []:
        words = set(re.findall(r"\w+", text))
        keys = [key for key in _schema_keys(Recipe) if key[-1] in words]
        places = dict.fromkeys(place for key in keys if (place := place_of(tree, key)))
        findings.problems.append(f"{text} ({', '.join(places) or label})")
    return recipe


def get(tree: Tree, key: Key) -> Entry | None:
    entry: Entry | None = tree
    for name in key:
        entry = entry.entries.get(name) if isinstance(entry, Tree) else None
    return entry


def scalar_at(tree: Tree, key: Key) -> Any:
    entry = get(tree, key)
    return entry.value if isinstance(entry, Leaf) else None


def place_of(tree: Tree, key: Key) -> str:
    """Return the file and line where a recipe's `key`, or the nearest key above it, stands; "" if there is none."""
    if (entry := get(tree, key)) is not None:
        return entry.origin.place
    above = get(tree, key[:-1])
    return above.origin.place if isinstance(above, Leaf) else ""


def _known_only(tree: Tree, model: type[BaseModel], above: Key, findings: Findings) -> dict[str, Any]:
    """Return a recipe's contents as plain data without unknown keys; report each unknown key in `findings`."""
    data: dict[str, Any] = {}
    for name, entry in tree.entries.items():
        key = (*above, name)
        if name not in model.model_fields:
            same = [".".join(k) for k in _schema_keys(Recipe) if k[-1] == name or ".".join(k) == name]
            same += [".".join((*PARAMETERS, name)) for method in all_methods().values() if name in method.model_fields]
            same.sort(key=lambda key: not key.startswith("cache."))  # recipes set keys of `cache` most often
            near = same or [".".join((*above, n)) for n in get_close_matches(name, model.model_fields)]
            nested = "; a dotted key is for --set, in a file keys are nested" if "." in name else ""
            advice = did_you_mean(near) + nested
            findings.problems.append(f"unknown key {shown_key('.'.join(key))} ({entry.origin.key_place}){advice}")
            continue
        section = section_of(model, name)
        data[name] = _known_only(entry, section, key, findings) if section and isinstance(entry, Tree) else plain(entry)
    return data


def _schema_keys(model: type[BaseModel], above: Key = ()) -> list[Key]:
    keys = []
    for name in model.model_fields:
        section = section_of(model, name)
        keys += _schema_keys(section, (*above, name)) if section else [(*above, name)]
    return keys


def _local(path: Leaf) -> Any:
    """Return a recipe's value `model.path`, as an absolute path if it names a local folder or GGUF file."""
    value = path.value
    if not isinstance(value, str) or not value:
        return value
    local = value in (".", "..") or value.startswith(("./", "../"))
    if not local and path.origin.place.startswith("--set "):
        try:
            file = path.origin.folder / value
            local = file.is_dir() or (file.suffix == ".gguf" and file.is_file())
        except OSError:
            local = False
    return os.path.normpath(path.origin.folder / value) if local else value


def _check_parameters(tree: Tree, cache: dict[str, Any], findings: Findings) -> Method | None:
    name = cache.get("method", CacheSection.model_fields["method"].default)
    if not isinstance(name, str) or name not in all_methods() or (findings.lost and "method" not in cache):
        return None
    method = all_methods()[name]
    parameters = cache.get("parameters", {})
    for unknown in [parameter for parameter in parameters if parameter not in method.model_fields]:
        key = (*PARAMETERS, unknown)
        entry = get(tree, key)
        near = did_you_mean([".".join((*PARAMETERS, n)) for n in get_close_matches(unknown, method.model_fields)])
        has = ", ".join(method.model_fields) or "no parameters"
        findings.problems.append(
            f"unknown parameter {shown_key('.'.join(key))} ({entry.origin.key_place if entry else ''}){near}; {name} "
            f"has {has}"
        )
    built: Method | None
    built, errors = _validate(method, {k: v for k, v in parameters.items() if k in method.model_fields})
    findings.problems += [_wording(tree, (*PARAMETERS, *key), messages) for key, messages in errors.items()]
    return built


def _validate(model: type[Any], data: dict[str, Any]) -> tuple[Any, dict[Key, list[Any]]]:
    """Return the checked model, or None and pydantic's errors by key; types are strict: "64" or true is no integer."""
    try:
        return model.model_validate(data, strict=True), {}
    except ValidationError as error:
        if error.title != model.__name__:
            return None, {}  # an error of the method, whose parameters were reported already
        errors: dict[Key, list[Any]] = {}
        for item in error.errors(include_url=False):
            key: Key = ()
            value: Any = data
            # pydantic appends the branch of a union to the key.
            for name in map(str, item["loc"]):
                if not isinstance(value, dict) or (name not in value and item["type"] != "missing"):
                    break
                key, value = (*key, name), value.get(name)
            errors.setdefault(key, []).append(item)
        return None, errors


def _across(data: dict[str, Any], errors: dict[Key, list[Any]]) -> list[str]:
    if not errors:
        return []
    wrong = [key for key in errors if key]
    data = copy.deepcopy(data)
    for key in wrong:
        section: Any = data
        for name in key[:-1]:
            section = section.get(name, {})
        section.pop(key[-1], None)
    if wrong:
        data["model"] = {"path": "-", **data.get("model", {})}
        errors = _validate(Recipe, data)[1]
    texts = [_message(item) for item in errors.get((), [])]
    return [text for text in texts if not any(key[-1] in text for key in wrong)]


def _message(item: Any) -> str:
    if item["type"] in ("model_type", "dict_type"):
        return "should be a mapping"
    return str(item["msg"]).removeprefix("Value error, ").replace("Input should be", "should be", 1)


def _wording(tree: Tree, key: Key, items: list[Any]) -> str:
    value = items[0]["input"]
    texts = list(dict.fromkeys(_message(item) for item in items))
    text = " or ".join([texts[0], *(t.removeprefix("should be ") for t in texts[1:])])
    if key == METHOD and isinstance(value, str):
        text += did_you_mean(get_close_matches(value, all_methods()))
    elif isinstance(value, str) and any(item["type"] in ("int_type", "float_type") for item in items):
        text += " (text: take off the quotes, or write 1e-3 as YAML's 1.0e-3)" if _is_number(value) else ""
    meaning = _meaning(key, scalar_at(tree, METHOD))
    return f"{shown_key('.'.join(key))}: {text}{meaning}, found {shown(value)} ({place_of(tree, key)})"


def _meaning(key: Key, method: Any) -> str:
    model: type[BaseModel] | None = Recipe
    if key[:2] == PARAMETERS and len(key) > 2:
        model, key = all_methods().get(str(method or CacheSection.model_fields["method"].default)), key[2:]
    for name in key[:-1]:
        model = section_of(model, name) if model and name in model.model_fields else None
    meaning = re.split(r"[.;] ", meanings(model).get(key[-1], ""), maxsplit=1)[0] if model else ""
    return f" ({meaning[0].lower()}{meaning[1:].rstrip('.')})" if meaning else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def did_you_mean(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""


def shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
