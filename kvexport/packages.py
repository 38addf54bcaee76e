"""The Python packages that each command needs: which are missing or too old, and the command that installs them.

This module works if all other packages are missing, because its imports need only the standard library.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvexport.errors import EnvironmentProblem
from kvexport.machine import require_address_space

VERBS = {
    "bench": "run",
    "generate": "run",
    "chat": "run",
    "inspect": "run",
    "recipes": "run",
    "serve": "serve",
    "build": "export",
    "plan": "export",
    "validate": "export",
    "eval": "export",
    "calibrate": "export",
}


@dataclass(frozen=True)
class Package:
    name: str  # name of the distribution
    module: str  # module that it provides
    minimum: str  # oldest version that works
    extra: str  # extra of kvexport that requires it; "run" if kvexport requires it without extras
    purpose: str  # what kvexport uses it for
    needs_gpu: bool = False  # whether only a machine with an NVIDIA GPU can use it

    @property
    def install(self) -> str:
        return (
            f"pip install '{self.name}>={self.minimum}'"
            if self.extra == "run"
            else f"pip install 'kvexport[{self.extra}]'"
        )


# Backends list their own packages; `kvexport.backends.packages` returns all.
PACKAGES = (
    Package("minijinja", "minijinja", "3", "run", "renders chat templates"),
    Package("numpy", "numpy", "1.26", "run", "arrays"),
    Package("pydantic", "pydantic", "2.7", "run", "checks recipes"),
    Package("pyyaml", "yaml", "6", "run", "reads recipes"),
    Package("rich", "rich", "13", "run", "progress bars"),
    Package("tokenizers", "tokenizers", "0.20", "run", "text to tokens and back"),
    Package("typer", "typer", "0.12", "run", "the command line"),
    Package("torch", "torch", "2.9", "export", "traces the checkpoint; the reference of validate"),
    Package("transformers", "transformers", "5.22", "export", "the checkpoint's model"),
    Package("safetensors", "safetensors", "0.4", "export", "the checkpoint's weights"),
    Package("onnx", "onnx", "1.18", "export", "writes graphs"),
    Package("onnxscript", "onnxscript", "0.7", "export", "optimises graphs"),
    Package("onnx-ir", "onnx_ir", "1.0", "export", "optimises graphs"),
    Package("polygraphy", "polygraphy", "0.49", "export", "validate runs the engine with it"),
    Package("llguidance", "llguidance", "1.9", "serve", "answers that keep to a JSON schema or a grammar"),
    Package("prometheus_client", "prometheus_client", "0.20", "serve", "the server's metrics"),
    Package("starlette", "starlette", "0.37", "serve", "the server's routes"),
    Package("uvicorn", "uvicorn", "0.30", "serve", "the server's HTTP"),
)


@dataclass(frozen=True)
class PackageState:
    package: Package
    version: str | None  # installed version; None if it is not installed
    problem: str  # reason why the package cannot be used; "" if it can


def require(verb: str) -> None:
    missing = [p.name for p in PACKAGES if p.extra != "run" and needs(verb, p) and not is_there(p.module)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise EnvironmentProblem(
            f"{verb} needs {', '.join(missing)}, which {are} not installed", f"pip install 'kvexport[{VERBS[verb]}]'"
        )
    if VERBS[verb] == "export":
        require_address_space()


def missing_package(error: ImportError, packages: Sequence[Package]) -> EnvironmentProblem | None:
    module = (error.name or "").partition(".")[0]
    if module == "kvexport":
        return None
    known = next((p for p in packages if p.module == module), None)
    if known is None:
        return EnvironmentProblem(
            f"an import failed: {str(error).splitlines()[0] if str(error) else module}", "kvexport doctor"
        )
    return EnvironmentProblem(
        f"{known.name} ({known.purpose}) cannot be imported: {str(error).splitlines()[0]}", known.install
    )


def package_state(package: Package) -> PackageState:
    """Return the installed version of a package, and why it cannot be used, from the package's metadata alone."""
    version = installed_version(package.name)
    if version is None:
        return PackageState(package, None, "missing")
    if not is_there(package.module):
        return PackageState(package, version, f"installed, but there is no module {package.module}")
    if _numbers(version) < _numbers(package.minimum):
        return PackageState(package, version, f"too old, {package.minimum} is the oldest that will do")
    return PackageState(package, version, "")


def installed_version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needs(verb: str, package: Package) -> bool:
    if package.name == "polygraphy":
        return verb == "validate"
    return package.extra == "run" or package.extra == VERBS[verb]


def is_there(module: str) -> bool:
    """Return whether a Python module could be imported; only its parent packages are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
