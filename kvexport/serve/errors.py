"""Errors in HTTP responses, in the form of each API, without tracebacks and without paths of the server's files."""

from __future__ import annotations

import re
from typing import Any

from kvexport.errors import (
    DeadlineError,
    EngineEndedError,
    EnvironmentProblem,
    KvexportError,
    UsageError,
    lacks_files,
)

_FIELD = re.compile(r"([a-z_]+(?:\.[a-z0-9_]+)*): ")  # at the start of a message about one field of a request
_OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {**_OPENAI, 413: "request_too_large", 503: "overloaded_error"}


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {"Retry-After": str(retry_after)} if retry_after else {}

    def body(self, path: str) -> dict[str, Any]:
        """Return the JSON body of the error response: Anthropic's form for its routes, OpenAI's for all others."""
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": self._kind(_ANTHROPIC, "api_error"), "message": self.message}}
        error = {"message": self.message, "type": self._kind(_OPENAI, "server_error"), "param": self.param}
        return {"error": {**error, "code": self.code}}

    def _kind(self, names: dict[int, str], server: str) -> str:
        return names.get(self.status, "invalid_request_error" if self.status < 500 else server)


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    return ApiError(503, message, code="overloaded", retry_after=retry_after)


def engine_failed() -> ApiError:
    return ApiError(500, "the engine has failed; the server's log says why", code="engine_failed")


def api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if lacks_files(error):
        message = "the server has too many files open: it needs a larger limit (ulimit -n), or fewer clients"
        return overloaded(message, 5)
    if isinstance(error, UsageError):
        field = _FIELD.match(error.problem)
        message = f"{error.problem} ({error.fix})" if error.fix else error.problem
        return ApiError(400, message, param=field and field[1])
    if isinstance(error, DeadlineError):
        return overloaded(error.problem)
    if isinstance(error, EngineEndedError):
        return engine_failed()
    if isinstance(error, EnvironmentProblem):
        return ApiError(501, f"{error.problem} ({error.fix})", code="not_installed")
    if isinstance(error, KvexportError):
        return ApiError(500, error.problem, code="generation_failed")
    return ApiError(500, "the server failed; its log says why", code="internal_error")
