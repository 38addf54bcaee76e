"""Recipes: what ships, where every value comes from, and that every mistake is named with its line, all of them at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvexport import recipe_files
from kvexport.errors import UsageError
from kvexport.methods import all_methods
from kvexport.recipe import Recipe
from kvexport.recipe_files import describe_method_parameters, list_recipes, load_recipe, recipe_folder

TINY = ("tiny-base", *(f"tiny-{name}" for name in all_methods()))
# The recent share of the budget that a method wants; half otherwise.
RECENT = {"tiny-ballot": 0.75, "tiny-kvslimmer": 0.25, "tiny-asymkv": 0.25}
HUB = {
    "llama2-7b-keepkv": ("meta-llama/Llama-2-7b-hf", 4096),
    "llama2-13b-keepkv": ("meta-llama/Llama-2-13b-hf", 4096),
    "llama3-8b-keepkv": ("meta-llama/Meta-Llama-3-8B-Instruct", 8192),
    "mistral-7b-keepkv": ("mistralai/Mistral-7B-Instruct-v0.2", 32768),
    "qwen3-8b-keepkv": ("Qwen/Qwen3-8B", 32768),
}
SMALL = "model:\n  path: some/model\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty recipe folder, which is also next to the current directory."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(recipe_files, "recipe_folder", lambda: folder)
    return folder


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def problems(name: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_recipe(str(name), overrides)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value.problem.splitlines()


def one_problem(name: str | Path, *overrides: str) -> str:
    lines = problems(name, overrides)
    assert len(lines) == 1, lines
    return lines[0]


def test_every_shipped_recipe_loads_and_the_base_says_that_it_is_one() -> None:
    listed = {info.name: info for info in list_recipes()}
    assert set(listed) == {*TINY, *HUB, "keepkv-paper"}
    for name, info in listed.items():
        assert not info.problem
        assert info.description
        if not info.base:
            loaded = load_recipe(name)
            assert loaded.name == name
            assert Recipe(**loaded.resolved) == loaded.recipe
            assert json.loads(json.dumps(loaded.resolved, allow_nan=False)) == loaded.resolved
    assert [name for name, info in listed.items() if info.base] == ["keepkv-paper"]
    assert listed["keepkv-paper"].model is None


@pytest.mark.parametrize("name", TINY)
def test_tiny_recipes_share_one_geometry(name: str) -> None:
    recipe = load_recipe(name).recipe
    assert Path(recipe.model.path) == recipe_folder() / "checkpoints" / "tiny"
    assert (recipe.model.dtype, recipe.cache.sinks, recipe.cache.merge_every) == ("float32", 4, 8)
    assert recipe.cache.recent == RECENT.get(name, 0.5)
    assert (recipe.export.prefill_chunk, recipe.limits.max_length, recipe.limits.max_batch) == (32, 1024, 8)
    assert recipe.budget == (1024 if name == "tiny-full" else 64)
    if name != "tiny-base":
        assert recipe.cache.method == name.removeprefix("tiny-")


@pytest.mark.parametrize("name", HUB)
def test_paper_recipes_state_the_paper_setting(name: str) -> None:
    recipe = load_recipe(name).recipe
    assert (recipe.model.path, recipe.limits.max_length) == HUB[name]
    assert (recipe.cache.method, recipe.cache.budget, recipe.cache.allocation.kind) == ("keepkv", 0.2, "cosine")
    assert (recipe.model.dtype, recipe.cache.sinks, recipe.cache.merge_every, recipe.export.prefill_chunk) == ("float16", 4, 32, 512)
    assert recipe.cache.parameters["threshold"] == 0.8


def test_shipped_files_begin_with_a_comment_that_cites() -> None:
    for info in list_recipes():
        lines = info.path.read_text(encoding="utf-8").splitlines()
        comment = [line for line in lines[:4] if line.startswith("#")]
        assert 1 <= len(comment) <= 3
        assert "arXiv" in " ".join(comment) or "baseline" in comment[0]


def test_origin_is_the_line_of_the_value_the_override_or_the_default() -> None:
    loaded = load_recipe("llama2-13b-keepkv", ["limits.max_batch=2", "cache.parameters.zip=key"])
    text = {
        name: (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines() for name in ("keepkv-paper", "llama2-13b-keepkv")
    }
    for key, name in {"cache.budget": "keepkv-paper", "cache.allocation.kind": "keepkv-paper", "model.path": "llama2-13b-keepkv"}.items():
        file, line = loaded.origin[key].split(":")
        assert file == f"recipes/{name}.yaml"
        assert text[name][int(line) - 1].strip().startswith(key.split(".")[-1] + ":")
    assert loaded.origin["limits.max_batch"] == "--set limits.max_batch=2"
    assert loaded.origin["cache.parameters.zip"] == "--set cache.parameters.zip=key"
    assert loaded.origin["cache.parameters.decay"] == loaded.origin["backend.threads"] == "default"


def test_origin_names_every_value_of_resolved_and_no_other(folder: Path) -> None:
    write(folder, a=SMALL)
    loaded = load_recipe("a")
    flat: set[str] = set()

    def walk(data: dict[str, Any], above: str) -> None:
        for key, value in data.items():
            walk(value, f"{above}{key}.") if isinstance(value, dict) else flat.add(above + key)

    walk(loaded.resolved, "")
    assert set(loaded.origin) == flat
    assert loaded.resolved["cache"]["parameters"] == all_methods()["keepkv"]().model_dump()


def test_value_on_a_line_of_its_own_has_that_line(folder: Path) -> None:
    write(folder, a="# comment\nmodel:\n  path:\n\n    some/model\ndescription: >\n  long\n  text\n")
    assert load_recipe("a").origin["model.path"] == "recipes/a.yaml:5"
    assert load_recipe("a").origin["description"] == "recipes/a.yaml:6"


def test_extends_chain_merges_mappings_and_the_nearest_wins(folder: Path) -> None:
    write(folder, a=SMALL + "cache: {budget: 10, sinks: 1, parameters: {threshold: 0.5, decay: 0.7}}\n")
    write(folder, b="extends: a\ncache: {sinks: 2, parameters: {threshold: 0.6}}\n")
    write(folder, c="extends: ./b.yaml\ncache: {sinks: 3}\n")
    cache = load_recipe("c").recipe.cache
    assert (cache.budget, cache.sinks, cache.parameters["threshold"], cache.parameters["decay"]) == (10, 3, 0.6, 0.7)
    assert load_recipe("c").origin["cache.parameters.threshold"] == "recipes/b.yaml:2"


def test_relative_extends_is_beside_the_file_and_a_name_is_in_the_recipe_folder(folder: Path) -> None:
    deep = folder.parent / "mine" / "deep"
    deep.mkdir(parents=True)
    write(folder, a=SMALL)
    write(deep.parent, b="extends: a\ncache: {sinks: 7}\n")
    write(deep, c="extends: ../b.yaml\n")
    assert load_recipe(str(deep / "c.yaml")).recipe.cache.sinks == 7


def test_another_method_drops_the_inherited_parameters_that_it_lacks(folder: Path) -> None:
    write(folder, a=SMALL + "cache: {parameters: {threshold: 0.5}}\n", b="extends: a\ncache: {method: h2o}\n")
    assert load_recipe("b").recipe.cache.parameters == {}
    assert load_recipe("a", ["cache.method=streaming"]).recipe.cache.parameters == {}
    write(folder, c="extends: b\ncache: {method: keepkv}\n", d="extends: a\ncache: {method: keepkv}\n")
    assert load_recipe("c").recipe.cache.parameters["threshold"] == 0.8
    assert load_recipe("d").recipe.cache.parameters["threshold"] == 0.5
    write(folder, e="extends: a\ncache: {method: h2o, parameters: {threshold: 0.5}}\n")
    assert "unknown parameter cache.parameters.threshold (recipes/e.yaml:2)" in one_problem("e")


def test_set_wins_over_files_and_the_later_over_the_earlier(folder: Path) -> None:
    write(folder, a=SMALL + "cache: {budget: 10, slack: 500}\n")
    loaded = load_recipe("a", ["cache.budget=20", "cache.budget=30", "cache.slack=null", "cache={sinks: 9}", "model.revision=v=1"])
    assert (loaded.recipe.cache.budget, loaded.recipe.cache.slack, loaded.recipe.cache.sinks) == (30, None, 9)
    assert loaded.recipe.model.revision == "v=1"
    assert loaded.origin["cache.budget"] == "--set cache.budget=30"
    assert loaded.origin["cache.sinks"] == "--set cache={sinks: 9}"
    assert loaded.origin["cache.slack"] == "--set cache.slack=null"


@pytest.mark.parametrize("text", ["cache.budget", "=3", "cache..budget=3", ".=1", "a.b.c.d.e.f.g.h.i=1"])
def test_set_without_key_and_value(folder: Path, text: str) -> None:
    write(folder, a=SMALL)
    assert one_problem("a", text).startswith(f"--set {text}: should be --set KEY=VALUE")


def test_set_cannot_extend_and_its_yaml_must_be_yaml(folder: Path) -> None:
    write(folder, a=SMALL)
    assert one_problem("a", "extends=a") == "--set extends=a: extends is written in a file, not set"
    assert one_problem("a", "cache.budget=[1").startswith("--set cache.budget=[1: not YAML")


def test_model_path_is_relative_to_who_says_it(folder: Path) -> None:
    write(folder, a="model: {path: ./weights}\n", b="model: {path: ../weights}\n", c="model: {path: some/model}\n")
    other = folder.parent / "other"
    other.mkdir()
    write(other, d="extends: a\n", e="extends: a\nmodel: {path: ./own}\n")
    here = Path.cwd()
    (here / "local").mkdir()
    (here / "some" / "model").mkdir(parents=True)
    assert load_recipe("a").recipe.model.path == str(folder / "weights")
    assert load_recipe("b").recipe.model.path == str(folder.parent / "weights")
    assert load_recipe("c").recipe.model.path == "some/model"
    assert load_recipe("../other/d.yaml").recipe.model.path == str(folder / "weights")
    assert load_recipe("../other/e.yaml").recipe.model.path == str(other / "own")
    assert load_recipe("a", ["model.path=./weights"]).recipe.model.path == str(here / "weights")
    assert load_recipe("a", ["model.path=local"]).recipe.model.path == str(here / "local")
    assert load_recipe("a", ["model.path=local/none"]).recipe.model.path == "local/none"


def test_mistakes_of_different_kinds_come_out_in_one_error(folder: Path) -> None:
    cache = "cache:\n  budgt: 64\n  merge_every: often\n  slack: 3\n  parameters:\n    treshold: 0.5\n    decay: 2\n"
    write(folder, a="model:\n  path: 7\n" + cache + "limits: 5\n")
    found = problems("a", ["export.logits=some", "cache.sinks=-1"])
    expected = [
        ("unknown key cache.budgt (recipes/a.yaml:4)", "did you mean cache.budget?"),
        ("unknown parameter cache.parameters.treshold (recipes/a.yaml:8)", "did you mean cache.parameters.threshold?"),
        ("cache.parameters.decay: should be less than 1, found 2", "(recipes/a.yaml:9)"),
        ("model.path: should be a valid string, found 7", "(recipes/a.yaml:2)"),
        ("cache.merge_every: should be a valid integer, found 'often'", "(recipes/a.yaml:5)"),
        ("limits: should be a mapping, found 5", "(recipes/a.yaml:10)"),
        ("export.logits: should be 'last' or 'all', found 'some'", "(--set export.logits=some)"),
        ("cache.sinks: should be greater than or equal to 0, found -1", "(--set cache.sinks=-1)"),
    ]
    for start, end in expected:
        assert [line for line in found if line.startswith(start) and end in line], (start, found)
    assert len(found) == len(expected)


def test_unknown_key_points_at_the_key_and_suggests_across_sections(folder: Path) -> None:
    write(folder, a=SMALL + "budget: 3\ncahce:\n  sinks: 3\ncache:\n  threshold: 0.5\n  sinks.x: 2\nzzzz:\n\n  1\n")
    assert problems("a") == [
        "unknown key budget (recipes/a.yaml:3); did you mean cache.budget?",
        "unknown key cahce (recipes/a.yaml:4); did you mean cache?",
        "unknown key cache.threshold (recipes/a.yaml:7); did you mean cache.parameters.threshold?",
        "unknown key cache.sinks.x (recipes/a.yaml:8); did you mean cache.sinks?; a dotted key is for --set, in a file keys are nested",
        "unknown key zzzz (recipes/a.yaml:9)",
    ]


def test_unknown_method_and_parameters(folder: Path) -> None:
    write(folder, a=SMALL + "cache:\n  method: keepvk\n", b=SMALL + "cache: {method: full, parameters: {decay: 1}}\n")
    problem = one_problem("a")
    assert problem.startswith("cache.method: unknown method 'keepvk'")
    assert "did you mean keepkv?" in problem
    assert all(name in problem for name in (*all_methods(), "recipes/a.yaml:4"))
    assert one_problem("b").endswith("full has no parameters")
    listing = one_problem("b", "cache.method=keepkv", "cache.parameters={nothing_like_it: 1, decay: 0.5}")
    assert all(name in listing for name in all_methods()["keepkv"].model_fields)


@pytest.mark.parametrize("value", ["true", "'64'", "1e-3", "null", "[1]", "{a: 1}", "2020-01-01"])
def test_budget_is_a_number_and_nothing_else(folder: Path, value: str) -> None:
    write(folder, a=SMALL + f"cache:\n  sinks: 1\n  budget: {value}\n")
    problem = one_problem("a")
    assert problem.startswith("cache.budget: should be a valid integer or a valid number")
    assert problem.endswith("(recipes/a.yaml:5)")
    assert ("1.0e-3" in problem) == (value in ("'64'", "1e-3"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (".nan", "is not finite"),
        ("-.inf", "is not finite"),
        ("1" * 30, "does not fit 64 bits"),
        ("9" * 5000, "is no int"),
        ("0x" + "f" * 5000, "does not fit 64 bits"),
        ("2020-13-45", "is no timestamp"),
        ("!!int ''", "is no int"),
        ("!!bool x", "is no bool"),
        ('"a\\0b"', "holds a NUL character"),
        ("!!python/name:os.system x", "tag 'python/name:os.system' is not allowed"),
        ("!!python/object/apply:os.getcwd []", "is not allowed"),
        ("!!set {a}", "is not allowed"),
        ("!mine 3", "is not allowed"),
    ],
)
def test_values_that_no_recipe_has_are_named_once_and_hide_nothing(folder: Path, value: str, reason: str) -> None:
    write(folder, a=SMALL + f"cache:\n  budget: {value}\n  snks: 3\n")
    first, second = problems("a")
    assert first.startswith("cache.budget: ")
    assert reason in first
    assert first.endswith("(recipes/a.yaml:4)")
    assert second.startswith("unknown key cache.snks (recipes/a.yaml:5)")


def test_check_across_values_names_the_lines_of_both(folder: Path) -> None:
    write(folder, a=SMALL + "cache:\n  slack: 3\nexport:\n  prefill_chunk: 16\n")
    problem = one_problem("a", "cache.merge_every=8")
    assert problem.startswith("cache.slack 3 is smaller than")
    assert all(place in problem for place in ("recipes/a.yaml:4", "recipes/a.yaml:6", "--set cache.merge_every=8"))
    assert len(problems("a", ["limits.max_batch=0"])) == 2
    assert "prefill_chunk" in one_problem("a", "export.prefill_chunk=many"), "no echo of a value that is wrong itself"


def test_duplicate_keys_name_both_lines_and_hide_nothing(folder: Path) -> None:
    write(folder, a=SMALL + "cache:\n  budget: 3\n  sinks: x\n  budget: 4\n")
    first, second = problems("a")
    assert first == "cache.budget is written twice (recipes/a.yaml:4 and recipes/a.yaml:6)"
    assert second.startswith("cache.sinks: ")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("model:\n  path: [1\n", 3, "not YAML"),
        ("model: {path: a}\n\tcache: 1\n", 2, "not YAML"),
        ("model: a: b\n", 1, "not YAML"),
        ("model: {path: a}\n---\nmodel: {}\n", 2, "single document"),
        ("model: {path: a}\nx: *nowhere\n", 2, "nowhere"),
        ("model: {path: a}\nx: \x07\n", 2, "does not allow"),
        ("- a\n- b\n", 1, "a mapping of keys, this is a list"),
        ("\n\nword\n", 3, "a mapping of keys, this is a str"),
        ("", 1, "this is empty"),
        ("&a\nmodel: {path: x}\ncache: *a\n", 1, "contains itself"),
        ("x: " + "[" * 200 + "]" * 200, 1, "nested too deep"),
        ("x: " + "[" * 20000, 1, "nested too deep"),
    ],
)
def test_text_that_is_no_mapping_is_reported_with_its_line(folder: Path, text: str, line: int, reason: str) -> None:
    write(folder, a=text)
    problem = one_problem("a")
    assert problem.startswith(f"recipes/a.yaml:{line}: ")
    assert reason in problem


def test_other_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "latin.yaml").write_bytes(b"description: ok\nmodel: \xe9\n")
    (folder / "big.yaml").write_text("# " + "x" * 300_000, encoding="utf-8")
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    (folder / "dir.yaml").mkdir()
    assert one_problem("latin") == "recipes/latin.yaml:2: not UTF-8 text"
    assert "larger than" in one_problem("big")
    assert one_problem("loop").startswith("recipes/loop.yaml: cannot be read: ")
    assert one_problem("dir").startswith("recipes/dir.yaml: cannot be read: ")
    assert one_problem("./none.yaml") == "none.yaml: there is no such file"
    assert "cannot be read" in one_problem("a\0/x.yaml")


def test_aliases_and_merge_keys_read_as_safe_load_reads_them_and_cannot_explode(folder: Path) -> None:
    text = SMALL + "cache: &c\n  budget: &n 5\n  sinks: *n\n  <<: [{sinks: 1, recent: 2}, {recent: 3, merge_every: 4}]\n"
    write(folder, a=text)
    resolved = load_recipe("a").resolved
    for key, value in yaml.safe_load(text)["cache"].items():
        assert resolved["cache"][key] == value
    bomb = "x0: &x0 [1, 1]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 40))
    write(folder, b=bomb, c=SMALL + "cache: {<<: 3}\n", d=SMALL + "? [a]\n: 1\n")
    assert "too many values" in one_problem("b")
    assert one_problem("c") == "<<: merges mappings, this is something else (recipes/c.yaml:3)"
    assert one_problem("d") == "a key is text, this is something else (recipes/d.yaml:3)"


def test_cycles_name_the_circle(folder: Path) -> None:
    write(folder, a="extends: b\n", b="# x\nextends: ./c.yaml\n", c="extends: b\n", me="extends: me\n")
    assert one_problem("me") == "extends goes round in a circle: recipes/me.yaml -> recipes/me.yaml (recipes/me.yaml:1)"
    expected = "extends goes round in a circle: recipes/b.yaml -> recipes/c.yaml -> recipes/b.yaml (recipes/c.yaml:1)"
    assert one_problem("a") == expected


def test_a_bad_extends_does_not_hide_the_rest(folder: Path) -> None:
    write(folder, tiny=SMALL, a="extends: tinny\ncache: {snks: 1}\n", b="extends: ./none.yaml\ncache: {sinks: x}\n", c="extends: [tiny]\n")
    assert [line.split(" (")[0] for line in problems("a")] == ["unknown recipe 'tinny'", "unknown key cache.snks"]
    assert "(recipes/a.yaml:1); did you mean tiny?" in problems("a")[0]
    assert problems("b")[0] == "recipes/none.yaml: there is no such file (extended at recipes/b.yaml:1)"
    assert problems("b")[1].startswith("cache.sinks: ")
    assert one_problem("c") == "extends: should be the name of a recipe or ./file.yaml, found ['tiny'] (recipes/c.yaml:1)"


def test_a_mistake_in_what_is_extended_is_named_there_unless_it_is_overridden(folder: Path) -> None:
    write(folder, a=SMALL + "cache:\n  sinks: x\n", b="extends: a\ncache: {budget: 3}\n", c="extends: a\ncache: {sinks: 3}\n")
    assert one_problem("b").endswith("(recipes/a.yaml:4)")
    assert load_recipe("c").recipe.cache.sinks == 3


def test_unknown_name_gives_the_nearest() -> None:
    assert "did you mean tiny-keepkv?" in one_problem("tiny-keepvk")
    assert "known: " in one_problem("")


def test_a_base_asks_for_its_model_and_takes_it() -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("keepkv-paper")
    assert caught.value.problem.startswith("model.path is missing: recipes/keepkv-paper.yaml")
    assert "--set model.path=" in caught.value.fix
    loaded = load_recipe("keepkv-paper", ["model.path=a/b"])
    assert (loaded.recipe.model.path, loaded.origin["model.path"]) == ("a/b", "--set model.path=a/b")


def test_listing_shows_broken_recipes_beside_the_others(folder: Path) -> None:
    write(folder, a="model: 3\n", b=SMALL + "description: fine\ncache: {method: full}\n", c="[", d="cache: {sinks: x}\n", e="extends: e\n")
    listed = {info.name: info for info in list_recipes()}
    assert {name for name, info in listed.items() if info.problem} == {"a", "c", "d", "e"}
    assert "recipes/d.yaml:1" in listed["d"].problem
    fine = listed["b"]
    assert (fine.description, fine.model, fine.method, fine.slots, fine.max_length) == ("fine", "some/model", "full", 4096, 4096)


def test_recipe_folder_prefers_what_a_wheel_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kvexport"
    package.mkdir()
    monkeypatch.setattr(recipe_files, "__file__", str(package / "recipe_files.py"))
    assert recipe_folder() == tmp_path / "recipes"
    (package / "_recipes").mkdir()
    write(package / "_recipes", a=SMALL)
    assert recipe_folder() == package / "_recipes"
    assert load_recipe("a").origin["model.path"] == "recipes/a.yaml:2"


def test_method_listing_follows_the_methods() -> None:
    listed = {info.name: info for info in describe_method_parameters()}
    assert set(listed) == set(all_methods())
    for name, method in all_methods().items():
        assert (listed[name].summary, listed[name].source) == (method.summary, method.source)
        assert {p.name: p.default for p in listed[name].parameters} == method().model_dump()
    constraints = {p.name: p.constraint for p in listed["keepkv"].parameters}
    assert constraints["decay"] == "> 0, < 1"
    assert constraints["threshold"] == ">= -1, <= 1"
    assert constraints["zip"] == "key | vote | mean"


def test_reading_recipes_needs_no_torch() -> None:
    code = "import sys; from kvexport.recipe_files import *; load_recipe('tiny-keepkv'); list_recipes(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


KEYS = st.sampled_from(
    [*Recipe.model_fields, *Recipe.model_fields["cache"].annotation.model_fields, "path", "<<", "extends", "a.b", "decay", "\n"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.binary(max_size=4) | st.text(max_size=8)
WORDS = st.sampled_from(["keepkv", "h2o", "tiny-base", "./fuzz.yaml", "fuzz", "../x.yaml", "float16", "1e-3", "\ud800"])
VALUES = st.recursive(
    SCALARS | WORDS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), v, max_size=5), max_leaves=12
)
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def survives(folder: Path, text: str, overrides: Sequence[str] = ()) -> None:
    (folder / "fuzz.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
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
def test_any_mapping_is_a_recipe_or_a_usage_error(folder: Path, data: Any, style: bool) -> None:
    survives(folder, yaml.safe_dump(data, default_flow_style=style))


@FUZZ
@given(text=st.text(alphabet=st.sampled_from("abc:-[]{}&*!|>'\"%@`#, \n\t0.1~=<?\\x\u2028\ufeff\x85"), max_size=60) | st.text(max_size=40))
def test_any_text_is_a_recipe_or_a_usage_error(folder: Path, text: str) -> None:
    survives(folder, text)
    survives(folder, SMALL, [text, f"cache.budget={text}", f"model.path={text}", f"cache.parameters={text}"])


@FUZZ
@given(cuts=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.text(max_size=4)), max_size=4))
def test_a_damaged_recipe_is_a_recipe_or_a_usage_error(folder: Path, cuts: Any) -> None:
    text = (
        SMALL
        + "cache: {method: keepkv, budget: 0.2, parameters: {threshold: 0.8}}\nexport:\n  prefill_chunk: 32\nlimits: {max_length: 64}\n"
    )
    for where, length, new in cuts:
        at = int(where * len(text))
        text = text[:at] + new + text[at + length :]
    survives(folder, text)
