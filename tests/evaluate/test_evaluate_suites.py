"""Tests of RULER from a local folder, with the recipes of the papers' settings.

They check the prompts and the scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.commands.app import app
from kvexport.engine.completion import Completion
from kvexport.evaluate.settings import equal_bytes
from kvexport.evaluate.suites import read_ruler, run_items
from kvexport.plan.cache import LayerGeometry
from kvexport.recipe.load import load_recipe
from tests.support.http_server import engine_of, prompt

# The checkpoints that the recipes name: layers, query heads and KV heads, of 128 dimensions each.
SHAPES = {
    "llama2-7b-keepkv": (32, 32, 32),
    "llama31-8b-keepkv": (32, 32, 8),
    "mistral-7b-keepkv": (32, 32, 8),
    "qwen3-8b-keepkv": (36, 32, 8),
}
RULER_PROMPT = "VAR a 12345 VAR b VAR a Find all variables of 12345"


@pytest.mark.parametrize("name", SHAPES)
def test_the_papers_settings_give_every_method_a_fifth_of_the_context(name: str) -> None:
    layers, heads, kv_heads = SHAPES[name]
    length = load_recipe(name).recipe.limits.max_length
    compared = equal_bytes(
        name, ["streaming", "h2o", "keepkv"], [0.2], length, [LayerGeometry(heads, kv_heads, 128, 128)] * layers, []
    )
    slots = round(0.2 * length)
    assert [c.label for c in compared] == ["streaming", "h2o", "keepkv"]
    token = layers * kv_heads * 2 * 128 * 2  # float16
    for setting in compared:
        assert setting.recipe.cache.method == setting.label
        assert slots - 2 <= setting.slots <= slots
        # The budget and a chunk's slack. Votes, scores and positions are 12 bytes in addition to 512.
        assert slots * token < setting.bytes < (slots + 512) * token * 1.03
    assert {c.recipe.cache.allocation.kind for c in compared} == {"cosine"}


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    row = {"index": 0, "input": RULER_PROMPT, "outputs": ["a", "b", "q", "z", "7"]}
    path = tmp_path / "ruler" / "vt" / "validation.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("prefix", "chat", "expected"),
    [
        (" they are", True, prompt([{"role": "user", "content": "who has it"}]) + " they are"),
        (" they are", False, "who has it they are"),
        (None, True, "who has it"),
    ],
    ids=["in the chat template", "without a template", "a whole prompt"],
)
def test_a_prompt_of_ruler_ends_with_the_beginning_of_the_answer(
    prefix: str | None, chat: bool, expected: str, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwe").mkdir()
    row = {"input": "who has it", "outputs": ["anna"], **({} if prefix is None else {"answer_prefix": prefix})}
    (tmp_path / "cwe" / "validation.jsonl").write_text(json.dumps(row))
    engine, seen = engine_of(tiny_artifact) if chat else kvexport.load(tiny_artifact), list[Any]()
    monkeypatch.setattr(engine, "generate", lambda prompts, **_: seen.extend(prompts) or [Completion(0)])
    assert run_items(engine, read_ruler(tmp_path)["ruler/cwe"], 1) == [0.0]
    assert engine.tokenizer is not None and engine.tokenizer.decode(seen[0]) == expected


def test_a_papers_recipe_is_evaluated_on_a_local_folder(suites: Path, tiny_checkpoint: Path) -> None:
    recipe = suites / "mine.yaml"
    changes = {
        "model": {"path": str(tiny_checkpoint), "dtype": "float32"},
        "limits": {"max_length": 256},
        "export": {"prefill_chunk": 16},
    }
    recipe.write_text(
        json.dumps({"extends": "llama2-7b-keepkv", **changes, "cache": {"merge_every": 8}, "backend": {"threads": 1}})
    )
    arguments = [
        "eval", "--recipe", str(recipe), "--budgets", "0.2", "--methods", "keepkv", "--json", "--ruler",
        str(suites / "ruler"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    names = ["ruler/vt"]
    assert (data["length"], data["tasks"]) == (256, names)
    (keepkv,) = data["results"]
    assert (keepkv["label"], keepkv["slots"]) == ("keepkv", 51)
    assert keepkv["bytes"] < 0.35 * data["full"]["bytes"]
    for entry in (data["full"], keepkv):
        assert {name: score["accuracy"]["count"] for name, score in entry["scores"].items()} == dict.fromkeys(names, 2)
