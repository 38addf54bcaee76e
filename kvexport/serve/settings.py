"""What a server allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvexport.errors import UsageError

MIB = 1 << 20


@dataclass(frozen=True)
class ServeSettings:
    """names: of the model in requests, the first as /v1/models gives it; "*" among them: any name will do. api_keys:
    none = every client that reaches the server may use it. hosts: further names by which a server without keys may be
    called. origins: of web pages that may call it, besides its own.

    preempts: a request of a better priority takes the lane of one of a worse, which goes on later. reasoning: told
    apart from answers, of models whose chat template knows it.

    queue: requests that may wait for a lane. choices: answers of one HTTP request (n times its prompts). body: bytes.
    max_tokens: of one answer; None = what the artifact's length leaves. Seconds: timeout (of one HTTP request in all),
    keep_alive (between comments in a silent stream), stall (a reader that takes nothing for so long is given up),
    drain (for running requests when the server ends). buffer: tokens of a stream that its reader has not taken; one
    that falls further behind is given up.

    Bytes: prefix_memory (for the states of what prompts begin with; 0 = none are kept), session_memory (for sessions;
    beyond it they go to session_folder, where there is one), session_disk (in that folder). session_shared: other
    servers of the artifact use the folder too, and every turn is written at once. latency_budget: seconds that a call
    of several prompts may take, for which others wait; None = any, see `EngineOptions.latency_budget`.
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
    prefix_memory: int = 1 << 30
    session_memory: int = 1 << 30
    session_folder: str | None = None
    session_disk: int = 16 << 30
    session_shared: bool = False
    latency_budget: float | None = 0.1

    def __post_init__(self) -> None:
        """Refuse keys that no client can send."""
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
