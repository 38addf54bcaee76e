"""A disk without space, for files that `kvexport.files` writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvexport.files import PART


@contextmanager
def full_disk() -> Iterator[None]:
    """Let every new file be on a disk without space: each write to it fails in the kernel."""
    real = os.open

    def onto_a_full_disk(path: Any, flags: int, *mode: int) -> int:
        return real("/dev/full", os.O_RDWR) if str(path).endswith(PART) else real(path, flags, *mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", onto_a_full_disk)
        yield
