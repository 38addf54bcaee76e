"""File permissions that hold for root as well."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION, _OVERRIDE = 0x20080522, 1 << 1  # _LINUX_CAPABILITY_VERSION_3, CAP_DAC_OVERRIDE


@contextmanager
def permissions_hold() -> Iterator[None]:
    """Make this thread, and threads that it starts, obey file permissions until the end of the `with` block."""
    if os.geteuid() != 0:
        yield
        return
    header, data = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data) != 0:
        pytest.skip("not reached: the capabilities of root cannot be read here")
    effective = data[0]
    data[0] = effective & ~_OVERRIDE
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = effective
        assert libc.capset(header, data) == 0
