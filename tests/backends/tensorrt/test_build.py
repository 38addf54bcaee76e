"""Tests of building and validating TensorRT engines, on fakes of TensorRT and CUDA."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt.log import STEPS, make_monitor
from kvexport.backends.tensorrt.model import Phase
from kvexport.commands.app import app
from kvexport.errors import KvexportError
from kvexport.export.rebuild import rebuild
from kvexport.schema.operators import MERGE_CACHE
from kvexport.schema.policy import FIT
from kvexport.validate.runner import validate_artifact
from tests.support import fake_tensorrt
from tests.support.tensorrt_artifacts import engines
from tests.support.with_top_logits import with_top_logits


def test_profiles_and_options_are_the_recipes(tiny_artifact: Path, tmp_path: Path, plugins: Path) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a", "optimization_level=5")
    decoder, merge, top_logits = fake_tensorrt.IBuilderConfig.seen
    assert {config.builder_optimization_level for config in (decoder, merge, top_logits)} == {5}
    shapes = profiles_in(artifact / "merge.plan")
    assert [p["past_key_values.1.votes"] for p in shapes] == [[[1, 96], [1, 96], [4, 96]]]
    decode, prefill, single = profiles_in(artifact / "decoder.plan")
    assert single["input_ids"] == [[1, 1]] * 3
    assert decode["input_ids"] == [[1, 1], [4, 1], [4, 1]]
    assert prefill["input_ids"] == [[1, 1], [4, 16], [4, 16]]
    assert profiles_in(artifact / "top_logits.plan") == [{"logits": [[1, 1, 64], [4, 1, 64], [4, 1, 64]]}]
    assert decode["past_length"] == prefill["query_length"] == [[1, 1], [4, 1], [4, 1]]
    assert decode["past_key_values.0.key"] == [[1, 96, 8], [4, 96, 8], [4, 96, 8]]


def test_progress_reaches_the_builder(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    shown: dict[str, int] = {}

    @contextmanager
    def progress(title: str, total: int | None) -> Iterator[Any]:
        shown[title] = 0

        def advance(amount: int) -> None:
            shown[title] += amount

        yield SimpleNamespace(advance=advance, total=total)

    rebuild(tiny_artifact, tmp_path / "a", ["backend.name=tensorrt"], progress=progress)
    plans = ("decoder.plan", "merge.plan", "top_logits.plan")
    assert {title: amount for title, amount in shown.items() if title.startswith("building")} == {
        f"building {p}": STEPS for p in plans
    }


def profiles_in(plan: Path) -> Any:
    data = plan.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["profiles"]


def test_the_manifest_and_the_log_describe_the_built_engines(
    tiny_artifact: Path, tmp_path: Path, plugins: Path
) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    manifest, before = load_manifest(artifact), load_manifest(tiny_artifact)
    assert set(manifest.files) - set(before.files) == {"top_logits.plan", "decoder.plan", "merge.plan", "tensorrt.log"}
    assert all(manifest.files[name] == entry for name, entry in before.files.items())
    about = manifest.engines["tensorrt"]
    assert (about["decoder"], about["merge"], about["tensorrt"]) == (
        "decoder.plan",
        "merge.plan",
        fake_tensorrt.VERSION,
    )
    assert about["gpu"] == {"name": "Fake GPU", "compute_capability": [9, 0]}
    assert manifest.recipe.backend.name == "tensorrt"
    assert (artifact / "tensorrt.log").read_text() == "[INFO] Building\n" * 3
    # Files that both artifacts have are hard links to the same file.
    assert (artifact / "decoder.onnx").samefile(tiny_artifact / "decoder.onnx")


def test_the_plugin_gets_the_fields_that_the_parser_would_pass(
    tiny_artifact: Path, tmp_path: Path, plugins: Path
) -> None:
    engines(tiny_artifact, tmp_path / "a")
    fields = fake_tensorrt.IPluginCreatorV3One.fields  # the fields of the last layer's merge
    assert fields.keys() == {
        attribute.name for attribute in MERGE_CACHE.attributes if "rotary" not in attribute.name
    } - {"capacity", "inverse_frequencies", "cache_positions", "value_prefix", *(attribute.name for attribute in FIT)}
    assert fields["merge"] == ("CHAR", list(b"zip"))
    assert fields["budget"] == ("INT32", [32, 32])
    assert fields["threshold"][0] == "FLOAT32"
    assert not {"plugin_version", "plugin_namespace"} & fields.keys()


def test_engines_are_rebuilt_in_place(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    gpu.name, gpu.capability = "Another GPU", (12, 0)
    assert rebuild(artifact) == artifact
    assert load_manifest(artifact).engines["tensorrt"]["gpu"]["name"] == "Another GPU"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_recipe_builds_engines_or_stops_at_the_graphs(tiny_recipe: Path, tmp_path: Path, gpu: Any) -> None:
    small = ["--set", "cache.method=full", "--set", "limits.max_length=32"]
    arguments = ["build", "--recipe", str(tiny_recipe), *small, "--backend", "tensorrt"]
    ran = CliRunner().invoke(app, [*arguments, "--stage", "onnx", "--out", str(tmp_path / "graphs")])
    assert ran.exit_code == 0, ran.output
    assert not gpu.log  # no function of CUDA was called
    assert load_manifest(tmp_path / "graphs").engines == {}
    lacking = CliRunner().invoke(app, ["generate", str(tmp_path / "graphs"), "abc"])
    assert lacking.exit_code == 5
    assert f"kvexport build --from {tmp_path / 'graphs'}" in lacking.stderr
    ran = CliRunner().invoke(app, ["build", "--from", str(tmp_path / "graphs"), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["recipe"] == "tiny"
    assert "building decoder.plan" in ran.stderr
    manifest = load_manifest(tmp_path / "graphs")
    assert manifest.engines["tensorrt"]["merge"] is None  # `full` merges nothing
    assert manifest.operators == {"VoteAttention": "function", "MergeCache": None}
    ran = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "both")])
    assert ran.exit_code == 0, ran.output
    both = load_manifest(tmp_path / "both")
    assert both.engines == manifest.engines
    text = CliRunner().invoke(app, ["generate", str(tmp_path / "both"), "abc", "--max-new-tokens", "5"])
    assert len(text.stdout.rstrip("\n")) == 5, text.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "{a}"], "is for onnxruntime"),
        (["--from", "{a}", "--recipe", "tiny-keepkv"], "own recipe and graphs"),
        (["--from", "{a}", "--stage", "onnx"], "own recipe and graphs"),
        (["--from", "{a}", "--backend", "tensorrt", "--set", "cache.budget=3"], "would change the graphs"),
        (
            ["--from", "{a}", "--backend", "tensorrt", "--set", "backend.tensorrt.plugin=maybe"],
            "backend.tensorrt.plugin",
        ),
        (["--from", "{a}", "--backend", "tensorflow"], "backend.name"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(
    tiny_artifact: Path, gpu: Any, arguments: list[str], message: str
) -> None:
    ran = CliRunner().invoke(app, ["build", *(a.format(a=tiny_artifact) for a in arguments)])
    assert ran.exit_code == 2, ran.output
    assert message in ran.stderr


def test_a_graph_that_tensorrt_refuses_is_named(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.OnnxParser, "refused", "MatMul")
    with pytest.raises(KvexportError, match=r"parser refused decoder.onnx: In node .* MatMul"):
        engines(tiny_artifact, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_failed_build_leaves_the_artifact_and_gives_a_reason(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    before = (artifact / "manifest.json").read_bytes()
    monkeypatch.setattr(fake_tensorrt.Builder, "failing", "Could not find any implementation for node x")
    with pytest.raises(KvexportError, match=r"decoder.onnx: Could not find any implementation"):
        rebuild(artifact)
    assert (artifact / "manifest.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_an_interrupt_ends_the_build(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake_tensorrt.Builder, "during_build", staticmethod(lambda: os.kill(os.getpid(), signal.SIGINT))
    )
    previous = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engines(tiny_artifact, tmp_path / "a")
    assert signal.getsignal(signal.SIGINT) == previous
    assert not (tmp_path / "a").exists()


def test_progress_advances_to_its_end_and_never_back() -> None:
    class Task:
        def __init__(self) -> None:
            self.amounts: list[int] = []

        def advance(self, amount: int) -> None:
            self.amounts.append(amount)

    task = Task()
    monitor = make_monitor(fake_tensorrt, task)
    monitor.phase_start("build", None, 2)
    for step in range(2):
        monitor.phase_start("time", "build", 5)
        for inner in range(3 if step else 5):  # a phase may end before its last step
            assert monitor.step_complete("time", inner)
        monitor.phase_finish("time")
        assert monitor.step_complete("build", step)
    monitor.phase_finish("build")
    assert sum(task.amounts) == STEPS
    assert min(task.amounts) > 0
    monitor.interrupted = True
    assert monitor.step_complete("build", 1) is False


# Validating.


class Runner:
    profiles: list[int] = []  # noqa: RUF012

    def __init__(self, engine: Any, name: str, optimization_profile: int) -> None:
        self.session = engine._session
        self.profiles.append(optimization_profile)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None: ...

    def infer(self, feed: dict[str, Any]) -> dict[str, Any]:
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, feed), strict=True))


def test_engines_are_validated_as_sessions_are(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polygraphy.backend import trt

    monkeypatch.setattr(trt, "TrtRunner", Runner)
    Runner.profiles.clear()
    result = validate_artifact(engines(tiny_artifact, tmp_path / "a"), length=54, batch=2)
    assert result.passed, result.problem
    assert Runner.profiles == [0, 1, 0]
    assert result.backend == "tensorrt"
    assert result.top_logits_hold is True
    assert result.operators == dict.fromkeys(("VoteAttention", "MergeCache"), "plugin")
    assert {step["phase"] for step in result.steps} == {"prefill", "decode", "merge"}


def test_wrong_state_of_any_call_and_layer_is_detected(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polygraphy.backend import trt

    class Wrong(Runner):
        calls = 0

        def infer(self, feed: dict[str, Any]) -> dict[str, Any]:
            outputs = super().infer(feed)
            if self.profiles and "input_ids" in feed and feed["input_ids"].shape[1] == 1:
                Wrong.calls += 1
                used = feed["past_key_values.1.votes"] > 0
                if Wrong.calls == 2:
                    outputs["present.1.position"] += used
                elif Wrong.calls == 3:
                    outputs["present.1.votes"] = np.where(used, 1.0, outputs["present.1.votes"])
                elif Wrong.calls == 4:
                    outputs["present.1.score"] = feed["past_key_values.1.score"]
            return outputs

    monkeypatch.setattr(trt, "TrtRunner", Wrong)
    result = validate_artifact(engines(tiny_artifact, tmp_path / "a"), length=54, batch=2)
    assert [(m.phase, m.layer, m.tensor) for m in result.mismatches] == [
        ("decode", 1, tensor) for tensor in ("position", "votes", "score")
    ]


def test_layers_alone_are_held_and_engines_are_built_for_it(
    tiny_artifact: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polygraphy.backend import trt

    monkeypatch.setattr(trt, "TrtRunner", Runner)
    arguments = ["--layers", "1", "--length", "24", "--batch", "1", "--backend", "tensorrt", "--json"]
    ran = CliRunner().invoke(app, ["validate", str(tiny_artifact), *arguments])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert (result["backend"], result["layers"], result["artifact"]) == ("tensorrt", [1, 2], str(tiny_artifact))
    assert "building decoder.plan" in ran.stderr
    assert load_manifest(tiny_artifact).engines == {}


def test_top_logits_that_are_not_the_largest_are_detected(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polygraphy.backend import trt

    monkeypatch.setattr(trt, "TrtRunner", Runner)
    artifact = engines(with_top_logits(tiny_artifact, tmp_path / "graphs", 8), tmp_path / "a")
    original = Phase.top_logits

    def shifted(phase: Any, lane: int) -> Any:
        right = original(phase, lane)
        return replace(right, ids=right.ids + 1)

    monkeypatch.setattr(Phase, "top_logits", shifted)
    result = validate_artifact(artifact, length=20, batch=1)
    assert not result.passed
    assert result.problem == "the top logits that the device returned are not the largest logits"
