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
        api_keys: Keys of which every client needs one. Without keys every client that reaches the server may use it.
        hosts: Further host names under which a server without keys answers.
        origins: Origins of web pages that may call the server, besides its own page.
        preempts: Whether a request of better priority takes the lane of a request of worse priority, which goes on
            later.
        reasoning: Whether answers are split into reasoning and text, for models whose chat template knows reasoning.
        queue: Requests that may wait for a lane.
        choices: Answers of one HTTP request: `n` times its prompts.
        body: Bytes of one request body.
        max_tokens: Tokens of one answer. None allows what the artifact's length leaves.
        timeout: Seconds that one HTTP request may take in all.
        keep_alive: Seconds between two comments in a silent stream.
        stall: Seconds after which a reader that takes no data counts as gone.
        drain: Seconds that running requests have when the server ends.
        buffer: Tokens of a stream that its reader has not taken. A reader that falls further behind is given up.
        prefix_memory: Bytes for the states of prefixes. 0 keeps none.
        session_memory: Bytes for sessions in memory. More sessions go to `session_folder`, if there is one.
        session_folder: The folder for sessions.
        session_disk: Bytes of all files in that folder.
        session_shared: Whether other servers of the artifact use the folder too. Every turn is then written at once.
        latency_budget: Seconds that a call of several prompts may take while others wait. None sets no bound, see
            `EngineOptions.latency_budget`.
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
