"""The errors that a user may see. Each has the problem, the value that was found, and the line that fixes it.

A command exits with the exit code of the error's class.
"""

from __future__ import annotations


class KvexportError(Exception):
    """The base of all errors meant for a user.

    Attributes:
        problem: One line that names the problem and the value found.
        fix: The line that fixes it, or "".
        exit_code: The exit code of a command that ends by this error.
    """

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}\n  fix: {fix}" if fix else problem)
        self.problem = problem
        self.fix = fix


class UsageError(KvexportError):
    """The error for an unusable call, recipe, prompt or checkpoint."""

    exit_code = 2


class EnvironmentProblem(KvexportError):
    """The error for something that this machine lacks: a package, a provider, disk space."""

    exit_code = 3


class MismatchError(KvexportError):
    """The error for a difference between an engine and its PyTorch reference."""

    exit_code = 4


class ArtifactError(KvexportError):
    """The error for a damaged or incomplete artifact, or one of another contract version."""

    exit_code = 5


class SnapshotError(KvexportError):
    """The error for a snapshot that is damaged, or belongs to another model, recipe or contract than the artifact's."""

    exit_code = 5


class QueueFullError(KvexportError):
    """The error for a request that is refused because the queue of waiting requests is full."""


class DeadlineError(KvexportError):
    """The error for a request that got no lane (row of the batch) before its deadline."""


class EngineEndedError(KvexportError):
    """The error for a call of an engine whose thread has ended."""


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


def lacks_memory(error: BaseException) -> bool:
    """Return whether an exception was raised for lack of memory."""
    text = str(error).casefold()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)
