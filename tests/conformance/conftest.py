"""A hook that runs only a sample of the cases of the backend *cuda-ptx*, which takes a hundred times as long as others.

A hash of a case's name decides whether it runs. ``KVEXPORT_EVERY_PTX=1`` runs all of them.
"""

import os
import zlib

import pytest

from tests.conformance.cuda_library import EVERY_PTX, CudaPtx

ONE_IN = 6


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of *cuda-ptx* that are not in the sample."""
    if os.environ.get(EVERY_PTX):
        return
    left_out = [item for item in items if _is_of_ptx(item) and zlib.crc32(item.name.encode()) % ONE_IN]
    if left_out:
        gone = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in gone]
        config.hook.pytest_deselected(items=left_out)


def _is_of_ptx(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    if call is None:
        return False
    return isinstance(call.params.get("backend"), CudaPtx) or call.params.get("way") == CudaPtx.name
