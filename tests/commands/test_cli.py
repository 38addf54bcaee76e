"""Tests of the command line: data goes to stdout, progress to stderr, and verbs import only what they need."""

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvexport
from kvexport.errors import KvexportError
from kvexport.report import Paragraph, Section
from tests.support.command_line import ENVIRONMENT, ROOT, failure, ok, process, run

IDS = "7,3,40,2,9"


def generated(artifact: Path, prompt: Sequence[object], *arguments: object, **options: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(
        ok("generate", artifact, *prompt, "--max-new-tokens", 8, "--json", *arguments, **options)
    )
    return data


# Importing and help.


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvexport; kvexport.__version__; dir(kvexport); kvexport.KvexportError\n"
        "import kvexport.commands.app\n"
        "try: kvexport.commands.app.app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'transformers', 'onnxruntime', 'pydantic', 'yaml', 'rich') if m in "
        "sys.modules])"
    )
    output, problems = process(code=code).communicate()
    assert output.splitlines()[-1] == "[]", problems
    assert "Usage" in output


def test_running_an_artifact_needs_neither_torch_nor_transformers_nor_onnx(tiny_artifact: Path) -> None:
    code = (
        "import sys; [sys.modules.__setitem__(m, None) for m in ('torch', 'transformers', 'onnx', 'onnxscript', "
        "'safetensors')]\n"
        "from kvexport.commands.app import main; main()"
    )
    output, problems = process("generate", tiny_artifact, "abc", "--max-new-tokens", "3", code=code).communicate()
    assert len(output.rstrip("\n")) == 3, problems
    inspected = process("inspect", tiny_artifact, "--json", code=code)
    assert json.loads(inspected.communicate()[0])["graphs"]["decoder"]["nodes"] is None
    build = process("build", "--recipe", "tiny-keepkv", code=code)
    _, problems = build.communicate()
    assert build.returncode == 3
    assert problems.startswith(
        "error: build needs torch, transformers, safetensors, onnx, onnxscript, which are not installed"
    )
    assert "pip install 'kvexport[export]'" in problems
    _, problems = process("validate", tiny_artifact, code=code).communicate()
    assert "error: validate needs torch, transformers, safetensors, onnx, onnxscript, which are" in problems


def test_the_public_names_are_there_and_survive_the_import_of_the_package_build(tiny_artifact: Path) -> None:
    import kvexport.artifact.publish as artifact

    assert callable(kvexport.build)
    assert kvexport.artifact.publish is artifact  # type: ignore[attr-defined]
    engine = kvexport.load(tiny_artifact)
    assert isinstance(engine, kvexport.Engine)
    completion = engine.generate("abc", kvexport.GenerationSettings(max_new_tokens=2))[0]
    assert isinstance(completion, kvexport.Completion)
    assert [type(token) for token in engine.stream([1], max_new_tokens=1)] == [kvexport.Token]
    for name in kvexport.__all__:
        assert name in dir(kvexport)
        assert getattr(kvexport, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = kvexport.nothing
    with pytest.raises(KvexportError, match="unknown recipe"):
        kvexport.build("no-such-recipe", "x")


@pytest.mark.parametrize("verb", ["", "build", "generate", "plan", "inspect", "validate", "doctor", "recipes"])
def test_help(verb: str) -> None:
    assert "Usage:" in ok(*([verb] if verb else []), "--help")


def test_recipe_names_are_completed() -> None:
    words = {"_KVEXPORT_COMPLETE": "complete_bash", "COMP_WORDS": "kvexport build --recipe tiny-ke", "COMP_CWORD": "3"}
    output, problems = process(
        env={**ENVIRONMENT, **words}, code="from kvexport.commands.app import main; main()"
    ).communicate()
    assert output.split() == ["tiny-keepkv"], problems


# Building artifacts and inspecting them.


def test_build_prints_the_path_and_uses_the_overrides(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("build", "--recipe", tiny_recipe, "--set", "cache.method=full", "--set", "limits.max_length=64")
    assert result.exit_code == 0, result.output
    assert result.stdout == "artifacts/tiny\n"
    assert "tracing" in result.stderr
    manifest = json.loads((tmp_path / "artifacts/tiny/manifest.json").read_text())
    assert manifest["recipe"]["cache"]["method"] == "full"
    assert manifest["limits"]["max_length"] == 64


def test_inspect_shows_the_contents_of_an_artifact(tiny_artifact: Path) -> None:
    data = json.loads(ok("inspect", tiny_artifact, "--json"))
    manifest = json.loads((tiny_artifact / "manifest.json").read_text())
    assert data["digests"] == "verified"
    assert data["files"] == manifest["files"]
    assert data["graphs"]["decoder"]["operators"]["kvexport.VoteAttention"] == 2
    assert data["graphs"]["merge"]["nodes"] == 2
    own, of_heads = sorted(data["graphs"]["merge"]["functions"], key=len)
    assert own == "kvexport.MergeCache" and of_heads.startswith("kvexport.HeadsMergeCache_")
    assert data["cache"]["bytes_per_sequence"] == sum(layer["bytes"] for layer in data["cache"]["layers"]) + 8
    assert data["divergence"] is None and "measured at build" not in (
        shown := ok("inspect", tiny_artifact, "--no-verify")
    )
    assert "NOT verified" in shown
    for name in manifest["files"]:
        assert name in shown


def test_a_damaged_artifact_is_exit_code_5(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_artifact, tmp_path / "copy")
    weights = copy / "decoder.weights"
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)
    assert "decoder.weights" in failure(5, "generate", copy, "abc")
    assert "decoder.weights" in failure(5, "inspect", copy)
    ok("inspect", copy, "--no-verify")
    weights.unlink()
    assert "missing" in failure(5, "inspect", copy, "--no-verify")


# Generating.


def test_generate_streams_the_text_that_the_engine_generates(tiny_artifact: Path) -> None:
    expected = kvexport.load(tiny_artifact).generate("abc", max_new_tokens=40)[0]
    assert ok("generate", tiny_artifact, "abc", "--max-new-tokens", 40) == expected.text + "\n"
    assert generated(tiny_artifact, ["abc"])["token_ids"] == expected.token_ids[:8]


def test_every_way_to_give_a_prompt_is_the_same_prompt(tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("abc")
    expected = generated(tiny_artifact, ["abc"])["token_ids"]
    assert generated(tiny_artifact, ["--prompt-file", tmp_path / "prompt"])["token_ids"] == expected
    assert generated(tiny_artifact, ["-"], input="abc")["token_ids"] == expected
    assert generated(tiny_artifact, ["--token-ids", "0, 1 2"])["token_ids"] == expected


def test_a_setting_that_only_sampling_reads_implies_sampling(tiny_artifact: Path) -> None:
    plain = generated(tiny_artifact, ["abc"])
    assert not plain["settings"]["do_sample"]
    for option, value in {"--temperature": 0.7, "--top-k": 3, "--top-p": 0.9, "--min-p": 0.1, "--seed": 5}.items():
        settings = generated(tiny_artifact, ["abc"], option, value)["settings"]
        assert settings["do_sample"]
        assert settings[option.removeprefix("--").replace("-", "_")] == value
    greedy = generated(tiny_artifact, ["abc"], "--seed", 5, "--greedy")
    assert greedy["token_ids"] == plain["token_ids"]
    assert not greedy["settings"]["do_sample"]
    hot = ["--temperature", 5, "--top-k", 0, "--seed"]
    same = [generated(tiny_artifact, ["abc"], *hot, seed)["token_ids"] for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_a_stop_string_ends_the_text_before_it(tiny_artifact: Path) -> None:
    text = generated(tiny_artifact, ["abc"])["text"]
    stop = text[3:5]
    data = generated(tiny_artifact, ["abc"], "--stop", "nowhere", "--stop", stop)
    assert data["text"] == text[: text.index(stop)]
    assert data["finish_reason"] == "stop"


def test_statistics_count_tokens_and_time(tiny_artifact: Path) -> None:
    data = generated(tiny_artifact, ["--token-ids", IDS])
    assert data["prompt_tokens"] == data["stats"]["prompt_tokens"] == 5
    assert data["stats"]["generated_tokens"] == 8
    assert data["stats"]["decode_tokens_per_second"] > 0
    assert data["stats"]["cache_bytes"] == kvexport.load(tiny_artifact).plan.bytes(1)
    result = run("generate", tiny_artifact, "abc", "--max-new-tokens", 3, "--stats")
    assert len(result.stdout.rstrip("\n")) == 3, "figures go to stderr"
    assert f"cache bytes: {data['stats']['cache_bytes']}\n" in result.stderr
    assert "cache: 5 slots stand for 5 tokens\n" in result.stderr  # the last token is not read
    stats = generated(tiny_artifact, ["--token-ids", ",".join(["5"] * 88)])["stats"]
    assert stats["cache_tokens"] == 88 + 7 and 32 <= stats["cache_slots"] < 64
    assert stats["prompt_tokens_over_budget"] == 88 - 32


def test_the_bar_of_the_prompt_advances_to_its_end(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[int | None]] = {}

    class Bar:
        def __init__(self, label: str) -> None:
            self.label = label

        def advance(self, amount: int) -> None:
            seen[self.label].append(amount)

    @contextmanager
    def show(label: str, total: int | None = None) -> Iterator[Bar]:
        seen[label] = [total]
        yield Bar(label)

    monkeypatch.setattr("kvexport.terminal.show", show)
    ok("generate", tiny_artifact, "a" * 40, "--max-new-tokens", 1)
    assert seen["reading the prompt"] == [40, 16, 16, 8]


def test_without_a_tokenizer_token_ids_are_streamed(
    tiny_recipe: Path, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvexport.engine.load.FILE_NAME", "no-such-file")
    expected = kvexport.load(tiny_artifact).generate([7, 3], max_new_tokens=4)[0].token_ids
    assert [
        int(x) for x in ok("generate", tiny_artifact, "--token-ids", "7,3", "--max-new-tokens", 4).split()
    ] == expected
    assert "token ids" in failure(2, "generate", tiny_artifact, "abc")


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "there is no prompt"), (["abc", "--token-ids", "1"], "there are 2 prompts"), (["--token-ids", "1,x"], "'x'"),
    (["--token-ids", "1,64"], "token id 64 is out of range"), (["--token-ids", "-1"], "token id -1 is out of range"),
    (["--token-ids", ""], "the prompt is empty"), (["--prompt-file", "no-such-file"], "no-such-file"),
    (["--prompt-file", "."], "cannot be read"), (["abc", "--temperature", "0"], "--greedy"),
    (["abc", "--top-p", "2"], "top_p"), (["abc", "--max-new-tokens", "0"], "max_new_tokens"),
    (["abc" * 200], "limits.max_length 512"),
])  # fmt: skip
def test_prompts_and_settings_that_cannot_be_used(tiny_artifact: Path, arguments: list[str], words: str) -> None:
    message = failure(2, "generate", tiny_artifact, *arguments)
    assert words in message
    assert "fix: " in message


def test_a_prompt_that_is_not_utf8_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    assert "byte 0xff at 2" in failure(2, "generate", tiny_artifact, "--prompt-file", tmp_path / "prompt")
    assert "byte 0xff at 2" in failure(2, "generate", tiny_artifact, "-", input=b"ab\xff")


# Validating.


@dataclass
class Outcome:
    passed: bool
    problem: str = ""
    warning: str = "the compressed cache predicts text much worse"

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "mean_kl": math.nan, "steps": [{"largest": math.inf}]}


@pytest.mark.parametrize("outcome", [Outcome(True), Outcome(False, "layer 1, step 3 differs by 0.5")])
def test_validate_reports_and_exits_with_4_on_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome
) -> None:
    arguments_seen: dict[str, Any] = {}

    def compare(path: Path, **options: Any) -> Outcome:
        arguments_seen.update(options, path=path)
        return outcome

    def sections(outcome: Outcome) -> list[Section]:
        return [Paragraph(f"passed: {outcome.passed}")]

    monkeypatch.setattr("kvexport.validate.runner.validate_artifact", compare)
    monkeypatch.setattr("kvexport.validate.sections.sections", sections)
    result = run("validate", "x", "--batch", 2, "--length", 99, "--seed", 4, "--checkpoint", "there")
    arguments_seen.pop("progress")
    assert arguments_seen.pop("backend") is None
    assert arguments_seen == {"path": Path("x"), "batch": 2, "length": 99, "seed": 4, "checkpoint": "there"}
    assert result.exit_code == (0 if outcome.passed else 4)
    assert f"passed: {outcome.passed}" in result.stdout
    assert outcome.problem in result.stderr and f"warning: {outcome.warning}\n" in result.stderr
    shown = run("validate", "x", "--json")
    assert shown.exit_code == result.exit_code
    assert json.loads(shown.stdout) == {"passed": outcome.passed, "mean_kl": None, "steps": [{"largest": None}]}


# Recipes.


def test_recipes_are_listed_with_their_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "recipes/tiny-base.yaml", tmp_path / "good.yaml")
    (tmp_path / "broken.yaml").write_text("cache:\n  budgett: 3\n  sinkss: 4\n")
    monkeypatch.setattr("kvexport.recipe.inherit.recipe_folder", lambda: tmp_path)
    listed = {entry["name"]: entry for entry in json.loads(ok("recipes", "--json"))}
    assert listed["good"]["method"] == "keepkv"
    assert "broken.yaml:2" in listed["broken"]["problem"]
    assert "CANNOT BE LOADED" in ok("recipes")


def test_a_recipe_is_shown_as_written_resolved_and_with_the_origin_of_its_values(tiny_recipe: Path) -> None:
    assert ok("recipes", "show", "tiny-keepkv") == (ROOT / "recipes/tiny-keepkv.yaml").read_text()
    assert ok("recipes", "show", "keepkv-paper") == (ROOT / "recipes/keepkv-paper.yaml").read_text(), (
        "a base can be shown"
    )
    resolved = yaml.safe_load(ok("recipes", "show", "tiny-keepkv", "--resolved", "--set", "cache.budget=99"))
    assert resolved["cache"]["budget"] == 99
    assert resolved["cache"]["sinks"] == 4, "inherited"
    assert resolved["backend"]["threads"] == 0, "a default"
    origins = ok("recipes", "show", "tiny-keepkv", "--origin", "--set", "cache.budget=99")
    assert re.search(r"^cache\.budget +99 +--set cache\.budget=99$", origins, re.MULTILINE)
    assert re.search(r"^cache\.sinks +4 +recipes/tiny-base\.yaml:\d+$", origins, re.MULTILINE)
    assert re.search(r"^backend\.threads +0 +default$", origins, re.MULTILINE)
    data = json.loads(ok("recipes", "show", tiny_recipe, "--json"))
    assert data["resolved"]["cache"]["budget"] == 32
    assert "keepkv-paper" in failure(2, "recipes", "show", "keepkv-papr")


def test_methods_are_listed_with_their_parameters() -> None:
    methods = {entry["name"]: entry for entry in json.loads(ok("recipes", "methods", "--json"))}
    assert {"full", "streaming", "h2o", "keepkv"} <= methods.keys()
    shown = ok("recipes", "methods")
    for parameter in methods["keepkv"]["parameters"]:
        assert parameter["name"] in shown
