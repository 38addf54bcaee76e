"""`kvexport doctor`: what this machine has, what it lacks, and which verbs will work. Not covered: whether a GPU
computes."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvexport.commands.options import JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import EnvironmentProblem
from kvexport.packages import PACKAGES, VERBS, PackageState, needs, package_state
from kvexport.units import format_bytes
from kvexport.version import __version__

if TYPE_CHECKING:
    from kvexport.report.page import Section

FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "asimd",
    "asimdhp",
    "sve",
)


def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine has and what it lacks.

    Exit code 3 where an artifact cannot be run.
    """
    found = diagnose()
    print_result(as_json, found.to_json, found.sections)
    if not found.runs:
        raise typer.Exit(3)


@dataclass(frozen=True)
class Native:
    """A library of native operators. instruction_set: what it uses of this machine, "" where it cannot be used; then
    the problem, and the
    line that mends it. small_pages: why weights stay in small pages, "" where they do not."""

    instruction_set: str
    problem: str = ""
    fix: str = ""
    small_pages: str = ""


@dataclass
class Diagnosis:
    """The environment. verbs: verb -> what it lacks (empty: it will work). Memory and disk in bytes, 0 = unknown."""

    packages: list[PackageState]
    verbs: dict[str, list[str]]
    providers: list[str]
    system: dict[str, Any]
    native: Native
    native_cuda: Native
    gpus: list[str] = field(default_factory=list)
    gpu_problem: str = ""
    tensorrt_plugins: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether an artifact can be run here."""
        return not self.verbs["generate"]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        packages = [
            {**asdict(p.package), "install": p.package.install, "version": p.version, "problem": p.problem}
            for p in self.packages
        ]
        verbs = {verb: {"works": not lacks, "lacks": lacks} for verb, lacks in self.verbs.items()}
        gpu = {"devices": self.gpus, "problem": self.gpu_problem}
        return {
            "runs": self.runs,
            **self.system,
            "providers": self.providers,
            "native": asdict(self.native),
            "native_cuda": asdict(self.native_cuda),
            "tensorrt_plugins": self.tensorrt_plugins,
            "gpu": gpu,
            "packages": packages,
            "verbs": verbs,
        }

    def sections(self) -> list[Section]:
        """For a person."""
        from kvexport.report.page import KeyValues, Paragraph, Table

        system, plugins = self.system, self.tensorrt_plugins
        machine = {
            "kvexport": system["kvexport"],
            "Python": system["python"],
            "system": system["system"],
            "processor": f"{system['processor']}, {system['cores']} cores usable",
            "instructions": " ".join(system["instructions"]) or "unknown",
            "memory": f"{_size(system['memory'])}, {_size(system['memory_available'])} available",
            "free disk": f"{_size(system['disk_free'])} in {Path.cwd()}",
            "GPU": ", ".join(self.gpus) or f"none: {self.gpu_problem}",
            "ONNX Runtime providers": ", ".join(self.providers) or "none: onnxruntime cannot be imported",
            "native operators": _row(self.native),
            "weights in huge pages": _pages_row(self.native),
            "native operators for CUDA": _row(self.native_cuda),
            "TensorRT plugins": plugins.get("library") or "none: {problem}. To mend it: {fix}".format(**plugins),
        }
        packages = Table(
            "Packages",
            ("package", "version", "for", "what it does", "to mend"),
            [_package_row(p) for p in self.packages],
        )
        verbs = {verb: "works" if not lacks else f"lacks {', '.join(lacks)}" for verb, lacks in self.verbs.items()}
        return [KeyValues("Machine", machine), packages, KeyValues("Verbs", verbs), Paragraph(self.verdict)]

    @property
    def verdict(self) -> str:
        """What can be done here, in a line or two."""
        if not self.runs:
            lines = {s.package.install for s in self.packages if s.problem and s.package.extra == "run"}
            return f"Artifacts cannot be run here. To mend it: {' && '.join(sorted(lines)) or 'see above'}"
        if any(self.verbs.values()):
            return "Artifacts can be run here, but not built or validated. To mend it: pip install 'kvexport[export]'"
        return "Artifacts can be built, validated and run here."


def diagnose() -> Diagnosis:
    """Look at this machine. Takes about a second; imports onnxruntime and tokenizers, which are known to break, and
    nothing heavier."""
    providers, ort_problem = _providers()
    states = [package_state(package) for package in PACKAGES]
    broken = {"onnxruntime": ort_problem, "tokenizers": _import_problem("tokenizers")}
    states = [_with_problem(state, broken.get(state.package.name, "")) for state in states]
    if providers:
        # onnxruntime-gpu gives the same module as onnxruntime.
        states = [
            s if s.package.name != "onnxruntime" or s.version else PackageState(s.package, "from another package", "")
            for s in states
        ]
    lacking = [s.package for s in states if s.problem]
    verbs = {verb: [package.name for package in lacking if needs(verb, package)] for verb in VERBS}
    if providers and "CPUExecutionProvider" not in providers:
        for lacks in verbs.values():
            lacks.append("onnxruntime's CPUExecutionProvider")
    gpus, gpu_problem = _gpus()
    return Diagnosis(
        states, verbs, providers, _system(), _native("cpu"), _native("cuda"), gpus, gpu_problem, _tensorrt_plugins()
    )


def _package_row(state: PackageState) -> tuple[str, str, str, str, str]:
    package = state.package
    if not state.problem:
        return package.name, state.version or "", package.extra, package.purpose, ""
    shown = "missing" if state.version is None else f"{state.version}: {state.problem}"
    return package.name, shown, package.extra, package.purpose, package.install


def _with_problem(state: PackageState, problem: str) -> PackageState:
    return state if state.problem or not problem else PackageState(state.package, state.version, problem)


def _import_problem(module: str) -> str:
    """Why a module cannot be imported. Compiled ones fail in ways of their own."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"cannot be imported: {(str(error) or type(error).__name__).splitlines()[0]}"
    return ""


def _providers() -> tuple[list[str], str]:
    if problem := _import_problem("onnxruntime"):
        return [], problem
    try:
        return list(importlib.import_module("onnxruntime").get_available_providers()), ""
    except Exception as error:
        return [], f"does not name its providers: {error}"


def _system() -> dict[str, Any]:
    memory, available = _memory()
    model, flags = _processor()
    return {
        "kvexport": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "instructions": [flag for flag in FLAGS if flag in flags],
        "memory": memory,
        "memory_available": available,
        "disk_free": shutil.disk_usage(Path.cwd()).free,
    }


def _processor() -> tuple[str, set[str]]:
    text = _read(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine(), set(flags[1].split()) if flags else set()


def _memory() -> tuple[int, int]:
    """Bytes of memory in all and available, the smaller of the machine's and the control group's."""
    text = _read(Path("/proc/meminfo"))
    found = {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    limit, used = (_read(Path("/sys/fs/cgroup") / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit() and 0 < int(limit) < (total or int(limit) + 1):
        return int(limit), min(available or int(limit), max(0, int(limit) - int(used)))
    return total, available


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _native(device: str) -> Native:
    from kvexport.backends.onnxruntime.devices import problems
    from kvexport.backends.onnxruntime.operators import (
        instruction_set,
        library,
        require_runnable,
        why_no_library,
        why_small_pages,
    )

    if lacks := problems(device) if device != "cpu" else []:
        return Native("", "; ".join(problem for problem, _ in lacks), lacks[0][1])
    path = library(device)
    if path is None:
        return Native("", *why_no_library(device))
    try:
        require_runnable(path)
        return Native(instruction_set(path), small_pages=why_small_pages(path) if device == "cpu" else "")
    except EnvironmentProblem as error:
        return Native("", error.problem, error.fix)


def _tensorrt_plugins() -> dict[str, str]:
    """Where their library is, or why there is none and what changes that; whether TensorRT takes it is seen when
    engines are built."""
    from kvexport.backends.tensorrt import plugin

    path = plugin.library()
    if path is not None:
        return {"library": str(path)}
    problem, fix = plugin.why_no_library()
    lacks = plugin.what_building_lacks() if fix == plugin.BUILD else None
    return {"problem": f"{problem}; to build them here, first: {lacks}" if lacks else problem, "fix": fix}


def _row(native: Native) -> str:
    return native.instruction_set or f"none: {native.problem}. To mend it: {native.fix}"


def _pages_row(native: Native) -> str:
    if not native.instruction_set:
        return "no: it takes the native operators"
    if not native.small_pages:
        return "yes, where memory allows"
    fix = (
        ". To mend it, as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        if native.small_pages == "switched off in the kernel"
        else ""
    )
    return f"no: {native.small_pages}{fix}"


def _gpus() -> tuple[list[str], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not there"
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not run: {error}"
    if done.returncode:
        return [], f"nvidia-smi says: {((done.stdout + done.stderr).strip().splitlines() or ['nothing'])[0]}"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


def _size(count: int) -> str:
    return format_bytes(count) if count else "unknown"
