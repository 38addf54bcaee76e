"""Detection of panics (fatal errors) of libraries that are written in Rust."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of a Rust library, which Python gets as PanicException."""
    return type(error).__name__ == "PanicException"
