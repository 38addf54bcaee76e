"""Registry of the backends: the libraries (ONNX Runtime, TensorRT) that run an exported model's ONNX graphs.

Each folder in this package is a backend; new ones are found by a scan. A folder has `section.py`, whose `Section`
defines the keys that the backend adds to a recipe's `backend:`, and `backend.py`, whose `BACKEND` is a
`kvexport.backends.base.Backend`. All other code uses this registry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvexport.errors import UsageError

if TYPE_CHECKING:
    from kvexport.backends.base import Backend
    from kvexport.packages import Package


def get(name: str) -> Backend:
    from kvexport.backends.sections import names

    if name not in names():
        raise UsageError(f"there is no backend {name}", f"one of {', '.join(names())}")
    backend: Backend = importlib.import_module(f"{__name__}.{name}.backend").BACKEND
    return backend


def all_backends() -> list[Backend]:
    from kvexport.backends.sections import names

    return [get(name) for name in names()]


def packages() -> tuple[Package, ...]:
    from kvexport.packages import PACKAGES

    return (*PACKAGES, *(package for backend in all_backends() for package in backend.packages))
