"""Errors a user may see. Each says what was wrong, what was found, and what mends it; the verb exits with its class's
code."""

from __future__ import annotations


class KvexportError(Exception):
    """Base of all errors meant for a user: `problem` (one line, with what was found) and `fix` (the line that mends it,
    or "")."""

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}\n  fix: {fix}" if fix else problem)
        self.problem = problem
        self.fix = fix


class UsageError(KvexportError):
    """The call, the recipe, the prompt or the checkpoint cannot be used as given."""

    exit_code = 2


class EnvironmentProblem(KvexportError):
    """Something this machine lacks: a package, a provider, disk space."""

    exit_code = 3


class MismatchError(KvexportError):
    """An engine and its PyTorch reference disagree."""

    exit_code = 4


class ArtifactError(KvexportError):
    """An artifact is damaged, incomplete or of another contract version."""

    exit_code = 5


class SnapshotError(KvexportError):
    """A snapshot is damaged, or of another model, recipe or contract than the artifact that is to go on with it."""

    exit_code = 5


class QueueFullError(KvexportError):
    """As many requests wait as may: come again later."""


class DeadlineError(KvexportError):
    """A request's deadline passed before there was a lane for it."""


# torch and ONNX Runtime say so in errors of their own.
_NO_MEMORY = ("bad_alloc", "Failed to allocate memory", "can't allocate memory", "not enough memory")


def lacks_memory(error: BaseException) -> bool:
    """Whether it says that there is not enough memory."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)
