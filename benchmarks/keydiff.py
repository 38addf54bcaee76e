"""KeyDiff (arXiv 2504.15364), which kvexport does not have. It has no policy, so its ONNX function runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvexport.methods import all_methods
from kvexport.methods.base import Method
from kvexport.methods.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor


class KeyDiff(Method):
    """The method that evicts the keys most similar to the others, by their cosine to the mean of all normalised keys.

    It evicts after every chunk, so that evicted keys are no longer part of the mean.
    """

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keys that differ from the mean key are kept; the rest is dropped"
    source: ClassVar[str] = "arXiv 2504.15364"

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        """Return the negative cosine [B, H, C]."""
        import torch

        key = slots.key.float()
        key = key / torch.clamp((key * key).sum(-1, keepdim=True).sqrt(), min=1e-12)
        # The length of the mean does not change the order, so it is not normalised.
        anchor = torch.where((slots.votes > 0)[..., None], key, 0.0).sum(2, keepdim=True)
        return -(key * anchor).sum(-1)


def register() -> None:
    """Register the method, so that recipes of this process can name it."""
    all_methods()[KeyDiff.name] = KeyDiff
