"""Registry of the backends: the libraries (ONNX Runtime, TensorRT) that run an exported model's ONNX graphs.

Every folder of this package is a backend and is found by a scan. The folder's `section.py` has a class `Section` with
the keys that the backend adds to a recipe's `backend:`. Its `backend.py` has an object `BACKEND`, a
`kvexport.backends.base.Backend`. Code outside a backend's folder reaches the backend only by this registry.
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
