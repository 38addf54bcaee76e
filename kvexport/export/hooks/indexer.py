"""The indexer hook: a layer attends to every token in place of the tokens that its indexer picks.

An indexer picks a limited number of the tokens that a query sees (2,048 in DeepSeek V3.2). An indexer picks all tokens
of a shorter sequence, and the layer is then plain attention. Indexers are therefore left out, with their weights, and
the planner refuses caches of more slots (`LayerGeometry.most_picked`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

_SINGLE = ("DeepseekV32", "GlmMoeDsa", "AXK2", "HYV4", "MistralLarge4Text", "Dots3NoteText")
MOST_PICKED: dict[str, Callable[[Any], int]] = {
    **{f"{name}Indexer": lambda indexer: indexer.index_topk for name in _SINGLE},
    # Blocks of tokens: those after the last whole block are picked too, or there is no such token.
    "Glm5NextTextIndexer": lambda indexer: indexer.index_topk if indexer.index_kpool_always_select_tail else 0,
    "Qwen4ExpTextQSAIndexer": lambda indexer: indexer.block_topk * indexer.compress_ratio,
    "MiniMaxM3VLIndexer": lambda indexer: indexer.topk_blocks * indexer.block_size,
}
"""By the class of an indexer, how many tokens it picks without leaving one out; 0 if it leaves some out of any."""


class EveryToken:
    """The replacement of an indexer's choice: all tokens that `mask` lets a query see, which are at most `most`.

    Models give parts of their mask to the indexer, and combine the chosen tokens with the mask.
    """

    dtype = torch.bool

    def __init__(self, mask: Any, most: int) -> None:
        self.mask, self.most = mask, most

    def __getitem__(self, index: Any) -> EveryToken:
        return self

    def __and__(self, other: Any) -> EveryToken:
        return self


class _PicksAll(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, *args: Any, **kwargs: Any) -> EveryToken:
        return EveryToken(None, self.most)


def leave_out_indexers(model: Any) -> None:
    """Replace a model's indexers (see `MOST_PICKED`), and list their weights in `model.unread_parameters`."""
    unread = set()
    for name, module in list(model.named_modules()):
        if hasattr(module, "build_attention_mask_from_topk"):  # the mask of GLM-5 Next, made of nothing but the picks
            module.build_attention_mask_from_topk = lambda topk_indices, **_: topk_indices
        indexer: Any = getattr(module, "indexer", None)
        most = MOST_PICKED[kind](indexer) if (kind := type(indexer).__name__) in MOST_PICKED else 0
        if most:
            unread |= {f"{name}.indexer.{own}" for own, _ in indexer.named_parameters()}
            module.indexer = _PicksAll(most)
            module.register_forward_pre_hook(partial(_wrap_mask, most), with_kwargs=True)
    model.unread_parameters = unread


def picks_alone(module: nn.Module) -> bool:
    return isinstance(module, _PicksAll)


def _wrap_mask(most: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "attention_mask": EveryToken(kwargs["attention_mask"], most)}


def without_picks(attention_mask: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an attention call that reads every token, as if the model had no indexer."""
    picked = [x for x in (attention_mask, *options.values()) if isinstance(x, EveryToken)]
    rest = {name: x for name, x in options.items() if not isinstance(x, EveryToken)}
    mask = attention_mask.mask if isinstance(attention_mask, EveryToken) else attention_mask
    return {**rest, "attention_mask": mask, "most_picked": picked[0].most if picked else 0}
