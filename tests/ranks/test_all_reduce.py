"""The sum over ranks: the same bits on all of them whoever comes first, in pieces, and an error, never a wait, where a
rank is missing or does something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from kvexport.backends.onnxruntime.collectives import NativeCollectives
from kvexport.backends.onnxruntime.operators import library
from kvexport.methods.h2o import H2O
from tests.support.one_node import session

pytestmark = pytest.mark.skipif(
    library() is None, reason="not reached: the native operators are not built (make native)"
)
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def model(dtype: str) -> bytes:
    part, whole = (helper.make_tensor_value_info(name, TYPES[dtype], None) for name in ("part", "sum"))
    node = helper.make_node("AllReduce", ["part"], ["sum"], domain="kvexport")
    graph = helper.make_graph([node], "g", [part], [whole])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvexport", 1)]
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return made


@pytest.fixture
def collectives() -> NativeCollectives:
    cache = SimpleNamespace(layers=[SimpleNamespace(dtype="float32")])
    recipe = SimpleNamespace(cache=SimpleNamespace(build_method=H2O))
    manifest: Any = SimpleNamespace(recipe=recipe, cache=cache, model=SimpleNamespace(query_heads=()))
    return NativeCollectives(manifest)


Run = Callable[[list[Any]], list[Any]]


@pytest.fixture
def ranks(collectives: NativeCollectives) -> Iterator[Callable[[int, str], Run]]:
    """Makes ranks that are threads: what each of them sums in turn, to what each of them gets, or its error."""
    pools: list[ThreadPoolExecutor] = []

    def make(count: int, dtype: str = "float32") -> Run:
        memory = mmap(-1, collectives.bytes(count))

        def opened(rank: int) -> Any:
            with collectives.joined(memory, rank, count):
                return session(model(dtype))

        def one(at: tuple[Any, list[Any]]) -> Any:
            try:
                return [at[0].run(["sum"], {"part": part})[0] for part in at[1]]
            except Exception as error:
                return str(error)

        sessions = [opened(rank) for rank in range(count)]
        pools.append(ThreadPoolExecutor(count))
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
    got = ranks(count, dtype)(parts)
    for i in range(len(shapes)):
        total = parts[0][i].astype(np.float32)
        for part in parts[1:]:
            total += part[i].astype(np.float32)
        for rank in range(count):
            assert np.array_equal(got[rank][i], total.astype(dtype)), (rank, i)


def test_ranks_that_sum_different_tensors_are_told_so_and_never_sum_again(ranks: Any) -> None:
    run = ranks(2)
    first = run([[np.zeros(4, np.float32)], [np.zeros(5, np.float32)]])
    assert sum("the ranks are out of step" in str(answer) for answer in first) >= 1
    assert all("a rank has failed" in answer for answer in run([[np.zeros(4, np.float32)]] * 2))


def test_who_waits_for_a_rank_that_fails_is_released(ranks: Any, collectives: NativeCollectives) -> None:
    run = ranks(2)
    with ThreadPoolExecutor(1) as other:
        alone = other.submit(run, [[np.zeros(4, np.float32)]])
        collectives.fail(run.memory)
        assert "AllReduce: a rank has failed" in alone.result()[0]


def test_a_process_that_is_no_rank_opens_no_model_of_one() -> None:
    with pytest.raises(Exception, match="AllReduce: this process is no rank"):
        session(model("float32"))


def test_there_are_not_any_number_of_ranks(collectives: NativeCollectives) -> None:
    assert collectives.bytes(64) > 0
    assert collectives.bytes(0) == collectives.bytes(65) == 0
