"""Ballot, this project's own: nobody's vote is lost. Every slot that leaves merges into the key nearest to its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvexport.methods.base import Leaving, Slots, Statistic, corrected_log_ema
from kvexport.methods.joint import group, nearest, zipped
from kvexport.methods.merging import Merging

if TYPE_CHECKING:
    from torch import Tensor


class Ballot(Merging):
    """KeepKV's merge without its gate: what a threshold rejects loses its mass, and cosine bounds nothing where norms differ, while
    ``|q (k_e - k_c)| <= |q| |k_e - k_c|`` bounds the change of a logit. Wants a large recent share (`cache.recent` 0.5 to 0.8).

    zip: ``vote`` stores fractional votes, ``count`` adds votes up; both keep the mean key. decay: ``a`` of the average that weighs.
    """

    name: ClassVar[str] = "ballot"
    summary: ClassVar[str] = "every leaving slot merges into the nearest key; no threshold"
    source: ClassVar[str] = "this project"
    recent_receives: ClassVar[bool] = True

    zip: Literal["vote", "count"] = "vote"
    decay: float = Field(0.95, gt=0.0, lt=1.0)

    @property
    def vote_exponent(self) -> float:
        """Votes count in full."""
        return 1.0

    @property
    def own_statistics(self) -> tuple[Statistic, ...]:
        """The sum of probabilities, which selects, and ln of the moving average of exp(raw logit), which weighs."""
        return (Statistic("probability"), Statistic("log_ema", self.decay))

    def own_importance(self, slots: Slots) -> Tensor:
        """The mean probability per observation, ``A / (now - position + 1)``."""
        import torch

        seen = torch.clamp(slots.now - slots.position + 1, min=1)
        return slots.score[:, :, 0] / seen.float()

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """Joint merge into the nearest key (`joint.zipped`), recent ones included, sinks not."""
        import torch

        to, _ = nearest(slots, leaving, "distance")
        groups = group(leaving, to, leaving.live & leaving.target.any(-1, keepdim=True))
        mode = "vote" if self.zip == "vote" else "mean"
        key, value, votes = zipped(slots, groups, corrected_log_ema(slots, -1, self.decay), mode)
        score = groups.scores(slots, self.statistics)
        if self.selector == "own":
            # Means per observation add; as a sum over the merged slot's own observations, which began with its latest token.
            own, arriving = groups.pair(self.own_importance(slots))
            mean = groups.total(own, arriving)
            score = torch.stack([mean * (slots.now - groups.latest(slots) + 1).float(), score[..., -1]], dim=-1)
        return groups.write(slots, key, value, votes, score)
