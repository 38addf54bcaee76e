"""The operator AllReduce gives the same bits on all ranks, in any order of arrival, and in pieces.

If a rank is missing or sums another tensor, there is an error instead of a wait. The tests cover CPUs, and GPUs on the
host (tests/support/fake_gpus.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from kvexport.backends.base import Collectives
from kvexport.backends.onnxruntime.collectives import NativeCollectives
from kvexport.backends.onnxruntime.mailboxes import Mailboxes
from kvexport.backends.onnxruntime.operators import VARIABLE, library
from kvexport.methods.h2o import H2O
from plugins.building import make
from tests.support import fake_gpus
from tests.support.cuda_ranks import multiprocessors
from tests.support.one_node import session

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def model(dtype: str) -> bytes:
    part, whole = (helper.make_tensor_value_info(name, TYPES[dtype], None) for name in ("part", "sum"))
    node = helper.make_node("AllReduce", ["part"], ["sum"], domain="kvexport")
    graph = helper.make_graph([node], "g", [part], [whole])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return serialized


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu" and library() is None:
        pytest.skip("not reached: the native operators are not built (make native)")
    if request.param == "cuda":
        if not make.is_current("onnxruntime-cuda-host"):
            pytest.skip("not reached: the binding is not compiled for the host (make cuda-host)")
        monkeypatch.setenv(VARIABLE, str(fake_gpus.ON_HOST))
        fake_gpus.install(monkeypatch.setattr, fake_gpus.Driver(3))
    with multiprocessors() if request.param == "cuda" else contextlib.nullcontext():
        yield str(request.param)


@pytest.fixture
def new(device: str) -> Callable[[], Collectives]:
    """A function that makes the collectives of a rank's process."""
    layer = {"dtype": "float32", "kv_heads": 1, "capacity": 8, "key_size": 8, "value_size": 8, "statistics": 1}
    cache = SimpleNamespace(caches=[SimpleNamespace(**layer, budget=8, value_in_key=False)])
    recipe, graphs = SimpleNamespace(cache=SimpleNamespace(build_method=H2O)), SimpleNamespace(rank_count=2)
    model = SimpleNamespace(query_heads=(1,))
    manifest: Any = SimpleNamespace(recipe=recipe, cache=cache, model=model, graphs=graphs)
    return lambda: (Mailboxes if device == "cuda" else NativeCollectives)(manifest)


@pytest.fixture
def collectives(new: Callable[[], Collectives]) -> Collectives:
    return new()


Run = Callable[[list[Any]], list[Any]]


@pytest.fixture
def ranks(new: Callable[[], Collectives]) -> Iterator[Callable[[int, str], Run]]:
    """A function that makes ranks as threads.

    Its result takes the parts of each rank in turn, and returns the sums, or the error, of each rank.
    """
    pools: list[ThreadPoolExecutor] = []

    def make(count: int, dtype: str = "float32") -> Run:
        memory = mmap(-1, new().bytes(count))
        pools.append(ThreadPoolExecutor(count))

        def opened(rank: int) -> tuple[Any, Collectives]:
            own = new()
            own.join(memory, rank, count)
            return session(model(dtype)), own

        def one(at: tuple[Any, list[Any]]) -> Any:
            (one, own), parts = at
            try:
                sums = [one.run(["sum"], {"part": part})[0] for part in parts]
            except Exception as error:
                return str(error)
            return own.problem(memory) or sums

        sessions = list(pools[-1].map(opened, range(count)))
        run: Any = lambda parts: list(pools[-1].map(one, zip(sessions, parts, strict=False)))  # noqa: E731
        run.memory = memory
        return run  # type: ignore[no-any-return]

    yield make
    for pool in pools:
        pool.shutdown()


@pytest.mark.parametrize(("dtype", "count"), [("float32", 2), ("float16", 3)])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(ranks: Any, dtype: str, count: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [(1, 1, 576), (3, 5), (0, 4), (2, 100_003), (1,)] + [(2, 64)] * 40
    parts = [[rng.normal(size=shape).astype(dtype) for shape in shapes] for _ in range(count)]
    sums = ranks(count, dtype)(parts)
    for i in range(len(shapes)):
        total = parts[0][i].astype(np.float32)
        for part in parts[1:]:
            total += part[i].astype(np.float32)
        for rank in range(count):
            assert np.array_equal(sums[rank][i], total.astype(dtype)), (rank, i)


def test_ranks_that_sum_different_tensors_fail_for_good(ranks: Any) -> None:
    run = ranks(2)
    first = run([[np.zeros(4, np.float32)], [np.zeros(5, np.float32)]])
    assert sum("the ranks are out of step" in str(answer) for answer in first) >= 1
    again = run([[np.zeros(4, np.float32)]] * 2)
    assert all("a rank has failed" in answer or "the ranks are out of step" in answer for answer in again)


def test_ranks_that_wait_for_a_failed_rank_stop(ranks: Any, collectives: Collectives) -> None:
    run = ranks(2)
    with ThreadPoolExecutor(1) as other:
        alone = other.submit(run, [[np.zeros(4, np.float32)]])
        collectives.fail(run.memory)
        assert "a rank has failed" in alone.result()[0]


def test_a_process_that_is_no_rank_opens_no_model_of_one(device: str) -> None:
    with pytest.raises(Exception, match="AllReduce: this process is no rank"):
        session(model("float32"))


def test_the_number_of_ranks_is_bounded(collectives: Collectives) -> None:
    assert collectives.bytes(16) > 0
    assert collectives.bytes(0) == collectives.bytes(65) == 0
