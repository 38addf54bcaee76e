"""Errors on the command line: one readable message on stderr, and the exit code of the error's class.

A user never sees a bare traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from kvexport.commands.process import Terminated
from kvexport.errors import EnvironmentProblem, KvexportError, UsageError, lacks_files, lacks_memory, summary

INTERRUPTED = 128 + 2  # a shell's exit code for a process that SIGINT ended; below that for SIGPIPE
PIPE_CLOSED = 128 + 13
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EROFS, errno.EPERM)
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)


class Verbs(TyperGroup):
    """The group of kvexport's commands, which turns an error of a command into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the command line names, and turn its errors into messages and exit codes."""
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
            return result
        except (typer.Exit, typer.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if hasattr(error, "show"):  # typer's own usage errors
                raise
            raise typer.Exit(report(error, debug=bool(ctx.params.get("debug")))) from None
        finally:
            _flush_or_abandon()


def report(error: BaseException, *, debug: bool = False) -> int:
    """Print an error for the user on stderr, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED
    if isinstance(error, Terminated):
        _say(f"\n{error}")
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt):
        _say("\ninterrupted")
        return INTERRUPTED
    known = _too_many_files(error) or (error if isinstance(error, KvexportError) else _known_problem(error))
    if debug:
        _say("".join(traceback.format_exception(error)).rstrip())
    if known is not None:
        _say(f"error: {known.problem}" + (f"\n  fix: {known.fix}" if known.fix else ""))
        return known.exit_code
    _say(f"error: {summary(error)}")
    if not debug:
        _say(f"  this is a defect of kvexport; {_write_log(error)}")
    return KvexportError.exit_code


def _too_many_files(error: BaseException) -> KvexportError | None:
    """Return a clear error if too many files are open, which otherwise looks like a damaged or unreadable file."""
    if not lacks_files(error):
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    problem = f"this process may open {limit} files at once, and needs more: {summary(error)}"
    return EnvironmentProblem(problem, f"ulimit -n {max(1024, 2 * limit)}")


def _known_problem(error: BaseException) -> KvexportError | None:
    """Return the error to show for a missing package, too little memory or disk space, or an impossible path."""
    if lacks_memory(error):
        fix = "a larger limit of memory (ulimit -v, the container's), or smaller limits.max_batch, limits.max_length "
        fix += "or cache.budget; kvexport plan MODEL says what a model takes"
        return EnvironmentProblem(f"not enough memory: {summary(error)}", fix)
    if isinstance(error, ImportError):
        from kvexport.backends import packages
        from kvexport.packages import missing_package

        return missing_package(error, packages())
    if isinstance(error, OSError) and error.errno in _NO_PATH:
        path = str(error.filename or "a path")
        name = path if len(path) <= 80 else f"{path[:40]}...{path[-40:]} ({len(path)} characters)"
        return UsageError(f"no file can be called {name}: {error.strerror}", "a shorter path, without circles of links")
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED and error.filename:
        fix = "a folder that you may write: --out, or TMPDIR=DIRECTORY for temporary files"
        return EnvironmentProblem(f"{error.filename} cannot be written or read: {error.strerror}", fix)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        written = error.filename or "the output"
        return EnvironmentProblem(f"{written} grew past the limit on the size of files", "ulimit -f unlimited")
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return EnvironmentProblem(f"nowhere to write temporary files: {error.strerror}", "TMPDIR=DIRECTORY with room")
    if isinstance(error, OSError) and error.errno in _FULL:
        written = error.filename or "the output"
        return EnvironmentProblem(
            f"disk full while writing {written}: {error.strerror}", f"free space where {written} is"
        )
    return None


def _write_log(error: BaseException) -> str:
    from kvexport.version import __version__

    try:
        number, path = tempfile.mkstemp(prefix="kvexport-", suffix=".log", text=True)
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"kvexport {__version__}, Python {sys.version}\n{sys.argv}\n\n")
            file.write("".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"its traceback could not be kept ({problem.strerror}): KVEXPORT_DEBUG=1 shows it"
    return f"its traceback is in {path}, and KVEXPORT_DEBUG=1 shows it"


def _say(text: str) -> None:
    # stderr may have no reader, as stdout may.
    with suppress(OSError, ValueError):
        typer.echo(text, err=True)


def _flush_or_abandon() -> None:
    """Flush stdout. If stdout cannot be written, discard its content, so that Python ends without an error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
