"""Memory that is backed by a file, for a full KV cache that is larger than the machine's memory."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import EnvironmentProblem
from kvexport.units import format_bytes


def mapped(size: int, folder: str, limit: int | None) -> NDArray[np.uint8]:
    """Return an array of zeros in a memory-mapped file without a name, for a full cache on disk.

    The name of the file is removed as soon as it is open, so the system frees the file with the array, or when the
    process ends. All blocks are allocated at once, so a full disk raises an error here instead of a signal during a
    step.
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
