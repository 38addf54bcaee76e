"""Memory of a file: a full cache that is larger than the machine's memory lies on its disk."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import EnvironmentProblem
from kvexport.units import format_bytes


def mapped(size: int, folder: str, limit: int | None) -> NDArray[np.uint8]:
    """So many bytes of zeros of a file in `folder`, mapped into memory (see `kvexport.backends.base.Memory`).

    The file has no name from the moment that it is open, so that the system frees it with the array, or with the
    process however that ends. All of its blocks are taken at once: a disk that is full is found here, not by a signal
    in the middle of a step. Raises EnvironmentProblem for a folder that is missing or cannot be written, a disk without
    room, and a size above `limit` bytes.
    """
    if limit is not None and size > limit:
        raise EnvironmentProblem(
            f"the file of the full cache takes {size} bytes ({format_bytes(size)}), cache.periodic.limit is {limit}",
            f"--set cache.periodic.limit={size}, or smaller limits.max_length or limits.max_batch",
        )
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            piece = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise EnvironmentProblem(
            f"the full cache takes {format_bytes(size)} in cache.periodic.store {folder}: {error.strerror or error}",
            "a folder that exists and can be written on a disk with that much room, smaller limits.max_length or "
            "limits.max_batch, or cache.periodic.store=null, which is memory",
        ) from error
    return np.frombuffer(piece, np.uint8)
