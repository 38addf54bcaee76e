"""The options of an inference engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvexport.errors import UsageError


@dataclass(frozen=True)
class EngineOptions:
    """The options of an inference engine, fixed when it is constructed.

    Attributes:
        lanes: The most sequences that run at once; None takes the artifact's `limits.max_batch`, which is the most.
        max_waiting: The most requests that may wait for a lane; None sets no bound.
        latency_budget: The most seconds that one call may spend on the prompts of several requests, while requests that
            decode wait for it; None sets no bound. A call always reads at least one chunk.
        preempts: Whether a request takes the lane of a request with a worse priority, which goes on later.
        prefix_memory: Bytes for the states of prompt prefixes, so that a prefix that several prompts share is read
            once; 0 keeps none.
        drafts: Whether the engine drafts tokens where the artifact's recipe asks for it (`speculate.draft`).

    Raises:
        UsageError: A value is out of range.
    """

    lanes: int | None = None
    max_waiting: int | None = None
    latency_budget: float | None = None
    preempts: bool = False
    prefix_memory: int = 0
    drafts: bool = True

    def __post_init__(self) -> None:
        """Raise UsageError for engine options that are out of range."""
        for name in ("max_waiting", "latency_budget", "prefix_memory"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} is {value}", f"set {name} to a number of at least 0")
