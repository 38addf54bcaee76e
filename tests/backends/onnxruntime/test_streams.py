"""The CUDA stream in which a model's sessions run, on a fake of CUDA's driver, and the options of runs in it."""

import ctypes
import re
import threading

import pytest

from kvexport.backends.onnxruntime import devices
from kvexport.backends.onnxruntime.model_sessions import NO_GRAPH, _run_options
from kvexport.backends.onnxruntime.streams import CudaStream, HostStream, new_stream
from kvexport.errors import EnvironmentProblem
from plugins.building import headers
from tests.support.fake_gpus import Driver, load_driver, names_of_cuda_h


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", load_driver(driver))
    monkeypatch.setattr(devices, "driver_problem", lambda: "")
    devices._first_context.cache_clear()
    return driver


def test_a_mark_waits_for_the_runs_before_it(driver: Driver) -> None:
    stream = new_stream("cuda")
    assert isinstance(stream, CudaStream) and stream.address == 2
    first, second = stream.mark(), stream.mark()
    driver.log.clear()
    first()
    stream.mark()()
    second()
    stream.wait()
    assert driver.log == [
        "cuEventSynchronize",
        *("cuEventRecord", "cuEventSynchronize"),  # the event of the first mark
        "cuEventSynchronize",
        "cuStreamSynchronize",
    ]


def test_every_thread_makes_the_gpu_current(driver: Driver) -> None:
    stream = CudaStream()
    driver.log.clear()
    thread = threading.Thread(target=stream.wait)
    thread.start()
    thread.join()
    stream.wait()
    assert driver.log == ["cuCtxSetCurrent", "cuStreamSynchronize", "cuStreamSynchronize"]


def test_an_error_of_the_gpu_is_named(driver: Driver) -> None:
    stream = CudaStream()
    driver.answers["cuStreamSynchronize"] = 700
    with pytest.raises(EnvironmentProblem, match="cannot be used for cuStreamSynchronize: CUDA_ERROR_700"):
        stream.wait()


def test_a_machine_without_a_gpu_has_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "driver_problem", lambda: "there is no NVIDIA driver")
    for device in ("cpu", "cuda"):
        stream = new_stream(device)
        assert type(stream) is HostStream and stream.address is None
        stream.mark()()
        stream.wait()


@pytest.mark.parametrize("graph", [None, NO_GRAPH, 5])
def test_a_run_waits_unless_it_is_enqueued(graph: int | None) -> None:
    for wait in (False, True):
        options = _run_options(graph, wait)
        entries = [options.get_run_config_entry(key) if known else None for key, known in (
            ("gpu_graph_id", graph is not None), ("disable_synchronize_execution_providers", not wait))]  # fmt: skip
        assert entries == [None if graph is None else str(graph), None if wait else "1"]
    with pytest.raises(RuntimeError):
        _run_options(graph, True).get_run_config_entry("disable_synchronize_execution_providers")


def test_the_driver_of_the_tests_has_names_of_the_real_one() -> None:
    try:
        header = headers.find("cuda") / "cuda.h"
    except Exception as error:
        pytest.skip(f"not reached: {error}")
    names = {name for name in vars(Driver) if re.match("cu[A-Z]", name)}
    assert len(names) > 10 and names <= names_of_cuda_h(header)
