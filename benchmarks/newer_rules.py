"""Rules of papers that appeared after kvexport's methods, for `newer_methods.py`: on their own, and on top of `ballot`.

A *rule* changes the importance of slots, or protects some of them from eviction. The methods `newer` (evicts like
`h2o`, drops evicted slots) and `newer_ballot` (merges like `ballot`) apply the rules in their parameter `rules`, whose
names are separated by "+". The rules need PyTorch: native kernels do not support them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvexport.methods import all_methods
from kvexport.methods.ballot import Ballot
from kvexport.methods.base import Method
from kvexport.methods.h2o import H2O
from kvexport.methods.primitives.select import mean_per_observation
from kvexport.methods.random import MULTIPLIER
from kvexport.methods.slots import Slots, Statistic
from kvexport.ops import vote_attention
from kvexport.schema.policy import MergePolicy

ENDS = 0.1  # the share of the slots that is reserved at each end of the prompt (2605.18053)
LARGE = 0.1  # the share of the slots that is reserved for the values of the largest norm
NEVER = 1e36  # the keep score of a slot that a rule protects
FUTURE = 512  # future positions over which Expected Attention averages the rotation

RULES = ("oldest", "redrawn", "ends", "largest", "prior", "norms", "values", "noise", "expected", "given")


@dataclass(frozen=True)
class Largest(Statistic):
    """The statistic of DefensiveKV: the largest probability that a query of any head of the group gave a slot."""


def _sum_or_largest(
    probability: Tensor, past: Tensor, fresh: Tensor, n: Tensor, log_weight: Tensor, statistic: Statistic
) -> Tensor:
    if not isinstance(statistic, Largest):
        return _summed(probability, past, fresh, n, log_weight, statistic)
    counts = (log_weight > 0.5 * vote_attention.LOG_ZERO)[:, None, None, :, None]
    largest = torch.where(counts, probability, 0.0).amax((2, 3))
    return torch.maximum(torch.where(fresh, 0.0, past), largest)


_summed = vote_attention._probability_sum


class Queries:
    """The mean and the covariance of a layer's queries before their rotation, for the rule `expected`.

    Args:
        frequencies: [F], the inverse frequencies of the rotary embedding, half the size of a query.
        heads: The number of KV heads.
    """

    now: ClassVar[Queries | None] = None  # of the layer that is being merged

    def __init__(self, frequencies: Tensor, heads: int) -> None:
        self.frequencies, self.heads = frequencies, heads
        self.count, self.total, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, query: Tensor, position: Tensor, first: int) -> None:
        """Add queries [B, Hq, T, D], which are scaled and rotated to `position` [T]; those before `first` are left."""
        counted = position >= first
        query, position = query[:, :, counted], position[counted]
        plain = _turned(query, -position[:, None].float() * self.frequencies)
        self.count += len(position)
        self.total = self.total + plain.sum(2)
        self.squares = self.squares + plain.transpose(2, 3) @ plain

    def expected(self, slots: Slots) -> Tensor:
        """Return the expected attention of future queries to every slot, relative to all slots; [B, H, C].

        The logit of a slot is Gaussian, so the mean of its exponential is ``exp(mu k + k Sigma k / 2)``. The rotation
        of mu and Sigma is the mean rotation of the next `FUTURE` positions.
        """
        mean = self.total / self.count
        covariance = self.squares / self.count - mean[..., None] * mean[..., None, :]
        now = int(slots.now.max())
        angles = torch.arange(now + 1, now + 1 + FUTURE)[:, None].float() * self.frequencies
        identity = torch.eye(mean.shape[-1])
        turn = _turned(identity[None, None], angles.cos().mean(0), angles.sin().mean(0))[0, 0]  # row i is R e_i
        mean, covariance = mean @ turn, turn.T @ covariance @ turn
        shape = (mean.shape[0], self.heads, -1)
        mean = mean.reshape(*shape, mean.shape[-1])
        covariance = covariance.reshape(*shape, *covariance.shape[-2:])
        key = slots.key.float()[:, :, None]
        logit = (mean[..., None, :] @ key.transpose(-1, -2))[..., 0, :] + 0.5 * ((key @ covariance) * key).sum(-1)
        logit = torch.where((slots.votes > 0)[:, :, None], logit + slots.votes.clamp(min=1).log()[:, :, None], -1e30)
        return logit.softmax(-1).mean(2)


def _turned(x: Tensor, angles: Tensor, sine: Tensor | None = None) -> Tensor:
    """Return x [..., D] rotated by angles [..., D / 2], or by mean cosines (`angles`) and mean sines."""
    cos, sin = (angles.cos(), angles.sin()) if sine is None else (angles, sine)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Given:
    """The importance that a second pass found for the slots of each position, for the rule `given` (KVzip)."""

    now: ClassVar[Tensor | None] = None  # [B, H, positions] of the layer that is being merged


class Rules:
    """The rules of a method, by name."""

    def __init__(self, names: str, prompt: int, kept: int) -> None:
        self.names = [name for name in names.split("+") if name]
        assert set(self.names) <= set(RULES), names
        self.prompt, self.kept = prompt, kept

    def importance(self, slots: Slots, unprotected: Tensor, importance: Tensor) -> Tensor:
        """Return the importance [B, H, C] that the rules give to slots.

        Args:
            slots: The layer's cache.
            unprotected: [B, H, C] bool, the slots that may be evicted.
            importance: [B, H, C], the importance without the rules.
        """
        for name in self.names:
            if name == "oldest":
                importance = slots.position.float()
            elif name == "redrawn":
                importance = noise(slots)
            elif name == "expected":
                assert Queries.now is not None
                importance = Queries.now.expected(slots)
            elif name == "given":
                assert Given.now is not None
                place = slots.position.long().clamp(min=0, max=Given.now.shape[-1] - 1)
                importance = Given.now.gather(-1, place)
            elif name == "prior":
                # The prior of DefensiveKV: no slot is taken to be less risky than the mean of all.
                counted = torch.where(unprotected, importance, 0.0)
                mean = counted.sum(-1, keepdim=True) / unprotected.sum(-1, keepdim=True).clamp(min=1)
                importance = torch.maximum(importance, mean)
            elif name == "norms":
                importance = importance * slots.value.float().norm(dim=-1)
            elif name == "noise":
                # Gumbel noise on ln(importance): the kept slots are a sample without replacement.
                importance = importance.clamp(min=1e-12) / -torch.log(noise(slots))
        return importance

    def protected(self, slots: Slots, unprotected: Tensor) -> Tensor:
        """Return the slots that the rules protect, [B, H, C] bool."""
        result = torch.zeros_like(unprotected)
        if "ends" in self.names:
            reserved = round(ENDS * self.kept)
            position = slots.position
            last = (position >= self.prompt - reserved) & (position < self.prompt)
            result = result | (position < reserved) | last
        if "values" in self.names:
            norms = torch.where(unprotected, slots.value.float().norm(dim=-1), -1.0)
            place = norms.sort(dim=-1, descending=True, stable=True).indices[..., : round(LARGE * self.kept)]
            result = result.scatter(-1, place, torch.ones_like(place, dtype=torch.bool))
        return result & unprotected


def noise(slots: Slots) -> Tensor:
    """Return a number in (0, 1) for every slot, a hash of its position, its head and the present position."""
    heads = torch.arange(slots.position.shape[1])[:, None]
    x = slots.position.to(torch.int64) + 7919 * heads + 104729 * slots.now.to(torch.int64)
    for _ in range(3):
        x = (x * MULTIPLIER + 12345) % 2**32
        x = x % 2**16 * 2**16 + x // 2**16
    return (x.double() + 0.5).div(2**32).clamp(1e-7, 1 - 1e-7).float()


class Newer(H2O):
    """Eviction by accumulated attention, with rules."""

    name: ClassVar[str] = "newer"
    summary: ClassVar[str] = "h2o with newer rules"
    source: ClassVar[str] = "-"

    rules: str = ""  # names of the rules, separated by "+"
    prompt: int = 512  # length of the prompt, for the rule `ends`
    kept: int = 128  # slots of a head, for shares of them

    @cached_property
    def parsed(self) -> Rules:
        """The rules of `rules`, with the numbers that they need."""
        return Rules(self.rules, self.prompt, self.kept)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistic that ranks slots."""
        return (Largest("probability"),) if "largest" in self.parsed.names else (Statistic("probability"),)

    def policy(self) -> MergePolicy | None:
        """Return None, because the rules are PyTorch code."""
        return None

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return the importance by the rules; the largest number for slots that they protect."""
        importance = self.parsed.importance(slots, unprotected, slots.score[:, :, 0])
        return torch.where(self.parsed.protected(slots, unprotected), NEVER, importance)


class NewerBallot(Ballot):
    """The method `ballot` with rules. The attributes are those of `Newer`."""

    name: ClassVar[str] = "newer_ballot"
    summary: ClassVar[str] = "ballot with newer rules"
    source: ClassVar[str] = "-"

    rules: str = ""
    prompt: int = 512
    kept: int = 128

    @cached_property
    def parsed(self) -> Rules:
        """The rules of `rules`, with the numbers that they need."""
        return Rules(self.rules, self.prompt, self.kept)

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The statistics of `ballot`, the first of them replaced if a rule needs another."""
        first, *others = super().own_statistics
        return (Largest("probability") if "largest" in self.parsed.names else first, *others)

    def policy(self) -> MergePolicy:
        """Return the policy of `ballot`; a largest probability is no sum, and is not divided by the observations."""
        policy = super().policy()
        return replace(policy, select="score", mean_adds=False) if "largest" in self.parsed.names else policy

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return the keep score of `ballot` for the importance by the rules."""
        largest = "largest" in self.parsed.names
        plain = slots.score[:, :, 0] if largest else mean_per_observation(slots)
        importance = self.parsed.importance(slots, unprotected, plain)
        if not largest:
            importance = importance * (slots.now - slots.position + 1).clamp(min=1).float()
        score = torch.cat([importance[:, :, None], slots.score[:, :, 1:]], 2)
        protected = self.parsed.protected(slots, unprotected)
        result = super().keep_score(replace(slots, score=score), unprotected & ~protected, count)
        return torch.where(protected, NEVER, result)


def register() -> None:
    """Let recipes name the methods of this file, and let attention compute their statistics."""
    methods: dict[str, type[Method]] = all_methods()
    methods |= {Newer.name: Newer, NewerBallot.name: NewerBallot}
    patched: Any = vote_attention
    patched._probability_sum = _sum_or_largest
    assert math.isfinite(NEVER)
