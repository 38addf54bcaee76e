"""KeyDiff (arXiv 2504.15364), for comparison: it is no method of kvexport, has no policy and runs from its function."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.methods.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor


class KeyDiff(Method):
    """The keys that are most like the others are evicted, by their cosine to the mean of all normalised keys; after
    every chunk, so that what was evicted is no longer in the mean."""

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keys that differ from the mean key are kept; the rest is dropped"
    source: ClassVar[str] = "arXiv 2504.15364"

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Minus that cosine; [B, H, C]."""
        import torch

        key = slots.key.float()
        key = key / torch.clamp((key * key).sum(-1, keepdim=True).sqrt(), min=1e-12)
        # The mean's length changes no order.
        anchor = torch.where((slots.votes > 0)[..., None], key, 0.0).sum(2, keepdim=True)
        return -(key * anchor).sum(-1)


def register() -> None:
    """Let recipes of this process name it."""
    all_methods()[KeyDiff.name] = KeyDiff
