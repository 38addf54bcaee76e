"""The limits and options of the HTTP server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvexport.errors import UsageError
from kvexport.machine import KEPT_BYTES

MIB = 1 << 20
KEY_VARIABLE = "KVEXPORT_API_KEY"  # an API key of a server


@dataclass(frozen=True)
class ServeSettings:
    # Names of the model in requests. /v1/models lists the first one. "*" accepts any name.
    names: tuple[str, ...] = ("kvexport",)
    # API keys; every client needs one of them. Without keys every client that reaches the server may use it.
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # further host names that a server without keys accepts
    origins: tuple[str, ...] = ()  # origins of web pages that may call the server
    # Whether reasoning is separated from the text of answers, for models whose chat template has reasoning
    reasoning: bool = True
    # Whether the first system messages and tools of conversations are pinned, if the artifact has room for them
    pins_system: bool = True
    queue: int = 256  # largest number of requests that wait for a lane
    choices: int = 128  # largest number of answers to one HTTP request: `n` times its prompts
    body: int = 16 * MIB  # largest size of a request body in bytes
    images: int = 64  # largest number of images in one conversation
    image_folder: str | None = None  # absolute path of the folder whose files a request may name as file:PATH
    # Largest number of tokens of one answer; None allows as many as the artifact's length
    max_tokens: int | None = None
    timeout: float = 1800.0  # seconds that one HTTP request may take in total
    keep_alive: float = 15.0  # seconds without events after which a stream sends a comment
    stall: float = 30.0  # seconds after which a client that receives no data counts as disconnected
    drain: float = 30.0  # seconds that running requests may still take when the server ends
    # Largest number of tokens of a stream that its client has not received yet; the server disconnects a client that
    # falls further behind
    buffer: int = 4096
    prefix_memory: int = KEPT_BYTES  # bytes for saved states of prompt prefixes; 0 saves none
    session_memory: int = KEPT_BYTES  # bytes in memory for sessions (stored conversations)
    session_folder: str | None = None  # folder to which a session is written after every turn
    session_disk: int = 16 << 30  # largest size of all files in the session folder in bytes
    session_shared: bool = False  # whether other servers of the artifact also use the session folder
    # Seconds that a call which reads several prompts may take while other requests wait; None sets no bound. See
    # `EngineOptions.latency_budget`.
    latency_budget: float | None = 0.1

    def __post_init__(self) -> None:
        check_keys(self.api_keys)


_KEY = re.compile(r"[!-~]+")  # visible ASCII: a header cannot carry other characters reliably


def check_keys(keys: Sequence[str]) -> None:
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            wrong = "has characters other than visible ASCII" if key else "is empty"
            raise UsageError(f"API key {number} of {len(keys)} {wrong}", "openssl rand -hex 32 prints a key")
