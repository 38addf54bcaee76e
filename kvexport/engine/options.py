"""The options of an inference engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvexport.errors import UsageError


@dataclass(frozen=True)
class EngineOptions:
    """The options of an inference engine, fixed when it is constructed.

    Attributes:
        lanes: The largest number of sequences that run at once, at most the artifact's `limits.max_batch`; None takes
            that limit.
        latency_budget: The longest time in seconds that one model call may spend on the prompts of several requests,
            while decoding requests wait for it; None sets no bound. A call always reads at least one prompt chunk.
        prefix_memory: Bytes for saved states of prompt prefixes, so that a prefix that several prompts share is read
            once; 0 saves none. On a GPU no prefixes are saved.
        drafts: Whether the engine drafts (guesses) tokens if the artifact's recipe sets `speculate.draft`.
        ahead: Whether a GPU may begin the next decode call before the host has read the tokens of the previous one, if
            all requests decode greedily. The answers do not depend on this option.

    Raises:
        UsageError: A value is out of range.
    """

    lanes: int | None = None
    latency_budget: float | None = None
    prefix_memory: int = 0
    drafts: bool = True
    ahead: bool = True

    def __post_init__(self) -> None:
        for name in ("latency_budget", "prefix_memory"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} is {value}", f"set {name} to a number of at least 0")
