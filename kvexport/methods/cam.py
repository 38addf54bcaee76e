"""CaM (ICML 2024): an evicted cache slot adds its value to the slots after it, and its key is dropped."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from kvexport.methods.merging import Merging
from kvexport.methods.slots import Evicted, Slots, gather_rows


class CaM(Merging):
    """CaM (ICML 2024) with the expected value of its random merge of values.

    The value v_e of an evicted slot is added to the values v_j of the next M kept slots, recent ones included: ``v_j +=
    m v_e / M`` with ``m = clip(A_e / mean A, 0, 1)``, where A is a slot's accumulated attention and the mean is over
    all kept slots. The paper draws a Bernoulli variable with probability m instead. Keys, scores and token counts
    (votes) of the receiving slots stay unchanged.

    Attributes:
        receivers: The number M of slots that an evicted value is added to. If fewer than M slots follow, the shares of
            the missing ones are lost.
    """

    name: ClassVar[str] = "cam"
    summary: ClassVar[str] = "an evicted value is shared out to the next slots; its key is dropped"
    source: ClassVar[str] = "Zhang et al., ICML 2024"

    receivers: int = Field(32, ge=1)

    @property
    def recent_receives(self) -> bool:
        """Whether slots of the recent window, which are never evicted, get parts of evicted values: true."""
        return True

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        """Return the slots after a part of each evicted value was added to the next kept slots, summed in float32."""
        import torch

        mass = slots.score[:, :, -1]
        left = torch.zeros_like(evicted.can_receive).scatter(-1, evicted.index, evicted.occupied)
        stays = (slots.votes > 0) & ~left
        mean = torch.where(stays, mass, 0.0).sum(-1, keepdim=True) / torch.clamp(stays.sum(-1, keepdim=True), min=1)
        share = torch.clamp(gather_rows(mass, evicted.index) / torch.clamp(mean, min=1e-30), 0.0, 1.0) / self.receivers
        number = evicted.can_receive.to(torch.int64).cumsum(-1)
        place = number[:, :, None, :] - gather_rows(number, evicted.index)[..., None]  # 1 is the next receiver
        receives = (
            evicted.can_receive[:, :, None, :] & (place >= 1) & (place <= self.receivers) & evicted.occupied[..., None]
        )
        added = (
            torch.where(receives, share[..., None], 0.0).transpose(-1, -2)
            @ gather_rows(slots.value, evicted.index).float()
        )
        value = torch.where(receives.any(2)[..., None], slots.value.float() + added, slots.value.float())
        return replace(slots, value=value.to(slots.value.dtype))
