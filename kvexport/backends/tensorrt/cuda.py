"""The CUDA runtime calls of the TensorRT backend, by NVIDIA's package cuda-bindings, with checks of their errors."""

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.sections import default
from kvexport.backends.tensorrt.environment import INSTALL, Gpu
from kvexport.errors import EnvironmentProblem, KvexportError

ALIGNMENT = 256  # bytes; every address that TensorRT is given is a multiple of it
# CUDA's own messages for these errors do not say what the user can do.
_LACKS = {
    "cudaErrorNoDevice": (
        "there is no NVIDIA GPU",
        f"--backend {default()}, or a machine with one (docker run --gpus all)",
    ),
    "cudaErrorInsufficientDriver": (
        "the NVIDIA driver is missing, or older than this CUDA needs",
        "install or upgrade the NVIDIA driver",
    ),
    "cudaErrorMemoryAllocation": (
        "the GPU's memory is used up",
        "smaller limits.max_batch, limits.max_length or cache.budget",
    ),
}


class Cuda:
    """The CUDA runtime, with EnvironmentProblem for its errors."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except (ImportError, OSError) as error:
            raise EnvironmentProblem(f"the package cuda-bindings cannot be used: {error}", INSTALL) from error
        self.api: Any = runtime

    def call(self, name: str, *arguments: Any) -> Any:
        try:
            error, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as failure:  # cuda-bindings found no libcuda.so.1
            raise EnvironmentProblem(
                f"{name} cannot be called: {failure}", _LACKS["cudaErrorInsufficientDriver"][1]
            ) from failure
        if error != self.api.cudaError_t.cudaSuccess:
            problem, fix = _LACKS.get(error.name, (error.name, "kvexport doctor"))
            raise EnvironmentProblem(
                f"{problem} ({name}: {error.name})" if error.name in _LACKS else f"{name} failed: {problem}", fix
            )
        return values[0] if len(values) == 1 else values

    def gpu(self) -> Gpu:
        if not self.call("cudaGetDeviceCount"):
            raise EnvironmentProblem(*_LACKS["cudaErrorNoDevice"])
        properties = self.call("cudaGetDeviceProperties", self.call("cudaGetDevice"))
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        return Gpu(name.rstrip("\0"), (properties.major, properties.minor))

    def stream(self) -> Any:
        return self.call("cudaStreamCreateWithFlags", self.api.cudaStreamNonBlocking)

    def synchronize(self, stream: Any) -> None:
        self.call("cudaStreamSynchronize", stream)

    def copy(self, target: int, source: int, count: int, stream: Any) -> None:
        self.call("cudaMemcpyAsync", target, source, count, self.api.cudaMemcpyKind.cudaMemcpyDefault, stream)

    def clear(self, target: int, count: int, stream: Any) -> None:
        self.call("cudaMemsetAsync", target, 0, count, stream)

    def capture(self, enqueue: Callable[[], None], stream: Any) -> Any:
        """Return a CUDA graph of the work that `enqueue` puts into `stream`, which is not run."""
        self.call("cudaStreamBeginCapture", stream, self.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            enqueue()
        finally:
            graph = self.call("cudaStreamEndCapture", stream)
        try:
            return self.call("cudaGraphInstantiate", graph, 0)
        finally:
            self.call("cudaGraphDestroy", graph)


class Replay:
    """Repeated work of a CUDA stream, which is replayed as a CUDA graph from its second call on.

    The first call enqueues the work directly, because it may contain steps that a CUDA graph cannot contain. The second
    call captures the work and launches the CUDA graph, as all later calls do. If the capture fails, `warn` receives the
    reason and all calls enqueue the work directly.
    """

    def __init__(self, cuda: Cuda, stream: Any, warn: Callable[[str], None]) -> None:
        self._cuda, self._stream, self._warn = cuda, stream, warn
        self._graph: Any = None
        self._calls = 0

    def __call__(self, enqueue: Callable[[], None]) -> None:
        """Run the work directly or as a CUDA graph; `enqueue` must put the same work into the stream at every call."""
        if self._calls == 1:
            try:
                self._graph = self._cuda.capture(enqueue, self._stream)
                weakref.finalize(self, self._cuda.api.cudaGraphExecDestroy, self._graph).atexit = False
            except KvexportError as error:
                self._warn(error.problem)
        self._calls += 1
        if self._graph is not None:
            self._cuda.call("cudaGraphLaunch", self._graph, self._stream)
        else:
            enqueue()


class Arena:
    """Named tensors in one GPU allocation, each at a multiple of 256 bytes, with an optional page-locked host copy."""

    def __init__(self, cuda: Cuda, tensors: Mapping[str, tuple[tuple[int, ...], Any]], *, pinned: bool = False) -> None:
        self._cuda = cuda
        self._layout: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self.nbytes = 0
        for name, (shape, dtype) in tensors.items():
            self._layout[name] = (self.nbytes, shape, np.dtype(dtype))
            self.nbytes += -(-self.size(name) // ALIGNMENT) * ALIGNMENT
        self.device: int = cuda.call("cudaMalloc", max(self.nbytes, ALIGNMENT))
        # When the interpreter ends, CUDA releases everything itself, and may be unloaded before this object.
        weakref.finalize(self, cuda.api.cudaFree, self.device).atexit = False
        self.host = _pinned(cuda, self.nbytes) if pinned else None

    def size(self, name: str) -> int:
        _, shape, dtype = self._layout[name]
        return math.prod(shape) * dtype.itemsize

    def pointer(self, name: str) -> int:
        return self.device + self._layout[name][0]

    @property
    def names(self) -> list[str]:
        return [*self._layout]

    def array(self, name: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        assert self.host is not None
        offset, full, dtype = self._layout[name]
        shape = full if shape is None else shape
        return self.host[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def upload(self, stream: Any, *, begin: str | None = None) -> None:
        assert self.host is not None
        start = 0 if begin is None else self._layout[begin][0]
        self._cuda.copy(self.device + start, self.host.ctypes.data + start, self.nbytes - start, stream)

    def download(self, stream: Any) -> None:
        assert self.host is not None
        self._cuda.copy(self.host.ctypes.data, self.device, self.nbytes, stream)


def _pinned(cuda: Cuda, count: int) -> NDArray[np.uint8]:
    """Return `count` bytes of page-locked host memory, which are freed with the last array over them."""
    address: int = cuda.call("cudaHostAlloc", max(count, 1), 0)
    memory = (ctypes.c_uint8 * count).from_address(address)
    weakref.finalize(memory, cuda.api.cudaFreeHost, address).atexit = False
    array: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
    array[:] = 0
    return array
