"""Comparison of kvexport's operators with the authors' code of AsymKV and KVSlimmer, which merge neighbouring pairs.

Keys of both sides are compared in one rotary frame.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.correctness.peer_caches import TOLERANCE, Cache, Heads, Row, jaccard, mean, merged, raw, row, same
from kvexport.methods.asymkv import AsymKV
from kvexport.methods.kvslimmer import KVSlimmer
from kvexport.methods.primitives.pairs import rotated

FEW, PAIR = 48, 40  # tokens where one pair merges, and the first of that pair
LATER = 32
TAU = KVSlimmer().tau
Weights = tuple[Tensor, Tensor]


def compare_asymkv(code: SimpleNamespace, texts: list[list[Heads]]) -> list[Row]:
    """Compare AsymKV's merge of one pair.

    The authors' cache gets kvexport's probability mass as weights. Their own weights, the Fisher information, would
    need a backward pass.
    """
    pairs = []
    for heads, attention, mass in _with_a_weak_pair(texts):
        ours = merged(raw(heads, mass), AsymKV(share_pairs=True), FEW - 1, rotary=heads.rotary)
        cache = code.AsymKVCache(start_size=0, recent_size=FEW - 1)
        # The authors' code weighs keys by the square of the values that it calls the Hessian's diagonal.
        diagonal = mass.sqrt()[..., None].expand_as(heads.key).clone()
        kept, _ = cache([_their_layer(unrotated(heads))], [attention], heads.group, [(diagonal, None)])
        pairs.append((ours, _as_ours(kept[0], heads)))
    return [
        same(
            "AsymKV",
            "one pair, their squared weights set to our probability mass: key in one rotary frame, value, count",
            pairs,
        )
    ]


def compare_kvslimmer(code: SimpleNamespace, texts: list[list[Heads]], length: int) -> list[Row]:
    """Compare KVSlimmer's merge where both formulas are equal, then every difference by itself."""
    layers = [heads.part(0, length) for text in texts for heads in text]
    return [
        *_one_pair(code, texts),
        *_weights(code, layers),
        _overlapping(code, layers, length),
        _in_chunks(code, layers),
        *_selection(texts, length),
    ]


def _with_a_weak_pair(texts: list[list[Heads]]) -> list[tuple[Heads, Tensor, Tensor]]:
    """Return the first tokens of every layer with random attention in which both rules merge the pair at `PAIR` first.

    Each item is (tensors of the layer, attention [1, Hq, 1, T], its mean over the groups [1, H, T]).
    """
    generator, cases = torch.Generator().manual_seed(0), []
    for heads in (heads.part(0, FEW) for text in texts for heads in text):
        attention = 1 + torch.rand(1, heads.query.shape[1], 1, FEW, generator=generator)
        attention[..., PAIR : PAIR + 2] /= 3
        cases.append((heads, attention, attention.sum(2).unflatten(1, (-1, heads.group)).mean(2)))
    return cases


def unrotated(heads: Heads) -> Heads:
    """Return the layer with keys before RoPE, as the authors' caches hold them."""
    position = torch.arange(heads.key.shape[2]).expand(heads.key.shape[:3])
    return replace(heads, key=rotated(heads.key, -position, heads.rotary))


def _their_layer(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return one layer as the authors' caches hold it: keys, sums of values, token counts."""
    return heads.key.clone(), heads.value.clone(), torch.ones(heads.key.shape[:3])


def _as_ours(layer: Any, heads: Heads) -> Cache:
    """Convert a layer of the authors' cache into a `Cache`.

    Sums of values become means. Keys are rotated to their positions: the running count of tokens, which is the position
    of a slot's youngest token.
    """
    key, value, votes = layer
    position = votes.cumsum(-1).long() - 1
    score = torch.zeros(1, key.shape[1], 1, key.shape[2])
    return Cache(rotated(key, position, heads.rotary), value / votes[..., None], votes, score, position.int())


def _slimmed(code: SimpleNamespace, layer: Any, attention: Tensor, group: int, budget: int) -> Any:
    """Return the layer after one call of KVSlimmer's cache, with the diagonal that the authors' script makes for it."""
    diagonal = code.build_hessian_proxy_from_ratio([layer], [attention], 0, group)
    return code.KVSlimmerCache(start_size=0, recent_size=budget)([layer], [attention], diagonal)[0][0]


def _one_pair(code: SimpleNamespace, texts: list[list[Heads]]) -> list[Row]:
    flat, full, gap = [], [], []
    for heads, attention, mass in _with_a_weak_pair(texts):
        value = heads.value[..., :1].clone()
        value[:, :, PAIR : PAIR + 2] = value.amax() + torch.tensor([[1.0], [2.0]])
        for given, pairs in ((replace(heads, value=value), flat), (heads, full)):
            ours = merged(raw(given, mass), KVSlimmer(share_pairs=True), FEW - 1, rotary=given.rotary)
            layer = _slimmed(code, _their_layer(unrotated(given)), attention, given.group, FEW - 1)
            pairs.append((ours, _as_ours(layer, given)))
    for i, (ours, theirs) in enumerate(full):
        gap.append(float(_relative(theirs.key, ours.key).max()))
        full[i] = (ours, replace(theirs, key=ours.key))
    scalar = "one pair, values of one dimension, where both formulas are one: key in one rotary frame, value, count"
    return [
        same("KVSlimmer", scalar, flat),
        same("KVSlimmer", "one pair, the model's values: value and count", full),
        row(
            "KVSlimmer",
            "one pair, the model's values: the key",
            "its weights, see the switches",
            key_mean=mean(gap),
            key_largest=max(gap),
        ),
    ]


def bracket_weights(a: Weights, residual: Weights, *, norm: int, triangle: bool, guarded: bool) -> Weights:
    """Return KVSlimmer's two key weights [...]; their sum is one.

    Args:
        a: Shares a_i of the attention [...] of both tokens.
        residual: Residuals v_i - o [..., D] of both tokens.
        norm: The norm of residuals, 1 or 2.
        triangle: Whether the cross term is ``a_1 a_2 (|r_1| + |r_2|)`` in place of ``a_1 a_2 |r_1 + r_2|``.
        guarded: Whether brackets are clamped to at least 0, and the weights are a_i where both brackets are nearly 0.
    """
    size = [r.norm(p=norm, dim=-1) for r in residual]
    first, second = (x * (1 - 2 * x) * s for x, s in zip(a, size, strict=True))
    cross = a[0] * a[1] * (size[0] + size[1] if triangle else (residual[0] + residual[1]).norm(p=norm, dim=-1))
    if guarded:
        own, other = ((c.abs() - cross).clamp(min=0) for c in (first, second))
        degenerate = own + other <= TAU * (first.abs() + second.abs())
        own, other = torch.where(degenerate, a[0], own), torch.where(degenerate, a[1], other)
    else:
        own, other = first - cross, second - cross
    return own / (own + other), other / (own + other)


def weighted(keys: Weights, weights: Weights) -> Tensor:
    """Return the weighted sum of two keys [..., D]."""
    return weights[0][..., None] * keys[0] + weights[1][..., None] * keys[1]


def _relative(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def _weights(code: SimpleNamespace, layers: list[Heads]) -> list[Row]:
    """Compare the key weights of every disjoint pair of a text by one formula with three switches.

    The formula is compared with the authors' weights and with kvexport's. Each switch's effect on the key is measured
    alone.
    """
    theirs_off, ours_off, outside = 0.0, 0.0, []
    switches = {
        "norm": (1, False, True),
        "triangle": (2, True, True),
        "guard": (2, False, False),
        "all": (1, True, False),
    }
    effects: dict[str, list[Tensor]] = {name: [] for name in switches}
    for heads in layers:
        mass = heads.mass()
        a = mass / mass.sum(-1, keepdim=True)
        r = heads.value - a[:, :, None, :] @ heads.value
        shares, residuals = (a[..., ::2], a[..., 1::2]), (r[:, :, ::2], r[:, :, 1::2])
        older = rotated(heads.key[:, :, ::2], torch.ones(shares[0].shape, dtype=torch.long), heads.rotary)
        keys = (older, heads.key[:, :, 1::2])
        published = weighted(keys, bracket_weights(shares, residuals, norm=2, triangle=False, guarded=True))
        for name, (norm, triangle, guarded) in switches.items():
            weights = bracket_weights(shares, residuals, norm=norm, triangle=triangle, guarded=guarded)
            effects[name].append(_relative(weighted(keys, weights), published).flatten())
        as_theirs = bracket_weights(shares, residuals, norm=1, triangle=True, guarded=False)
        outside.append(float((as_theirs[0] * as_theirs[1] < 0).double().mean()))
        d = [x.norm(p=1, dim=-1) for x in residuals]
        h11, h22 = (x * (1 - 2 * x) * size for x, size in zip(shares, d, strict=True))
        key = code.optimal_merge_k_from_alpha_d(*keys, *shares, *d, h11=h11, h22=h22)[2]
        theirs_off = max(theirs_off, float(_relative(weighted(keys, as_theirs), key).max()))
        ours = merged(raw(heads), KVSlimmer(), heads.key.shape[2] // 2, rotary=heads.rotary)
        ours_off = max(ours_off, float(_relative(published, ours.key).max()))

    def effect(compared: str, why: str, name: str, **figures: float) -> Row:
        gaps = torch.cat(effects[name])
        quantiles = {
            "key_median": float(gaps.median()),
            "key_99": float(gaps.quantile(0.99)),
            "key_largest": float(gaps.max()),
        }
        return row("KVSlimmer", compared, why, **quantiles, **figures)

    both = max(theirs_off, ours_off) <= TOLERANCE
    what = "keys of all disjoint neighbours by one formula with three switches, relative to theirs and to ours"
    return [
        row("KVSlimmer", what, theirs=theirs_off, ours=ours_off, holds=both),
        effect("switch 1: norm", "theirs takes the L1 norm of residuals; ours (and the paper) L2", "norm"),
        effect(
            "switch 2: cross term",
            "theirs has a_1 a_2 (|r_1| + |r_2|), ours (and the paper) a_1 a_2 |r_1 + r_2|",
            "triangle",
        ),
        effect("switch 3: guard", "theirs has none: weights may leave [0, 1]", "guard", outside=mean(outside)),
        effect("all three", "theirs against ours", "all"),
    ]


def _overlapping(code: SimpleNamespace, layers: list[Heads], length: int) -> Row:
    lost: dict[str, list[float]] = {"their_lost": [], "our_lost": []}
    budget = 3 * length // 4
    for heads in layers:
        layer = _slimmed(code, _their_layer(heads), heads.logits().softmax(-1), heads.group, budget)
        ours = merged(raw(heads), KVSlimmer(share_pairs=True), budget, rotary=heads.rotary)
        for name, votes in (("their_lost", layer[2]), ("our_lost", ours.votes)):
            lost[name].append(1 - float(votes.sum(-1).mean()) / length)
    why = "their pairs overlap: of (1, 2) and (2, 3) the third token is lost; ours are disjoint"
    return row(
        "KVSlimmer",
        "a quarter of the slots merged at once: tokens lost",
        why,
        **{name: mean(x) for name, x in lost.items()},
    )


def _in_chunks(code: SimpleNamespace, layers: list[Heads], budget: int = 128, chunk: int = 64) -> Row:
    """Read a text with the authors' cache in chunks, as their script does.

    Before each chunk the earlier slots are merged by the attention of that chunk.
    """
    lost, clipped = [], []
    for heads in layers:
        past: Any = None
        for first in range(0, heads.key.shape[2], chunk):
            new = heads.part(first, first + chunk)
            state = _their_layer(new)
            if past is None:
                past = state
                continue
            key, votes = (x.repeat_interleave(heads.group, 1) for x in (past[0], past[2]))
            logits = new.query @ key.transpose(-1, -2) * heads.scale + votes.log()[:, :, None]
            # The authors' forward function gives the probability of one of the tokens of a slot.
            past = _slimmed(code, past, logits.softmax(-1) / votes[:, :, None], heads.group, budget)
            past = tuple(torch.cat(x, 2) for x in zip(past, state, strict=True))
        lost.append(1 - float(past[2].sum(-1).mean()) / heads.key.shape[2])
        clipped.append(float((past[2] == 5).double().mean()))
    why = "overlapping pairs, and counts clipped at 5; ours loses none to either"
    compared = f"chunks of {chunk} into {budget} slots: tokens lost, slots at the clip"
    return row("KVSlimmer", compared, why, their_lost=mean(lost), their_clipped=mean(clipped))


def _selection(texts: list[list[Heads]], length: int) -> list[Row]:
    """Compare the slots that a merge of a quarter keeps by kvexport's rule, by three inputs of that rule.

    The inputs are the accumulated attention, and the two quantities that the authors' script and cache use in its
    place.
    """
    script, late = [], []
    for heads in (heads for text in texts for heads in text):
        text, later = heads.part(0, length), heads.part(length, length + LATER)
        logits = later.query @ text.ungrouped().key.transpose(-1, -2) * heads.scale
        seen = logits.softmax(-1).sum(2).unflatten(1, (-1, heads.group)).mean(2)
        favoured = text.mass() / torch.exp(torch.arange(1, length + 1) * math.log(512) / 4096)
        ours, *theirs = (
            merged(raw(text, x), KVSlimmer(), 3 * length // 4, rotary=heads.rotary).position
            for x in (text.mass(), seen, favoured)
        )
        for jaccards, kept in zip((script, late), theirs, strict=True):
            jaccards.append(float(jaccard(ours, kept).mean()))
    what = "positions kept of three quarters by our rule, with"
    next_chunk = (
        "their script goes by the attention of the next chunk, run twice for that; ours by what has accumulated"
    )
    return [
        row("KVSlimmer", f"{what} the next queries' attention", next_chunk, jaccard=mean(script)),
        row(
            "KVSlimmer",
            f"{what} attention over exp(i / 657)",
            "theirs lets later pairs merge first; ours does not",
            jaccard=mean(late),
        ),
    ]
