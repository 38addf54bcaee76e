"""Tests of mistakes in recipes: all are reported at once with their lines, and any text gives at most a usage error."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvexport.errors import UsageError
from kvexport.methods import all_methods
from kvexport.recipe.fields import MOST, Recipe
from kvexport.recipe.listing import list_recipes
from kvexport.recipe.load import load_recipe
from tests.support.recipe_texts import SMALL, one_problem, problems, write


def test_mistakes_of_different_kinds_are_one_error(recipe_dir: Path) -> None:
    cache = "cache:\n  budgt: 64\n  merge_every: often\n  slack: 3\n  parameters:\n    treshold: 0.5\n    decay: 2\n"
    write(recipe_dir, a="model:\n  path: 7\n" + cache + "limits: 5\n")
    actual = problems("a", ["export.logits=some", "cache.sinks=-1"])
    line = "(recipes/a.yaml:{})".format
    sinks = "cache.sinks: should be greater than or equal to 0 (first positions, which are never evicted), found -1"
    expected = [
        (f"unknown key cache.budgt {line(4)}", "did you mean cache.budget?"),
        (f"unknown parameter cache.parameters.treshold {line(8)}", "did you mean cache.parameters.threshold?"),
        (
            "cache.parameters.decay: should be less than 1 (the factor ``a`` of the moving average",
            f", found 2 {line(9)}",
        ),
        ("model.path: should be a valid string (a directory", f", found 7 {line(2)}"),
        ("cache.merge_every: should be a valid integer (decoded tokens between two merges), found 'often'", line(5)),
        ("limits: should be a mapping (the largest inputs that the engine is built for), found 5", line(10)),
        ("export.logits: should be 'last' or 'all' (logits of", ", found 'some' (--set export.logits=some)"),
        (sinks, "(--set cache.sinks=-1)"),
    ]
    for start, end in expected:
        assert [line for line in actual if line.startswith(start) and end in line], (start, actual)
    assert len(actual) == len(expected)


def test_unknown_key_points_at_the_key_and_suggests_across_sections(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL + "budget: 3\ncahce:\n  sinks: 3\ncache:\n  threshold: 0.5\n  sinks.x: 2\nzzzz:\n\n  1\n")
    assert problems("a") == [
        "unknown key budget (recipes/a.yaml:3); did you mean cache.budget?",
        "unknown key cahce (recipes/a.yaml:4); did you mean cache?",
        "unknown key cache.threshold (recipes/a.yaml:7); did you mean cache.parameters.threshold?",
        "unknown key cache.sinks.x (recipes/a.yaml:8); did you mean cache.sinks?; a dotted key is for --set, in a "
        "file keys are nested",
        "unknown key zzzz (recipes/a.yaml:9)",
    ]


def test_unknown_method_and_parameters(recipe_dir: Path) -> None:
    write(
        recipe_dir, a=SMALL + "cache:\n  method: keepvk\n", b=SMALL + "cache: {method: full, parameters: {decay: 1}}\n"
    )
    problem = one_problem("a")
    assert problem.startswith("cache.method: unknown method 'keepvk'")
    assert "did you mean keepkv?" in problem
    assert all(name in problem for name in (*all_methods(), "recipes/a.yaml:4"))
    assert one_problem("b").endswith("full has no parameters")
    listing = one_problem("b", "cache.method=keepkv", "cache.parameters={nothing_like_it: 1, decay: 0.5}")
    assert all(name in listing for name in all_methods()["keepkv"].model_fields)


@pytest.mark.parametrize("value", ["true", "'64'", "1e-3", "null", "[1]", "{a: 1}", "2020-01-01"])
def test_budget_is_a_number_and_nothing_else(recipe_dir: Path, value: str) -> None:
    write(recipe_dir, a=SMALL + f"cache:\n  sinks: 1\n  budget: {value}\n")
    problem = one_problem("a")
    assert problem.startswith("cache.budget: should be a valid integer or a valid number")
    assert problem.endswith("(recipes/a.yaml:5)")
    assert ("1.0e-3" in problem) == (value in ("'64'", "1e-3"))


@pytest.mark.parametrize(("value", "reason"), [
    (".nan", "is not finite"), ("-.inf", "is not finite"), ("1" * 30, "does not fit 64 bits"),
    ("9" * 5000, "is no int"), ("0x" + "f" * 5000, "does not fit 64 bits"), ("2020-13-45", "is no timestamp"),
    ("!!int ''", "is no int"), ("!!bool x", "is no bool"), ('"a\\0b"', "holds a NUL character"),
    ("!!python/name:os.system x", "tag 'python/name:os.system' is not allowed"),
    ("!!python/object/apply:os.getcwd []", "is not allowed"), ("!!set {a}", "is not allowed"),
    ("!mine 3", "is not allowed"),
])  # fmt: skip
def test_impossible_values_are_named_once_and_hide_no_other_mistake(recipe_dir: Path, value: str, reason: str) -> None:
    write(recipe_dir, a=SMALL + f"cache:\n  budget: {value}\n  snks: 3\n")
    first, second = problems("a")
    assert first.startswith("cache.budget: ")
    assert reason in first
    assert first.endswith("(recipes/a.yaml:4)")
    assert second.startswith("unknown key cache.snks (recipes/a.yaml:5)")


def test_check_across_values_names_the_lines_of_both(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL + "cache:\n  slack: 3\nexport:\n  prefill_chunk: 16\n")
    problem = one_problem("a", "cache.merge_every=8")
    assert problem.startswith("cache.slack 3 is smaller than")
    assert all(place in problem for place in ("recipes/a.yaml:4", "recipes/a.yaml:6", "--set cache.merge_every=8"))
    assert len(problems("a", ["limits.max_batch=0"])) == 2
    assert "prefill_chunk" in one_problem("a", "export.prefill_chunk=many"), "no echo of a value that is wrong itself"


def test_duplicate_keys_name_both_lines_and_hide_no_other_mistake(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL + "cache:\n  budget: 3\n  sinks: x\n  budget: 4\n")
    first, second = problems("a")
    assert first == "cache.budget is written twice (recipes/a.yaml:4 and recipes/a.yaml:6)"
    assert second.startswith("cache.sinks: ")


@pytest.mark.parametrize(("text", "line", "reason"), [
    ("model:\n  path: [1\n", 3, "not YAML"), ("model: {path: a}\n\tcache: 1\n", 2, "not YAML"),
    ("model: a: b\n", 1, "not YAML"), ("model: {path: a}\n---\nmodel: {}\n", 2, "single document"),
    ("model: {path: a}\nx: *nowhere\n", 2, "nowhere"), ("model: {path: a}\nx: \x07\n", 2, "does not allow"),
    ("- a\n- b\n", 1, "a mapping of keys, this is a list"), ("\n\nword\n", 3, "a mapping of keys, this is a str"),
    ("", 1, "this is empty"), ("&a\nmodel: {path: x}\ncache: *a\n", 1, "contains itself"),
    ("x: " + "[" * 200 + "]" * 200, 1, "nested too deep"), ("x: " + "[" * 20000, 1, "nested too deep"),
])  # fmt: skip
def test_text_that_is_no_mapping_is_reported_with_its_line(recipe_dir: Path, text: str, line: int, reason: str) -> None:
    write(recipe_dir, a=text)
    problem = one_problem("a")
    assert problem.startswith(f"recipes/a.yaml:{line}: ")
    assert reason in problem


def test_other_files_that_cannot_be_read(recipe_dir: Path) -> None:
    (recipe_dir / "latin.yaml").write_bytes(b"description: ok\nmodel: \xe9\n")
    (recipe_dir / "big.yaml").write_text("# " + "x" * 300_000, encoding="utf-8")
    (recipe_dir / "loop.yaml").symlink_to(recipe_dir / "loop.yaml")
    (recipe_dir / "dir.yaml").mkdir()
    assert one_problem("latin") == "recipes/latin.yaml:2: not UTF-8 text"
    assert "larger than" in one_problem("big")
    assert one_problem("loop").startswith("recipes/loop.yaml: cannot be read: ")
    assert one_problem("dir").startswith("recipes/dir.yaml: cannot be read: ")
    assert one_problem("./none.yaml") == "none.yaml: there is no such file"
    os.mkfifo("pipe.yaml")  # no process writes to it
    assert one_problem("./pipe.yaml") == "pipe.yaml: cannot be read: it is no regular file"
    assert "cannot be read" in one_problem("a\0/x.yaml")


def test_aliases_read_as_safe_load_reads_them_and_cannot_explode(recipe_dir: Path) -> None:
    text = SMALL + "cache: &c\n  budget: &n 5\n  sinks: *n\n"
    write(recipe_dir, a=text)
    resolved = load_recipe("a").resolved
    for key, value in yaml.safe_load(text)["cache"].items():
        assert resolved["cache"][key] == value
    bomb = "x0: &x0 [1, 1]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 40))
    write(recipe_dir, b=bomb, c=SMALL + "cache: {<<: {sinks: 1}}\n", d=SMALL + "? [a]\n: 1\n")
    assert "too many values" in one_problem("b")
    assert one_problem("c") == "merge keys (<<) are not read; use extends (recipes/c.yaml:3)"
    assert one_problem("d") == "a key is text, this is something else (recipes/d.yaml:3)"


def test_cycles_name_the_circle(recipe_dir: Path) -> None:
    write(recipe_dir, a="extends: b\n", b="# x\nextends: ./c.yaml\n", c="extends: b\n", me="extends: me\n")
    assert one_problem("me") == "extends goes round in a circle: recipes/me.yaml -> recipes/me.yaml (recipes/me.yaml:1)"
    expected = "extends goes round in a circle: recipes/b.yaml -> recipes/c.yaml -> recipes/b.yaml (recipes/c.yaml:1)"
    assert one_problem("a") == expected


def test_a_bad_extends_does_not_hide_the_rest(recipe_dir: Path) -> None:
    write(
        recipe_dir,
        tiny=SMALL,
        a="extends: tinny\ncache: {snks: 1}\n",
        b="extends: ./none.yaml\ncache: {sinks: x}\n",
        c="extends: [tiny]\n",
    )
    assert [line.split(" (")[0] for line in problems("a")] == ["unknown recipe 'tinny'", "unknown key cache.snks"]
    assert "(recipes/a.yaml:1); did you mean tiny?" in problems("a")[0]
    assert problems("b")[0] == "recipes/none.yaml: there is no such file (extended at recipes/b.yaml:1)"
    assert problems("b")[1].startswith("cache.sinks: ")
    assert (
        one_problem("c") == "extends: should be the name of a recipe or ./file.yaml, found ['tiny'] (recipes/c.yaml:1)"
    )


def test_a_mistake_in_the_extended_recipe_is_named_there_unless_it_is_overridden(recipe_dir: Path) -> None:
    write(
        recipe_dir,
        a=SMALL + "cache:\n  sinks: x\n",
        b="extends: a\ncache: {budget: 3}\n",
        c="extends: a\ncache: {sinks: 3}\n",
    )
    assert one_problem("b").endswith("(recipes/a.yaml:4)")
    assert load_recipe("c").recipe.cache.sinks == 3


def test_unknown_name_gives_the_nearest() -> None:
    assert "did you mean tiny-keepkv?" in one_problem("tiny-keepvk")
    assert "known: " in one_problem("")


@pytest.mark.parametrize("text", ["cache.budget", "=3", "cache..budget=3", ".=1", "a.b.c.d.e.f.g.h.i=1"])
def test_set_without_key_and_value(recipe_dir: Path, text: str) -> None:
    write(recipe_dir, a=SMALL)
    assert one_problem("a", text).startswith(f"--set {text}: should be --set KEY=VALUE")


def test_set_cannot_extend_and_its_yaml_must_be_yaml(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL)
    assert one_problem("a", "extends=a") == "--set extends=a: extends is written in a file, not set"
    assert one_problem("a", "cache.budget=[1").startswith("--set cache.budget=[1: not YAML")


KEYS = st.sampled_from(
    [
        *Recipe.model_fields,
        *Recipe.model_fields["cache"].annotation.model_fields,
        "path",
        "<<",
        "extends",
        "a.b",
        "decay",
        "\n",
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.binary(max_size=4) | st.text(max_size=8)
)
WORDS = st.sampled_from(["keepkv", "h2o", "tiny-base", "./fuzz.yaml", "fuzz", "../x.yaml", "float16", "1e-3", "\ud800"])
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), v, max_size=5),
    max_leaves=12,
)
FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def survives(recipe_dir: Path, text: str, overrides: Sequence[str] = ()) -> None:
    (recipe_dir / "fuzz.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        loaded = load_recipe("fuzz", overrides)
    except UsageError as error:
        assert error.problem
        assert all(line.strip() for line in error.problem.split("\n"))
    else:
        json.dumps(loaded.resolved, allow_nan=False)
    assert len(list_recipes()) == 1


@FUZZ
@given(data=st.dictionaries(KEYS, VALUES, max_size=6), style=st.booleans())
def test_any_mapping_is_a_recipe_or_a_usage_error(recipe_dir: Path, data: Any, style: bool) -> None:
    survives(recipe_dir, yaml.safe_dump(data, default_flow_style=style))


@FUZZ
@given(
    text=st.text(alphabet=st.sampled_from("abc:-[]{}&*!|>'\"%@`#, \n\t0.1~=<?\\x\u2028\ufeff\x85"), max_size=60)
    | st.text(max_size=40)
)
def test_any_text_is_a_recipe_or_a_usage_error(recipe_dir: Path, text: str) -> None:
    survives(recipe_dir, text)
    survives(recipe_dir, SMALL, [text, f"cache.budget={text}", f"model.path={text}", f"cache.parameters={text}"])


@FUZZ
@given(cuts=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.text(max_size=4)), max_size=4))
def test_a_damaged_recipe_is_a_recipe_or_a_usage_error(recipe_dir: Path, cuts: Any) -> None:
    text = (
        SMALL
        + "cache: {method: keepkv, budget: 0.2, parameters: {threshold: 0.8}}\n"
        + "export:\n  prefill_chunk: 32\nlimits: {max_length: 64}\n"
    )
    for where, length, new in cuts:
        at = int(where * len(text))
        text = text[:at] + new + text[at + length :]
    survives(recipe_dir, text)


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
def test_a_value_out_of_its_bounds_or_of_another_type_is_refused(tmp_path: Path, recipe: dict[str, Any]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"extends": "tiny-base", **recipe}))
    with pytest.raises(UsageError):
        load_recipe(str(path))
