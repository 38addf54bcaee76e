"""A device that begins the next call before the host has read the tokens of the last one changes no answer."""

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.backends.onnxruntime.model import OnnxRuntimeState
from kvexport.backends.onnxruntime.model_sessions import DECODER, MERGE, NO_GRAPH, TOP_LOGITS
from kvexport.backends.rows import TopLogits
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import KvexportError
from kvexport.export.build import build
from kvexport.language.grammar import Grammar
from tests.support.hybrids import CONFIGS
from tests.support.models import make_recipe, save_checkpoint
from tests.support.on_device import onto_device
from tests.support.tensorrt_artifacts import engines as tensorrt_engines
from tests.support.tiny_model import PROMPTS, RECIPE, generated

VOCABULARY = 64
ENDS = [(7, 30), (0, 1, 2), (20, 21, 22), (41, 53)]  # eos tokens, which end the prompts' answers in different steps


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of lanes of each call that began before the host had read the tokens of the call before."""
    calls: list[int] = []
    follow = OnnxRuntimeState.follow

    def counted(state: OnnxRuntimeState) -> Any:
        calls.append(state._latest[1])
        return follow(state)

    monkeypatch.setattr(OnnxRuntimeState, "follow", counted)
    return calls


def late(path: Path, *, graphs: bool = False, **options: Any) -> Any:
    """Return an engine as on a device that computes every run as late as possible."""
    return onto_device(load(path, **options), graphs=graphs, late=True)


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[tuple[Any, ...]]:
    found = engine.generate(prompts, **{"max_new_tokens": 40, **settings})
    return [(answer.token_ids, answer.text, answer.finish_reason) for answer in found]


def run(engine: Engine, steps: int | None = None) -> None:
    while engine.busy and steps != 0:
        engine.step()
        steps = None if steps is None else steps - 1


def ids_of(request: Request) -> list[int]:
    return [token.id for token in request.tokens]


@pytest.fixture(scope="module", params=["merging", "quantized", "full", "lfm2", "bamba"])
def artifact(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, checkpoint = tmp_path_factory.mktemp(request.param), tiny_checkpoint
    if config := CONFIGS.get(request.param):
        checkpoint = folder / "checkpoint"
        save_checkpoint(checkpoint, config())
    cache: dict[str, Any] = {"full": {"method": "full"}, "quantized": {**RECIPE["cache"], "dtype": "int8"}}.get(
        request.param, RECIPE["cache"]
    )
    recipe = make_recipe(checkpoint, cache=cache, export=RECIPE["export"], limits=RECIPE["limits"])
    return build(recipe, folder / "artifact")


@pytest.mark.parametrize("graphs", [False, True], ids=["runs", "graphs"])
def test_answers_are_those_of_an_engine_that_waits(artifact: Path, followed: list[int], graphs: bool) -> None:
    """Batches whose answers end in different steps, by eos tokens, by a stop string and by their length."""
    plain, engine = load(artifact), late(artifact, graphs=graphs)
    for count in (1, 2, 3, 60):
        assert answers(engine, max_new_tokens=count) == answers(plain, max_new_tokens=count)
    assert len(followed) == 1 + 58, "the last token follows from its number, so no call is in vain"
    lengths = set()
    for ends in ENDS:
        expected = answers(plain, eos_token_ids=ends)
        assert answers(engine, eos_token_ids=ends) == expected
        lengths |= {len(tokens) for tokens, *_ in expected}
    assert len(lengths) > 3 and len(followed) > 150
    for stop in "aZx":
        assert answers(engine, stop_strings=(stop,)) == answers(plain, stop_strings=(stop,))


def test_steps_in_between_return_and_change_the_same(tiny_artifact: Path) -> None:
    """Each step gives one token to each request, and its sums are those of an engine that waits."""
    engines = load(tiny_artifact), late(tiny_artifact)
    seen = []
    for engine in engines:
        requests = [Request(ids, engine.settings(max_new_tokens=9 + i)) for i, ids in enumerate(PROMPTS)]
        for request in requests:
            engine.add(request)
        steps = []
        while engine.busy:
            advanced = engine.step()
            steps.append(sorted((request.sequence, len(request.tokens)) for request in advanced))
        timing = [(x.timing.steps, x.timing.generated_tokens, x.timing.whole_rows) for x in requests]
        seen.append(([ids_of(request) for request in requests], [x[:2] for x in timing]))
        assert len(steps) < 20
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "seed": 1, "top_k": 4},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5},
        {"logit_bias": {7: 2.0}},
        {"logprobs": 2},
        {"grammar": Grammar("regex", "([a-f]{1,3} ){2,30}")},
        {"logits_processor": lambda ids, logits: logits},
        {"min_new_tokens": 40, "eos_token_ids": (7, 30)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_tokens_that_need_the_host_do_not_run_ahead(
    tiny_artifact: Path, followed: list[int], settings: dict[str, Any]
) -> None:
    engine = late(tiny_artifact)
    assert answers(engine, **settings) == answers(load(tiny_artifact), **settings)
    assert not followed
    off = late(tiny_artifact)
    off.options = replace(off.options, ahead=False)
    assert generated(off) == generated(load(tiny_artifact)) and not followed


def test_a_minimum_of_tokens_runs_ahead_from_there_on(tiny_artifact: Path, followed: list[int]) -> None:
    settings = {"min_new_tokens": 12, "eos_token_ids": tuple(range(40))}
    engine, plain = late(tiny_artifact), load(tiny_artifact)
    assert answers(engine, [[3, 4]], **settings) == answers(plain, [[3, 4]], **settings)
    assert followed


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_join_and_leave_at_any_time_get_their_answers(
    tiny_artifact: Path, followed: list[int], seed: int
) -> None:
    """Requests are added and cancelled between steps, and lanes are reused, moved and added."""
    rng, plain, engine = np.random.default_rng(seed), load(tiny_artifact), late(tiny_artifact, graphs=seed % 2 == 1)
    known: dict[tuple[Any, ...], list[int]] = {}
    running: list[tuple[tuple[Any, ...], list[Request]]] = []
    happened = dict.fromkeys(("whole", "cancelled"), 0)

    def check(key: tuple[Any, ...], requests: list[Request], *, whole: bool) -> None:
        if key not in known:
            known[key] = plain.generate([list(key[0])], max_new_tokens=key[1], eos_token_ids=key[2])[0].token_ids
        tokens = [token for request in requests for token in ids_of(request)]
        assert tokens == (known[key] if whole else known[key][: len(tokens)])
        happened["whole" if whole else "cancelled"] += 1

    for step in range(240):
        if step < 200 and len(running) < 6 and rng.random() < 0.12:
            ids = tuple(rng.integers(0, VOCABULARY, rng.integers(1, 40)).tolist())
            key = ids, int(rng.integers(1, 60)), ENDS[rng.integers(len(ENDS))]
            settings = engine.settings(max_new_tokens=key[1], eos_token_ids=key[2])
            running.append((key, [Request(list(ids), settings)]))
            engine.add(running[-1][1][-1])
        if running and rng.random() < 0.04:
            key, requests = running[rng.integers(len(running))]
            if requests[-1].finish_reason is None and rng.random() < 0.5:
                assert engine.cancel(requests[-1].id)
                running.remove((key, requests))
                check(key, requests, whole=False)
        if engine.busy:
            engine.step()
        for key, requests in [*running]:
            if requests[-1].finish_reason is not None:
                running.remove((key, requests))
                check(key, requests, whole=True)
    run(engine)
    for key, requests in running:
        check(key, requests, whole=True)
    assert len(followed) > 40 and happened["whole"] > 10
    assert not engine._requests


def test_a_lane_with_nan_fails_alone_and_is_cleared(tiny_artifact: Path, followed: list[int]) -> None:
    engine, expected = late(tiny_artifact, graphs=True), generated(load(tiny_artifact), 40)
    requests = [Request(ids, engine.settings(max_new_tokens=40)) for ids in PROMPTS]
    for request in requests:
        engine.add(request)
    run(engine, 12)
    assert engine._calls.ahead is not None
    state: Any = engine._pool.state
    values = state.read(1, [name for name in state.state if name.endswith(".value")])
    state.write(1, {name: np.full_like(array, np.nan) for name, array in values.items()})
    run(engine)
    assert requests[1].finish_reason == "error" and "nan" in str(requests[1].error)
    assert [ids_of(request) for request in requests][::2] == expected[::2]
    assert generated(engine) == expected, "the lane is as new"


def test_a_device_that_does_not_order_equal_logits_is_named(tiny_artifact: Path) -> None:
    """If more logits are equal than the device lists, it must list those of the lowest ids, as ONNX requires."""
    engine = late(tiny_artifact)
    request = Request([1, 2], engine.settings(max_new_tokens=9))
    engine.add(request)
    run(engine, 4)
    assert engine._calls.ahead is not None

    class Equal:
        def top_logits(self, lane: int) -> TopLogits:
            return TopLogits(np.arange(5, 9, dtype=np.int32), np.ones(4, np.float32), 64.0, VOCABULARY)

        def row(self, lane: int) -> Any:
            return np.ones(VOCABULARY, np.float32)

    engine._calls.choose(request, Equal(), 0)
    assert isinstance(request.error, KvexportError) and "token 5 before the token 0" in str(request.error)
    assert request.error.fix == "EngineOptions(ahead=False)"


def test_the_device_takes_the_lowest_of_equal_tokens(tiny_artifact: Path) -> None:
    session = onnxruntime.InferenceSession(tiny_artifact / "top_logits.onnx", providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 3, (200, 1, VOCABULARY)).astype(np.float32)
    (token,) = session.run(["token"], {"logits": logits})
    assert (token == logits.argmax(-1)).all() and token.shape == (200, 1)
    assert len(np.unique(token)) > 5 and (logits == logits.max(-1, keepdims=True)).sum() > 1000
    logits[0] = np.nan
    assert session.run(["token"], {"logits": logits[:1]})[0].tolist() == [[VOCABULARY - 1]]


def test_threads_that_take_turns_capture_their_own_graphs(tiny_artifact: Path, followed: list[int]) -> None:
    """A thread that goes on with a call of another thread captures its graphs first, and the token stays."""
    engine, expected = late(tiny_artifact, graphs=True), generated(load(tiny_artifact), 40)
    requests = [Request(ids, engine.settings(max_new_tokens=40)) for ids in PROMPTS]
    for request in requests:
        engine.add(request)
    run(engine, 7)
    while engine.busy:
        thread = threading.Thread(target=partial(run, engine, 5))
        thread.start()
        thread.join()
        run(engine, 3)
    assert [ids_of(request) for request in requests] == expected and len(followed) > 30


@pytest.mark.parametrize("interrupt", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_an_error_ends_the_requests_of_both_calls(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    engine, expected = late(tiny_artifact), generated(load(tiny_artifact), 9)
    requests = [Request(ids, engine.settings(max_new_tokens=40)) for ids in PROMPTS]
    for request in requests:
        engine.add(request)
    run(engine, 9)

    def fails(*_: Any, **__: Any) -> None:
        raise interrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "run", fails)
        with pytest.raises(type(interrupt)):
            engine.step()
    assert {request.finish_reason for request in requests} == {"error"} and not engine.busy
    assert generated(engine, 9) == expected


def test_a_closed_engine_has_waited_for_its_calls(tiny_artifact: Path) -> None:
    engine = late(tiny_artifact)
    stream = engine.stream(PROMPTS, max_new_tokens=40)
    for _ in range(9):
        next(stream)
    assert engine._calls.ahead is not None
    engine.close()
    assert engine._calls.ahead is None and engine.model.stream.computed == engine.model.stream.late


def test_a_step_copies_nothing_to_the_device(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that runs ahead enqueues two runs, waits once, and copies the largest logits to the host: nothing else."""
    engine = late(tiny_artifact, graphs=True)
    generated(engine, 9)
    log: list[Any] = []
    stream: Any = engine.model.stream
    compute, run_one = stream._compute, engine.model.run
    for kind in ("write", "read"):
        whole = getattr(DeviceArray, kind)

        def watched(array: DeviceArray, *arguments: Any, kind: str = kind, whole: Any = whole) -> Any:
            log.append(kind)
            return whole(array, *arguments)

        monkeypatch.setattr(DeviceArray, kind, watched)

    def waited(number: int) -> None:
        log.append("wait")
        compute(number)

    def ran(name: str, *arguments: Any, wait: bool = True) -> None:
        log.append((name, wait))
        run_one(name, *arguments, wait=wait)

    monkeypatch.setattr(stream, "_compute", waited)
    monkeypatch.setattr(engine.model, "run", ran)
    engine.add(Request([5, 6], engine.settings(max_new_tokens=20)))
    run(engine, 4)
    log.clear()
    engine.step()
    assert log == [(DECODER, False), (TOP_LOGITS, False), "wait", "read"]
    log.clear()
    engine.options = replace(engine.options, ahead=False)
    engine.step()
    assert log == ["wait", "read"], "it reads what the device has computed meanwhile"
    log.clear()
    engine.step()
    assert log == ["write", (DECODER, False), (TOP_LOGITS, False), "wait", "read"]


def test_graphs_are_captured_once_for_both_turns(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = late(tiny_artifact, graphs=True)
    seen: list[tuple[str, int | None]] = []
    run_one = engine.model.run

    def watched(name: str, binding: Any, graph: int | None, *, wait: bool = True) -> None:
        seen.append((name, graph))
        run_one(name, binding, graph, wait=wait)

    monkeypatch.setattr(engine.model, "run", watched)
    for _ in range(2):
        generated(engine)
        steps = [run for run in seen if run[1] != NO_GRAPH and run[0] != MERGE]
        assert len(set(steps)) == 4, "two of the decoder, two of the largest logits"
        assert len(steps) == 2 * 39 + (4 if _ == 0 else 0)
        seen.clear()


def test_tensorrt_runs_ahead_too(
    tiny_artifact: Path, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvexport.backends.tensorrt.model import TensorRTState

    followed: list[None] = []
    follow = TensorRTState.follow
    monkeypatch.setattr(TensorRTState, "follow", lambda state: (followed.append(None), follow(state))[1])
    plain, engine = load(tiny_artifact), load(tensorrt_engines(tiny_artifact, tmp_path / "engines"))
    for ends in ENDS:
        assert answers(engine, eos_token_ids=ends) == answers(plain, eos_token_ids=ends)
    assert answers(engine) == answers(plain) and len(followed) > 100
    requests = [Request(ids, engine.settings(max_new_tokens=40)) for ids in PROMPTS]
    for request in requests:
        engine.add(request)
    run(engine, 9)
    assert engine.cancel(requests[0].id)
    run(engine)
    assert [ids_of(request) for request in requests[1:]] == [tokens for tokens, *_ in answers(plain)[1:]]
