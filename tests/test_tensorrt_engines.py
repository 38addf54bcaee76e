"""Building and running TensorRT engines, on fakes of TensorRT and CUDA that compute with ONNX Runtime on the host."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import fake_cuda
import fake_tensorrt
import models
import numpy as np
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport import native
from kvexport.build.artifact import load_manifest
from kvexport.build.rebuild import rebuild
from kvexport.cli import app
from kvexport.errors import EnvironmentProblem, KvexportError, UsageError
from kvexport.tensorrt.cuda import Arena, Cuda
from kvexport.tensorrt.log import STEPS, make_monitor
from kvexport.validate.runner import validate_artifact

PROMPTS = ["the quick brown fox jumps over the lazy dog. " * 3, "abc", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]
NEW = 40  # tokens: several merges beyond the budget of 32 slots
PLUGINS = "plugins\nVoteAttention 1\nMergeCache 1\n"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_sync: None) -> fake_cuda.FakeCuda:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", "off")
    cuda = fake_cuda.FakeCuda()
    fake_tensorrt.install(monkeypatch, cuda)
    return cuda


@pytest.fixture
def plugins(gpu: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A plugin library that takes what ONNX Runtime's native operators take."""
    if native.library() is None:
        pytest.skip(f"{native.why_no_library()[0]}; to build them: make native")
    path = tmp_path / "libkvexport_tensorrt.so"
    path.write_text(PLUGINS)
    monkeypatch.setenv("KVEXPORT_TENSORRT_PLUGIN", str(path))
    return path


def engines(artifact: Path, out: Path, *settings: str) -> Path:
    changes = ["backend.name=tensorrt", *(f"backend.tensorrt.{setting}" for setting in settings)]
    return rebuild(artifact, out, changes)


def generated(artifact: Path, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in kvexport.load(artifact, **options).generate(PROMPTS, max_new_tokens=NEW, do_sample=False)]


# What an engine computes.


def test_engines_of_plugins_generate_what_onnx_runtime_does(tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest["operators"] == {"VoteAttention": "plugin", "MergeCache": "plugin"}
    assert manifest["engines"]["plugin_version"] == "1"
    assert generated(artifact) == generated(tiny_artifact)
    # One address for past and present: of all copies none is of a whole cache, and only lanes that are not aligned are gathered.
    size = max(entry[3] for entry in gpu.log if entry[0] == "cudaMemcpyAsync")
    assert size < kvexport.load(tiny_artifact).plan.bytes(3)


def test_engines_of_functions_generate_what_onnx_runtime_does(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest["operators"] == {"VoteAttention": "function", "MergeCache": "function"}
    assert manifest["engines"]["functions"]["MergeCache"] == "switched off by KVEXPORT_TENSORRT_PLUGIN"
    monkeypatch.setenv("KVEXPORT_OPERATORS", "off")
    assert generated(artifact) == generated(tiny_artifact)


def test_a_method_that_the_plugin_does_not_know_merges_from_its_function(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.IPluginCreatorV3One, "refused", "MergeCache")
    artifact = engines(tiny_artifact, tmp_path / "a")
    found = load_manifest(artifact)
    assert found["operators"] == {"VoteAttention": "plugin", "MergeCache": "function"}
    assert found["engines"]["functions"] == {"MergeCache": "the plugin does not take the method keepkv"}
    assert generated(artifact) == generated(tiny_artifact)
    with pytest.raises(EnvironmentProblem, match="does not take the method keepkv"):
        engines(tiny_artifact, tmp_path / "b", "plugin=always")
    shown = CliRunner().invoke(app, ["inspect", str(artifact)]).stdout
    assert "function: the plugin does not take the method keepkv" in shown
    assert fake_tensorrt.VERSION in shown


def test_state_is_read_and_written(tiny_artifact: Path, tmp_path: Path, plugins: Path) -> None:
    ours, theirs = (kvexport.load(path).new_backend(3) for path in (engines(tiny_artifact, tmp_path / "a"), tiny_artifact))
    ids = np.random.default_rng(0).integers(0, 64, (3, 16))
    for backend in (ours, theirs):
        for part, lengths in ((ids, [16, 4, 0]), (ids[:, :1], [1, 0, 1]), (ids[:, :7], [7, 7, 7]), (ids, [16, 16, 16])):
            backend.decode(part, np.array(lengths)[:, None])
        backend.merge(0, 2)
        backend.merge(1, 3)  # begins at an address that TensorRT would not take
    state, expected = ours.get_state(), theirs.get_state()
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, atol=1e-5, err_msg=name)
    other = kvexport.load(tmp_path / "a").new_backend(3)
    other.set_state(state, np.full((3, 1), 24))
    assert all(np.array_equal(array, state[name]) for name, array in other.get_state().items())
    ours.reset()
    assert not any(array.any() for array in ours.get_state().values())


def test_decode_is_one_graph_and_prefill_is_none(tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any) -> None:
    engine = kvexport.load(engines(tiny_artifact, tmp_path / "a"))
    engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert engine.timing.steps == NEW - 1
    # The first step does what no graph may hold; the second is captured and, as all others, launched.
    assert gpu.called("cudaGraphLaunch") == NEW - 2
    assert gpu.called("cudaStreamBeginCapture") == gpu.called("cudaGraphInstantiate") == 1
    allocated = gpu.called("cudaMalloc")
    engine.generate(PROMPTS, max_new_tokens=4, do_sample=False)
    assert gpu.called("cudaMalloc") == allocated


def test_where_a_graph_cannot_be_captured_decode_goes_on_without(tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    gpu.errors["cudaGraphInstantiate"] = fake_cuda.cudaError_t.cudaErrorStreamCaptureUnsupported
    assert generated(artifact) == generated(tiny_artifact)
    assert gpu.called("cudaGraphLaunch") == 0


def test_weights_that_travel_have_a_budget_and_no_graph(tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a", "weight_streaming=600")
    engine = kvexport.load(artifact)
    assert engine.sessions.decoder.weight_streaming_budget_v2 == 600  # type: ignore[attr-defined]
    assert [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)] == generated(tiny_artifact)
    assert gpu.called("cudaGraphLaunch") == 0


def test_version_compatible_plans_run_on_the_lean_runtime(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, plain = engines(tiny_artifact, tmp_path / "a", "version_compatible=true"), engines(tiny_artifact, tmp_path / "b")
    fake_tensorrt.install(monkeypatch, gpu, version="11.9.0.1", lean=True)
    engine = kvexport.load(artifact)
    assert engine.sessions._runtime.engine_host_code_allowed is True  # type: ignore[attr-defined]
    assert [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)] == generated(tiny_artifact)
    with pytest.raises(EnvironmentProblem, match="tensorrt"):
        kvexport.load(plain)


def test_the_graphs_of_a_tensorrt_artifact_run_on_onnx_runtime(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    assert generated(artifact, backend="onnxruntime") == generated(tiny_artifact)
    assert not fake_tensorrt.Runtime.opened
    with pytest.raises(UsageError, match="no backend cuda-graphs"):
        kvexport.load(artifact, backend="cuda-graphs")


# What a build does.


def test_profiles_and_options_are_the_recipes(tiny_artifact: Path, tmp_path: Path, plugins: Path) -> None:
    settings = ["version_compatible=true", "embed_plugin=true", "hardware_compatible=ampere_plus", "refit=true", "alias_state=true"]
    artifact = engines(tiny_artifact, tmp_path / "a", *settings, "workspace=1000000", "optimization_level=5")
    merge = fake_tensorrt.IBuilderConfig.seen
    assert merge is not None
    assert {flag.name for flag in merge._flags} == {"VERSION_COMPATIBLE", "REFIT"}
    assert merge.plugins_to_serialize == [str(plugins.resolve())]
    assert merge.hardware_compatibility_level.name == "AMPERE_PLUS"
    assert merge.builder_optimization_level == 5
    assert list(merge._pools.values()) == [1000000]
    assert [(feature.name, on) for feature, on in merge._previews.items()] == [("ALIASED_PLUGIN_IO_10_03", True)]
    shapes = profiles_in(artifact / "merge.plan")
    assert [p["past_key_values.1.votes"] for p in shapes] == [[[1, 2, 48], [1, 2, 48], [4, 2, 48]]]
    decode, prefill = profiles_in(artifact / "decoder.plan")
    assert decode["input_ids"] == [[1, 1], [4, 1], [4, 1]]
    assert prefill["input_ids"] == [[1, 1], [4, 16], [4, 16]]
    assert decode["past_length"] == prefill["query_length"] == [[1, 1], [4, 1], [4, 1]]
    assert decode["past_key_values.0.key"] == [[1, 2, 48, 8], [4, 2, 48, 8], [4, 2, 48, 8]]


def profiles_in(plan: Path) -> Any:
    data = plan.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["profiles"]


def test_the_manifest_and_the_log_say_what_was_built(tiny_artifact: Path, tmp_path: Path, plugins: Path) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    manifest, before = load_manifest(artifact), load_manifest(tiny_artifact)
    assert set(manifest["files"]) - set(before["files"]) == {"decoder.plan", "merge.plan", "tensorrt.log"}
    assert all(manifest["files"][name] == entry for name, entry in before["files"].items())
    about = manifest["engines"]
    assert (about["decoder"], about["merge"], about["tensorrt"]) == ("decoder.plan", "merge.plan", fake_tensorrt.VERSION)
    assert about["gpu"] == {"name": "Fake GPU", "compute_capability": [9, 0]}
    assert about["options"]["hardware_compatible"] == "none"
    assert manifest["recipe"]["backend"]["name"] == "tensorrt"
    assert (artifact / "tensorrt.log").read_text() == "[INFO] Building\n" * 2
    # The files that both have are one on the disk.
    assert (artifact / "decoder.onnx").samefile(tiny_artifact / "decoder.onnx")


def test_the_plugin_is_asked_with_the_fields_that_the_parser_would_give(tiny_artifact: Path, tmp_path: Path, plugins: Path) -> None:
    engines(tiny_artifact, tmp_path / "a")
    fields = fake_tensorrt.IPluginCreatorV3One.fields  # of the merge's last layer
    assert fields["method"] == ("CHAR", list(b"keepkv"))
    assert fields["budget"] == ("INT32", [32])
    assert fields["threshold"][0] == "FLOAT32"
    assert not {"plugin_version", "plugin_namespace"} & fields.keys()


def test_engines_are_built_anew_in_place(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    gpu.name, gpu.capability = "Another GPU", (12, 0)
    assert rebuild(artifact) == artifact
    assert load_manifest(artifact)["engines"]["gpu"]["name"] == "Another GPU"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "cache"]


def test_a_recipe_builds_engines_or_stops_at_the_graphs(tiny_recipe: Path, tmp_path: Path, gpu: Any) -> None:
    small = ["--set", "cache.method=full", "--set", "limits.max_length=32"]
    arguments = ["build", "--recipe", str(tiny_recipe), *small, "--backend", "tensorrt"]
    with models._remembered_traces():
        ran = CliRunner().invoke(app, [*arguments, "--stage", "onnx", "--out", str(tmp_path / "graphs")])
    assert ran.exit_code == 0, ran.output
    assert not gpu.log  # nothing was asked of a GPU
    assert "engines" not in load_manifest(tmp_path / "graphs")
    lacking = CliRunner().invoke(app, ["generate", str(tmp_path / "graphs"), "abc"])
    assert lacking.exit_code == 5
    assert f"kvexport build --from {tmp_path / 'graphs'}" in lacking.stderr
    ran = CliRunner().invoke(app, ["build", "--from", str(tmp_path / "graphs"), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["recipe"] == "tiny"
    assert "building decoder.plan" in ran.stderr
    manifest = load_manifest(tmp_path / "graphs")
    assert manifest["engines"]["merge"] is None  # `full` merges nothing
    assert manifest["operators"] == {"VoteAttention": "function", "MergeCache": None}
    with models._remembered_traces():
        ran = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "both")])
    assert ran.exit_code == 0, ran.output
    both = load_manifest(tmp_path / "both")
    assert both["engines"] == manifest["engines"]
    text = CliRunner().invoke(app, ["generate", str(tmp_path / "both"), "abc", "--max-new-tokens", "5"])
    assert len(text.stdout.rstrip("\n")) == 5, text.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "{a}"], "is for onnxruntime"),
        (["--from", "{a}", "--recipe", "tiny-keepkv"], "own recipe and graphs"),
        (["--from", "{a}", "--stage", "onnx"], "own recipe and graphs"),
        (["--from", "{a}", "--backend", "tensorrt", "--set", "cache.budget=3"], "would change the graphs"),
        (["--from", "{a}", "--backend", "tensorrt", "--set", "backend.tensorrt.embed_plugin=true"], "needs version_compatible"),
        (["--from", "{a}", "--backend", "tensorrt", "--set", "backend.tensorrt.plugin=maybe"], "backend.tensorrt.plugin"),
        (["--from", "{a}", "--backend", "tensorflow"], "backend.name"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(tiny_artifact: Path, gpu: Any, arguments: list[str], said: str) -> None:
    ran = CliRunner().invoke(app, ["build", *(a.format(a=tiny_artifact) for a in arguments)])
    assert ran.exit_code == 2, ran.output
    assert said in ran.stderr


def test_what_was_timed_is_kept_and_damage_is_no_reason_to_stop(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    engines(tiny_artifact, tmp_path / "a")
    (cache,) = (tmp_path / "cache" / "kvexport" / "tensorrt").iterdir()
    assert cache.name == f"{fake_tensorrt.VERSION}-Fake-GPU.timing"
    assert cache.read_bytes() == b"timed timed "  # the decoder's and then the merge's
    engines(tiny_artifact, tmp_path / "a")
    assert cache.read_bytes() == b"timed " * 4
    cache.write_bytes(b"damaged")
    engines(tiny_artifact, tmp_path / "a")
    assert cache.read_bytes() == b"timed timed "


def test_a_graph_that_tensorrt_refuses_is_named(tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensorrt.OnnxParser, "refused", "MatMul")
    with pytest.raises(KvexportError, match=r"parser refused decoder.onnx: In node .* MatMul"):
        engines(tiny_artifact, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_build_that_fails_leaves_the_artifact_and_says_why(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    before = (artifact / "manifest.json").read_bytes()
    monkeypatch.setattr(fake_tensorrt.Builder, "failing", "Could not find any implementation for node x")
    with pytest.raises(KvexportError, match=r"decoder.onnx: Could not find any implementation"):
        rebuild(artifact)
    assert (artifact / "manifest.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "cache"]


def test_an_interrupt_ends_the_build(tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensorrt.Builder, "during_build", staticmethod(lambda: os.kill(os.getpid(), signal.SIGINT)))
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


def test_an_arena_is_aligned_and_its_twin_laid_out_alike(gpu: Any) -> None:
    cuda = Cuda()
    arena = Arena(cuda, {"a": ((3, 5), np.float16), "b": ((2,), np.int64), "c": ((1, 100), np.float32)}, pinned=True)
    assert [arena.pointer(name) % 256 for name in "abc"] == [0, 0, 0]
    assert [arena.pointer(name) - arena.device for name in "abc"] == [0, 256, 512]
    assert arena.nbytes == 1024
    stream = cuda.stream()
    for name in "abc":
        arena.array(name)[...] = ord(name)
    arena.upload(stream)
    cuda.synchronize(stream)
    arena.array("b")[...] = 0
    assert not arena.array("b").any()
    arena.download(stream)
    cuda.synchronize(stream)
    assert (arena.array("b") == ord("b")).all()
    assert arena.array("c", (1, 7)).shape == (1, 7)
    kept = arena.array("a")
    pinned = gpu.called("cudaFreeHost")
    del arena
    assert gpu.called("cudaFree") == 1
    assert gpu.called("cudaFreeHost") == pinned  # an array still looks at it
    assert (kept == ord("a")).all()
    del kept
    assert gpu.called("cudaFreeHost") == pinned + 1


# Validating.


class Runner:
    """polygraphy's TrtRunner, over a fake engine."""

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


def test_engines_are_validated_as_sessions_are(tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polygraphy.backend import trt

    monkeypatch.setattr(trt, "TrtRunner", Runner)
    Runner.profiles.clear()
    result = validate_artifact(engines(tiny_artifact, tmp_path / "a"), length=54, batch=2)
    assert result.passed, result.problem
    assert Runner.profiles == [0, 1, 0]
    assert result.backend == "tensorrt"
    assert result.operators == dict.fromkeys(("VoteAttention", "MergeCache"), "plugin")
    assert {step["phase"] for step in result.steps} == {"prefill", "decode", "merge"}


def test_validating_with_all_backends_names_those_it_could_not_reach(tiny_artifact: Path, gpu: Any) -> None:
    ran = CliRunner().invoke(app, ["validate", str(tiny_artifact), "--length", "8", "--batch", "1", "--backend", "all", "--json"])
    assert ran.exit_code == 0, ran.output
    assert [result["backend"] for result in json.loads(ran.stdout)] == ["onnxruntime cpu"]
    assert "not compared with onnxruntime cuda: " in ran.stderr
    assert "not compared with tensorrt: " in ran.stderr
    assert "has graphs and no engines yet" in ran.stderr
