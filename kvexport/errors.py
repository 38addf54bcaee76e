"""The errors that kvexport shows to users. Each error states the problem, the value found, and what the user can do.

A command of kvexport that fails exits with the exit code of the error's class.
"""

from __future__ import annotations

import errno
import os


class KvexportError(Exception):
    """The base of all errors meant for a user.

    Attributes:
        problem: One line that names the problem and the value found.
        fix: A line with what the user can do about the problem, such as a command or an option; "" if there is none.
        exit_code: The exit code of a command that ends by this error.
    """

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}\n  fix: {fix}" if fix else problem)
        self.problem = problem
        self.fix = fix


class UsageError(KvexportError):
    """The error for an argument, recipe, prompt or checkpoint that cannot be used."""

    exit_code = 2


class EnvironmentProblem(KvexportError):
    """The error for something that the machine lacks: a Python package, an ONNX Runtime provider, disk space."""

    exit_code = 3


class MismatchError(KvexportError):
    """The error for a difference between an engine's outputs and the outputs of the model in PyTorch."""

    exit_code = 4


class ArtifactError(KvexportError):
    """The error for an artifact (exported model) that is damaged, incomplete, or of an unsupported format version."""

    exit_code = 5


class SnapshotError(KvexportError):
    """The error for a snapshot (saved sequence) that is damaged, or from another model, recipe or format version."""

    exit_code = 5


class DeadlineError(KvexportError):
    """The error for a request that got no lane (row of the batch) before its deadline."""


class EngineEndedError(KvexportError):
    """The error for a call of the server's engine after its thread has ended, so that it can run no request."""


_TOO_MANY = os.strerror(errno.EMFILE)  # libraries put it into errors of their own types
# torch and ONNX Runtime raise errors of their own types.
_NO_MEMORY = (
    "bad_alloc",
    "failed to allocate memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "failed to map segment from shared object",  # a library that is loaded
    "can't start new thread",  # each thread has a stack
    "pthread_create failed",
)


def lacks_files(error: BaseException | None) -> bool:
    """Return whether an exception, or one that caused it, was raised because too many files were open."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        if not isinstance(error, KvexportError) and _TOO_MANY in str(error):  # ours may quote a user's text
            return True
        error = error.__cause__ or error.__context__
    return False


def lacks_memory(error: BaseException) -> bool:
    """Return whether an exception was raised for lack of memory."""
    text = str(error).casefold()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; the name of the exception's class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def summary(error: BaseException) -> str:
    """Return the name of an exception's class, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
