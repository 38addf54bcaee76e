"""Tests of running TensorRT engines, on fakes of TensorRT and CUDA that compute with ONNX Runtime on the host."""

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.backends.tensorrt import engines as building
from kvexport.backends.tensorrt.cuda import Arena, Cuda
from kvexport.commands.app import app
from kvexport.errors import EnvironmentProblem, UsageError
from tests.support import fake_cuda, fake_tensorrt
from tests.support.tensorrt_artifacts import NEW, PROMPTS, engines, generated
from tests.support.with_top_logits import with_top_logits


def test_engines_of_plugins_generate_the_tokens_of_onnx_runtime(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any
) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest.operators == {"VoteAttention": "plugin", "MergeCache": "plugin"}
    assert manifest.engines["tensorrt"]["plugin_version"] == "1"
    assert generated(artifact) == generated(tiny_artifact)
    # Past and present state have one address. No copy is as large as a cache: only unaligned lanes are gathered.
    size = max(entry[3] for entry in gpu.log if entry[0] == "cudaMemcpyAsync")
    assert size < kvexport.load(tiny_artifact).plan.bytes(3)


def test_engines_of_functions_generate_the_tokens_of_onnx_runtime(
    tiny_artifact: Path, tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest.operators == {"VoteAttention": "function", "MergeCache": "function"}
    assert manifest.engines["tensorrt"]["functions"]["MergeCache"] == "switched off by KVEXPORT_TENSORRT_PLUGIN"
    monkeypatch.setenv("KVEXPORT_OPERATORS", "off")
    assert generated(artifact) == generated(tiny_artifact)


def test_a_method_that_the_plugin_does_not_know_merges_from_its_function(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.IPluginCreatorV3One, "refused", "MergeCache")
    artifact = engines(tiny_artifact, tmp_path / "a")
    manifest = load_manifest(artifact)
    assert manifest.operators == {"VoteAttention": "plugin", "MergeCache": "function"}
    assert manifest.engines["tensorrt"]["functions"] == {"MergeCache": "the plugin does not take node layer.0.merge"}
    assert generated(artifact) == generated(tiny_artifact)
    with pytest.raises(EnvironmentProblem, match=r"does not take node layer\.0\.merge"):
        engines(tiny_artifact, tmp_path / "b", "plugin=always")
    shown = CliRunner().invoke(app, ["inspect", str(artifact)]).stdout
    assert "function: the plugin does not take node layer.0.merge" in shown
    assert fake_tensorrt.VERSION in shown


def test_state_is_read_and_written(tiny_artifact: Path, tmp_path: Path, plugins: Path) -> None:
    on_tensorrt, reference = (
        kvexport.load(path).new_state(3) for path in (engines(tiny_artifact, tmp_path / "a"), tiny_artifact)
    )
    ids = np.random.default_rng(0).integers(0, 64, (3, 16))
    for backend in (on_tensorrt, reference):
        for part, lengths in ((ids, [16, 4, 0]), (ids[:, :1], [1, 0, 1]), (ids[:, :7], [7, 7, 7]), (ids, [16, 16, 16])):
            backend.decode(part, np.array(lengths)[:, None])
        backend.merge(0, 2)
        backend.merge(1, 3)  # the lane's address is not aligned as TensorRT requires
    state, expected = on_tensorrt.get_state(), reference.get_state()
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, atol=1e-5, err_msg=name)
    other = kvexport.load(tmp_path / "a").new_state(3)
    other.set_state(state, np.full((3, 1), 24))
    assert all(np.array_equal(array, state[name]) for name, array in other.get_state().items())
    on_tensorrt.clear(0, 3)
    assert not any(array.any() for array in on_tensorrt.get_state().values())


DECODE, MERGE = 2, 1  # engines per graph: the decoder and the engine of the largest logits; the merge


def graphs(gpu: Any, call: str) -> Counter[int]:
    """Return how often a function was called with a CUDA graph, by the number of engines in the graph."""
    captured = [entry[1] for entry in gpu.log if entry[0] == call]
    return Counter(sum("IExecutionContext" in work.__qualname__ for work in graph) for graph in captured)


def test_decode_is_one_graph_and_prefill_is_none(tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any) -> None:
    engine = kvexport.load(engines(tiny_artifact, tmp_path / "a"))
    engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert engine.timing.steps == NEW - 1
    # The first step of a kind includes work that no graph may hold. The second one is captured and, like all later
    # ones, launched. One step has tokens of the host. The others have those of the GPU, and buffers in turn.
    assert graphs(gpu, "cudaGraphLaunch")[DECODE] == NEW - 1 - 3
    assert graphs(gpu, "cudaGraphInstantiate")[DECODE] == 2
    allocated = gpu.called("cudaMalloc")
    engine.generate(PROMPTS, max_new_tokens=4, do_sample=False)
    assert gpu.called("cudaMalloc") == allocated


def test_merges_of_one_lane_and_of_the_first_ones_are_graphs_from_their_second_on(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any
) -> None:
    states = [kvexport.load(path).new_state(4) for path in (engines(tiny_artifact, tmp_path / "a"), tiny_artifact)]
    rng = np.random.default_rng(0)
    stay, others = [(0, 4), (1, 2), (0, 2), (3, 4)], [(1, 3), (2, 4)]
    for first, last in [*stay, *others] * 3:
        ids, lengths = rng.integers(0, 64, (4, 16)), rng.integers(0, 17, (4, 1))
        for state in states:
            state.merge(0, 4)
            state.decode(ids, lengths)
            state.merge(first, last)
    actual, expected = (state.get_state() for state in states)
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, atol=1e-5, err_msg=name)
    assert graphs(gpu, "cudaGraphInstantiate") == {MERGE: len(stay)}
    merges = 18 + 3 * len(stay)  # (0, 4) every time, and the slices of the list
    assert graphs(gpu, "cudaGraphLaunch") == {MERGE: merges - len(stay)}


def test_decode_of_each_number_of_lanes_keeps_its_graph(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any
) -> None:
    """Other lanes run without a CUDA graph. One lane runs with its own optimization profile."""
    path = engines(tiny_artifact, tmp_path / "a")
    states = [kvexport.load(one).new_state(3) for one in (path, tiny_artifact)]
    rng = np.random.default_rng(0)
    for first, count in [(0, 1), (0, 3), (2, 1), (1, 2), (0, 2)] * 4:
        ids, lengths = rng.integers(0, 64, (count, 1)), rng.integers(0, 2, (count, 1))
        logits = [state.decode(ids, lengths, first) for state in states]
        np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
    assert graphs(gpu, "cudaGraphInstantiate") == {DECODE: 4}
    assert graphs(gpu, "cudaGraphLaunch") == {DECODE: 3 * 4}
    (decode,) = (phase for phase in states[0]._phases.values() if phase.tokens == 1)
    profiles = {key: call.context._profile["input_ids"] for key, call in decode._calls.items()}
    assert profiles[0, 1] == profiles[2, 1] == [[1, 1]] * 3
    assert profiles[0, 2] == profiles[None] == [[1, 1], [4, 1], [4, 1]]


def test_an_engine_without_a_profile_for_one_lane_runs(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of an older version, whose decoder has two optimization profiles, generates the same tokens."""
    whole = building.profiles
    with monkeypatch.context() as older:
        older.setattr(building, "profiles", lambda kind, limits: whole(kind, limits)[:2])
        artifact = engines(tiny_artifact, tmp_path / "a")
    assert generated(artifact) == generated(tiny_artifact)


def test_graphs_are_freed_with_their_engine(tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any) -> None:
    engine = kvexport.load(engines(tiny_artifact, tmp_path / "a"))
    for count in (3, 2, 3, 1):
        engine.generate(PROMPTS[:count], max_new_tokens=4, do_sample=False)
    instantiated = gpu.called("cudaGraphInstantiate")
    del engine
    gc.collect()
    assert instantiated == gpu.called("cudaGraphDestroy") == gpu.called("cudaGraphExecDestroy") >= 3


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": True, "seed": 1, "top_k": 5}, {"do_sample": True, "seed": 1, "top_k": 0}],
)
def test_logits_stay_on_the_gpu_if_the_largest_determine_the_token(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any, options: dict[str, Any]
) -> None:
    engine = kvexport.load(engines(with_top_logits(tiny_artifact, tmp_path / "graphs", 8), tmp_path / "a"))
    # So that no other copy has the size of the prompts' logits, or of one row: calls that run ahead copy lengths alone.
    prompts, engine.options = PROMPTS[:2], replace(engine.options, ahead=False)
    engine.generate(prompts, max_new_tokens=2, **options)
    gpu.log.clear()
    tokens = [c.token_ids for c in engine.generate(prompts, max_new_tokens=NEW, **options)]
    assert tokens == [
        c.token_ids for c in kvexport.load(tiny_artifact).generate(prompts, max_new_tokens=NEW, **options)
    ]
    chunks = -(-len(prompts[0]) // 16)
    copied = [entry[3] for entry in gpu.log if entry[0] == "cudaMemcpyAsync"]
    settled = options.get("top_k") != 0
    assert engine.timing.whole_rows == (0 if settled else (NEW - 1) * len(prompts))
    # The second prompt is one chunk, so all later chunks are of the first lane alone.
    assert copied.count(len(prompts) * 64 * 4) == 1 + (0 if settled else NEW - 1)
    assert copied.count(64 * 4) == chunks - 1


def test_one_row_leaves_the_gpu_if_the_largest_logits_do_not_determine_the_token(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any
) -> None:
    engine = kvexport.load(engines(with_top_logits(tiny_artifact, tmp_path / "graphs", 8), tmp_path / "a"))
    settings: dict[str, Any] = {"do_sample": True, "seed": 1, "top_k": 0, "top_p": 0.6}
    tokens = [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=NEW, **settings)]
    assert tokens == [
        c.token_ids for c in kvexport.load(tiny_artifact).generate(PROMPTS, max_new_tokens=NEW, **settings)
    ]
    rows = engine.timing.whole_rows
    assert rows
    assert rows < (NEW - 1) * len(PROMPTS)
    # All three prompts share a first chunk. After it the first and the last prompt are not neighbours, and are read
    # separately.
    alone = sum(-(-len(PROMPTS[i]) // 16) - 1 for i in (0, 2))
    assert sum(entry[0] == "cudaMemcpyAsync" and entry[3] == 64 * 4 for entry in gpu.log) == rows + alone


def test_decode_continues_without_a_graph_that_cannot_be_captured(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, gpu: Any
) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    gpu.errors["cudaGraphInstantiate"] = fake_cuda.cudaError_t.cudaErrorStreamCaptureUnsupported
    engine = kvexport.load(artifact)
    answers = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert [answer.token_ids for answer in answers] == generated(tiny_artifact)
    assert gpu.called("cudaGraphLaunch") == 0
    warnings = {line.partition(":")[0] for line in engine.model.log.lines if "CUDA graph" in line}  # type: ignore[attr-defined]
    assert warnings == {f"[WARNING] {what} runs without a CUDA graph" for what in ("decode", "merging")}


def test_the_graphs_of_a_tensorrt_artifact_run_on_onnx_runtime(tiny_artifact: Path, tmp_path: Path, gpu: Any) -> None:
    artifact = engines(tiny_artifact, tmp_path / "a")
    assert generated(artifact, backend="onnxruntime") == generated(tiny_artifact)
    assert not fake_tensorrt.Runtime.opened
    with pytest.raises(UsageError, match="no backend cuda-graphs"):
        kvexport.load(artifact, backend="cuda-graphs")


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
    assert gpu.called("cudaFreeHost") == pinned  # an array still refers to the memory
    assert (kept == ord("a")).all()
    del kept
    assert gpu.called("cudaFreeHost") == pinned + 1
