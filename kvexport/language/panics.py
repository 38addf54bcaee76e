"""Panics of libraries that are written in Rust."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a Rust library. Python sees it as PanicException, which is no Exception."""
    return type(error).__name__ == "PanicException"
