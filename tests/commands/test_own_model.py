"""Tests of a user's own model: one line builds it, loads it, or answers with it."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import kvexport
from kvexport import models
from kvexport.artifact.reading import load_manifest
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.models import model_recipe
from kvexport.recipe.load import BUDGET, name_of, recipe_for
from tests.export.test_checkpoint_hub import Hub
from tests.export.test_checkpoint_hub import hub as hub
from tests.support.command_line import failure, ok
from tests.support.models import save_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))
    return tmp_path / "cache-home" / "kvexport" / "artifacts"


def test_the_recipe_of_a_model(tiny_checkpoint: Path) -> None:
    loaded = recipe_for(str(tiny_checkpoint), ["cache.budget=64", "limits.max_batch=2"])
    recipe = loaded.recipe
    assert (recipe.cache.method, recipe.cache.budget, recipe.limits.max_batch) == ("ballot", 64, 2)
    assert recipe.cache.allocation.kind is None and recipe.model.path == str(tiny_checkpoint)
    assert (
        recipe_for("org/name").recipe.cache.budget == BUDGET and recipe_for("org/name").recipe.model.path == "org/name"
    )
    with pytest.raises(UsageError, match=r"cache\.budget"):
        recipe_for("org/name", ["cache.budget=-1"])
    assert [name_of(x) for x in ("Qwen/Qwen3-0.6B", "a/b.gguf", "x y")] == ["Qwen3-0.6B", "b", "x-y"]


def test_build_takes_a_folder_and_the_length_that_it_was_trained_for(tiny_checkpoint: Path, tmp_path: Path) -> None:
    printed = ok("build", tiny_checkpoint, "--budget", 32, "--out", tmp_path / "a")
    manifest = load_manifest(Path(printed.strip()))
    assert printed.strip() == str(tmp_path / "a") and manifest.recipe.cache.budget == 32
    assert manifest.limits.max_length == 512 and manifest.name == "checkpoint"
    again = f"kvexport build {tiny_checkpoint} --budget 32 --set limits.max_batch=9 --out ARTIFACT"
    assert manifest.build_command("limits.max_batch=9") == again
    for name, source in (("tiny-keepkv", "--recipe tiny-keepkv"), ("a recipe's file", "--recipe FILE")):
        assert replace(manifest, name=name).build_command() == f"kvexport build {source} --out ARTIFACT"
    built = kvexport.build(tiny_checkpoint, tmp_path / "b", budget=32, max_length=100)
    assert load_manifest(built).limits.max_length == 100
    other = ok("build", tiny_checkpoint, "--max-length", 64, "--out", tmp_path / "c", "--set", "cache.sinks=2")
    assert load_manifest(Path(other.strip())).recipe.cache.sinks == 2


def test_heads_of_another_name_are_found_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=160)
    checkpoint = str(save_checkpoint(tmp_path / "gpt2", config))
    assert "num_attention_heads" not in json.loads(Path(checkpoint, "config.json").read_text())
    monkeypatch.setattr("kvexport.export.build.read_model", lambda *_, **__: pytest.fail("the model was read"))
    assert models._without_cache(model_recipe(checkpoint), checkpoint, ()) is None


def test_a_model_without_attention_has_the_method_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.MambaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)
    checkpoint = save_checkpoint(tmp_path / "mamba", config)
    assert load_manifest(kvexport.build(checkpoint, tmp_path / "a")).recipe.cache.method == "full"
    assert "cache.method is full, because no layer of" in capsys.readouterr().err
    for asked in ({"budget": 64}, {"overrides": ["cache.method=h2o"]}):
        with pytest.raises(UsageError, match="but no layer of the model attends") as caught:
            kvexport.build(checkpoint, tmp_path / "b", **asked)
        assert caught.value.fix == "--set cache.method=full"


def test_the_plan_of_a_model_is_that_of_its_build(tiny_checkpoint: Path, tmp_path: Path) -> None:
    plan = json.loads(ok("plan", tiny_checkpoint, "--budget", 32, "--max-length", 64, "--json"))
    artifact = kvexport.build(tiny_checkpoint, tmp_path / "a", budget=32, max_length=64, calibrate=False)
    engine = kvexport.load(artifact)
    assert plan["cache_bytes_per_sequence"] == engine.plan.bytes(1)
    assert (plan["recipe"], plan["max_length"], plan["method"]) == ("checkpoint", 64, "ballot")
    recipe = ("--recipe", "tiny-keepkv", "--budget", 16, "--max-length", 64)
    assert json.loads(ok("plan", tiny_checkpoint, *recipe, "--json"))["model"] == str(tiny_checkpoint)
    assert "kvexport plan MODEL" in failure(2, "plan")
    larger = ok("plan", tiny_checkpoint, "--budget", 999999, "--max-length", 64)
    assert "so nothing is ever evicted: --budget 16, or a larger --max-length" in larger


def test_models_that_cannot_be_built_are_named(tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    for verb in ("plan", "build", "chat"):  # before weights or a tokenizer are read, which this folder does not have
        assert "is an encoder-decoder; only decoders" in failure(2, verb, tmp_path)
    assert "kvexport build MODEL" in failure(2, "build")
    assert "is an artifact: it is built already" in failure(2, "build", tiny_artifact)
    assert "neither a directory nor a Hugging Face hub id" in failure(2, "build", "/no/such/folder")
    message = failure(2, "generate", tiny_artifact, "abc", "--budget", 3)
    assert "no model but an artifact, whose budget, length and settings are fixed" in message


def test_a_model_is_built_once_into_the_cache_folder(
    tiny_checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "own"
    checkpoint.mkdir()
    for file in tiny_checkpoint.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    first = kvexport.load(checkpoint, budget=32)
    assert first.path.parent == cache and first.plan.caches[0].budget[0] == 32
    built = []
    original = models.model_recipe
    import kvexport.export.build as exporting

    build = exporting.build
    monkeypatch.setattr(exporting, "build", lambda *a, **k: built.append(a) or build(*a, **k))  # type: ignore[func-returns-value]
    assert kvexport.LLM(str(checkpoint), budget=32).path == first.path and not built
    assert ok("generate", checkpoint, "abc", "--budget", 32, "--no-chat", "--max-tokens", 3) and not built
    assert kvexport.load(checkpoint, budget=40).path != first.path and len(built) == 1
    weights = next(checkpoint.glob("*.safetensors"))
    os.utime(weights, (1, 1))  # another training with the same layout
    assert kvexport.load(checkpoint, budget=32).path != first.path and len(built) == 2
    assert original is models.model_recipe


def test_files_that_were_written_now_are_not_read_again(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvexport.engine import load as loading

    verified, load = [], loading.load

    def noted(path: Path, *, verify: bool, **options: Any) -> Any:
        verified.append(verify)
        return load(path, verify=verify, **options)

    monkeypatch.setattr(loading, "load", noted)
    for _ in range(2):
        kvexport.load(tiny_checkpoint, budget=32, calibrate=False)
    for _ in range(2):
        ok("generate", tiny_checkpoint, "abc", "--budget", 40, "--no-calibrate", "--no-chat", "--max-tokens", 3)
    assert verified == [False, True, False, True]


def test_a_model_of_the_hub(hub: type[Hub], tiny_checkpoint: Path, tmp_path: Path) -> None:
    hub.files.update({file.name: file.read_bytes() for file in tiny_checkpoint.iterdir() if file.suffix != ".yaml"})
    engine = kvexport.load("org/name", budget=32)
    assert engine.manifest.name == "name" and engine.max_length == 512
    plain = kvexport.load(kvexport.build(tiny_checkpoint, tmp_path / "a", budget=32))
    assert engine.generate("abc", max_tokens=9)[0] == plain.generate("abc", max_tokens=9)[0]


def test_the_offline_fix_is_immediate_and_the_only_one(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    for arguments in (
        ("build", "org/name", "--out", tmp_path / "a"),
        ("chat", "org/name"),
        ("plan", "--recipe", "llama2-7b-keepkv"),
    ):
        message = failure(3, *arguments)
        assert "the hub cannot be reached" in message and "fix: with a network, beforehand: hf download" in message
        assert len(message.splitlines()) <= 4 and "Retrying" not in message
    assert time.monotonic() - start < 20, "no request is repeated for a minute"
    assert "Retrying" not in "".join(capfd.readouterr())
    with pytest.raises(EnvironmentProblem):
        kvexport.load("org/name")


def test_directories_and_hub_ids_name_a_model(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").mkdir()
    assert models.is_model(str(tiny_checkpoint)) and models.is_model("org/name")
    assert not models.is_model(str(tiny_artifact)) and not models.is_model("artifacts/name")
    assert not models.is_model("/no/such") and not models.is_model("./org/name") and not models.is_model("name")


def test_a_budget_that_no_sequence_exceeds_is_named(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.command_line import run

    result = run("build", tiny_checkpoint, "--budget", 600, "--out", tmp_path / "a")
    assert (
        result.exit_code == 0 and "so nothing is ever evicted: --budget 128, or a larger --max-length" in result.stderr
    )
    result = run("build", tiny_checkpoint, "--budget", 32, "--out", tmp_path / "b")
    assert "nothing is ever evicted" not in result.stderr


def test_the_package_lists_its_own_names_alone() -> None:
    assert dir(kvexport) == sorted(kvexport.__all__)
    assert {"Recipe", "Engine", "EngineOptions", "LLM"} <= set(dir(kvexport))
    assert all(getattr(kvexport, name) is not None for name in dir(kvexport))


def test_help_lists_options_in_groups() -> None:
    text = ok("serve", "--help")
    places = [text.index(f"\n{group}:") for group in ("Arguments", "Model", "Server", "Requests", "Backend", "Options")]
    assert places == sorted(places) and text.count("--port") == 1


def test_a_chunk_of_a_prompt_has_room_for_an_image_that_one_call_has_to_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "mm_tokens_per_image": 256}')
    assert model_recipe(str(tmp_path)).recipe.export.prefill_chunk == 256
    assert model_recipe(str(tmp_path), ["export.prefill_chunk=64"]).recipe.export.prefill_chunk == 64
