"""The limits and options of the HTTP server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvexport.errors import UsageError
from kvexport.memory import KEPT_BYTES

MIB = 1 << 20


@dataclass(frozen=True)
class ServeSettings:
    """The limits and options of an HTTP server.

    Attributes:
        names: Names of the model in requests. /v1/models lists the first one. "*" accepts any name.
        api_keys: The API keys; every client needs one of them. Without keys every client that reaches the server may
            use it.
        hosts: Further host names that a server without keys accepts.
        origins: Origins of web pages that may call the server, besides its own page.
        preempts: Whether a waiting request takes the lane of a running request with a higher `priority` number, which
            continues later.
        reasoning: Whether reasoning is separated from the text of answers, for models whose chat template has
            reasoning.
        queue: The largest number of requests that wait for a lane.
        choices: The largest number of answers to one HTTP request: `n` times its prompts.
        body: The largest size of a request body in bytes.
        max_tokens: The largest number of tokens of one answer; None allows as many as the artifact's length.
        timeout: Seconds that one HTTP request may take in total.
        keep_alive: Seconds after which a stream without events gets a comment.
        stall: Seconds after which a client that receives no data counts as disconnected.
        drain: Seconds that running requests may still take when the server ends.
        buffer: The largest number of tokens of a stream that its client has not received yet; the server disconnects a
            client that falls further behind.
        prefix_memory: Bytes for saved states of prompt prefixes; 0 saves none.
        session_memory: Bytes for sessions in memory.
        session_folder: The folder to which every turn of a session is written.
        session_disk: Bytes of all files in that folder.
        session_shared: Whether other servers of the artifact also use the folder.
        latency_budget: Seconds that a call which reads several prompts may take while other requests wait; None sets no
            bound. See `EngineOptions.latency_budget`.
    """

    names: tuple[str, ...] = ("kvexport",)
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    preempts: bool = False
    reasoning: bool = True
    queue: int = 256
    choices: int = 128
    body: int = 16 * MIB
    max_tokens: int | None = None
    timeout: float = 1800.0
    keep_alive: float = 15.0
    stall: float = 30.0
    drain: float = 30.0
    buffer: int = 4096
    prefix_memory: int = KEPT_BYTES
    session_memory: int = KEPT_BYTES
    session_folder: str | None = None
    session_disk: int = 16 << 30
    session_shared: bool = False
    latency_budget: float | None = 0.1

    def __post_init__(self) -> None:
        """Raise UsageError for API keys that no client can send."""
        check_keys(self.api_keys)


_KEY = re.compile(r"[!-~]+")  # visible ASCII: a header cannot carry other characters reliably


def check_keys(keys: Sequence[str]) -> None:
    """Check that every API key is visible ASCII without spaces.

    Raises:
        UsageError: A key is empty, or has another character. The message does not show the key.
    """
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            wrong = "has characters other than visible ASCII" if key else "is empty"
            raise UsageError(f"API key {number} of {len(keys)} {wrong}", "openssl rand -hex 32 prints a key")
