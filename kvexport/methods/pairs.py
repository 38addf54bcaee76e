"""What AsymKV and KVSlimmer share: neighbouring slots merge in pairs, in one rotary frame; values are means and votes
add up."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvexport.methods.base import Leaving, Rotary, Slots
from kvexport.methods.joint import Groups, group, unprotected
from kvexport.methods.merging import Merging

if TYPE_CHECKING:
    from torch import Tensor


class NeighbourPairs(Merging):
    """Unprotected slots in order of position form pairs, (1, 2), (3, 4), ..., so that none is in two. The least
    attended pairs merge: the older slot leaves into the younger. What pairs cannot free is dropped, least attended
    first: keep at least as many unprotected slots in the budget as leave at once.

    share_pairs: all heads of a layer choose the same pairs, by the sum of their attention (slots at the same place of
        the order, which hold the same positions as long as every merge was shared).
    """

    rotary: ClassVar[bool] = True

    share_pairs: bool = False

    @property
    def vote_exponent(self) -> float:
        """``sum e^l v / sum n e^l`` with summed values is the softmax with ln n added, over mean values: votes in
        full."""
        return 1.0

    def priority(self, slots: Slots, target: Tensor, count: int) -> Tensor:
        """Older slots of pairs by the pair's importance, then all others by their own."""
        import torch

        importance = torch.where(target, self.importance(slots, target, count), 0.0)
        slots_in_all = target.shape[-1]
        place = torch.arange(slots_in_all, device=target.device)
        after = torch.clamp(place + 1, max=slots_in_all - 1)
        paired = _older(target)
        pair = importance + importance.index_select(-1, after)
        if self.share_pairs:
            pair = torch.where(paired, pair, 0.0).sum(1, keepdim=True).expand_as(pair)
        first = torch.where(paired, pair, torch.inf).sort(dim=-1, stable=True).indices
        then = importance.sort(dim=-1, stable=True).indices
        by_pair, alone = (torch.zeros_like(order).scatter(-1, order, place.expand_as(order)) for order in (first, then))
        return torch.where(paired, by_pair, alone + slots_in_all).float()

    def merge(self, slots: Slots, leaving: Leaving) -> Slots:
        """``k`` by `key_weights` of the younger key and the older one turned to its position, ``v = sum n v / sum n``,
        ``n = sum n``."""
        import torch

        to = torch.clamp(leaving.slot + 1, max=leaving.target.shape[-1] - 1)
        merges = _older(unprotected(leaving)).gather(-1, leaving.slot) & leaving.target.gather(-1, to)
        groups = group(leaving, to, merges)
        younger, older = groups.pair(slots.key)
        turned = rotated(older, slots.position.gather(-1, to) - slots.position.gather(-1, leaving.slot), slots.rotary)
        weight, weight_v = self.key_weights(slots, groups)
        # Equal weights where both are zero, as in a cache that nobody has attended to.
        total = weight + weight_v
        share = torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), 0.5)[..., None]
        votes, votes_v = groups.pair(slots.votes)
        value = groups.mean(slots.value, votes, votes_v)
        score = groups.scores(slots, self.statistics)
        return groups.write(slots, share * younger + (1.0 - share) * turned, value, groups.total(votes, votes_v), score)

    def key_weights(self, slots: Slots, groups: Groups) -> tuple[Tensor, Tensor]:
        """Nonnegative weights [B, H, V] of the younger key (the target's) and the older one."""
        raise NotImplementedError


def _older(free: Tensor) -> Tensor:
    """The first slot of every pair of unprotected ones; [B, H, C] bool. These lie together: sinks before them, recent
    and empty after."""
    import torch

    slots = free.shape[-1]
    place = torch.arange(slots, device=free.device)
    paired = free & free.index_select(-1, torch.clamp(place + 1, max=slots - 1)) & (place < slots - 1)
    number = free.to(torch.int64).cumsum(-1)
    return paired & (number % 2 == 1)


def rotated(key: Tensor, steps: Tensor, rotary: Rotary) -> Tensor:
    """Keys [B, H, V, D], in float32, turned by `steps` [B, H, V] positions: what they would have been so much later."""
    import torch

    planes = len(rotary.inverse_frequencies)
    if not planes:
        return key
    angle = steps[..., None].float() * torch.tensor(rotary.inverse_frequencies, dtype=torch.float32, device=key.device)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    turning = key[..., : 2 * planes]
    if rotary.interleaved:
        x, y = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([x * cosine - y * sine, y * cosine + x * sine], dim=-1).flatten(-2)
    else:
        x, y = turning[..., :planes], turning[..., planes:]
        turned = torch.cat([x * cosine - y * sine, y * cosine + x * sine], dim=-1)
    return torch.cat([turned, key[..., 2 * planes :]], dim=-1)
