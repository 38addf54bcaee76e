"""Detection of panics (fatal errors) of libraries that are written in Rust."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of a Rust library. Python gets it as PanicException, not an Exception."""
    return type(error).__name__ == "PanicException"
