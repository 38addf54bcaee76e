"""The JSON schema of recipes accepts and refuses the same values as `load_recipe`. Every field has a meaning."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexport.methods import all_methods
from kvexport.recipe.describe import describe_fields, meanings, recipe_schema
from kvexport.recipe.fields import MOST, Recipe
from kvexport.recipe.inherit import named_recipes
from kvexport.recipe.load import load_recipe
from tests.support.command_line import failure, ok

CHECKER = jsonschema.Draft202012Validator(recipe_schema())


def valid(recipe: Any) -> bool:
    return bool(CHECKER.is_valid(recipe))


def loads(folder: Path, recipe: dict[str, Any]) -> bool:
    """Return whether `load_recipe` accepts a recipe.

    Rules between fields are not part of the schema, so no tested recipe concerns them.
    """
    from kvexport.errors import UsageError

    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"extends": "tiny-base", **recipe}))
    try:
        load_recipe(str(path))
    except UsageError:
        return False
    return True


def test_the_command_prints_a_valid_schema() -> None:
    printed = json.loads(ok("recipes", "show", "--schema"))
    assert printed == json.loads(json.dumps(recipe_schema()))
    jsonschema.Draft202012Validator.check_schema(printed)
    assert "which recipe" in failure(2, "recipes", "show")


@pytest.mark.parametrize("name", named_recipes())
def test_every_shipped_recipe_is_valid(name: str) -> None:
    errors = [error.message for error in CHECKER.iter_errors(yaml.safe_load(named_recipes()[name].read_text()))]
    assert errors == []


@pytest.mark.parametrize("name", named_recipes())
def test_every_shipped_recipe_is_valid_as_it_is_resolved(name: str) -> None:
    resolved = load_recipe(name, ["model.path=x"]).resolved
    errors = [error.message for error in CHECKER.iter_errors(resolved)]
    assert errors == []


MISTAKES = [
    {"cache": {"budgett": 64}},
    {"cache": {"budget": "64"}},
    {"cache": {"budget": 1.5}},
    {"cache": {"budget": -1}},
    {"cache": {"sinks": -1}},
    {"cache": {"sinks": True}},
    {"cache": {"method": "keepkvv"}},
    {"cache": {"method": "keepkv", "parameters": {"threshold": 2}}},
    {"cache": {"method": "keepkv", "parameters": {"treshold": 0.5}}},
    {"cache": {"method": "h2o", "parameters": {"threshold": 0.5}}},
    {"cache": {"allocation": {"kind": "linear"}}},
    {"cache": {"allocation": {"minimum": 0}}},
    {"cache": {"allocation": {"kind": "listed", "shares": [[1], [0]]}}},
    {"cache": {"allocation": {"kind": "listed", "shares": [1, 2]}}},
    {"cache": 5},
    {"export": {"logits": "some"}},
    {"export": {"prefill_chunk": 0}},
    {"limits": {"max_batch": 0}},
    {"backend": {"name": "torch"}},
    {"backend": {"tensorrt": {"optimization_level": 6}}},
    {"model": {"dtype": "bfloat16"}},
    {"description": 5},
    {"nothing": 1},
    *({section: {key: MOST + 1}} for section, key in (
        ("export", "prefill_chunk"), ("cache", "merge_every"), ("cache", "slack"), ("cache", "sinks"),
        ("cache", "recent"), ("cache", "budget"), ("cache", "pinned"), ("limits", "max_length"),
        ("limits", "max_batch"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("recipe", MISTAKES, ids=str)
def test_a_mistake_is_refused_by_both(tmp_path: Path, recipe: dict[str, Any]) -> None:
    assert not valid(recipe)
    assert not loads(tmp_path, recipe)


# Values that differ in YAML but not in JSON (8.0 is no integer in YAML) are left out.
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=3)  # text that YAML can represent
VALUES = st.one_of(
    st.none(), st.booleans(), TEXT, st.integers(-2, 3), st.integers(MOST - 1, MOST + 2),
    st.sampled_from(["uniform", "last", "copy", "float16", 0.25, 0.75, -0.5, 1.5]), st.just([]), st.just({"a": 1}),
)  # fmt: skip
KEYS = st.sampled_from(
    [("cache", "sinks"), ("cache", "recent"), ("cache", "allocation"), ("export", "logits"), ("export", "weights"),
     ("limits", "max_batch"), ("backend", "threads"), ("backend", "device"), ("model", "dtype"), ("model", "revision")]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(KEYS, VALUES)
def test_both_take_the_same_values(tmp_path_factory: pytest.TempPathFactory, key: tuple[str, str], value: Any) -> None:
    recipe = {key[0]: {key[1]: value}}
    assert valid(recipe) == loads(tmp_path_factory.getbasetemp(), recipe)


def test_every_field_and_parameter_has_a_description() -> None:
    silent = [field.name for field in describe_fields(Recipe) if len(field.meaning) < 8]
    silent += [f"{n}.{p}" for n, m in all_methods().items() for p, meaning in meanings(m).items() if len(meaning) < 8]
    assert silent == []


def test_a_meaning_is_taken_from_a_docstring_of_the_class_or_a_base() -> None:
    meaning = meanings(all_methods()["pyramidkv"])
    assert meaning == meanings(all_methods()["snapkv"])
    assert meaning["pool"].startswith("The number of positions that are pooled")
    assert meanings(all_methods()["keepkv"])["zip"].endswith("is not lossless.")
