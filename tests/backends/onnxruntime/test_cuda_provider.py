"""ONNX Runtime on CUDA, as far as a machine without a GPU can test it.

The binding of the CUDA kernels is compiled for the host and registered with the CPU provider. It runs under whole
engines and malformed nodes. The runtime's device path runs over memory that ONNX Runtime holds.

`test_devices.py` tests the messages about missing parts, `test_cuda_build.py` compiles the same binding with nvcc, and
`tools/gpu_check` runs it on a GPU.
"""

import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from kvexport.artifact.reading import load_manifest
from kvexport.backends.onnxruntime import device_array, devices
from kvexport.backends.onnxruntime import operators as native
from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.backends.onnxruntime.model import OnnxRuntimeState
from kvexport.backends.onnxruntime.model_sessions import DECODER, MERGE, NO_GRAPH, TOP_LOGITS
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import EnvironmentProblem
from kvexport.export.build import build
from kvexport.plan.cache import CachePlan
from plugins.building import make
from tests.backends.onnxruntime.test_operators_nodes import BUDGET, CAPACITY, LISTED, layer_state, merging
from tests.export.test_head_budgets import UNEQUAL, recipe_of
from tests.support.on_device import onto_device
from tests.support.one_node import (
    DV,
    VOTE_ATTENTION,
    C,
    H,
    model,
    session,
    vote_attention_inputs,
    vote_attention_shapes,
)
from tests.support.paths import ROOT
from tests.support.tiny_model import PROMPTS, generated

ON_HOST = make.host_output("onnxruntime-cuda-host")
needs_binding = pytest.mark.skipif(
    not make.is_current("onnxruntime-cuda-host"),
    reason="not reached: the binding is not compiled for the host (make cuda-host)",
)


@pytest.fixture
def on_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, str(ON_HOST))


# The binding.


@needs_binding
def test_an_engine_on_the_binding_equals_the_functions(
    tiny_artifact: Path, on_the_binding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementations = native.implementations(load(tiny_artifact).manifest)
    assert {str(how) for how in implementations.values()} == {"native, CUDA kernels on the host"}
    tokens = generated(load(tiny_artifact))
    monkeypatch.setenv(native.VARIABLE, "off")
    assert generated(load(tiny_artifact)) == tokens


@needs_binding
def test_heads_with_budgets_of_their_own_equal_the_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, answers = build(recipe_of(UNEQUAL), tmp_path / "heads", name="heads"), []
    for setting in (str(ON_HOST), "off"):
        monkeypatch.setenv(native.VARIABLE, setting)
        completions = load(path).generate(PROMPTS[:2], max_new_tokens=40)
        answers.append([completion.token_ids for completion in completions])
    assert answers[0] == answers[1] and len(answers[0][0]) == 40


@needs_binding
def test_malformed_nodes_are_refused_as_on_the_cpu_and_in_place_has_the_same_bits() -> None:
    # Rows of 12 half-precision values are not whole vectors, which these kernels require. They do not read values from
    # keys: tests/conformance/test_values_in_keys.py tests their refusal.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["tests/backends/onnxruntime/test_operators_nodes.py"]
    selection = [
        "-k",
        "not float16 and not random_nodes and not in_keys and not from_keys and not prefix-of and not ring",
    ]
    environment = {**os.environ, native.VARIABLE: str(ON_HOST)}
    done = subprocess.run(
        [*command, *selection], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout


@needs_binding
def test_caches_of_float16_have_the_bits_of_the_kernels_called_by_themselves(on_the_binding: None) -> None:
    from kvexport.methods.slots import Statistic
    from kvexport.ops.vote_attention import VoteAttentionAttributes
    from tests.conformance.cuda_library import CudaOnHost

    feed = vote_attention_inputs(np.random.default_rng(3), 2, 3, 9)
    stored = {name for name in feed if name in ("query", "key", "value", "past_key", "past_value")}
    # Rows of the values' size, 12, are not whole vectors of two-byte numbers.
    feed |= {name: np.concatenate([feed[name]] * 2, -1) for name in ("value", "past_value")}
    feed = {name: x.astype(np.float16) if name in stored else np.ascontiguousarray(x) for name, x in feed.items()}
    attributes = VoteAttentionAttributes(VOTE_ATTENTION["scale"], 1.0, (Statistic("log_ema", 0.9),))
    expected = CudaOnHost().layer_vote_attention(feed, attributes, [C] * H)
    shapes = {**vote_attention_shapes(), "value": ["B", 2, "T", 24], "past_value": ["B", "S", 24]}
    one = session(model("VoteAttention", VOTE_ATTENTION, shapes, half=True))
    actual = one.run([*expected], feed)
    assert [x.tobytes() for x in actual] == [x.tobytes() for x in expected.values()]


@needs_binding
def test_a_merge_of_float16_on_cuda_has_the_bits_of_the_kernels_called_by_themselves(on_the_binding: None) -> None:
    from kvexport.methods import all_methods
    from kvexport.ops.merge_cache import MergeCacheAttributes
    from tests.conformance.cuda_library import CudaOnHost

    state = layer_state(used=(16, 9))
    # Rows of the values' size, 12, are not whole vectors of two-byte numbers.
    half = np.float16
    state |= {"key": state["key"].astype(half), "value": np.concatenate([state["value"]] * 2, -1).astype(half)}
    attributes = [MergeCacheAttributes(all_methods()["h2o"](), b, sinks=1, recent=2) for b in BUDGET]
    expected = CudaOnHost().caller.layer_merge_cache(state, attributes, CAPACITY)
    one = merging(LISTED | {"sinks": 1, "recent": [2, 2]}, {"value": ["B", "S", 2 * DV]}, half=True)
    names = [f"present_{name}" for name in state]
    actual = dict(zip(names, one.run(names, state), strict=True))
    assert all(x.tobytes() == expected[name].tobytes() for name, x in actual.items())
    assert (actual["present_votes"] > 0).sum() == 2 * sum(BUDGET)


@needs_binding
def test_runs_at_the_same_time_and_of_growing_size_share_a_workspace(on_the_binding: None) -> None:
    rng = np.random.default_rng(0)
    one = session(model("VoteAttention", VOTE_ATTENTION, vote_attention_shapes()))
    feeds = [vote_attention_inputs(rng, 1 + i, 1 + i, 40 * i, 60 * (1 + i)) for i in range(6)]
    alone = [one.run(None, feed) for feed in feeds]
    wrong: list[int] = []

    def run(order: list[int]) -> None:
        for i in order:
            if any(a.tobytes() != b.tobytes() for a, b in zip(one.run(None, feeds[i]), alone[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(list(rng.permutation(6)) * 3,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_binding
def test_a_layer_that_the_kernels_do_not_take_runs_from_its_function(tiny_artifact: Path, on_the_binding: None) -> None:
    manifest = load_manifest(tiny_artifact)
    assert all(how.native for how in native.implementations(manifest).values())
    first, second = manifest.cache.caches
    odd = replace(second, dtype="float16", value_size=20)
    manifest = replace(manifest, cache=CachePlan((first, odd)))
    why = "layer 1 has no native kernel: a row of keys or values is not a whole number of 16-byte vectors"
    assert {str(how) for how in native.implementations(manifest).values()} == {f"function: {why}"}
    long = replace(second, budget=(49_000,) * second.kv_heads, capacity=(50_000,) * second.kv_heads)
    why = "function: layer 1 has no native kernel: the cache has more slots"
    implementations = native.implementations(replace(manifest, cache=CachePlan((first, long))))
    assert str(implementations["MergeCache"]).startswith(why) and implementations["VoteAttention"].native
    manifest = replace(manifest, model=replace(manifest.model, query_heads=(64, 64)))
    assert "layer 0 has no native kernel: a KV head has more than 16 query heads" in str(
        native.implementations(manifest)["VoteAttention"]
    )


def gpu_check() -> Any:
    from tools.gpu_check import onnxruntime

    return onnxruntime


@needs_binding
def test_gpu_checks_comparison_passes_engines_that_agree_and_no_others(tiny_artifact: Path) -> None:
    check = gpu_check()
    with check.operators("off"):
        reference = load(tiny_artifact)
    engine = check.device_engine(tiny_artifact, ON_HOST, graphs=True, on_host=True)
    sequences = [np.random.default_rng(i).integers(0, 64, n) for i, n in enumerate((150, 60, 31))]
    assert check.largest_difference(engine, reference, sequences, (90, 41, 30)) < 1e-4
    assert check.largest_difference(engine, Changed(reference, 1.1), sequences, (90, 41, 30)) > 0.05
    with pytest.raises(AssertionError, match="a logit is not finite"):
        check.largest_difference(Changed(engine, np.nan), reference, sequences)
    check.require_graphs(engine.model)
    engine.model.without_graphs("merge", "no capture")
    with pytest.raises(AssertionError, match="no CUDA graph of merge: merge: no capture"):
        check.require_graphs(engine.model)


class Changed:
    """An engine whose logits after the prompts are multiplied by a factor."""

    def __init__(self, engine: Engine, factor: float) -> None:
        self.engine, self.factor = engine, factor

    def lanes(self, count: int) -> Any:
        lanes: Any = self.engine.lanes(count)
        return SimpleNamespace(prefill=lambda prompts: lanes.prefill(prompts) * self.factor, append=lanes.append)


# The runtime's device path, over memory of the CPU that ONNX Runtime holds.


def on_device(path: Path, *, graphs: bool = False, ahead: bool = True) -> Any:
    engine = onto_device(load(path), graphs=graphs)
    engine.options = replace(engine.options, ahead=ahead)
    return engine


Run = tuple[str, int | None]  # a session, and the id of the CUDA graph


def runs_of(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    seen: list[Run] = []
    run = engine.model.run

    def watched(name: str, binding: Any, graph: int | None, *, wait: bool = True) -> None:
        seen.append((name, graph))
        run(name, binding, graph, wait=wait)

    monkeypatch.setattr(engine.model, "run", watched)
    return seen


def replayed(seen: list[Run], name: str) -> list[int]:
    """Return how often each of a session's CUDA graphs ran, in the order of their first runs, including its capture."""
    return list(Counter(graph for run, graph in seen if run == name and graph != NO_GRAPH).values())


def test_state_on_a_device_equals_state_on_the_host(tiny_artifact: Path) -> None:
    host, device = load(tiny_artifact), on_device(tiny_artifact)
    assert generated(device) == generated(host)
    assert generated(device, 5) == generated(host, 5), "the lanes were used before"
    backends = [engine._pool._lanes.state for engine in (host, device)]  # type: ignore[union-attr]
    states = [backend.get_state() for backend in backends]  # type: ignore[attr-defined]
    for name, array in states[0].items():
        used = states[0][name.rpartition(".")[0] + ".votes"] > 0
        if name.endswith(".score"):
            array, states[1][name] = (x.transpose(0, 2, 1) for x in (array, states[1][name]))
        assert array[used].tobytes() == states[1][name][used].tobytes(), name
    assert (states[1]["past_key_values.0.votes"] == states[0]["past_key_values.0.votes"]).all()


def test_a_state_that_is_set_is_read_back(tiny_artifact: Path) -> None:
    backend = on_device(tiny_artifact).new_state(2)
    rng = np.random.default_rng(0)
    expected = {name: rng.integers(0, 9, x.shape).astype(x.dtype) for name, x in backend.get_state().items()}
    backend.set_state(expected, np.array([[3], [4]]))
    actual = backend.get_state()
    assert all((actual[name] == x).all() for name, x in expected.items())
    assert (backend.past_length.read() == [[3], [4]]).all()  # type: ignore[attr-defined]
    assert backend.past_length.place(slice(1, 2))[3:] == ((1, 1), backend.past_length.place()[4] + 8)  # type: ignore[attr-defined]


def test_decode_steps_are_graphs_and_a_capture_appends_nothing(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_device(tiny_artifact, graphs=True, ahead=False)
    seen = runs_of(engine, monkeypatch)
    assert generated(engine) == generated(load(tiny_artifact))
    assert replayed(seen, DECODER) == [1 + 39], "one capture, and every step after the prompts"
    assert seen.count((DECODER, NO_GRAPH)) == 3, "chunks of prompts are no graphs"
    # Tokens come from the largest logits, which a CUDA graph after the decoder's finds.
    assert replayed(seen, TOP_LOGITS) == [1 + 39]
    decode = next(graph for name, graph in seen if name == DECODER and graph != NO_GRAPH)
    steps = [i for i, run in enumerate(seen) if run == (DECODER, decode)][1:]
    assert {seen[i + 1][0] for i in steps} == {TOP_LOGITS}
    seen.clear()
    assert generated(engine, 4) == generated(load(tiny_artifact), 4)
    assert replayed(seen, DECODER) == replayed(seen, TOP_LOGITS) == [3], "the graphs were captured before"
    seen.clear()
    assert engine.generate(PROMPTS[:2], max_new_tokens=4)[0].token_ids == generated(load(tiny_artifact), 4)[0]
    assert replayed(seen, DECODER) == replayed(seen, TOP_LOGITS) == [1 + 3], "other lanes, other graphs"
    assert len({graph for _, graph in seen}) == len(set(seen)), "no two models share an id"


def test_merges_of_one_lane_and_of_the_first_ones_are_graphs(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured merge of one lane, or of the first ones, is right whatever the cache holds, and keeps other lanes."""
    engine = on_device(tiny_artifact, graphs=True)
    seen = runs_of(engine, monkeypatch)
    states = [engine.new_state(4), load(tiny_artifact).new_state(4)]
    rng, slices = np.random.default_rng(0), [(0, 4), (1, 2), (1, 3), (0, 4), (1, 3), (2, 4), (1, 2), (0, 1), (3, 4)]
    for first, last in slices * 3:
        ids, lengths = rng.integers(0, 64, (4, 16)), rng.integers(0, 17, (4, 1))
        for state in states:
            state.merge(0, 4)
            state.decode(ids, lengths)
            state.merge(first, last)
    actual, expected = (state.get_state() for state in states)
    assert {name: x.tobytes() for name, x in actual.items()} == {name: x.tobytes() for name, x in expected.items()}
    # The capture, the runs of the slice, and for the first one the runs between.
    assert replayed(seen, MERGE) == [1 + 2 * 3 + 27, 1 + 2 * 3, 1 + 3, 1 + 3]
    assert seen.count((MERGE, NO_GRAPH)) == 3 * 3


def test_every_thread_captures_its_own_graphs(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = on_device(tiny_artifact, graphs=True, ahead=False)
    seen = runs_of(engine, monkeypatch)
    tokens = [generated(engine, 9)]
    alone = {name: replayed(seen, name) for name in (DECODER, MERGE, TOP_LOGITS)}
    thread = threading.Thread(target=lambda: tokens.append(generated(engine, 9)))
    thread.start()
    thread.join()
    assert tokens[0] == tokens[1]
    assert alone[DECODER] == alone[TOP_LOGITS] == [1 + 8] and alone[MERGE]
    assert {name: replayed(seen, name) for name in alone} == {
        name: [2 * n for n in runs] for name, runs in alone.items()
    }


@pytest.mark.parametrize("name", [DECODER, MERGE, TOP_LOGITS])
def test_where_no_graph_can_be_captured_a_session_is_opened_without(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = on_device(tiny_artifact, graphs=True)
    model: Any = engine.model
    run, old = model.run, {each: model.session(each) for each in (DECODER, MERGE, TOP_LOGITS)}
    other = engine.new_state(3)  # bound to the old sessions

    def refuses(session: str, binding: Any, graph: int | None, *, wait: bool = True) -> None:
        run(session, binding, graph, wait=wait)  # ONNX Runtime runs the call before it captures
        if session == name and graph is not None and graph > 0:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    ids, lengths = np.full((3, 16), 5), np.array([[16], [9], [3]])
    for call in range(3):
        other.decode(ids, lengths)
        other.merge(0, 3)
        if call == 1:
            monkeypatch.setattr(model, "run", refuses)
            assert generated(engine) == generated(load(tiny_artifact))
    assert model.graphs == {DECODER, MERGE, TOP_LOGITS} - {name}
    assert model.graph_problem == f"{name}: operation not permitted when stream is capturing"
    assert {each for each, session in old.items() if model.session(each) is not session} == {name}
    expected = load(tiny_artifact).new_state(3)
    for _ in range(3):
        expected.decode(ids, lengths)
        expected.merge(0, 3)
    assert all(x.tobytes() == other.get_state()[tensor].tobytes() for tensor, x in expected.get_state().items())


def test_an_interrupted_capture_is_repeated(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that went on at a later call would append a token several times."""
    engine = on_device(tiny_artifact, graphs=True)
    state, ids, one = engine.new_state(1), np.array([[7]]), np.array([[1]])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.model, "run", interrupted)
        state.decode(ids, one)
    seen = runs_of(engine, monkeypatch)
    state.decode(ids, one)
    assert replayed(seen, DECODER) == [2], "its capture, and the step"


def test_a_layer_has_five_nodes_and_the_graph_the_documented_others(tiny_artifact: Path) -> None:
    nodes = onnx.load(tiny_artifact / "decoder.onnx", load_external_data=False).graph.node
    counts = Counter(node.op_type for node in nodes)
    layers = len(load_manifest(tiny_artifact).cache.caches)
    assert (counts.pop("Linear"), counts.pop("VoteAttention")) == (4 * layers + 1, layers)
    # float16 has three more casts: of cosines, of sines, and of the logits.
    launched = {"Range": 1, "Add": 2, "Cast": 1, "Mul": 1, "Cos": 1, "Sin": 1, "Slice": 1}
    launched |= {"Gather": 1, "Expand": 2, "GatherElements": 2, "Sub": 1, "Clip": 1}
    assert counts == launched | {"Shape": 1, "Squeeze": 1, "Unsqueeze": 3}


def test_gpu_check_times_steps_that_merge_and_others(tiny_artifact: Path) -> None:
    times = gpu_check().step_times(on_device(tiny_artifact, graphs=True))
    assert set(times) == {"ms of a step", "ms of a step that merges"}
    assert all(0 < value < 1000 for value in times.values())


def test_gpu_check_times_greedy_steps_and_compares_their_tokens(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_device(tiny_artifact, graphs=True)
    times, tokens = gpu_check().greedy_times(engine)
    assert set(times) == {"ms of a greedy step", "ms of a greedy step that runs ahead"}
    assert len(tokens) == len(gpu_check().PROMPTS)
    assert all(0 < value < 1000 for value in times.values())
    begin = OnnxRuntimeState.begin

    def other(state: Any, input_ids: Any, *rest: Any) -> Any:
        return begin(state, (input_ids + 1) % 64, *rest)

    monkeypatch.setattr(OnnxRuntimeState, "begin", other)
    with pytest.raises(AssertionError, match="give other tokens"):
        gpu_check().greedy_times(engine)


def test_a_step_makes_one_copy_in_each_direction(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = on_device(tiny_artifact, graphs=True)
    generated(engine, 2)
    lanes = engine._pool.lanes
    copies: list[str] = []
    for kind in ("write", "read"):
        whole = getattr(DeviceArray, kind)

        def watched(array: DeviceArray, *arguments: Any, kind: str = kind, whole: Any = whole) -> Any:
            copies.append(kind)
            return whole(array, *arguments)

        monkeypatch.setattr(DeviceArray, kind, watched)
    rows = lanes.append_by(lanes.state.step, [[4], [5], [6]])
    assert copies == ["write", "read"]
    assert rows.top_logits(2).values.shape == (64,)


def test_no_torch_is_imported_to_run_on_a_device(tiny_artifact: Path) -> None:
    script = (
        "import sys; from functools import partial; from kvexport.engine.load import load\n"
        "from kvexport.backends.onnxruntime.device_array import DeviceArray\n"
        f"engine = load({str(tiny_artifact)!r}); engine.model.zeros = partial(DeviceArray, 'cpu')\n"
        "engine.generate([[1, 2, 3]], max_new_tokens=2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_lanes_on_a_gpu_are_copied_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[Any]]] = []
    codes = {"cuMemcpyDtoD_v2": 0}

    class Driver:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                calls.append((name, [getattr(value, "value", value) for value in arguments]))
                return codes.get(name, 0)

            return call

    monkeypatch.setattr(device_array.ctypes, "CDLL", lambda name: {"libcuda.so.1": Driver()}[name])
    devices._first_context.cache_clear()
    array = DeviceArray("cpu", (4, 3), np.dtype(np.float32))
    array.device = "cuda"
    start = array.place()[4]
    device_array.copy(array, array, slice(0, 1), slice(2, 3))
    assert [name for name, _ in calls] == [
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuMemcpyDtoD_v2",
        "cuCtxSynchronize",
    ]
    assert calls[2][1] == [start + 24, start, 12]
    codes["cuMemcpyDtoD_v2"] = 700
    with pytest.raises(EnvironmentProblem, match="cannot be used for cuMemcpyDtoD: error 700"):
        device_array.copy(array, array, slice(0, 1), slice(2, 3))
    devices._first_context.cache_clear()
