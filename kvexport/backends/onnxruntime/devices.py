"""Detection of the devices that ONNX Runtime can use on this machine: execution providers, and GPUs.

GPUs are found with NVIDIA's driver library, libcuda, without torch and without the CUDA toolkit.
"""

import contextlib
import ctypes
import io
import platform
import sys
from functools import cache
from typing import Any

from kvexport.errors import EnvironmentProblem, first_line, lacks_memory
from kvexport.packages import installed_version

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# The packages onnxruntime and onnxruntime-gpu provide the same Python module. The package that was installed last
# overwrites the files of the other.
SAME_MODULE = {"cpu": "onnxruntime", "cuda": "onnxruntime-gpu"}
INSTALL_GPU = "pip install 'kvexport[gpu]' && pip install --force-reinstall --no-deps onnxruntime-gpu"
NO_WHEEL = "ONNX Runtime compiled with --use_cuda on this machine, or another backend: onnxruntime-gpu has no wheel for"
INSTALL_CUDA = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
# The oldest Linux driver of NVIDIA for each major version of CUDA (NVIDIA's release notes of CUDA).
DRIVERS = {12: 525, 13: 580}
A_GPU = "a machine with an NVIDIA GPU and its driver (in a container: docker run --gpus all)"
DRIVER = "libcuda.so.1"


def require_device(device: str) -> None:
    reasons = problems(device)
    if reasons:
        problem = f"nothing can run on {device} here: {'; '.join(text for text, _ in reasons)}"
        raise EnvironmentProblem(problem, fix_of(device, reasons))


def fix_of(device: str, reasons: list[tuple[str, str]]) -> str:
    return f"--device cpu, or {A_GPU}" if device == "cuda" and driver_problem() else reasons[0][1]


def problems(device: str) -> list[tuple[str, str]]:
    """Return why ONNX Runtime cannot run ONNX graphs on `device`, as (reason, fix) pairs; empty if it can."""
    try:
        import onnxruntime
    except Exception as error:  # compiled modules may raise any exception
        if lacks_memory(error):
            raise
        problem, fix = f"onnxruntime cannot be imported: {first_line(error)}", "pip install onnxruntime"
        if both := both_packages():
            return [(f"{problem}; {both}, and one has overwritten files of the other", reinstall(device))]
        return [(problem, install_gpu() if device == "cuda" else fix)]
    if device == "cpu":
        return []
    reasons = []
    available = providers(onnxruntime)
    driver = driver_problem()
    # A provider in a separate library is listed only if it finds a GPU.
    if PROVIDERS[device] not in available and not (driver and ", cuda-plugin-ep=" in _build_info(onnxruntime)):
        problem = f"onnxruntime {onnxruntime.__version__} has no CUDA provider, only {', '.join(available)}"
        clash = package_clash()
        reasons.append((f"{problem}: {clash[0]}", clash[1]) if clash else (problem, install_gpu()))
    if driver:
        reasons.append((driver, A_GPU))
    elif old := old_driver(onnxruntime):
        reasons.append(old)
    return reasons


def install_gpu() -> str:
    machine = platform.machine()
    return INSTALL_GPU if (sys.platform, machine) == ("linux", "x86_64") else f"{NO_WHEEL} {sys.platform} on {machine}"


def old_driver(onnxruntime: Any) -> tuple[str, str] | None:
    built = str(getattr(onnxruntime, "cuda_version", "")).partition(".")[0]
    if not built.isdigit():
        return None
    version = ctypes.c_int()
    drive("cuDriverGetVersion", ctypes.byref(version))
    if version.value >= int(built) * 1000:
        return None
    runs = f"{version.value // 1000}.{version.value % 1000 // 10}"
    least = f"NVIDIA's driver {DRIVERS[int(built)]}" if int(built) in DRIVERS else f"a driver of CUDA {built}"
    needs = f"onnxruntime {onnxruntime.__version__} is built for CUDA {built}"
    return f"the NVIDIA driver runs CUDA up to {runs}, and {needs}", f"{least} or newer, or --device cpu"


def both_packages() -> str:
    versions = {name: installed_version(name) for name in SAME_MODULE.values()}
    if not all(versions.values()):
        return ""
    return " and ".join(f"{name} {version}" for name, version in versions.items()) + " are both installed"


def package_clash() -> tuple[str, str] | None:
    both = both_packages()
    if not both or module_owner() != SAME_MODULE["cpu"]:
        return None
    return f"{both}, and onnxruntime, installed last, has overwritten the module of onnxruntime-gpu", reinstall("cuda")


def module_owner() -> str:
    try:
        from onnxruntime.capi.build_and_package_info import package_name
    except Exception:  # compiled modules may raise any exception, and older releases have no such file
        return ""
    return str(package_name)


def reinstall(device: str) -> str:
    return f"pip install --force-reinstall --no-deps {SAME_MODULE[device]}"


def providers(onnxruntime: Any) -> list[str]:
    names = list(onnxruntime.get_available_providers())
    with contextlib.suppress(Exception):  # releases before 1.22 have no such function
        names += [device.ep_name for device in onnxruntime.get_ep_devices() if device.ep_name not in names]
    return names


def graph_problem() -> str:
    """Return why the installed ONNX Runtime cannot replay decode steps and merges as CUDA graphs; "" if it can.

    ONNX Runtime 1.29 and 1.30 share a device's memory between sessions, and reuse memory that a captured CUDA graph
    still reads and writes. A replay would return wrong logits without an error.
    """
    import onnxruntime

    version = str(onnxruntime.__version__)
    if (1, 29) <= tuple(int(number) for number in version.split(".")[:2]) < (1, 31):
        return f"onnxruntime {version} reuses the memory of CUDA graphs; pip install 'onnxruntime-gpu>=1.31'"
    return ""


def load_cuda_libraries(onnxruntime: Any) -> None:
    if getattr(onnxruntime, "cuda_version", "") and hasattr(onnxruntime, "preload_dlls"):
        # preload_dlls prints the libraries that it does not find, although a session may start without them.
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()


@cache
def driver_problem() -> str:
    try:
        return "" if gpu_count() else "the NVIDIA driver shows no GPU"
    except EnvironmentProblem as error:
        return error.problem


def drive(name: str, *arguments: Any) -> None:
    library = driver()
    check(library, name, getattr(library, name)(*arguments))


def driver() -> Any:
    try:
        return ctypes.CDLL(DRIVER)
    except OSError as error:
        raise EnvironmentProblem(f"there is no NVIDIA driver ({DRIVER} cannot be loaded)", A_GPU) from error


def check(library: Any, name: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        answer = (text.value or b"error %d" % code).decode()
        function = "" if name in ("cuInit", "cuDeviceGetCount") else f" for {name.removesuffix('_v2')}"
        raise EnvironmentProblem(f"the NVIDIA driver cannot be used{function}: {answer}", "kvexport doctor")


def gpu_count() -> int:
    count = ctypes.c_int()
    drive("cuInit", 0)
    drive("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def gpu_memory() -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    use_first_gpu()
    drive("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def use_first_gpu() -> None:
    """Select the first GPU for driver calls of this thread, in the CUDA context that ONNX Runtime uses."""
    drive("cuCtxSetCurrent", _first_context())


@cache
def _first_context() -> Any:
    context = ctypes.c_void_p()
    drive("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    return context


def _build_info(onnxruntime: Any) -> str:
    try:
        return str(onnxruntime.get_build_info())
    except AttributeError:
        return ""
