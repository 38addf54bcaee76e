"""Fixtures of the tests that call TensorRT's plugins without TensorRT and without a GPU."""

import pytest

from plugins.building import make
from tests.conformance.cuda_library import Caller, HostMemory, load
from tests.support.tensorrt_harness import Harness, what_is_missing


@pytest.fixture(scope="module")
def harness() -> Harness:
    """The plugins' library with the harness that calls their methods as TensorRT does."""
    if missing := what_is_missing():
        pytest.skip(missing)
    return Harness(make.build("tensorrt-harness"))


@pytest.fixture(scope="module")
def direct(harness: Harness) -> Caller:
    """Direct calls of the CUDA kernels, compiled for the host, whose bits the plugins must give."""
    return Caller(load(make.build("cuda-host")), HostMemory())
