"""The KL divergence from the full cache of two compressed caches: the recipe's, and one that only drops entries."""

from __future__ import annotations

from dataclasses import dataclass

DROPPING = "h2o"  # evicts the least attended entries and merges none
TIMES_WORSE = 10.0  # than dropping, where something is wrong
NOISE = 1e-3  # nats: two caches that are both this near to the full one are not compared


@dataclass(frozen=True)
class Divergence:
    """KL divergences of a compressed KV cache's predictions from the full cache's on one text, in nats per token."""

    slots: int  # of a head, on average
    tokens: int  # of the text
    built: float  # with the recipe's cache
    dropped: float  # with a cache of as many slots that drops what it evicts

    @property
    def line(self) -> str:
        """A line for the user: the KL from the full cache with the recipe's method, and with plain eviction."""
        return (
            f"with {self.slots} slots, the KL to the full cache over a text of {self.tokens} tokens is "
            f"{self.built:.3g} nats a token, and {self.dropped:.3g} if entries are dropped"
        )

    @property
    def warning(self) -> str:
        """A warning with a remedy if the recipe's cache diverges far more than a cache that drops entries; else ""."""
        times = self.built / max(self.dropped, NOISE)
        if times <= TIMES_WORSE:
            return ""
        return (
            f"this cache is {times:.0f} times as far from the full cache as one that drops "
            f"entries: --set cache.method={DROPPING}, or a larger --budget"
        )
