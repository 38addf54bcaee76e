"""Shared parts of the comparisons of compressed caches: a model's tensors, both operators on them, and similarity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvexport.export.hooks.attention import PassThroughCache, attending
from kvexport.methods.base import Method
from kvexport.methods.slots import Rotary
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention

TOLERANCE = 1e-4  # relative to the largest magnitude (at least 1), as in `kvexport validate`


@dataclass(frozen=True)
class Heads:
    """The tensors of one layer over a text of T tokens."""

    query: Tensor  # queries [1, Hq, T, D] after RoPE
    key: Tensor  # keys [1, H, T, D] after RoPE
    value: Tensor  # values [1, H, T, Dv]
    scale: float  # scale of the logits
    rotary: Rotary = field(default_factory=Rotary)  # rotary frequencies of the keys

    @property
    def group(self) -> int:
        """The number of query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]

    def part(self, first: int, last: int) -> Heads:
        """Return the tensors of tokens first <= t < last."""
        return replace(self, **{name: getattr(self, name)[:, :, first:last] for name in ("query", "key", "value")})

    def ungrouped(self) -> Heads:
        """Return tensors in which every query head has its own keys and values, for code without groups."""
        return replace(
            self, **{name: getattr(self, name).repeat_interleave(self.group, dim=1) for name in ("key", "value")}
        )

    def logits(self) -> Tensor:
        """Return the logits [1, Hq, T, T], -inf where a query does not see a key."""
        logits = self.query @ self.key.repeat_interleave(self.group, dim=1).transpose(-1, -2) * self.scale
        return logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)

    def mass(self) -> Tensor:
        """Return the sum of probabilities of every token [1, H, T], a mean over the group."""
        return self.logits().softmax(-1).sum(2).unflatten(1, (-1, self.group)).mean(2)


@dataclass(frozen=True)
class Cache:
    """The used slots of one layer."""

    key: Tensor
    value: Tensor  # values [1, H, N, Dv]
    votes: Tensor
    score: Tensor
    position: Tensor  # positions [1, H, N], int32

    def tensors(self, spare: int = 0) -> tuple[Tensor, ...]:
        """Return the five state tensors with `spare` empty slots behind the used ones."""
        pad = torch.nn.functional.pad
        return (
            *(pad(x, (0, 0, 0, spare)) for x in (self.key, self.value)),
            *(pad(x, (0, spare)) for x in (self.votes, self.score, self.position)),
        )


class _Capture:
    """Causal attention that records its inputs layer by layer."""

    def __init__(self, rotary: list[Rotary]) -> None:
        self.rotary = rotary
        self.layers: list[Heads] = []

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        heads = Heads(query, key, value, scale, self.rotary[len(self.layers)])
        self.layers.append(heads)
        return heads.logits().softmax(-1) @ heads.ungrouped().value

    def mask(self, mask_function: Any) -> None:
        return None


@torch.no_grad()
def heads_of(model: Any, rotary: list[Rotary], ids: list[int]) -> list[Heads]:
    """Return every layer's tensors over the text `ids`; `model` is the model of a `TorchReference`."""
    capture = _Capture(rotary)
    with attending(capture):
        model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(len(ids))[None],
            **PassThroughCache().as_arguments(model),
        )
    return capture.layers


def raw(heads: Heads, score: Tensor | None = None) -> Cache:
    """Return the uncompressed cache of a text.

    `score` is [1, H, T] or [1, H, K, T]. Its default is the sum of probabilities.
    """
    score = heads.mass() if score is None else score
    score = score if score.dim() == 4 else score[:, :, None]
    position = torch.arange(heads.key.shape[2], dtype=torch.int32).expand(heads.key.shape[:3])
    return Cache(heads.key, heads.value, torch.ones(heads.key.shape[:3]), score, position.contiguous())


def merged(
    cache: Cache, method: Method, budget: int, *, sinks: int = 0, recent: int = 0, rotary: Rotary | None = None
) -> Cache:
    """Return the cache after MergeCache."""
    attributes = MergeCacheAttributes(method, budget, sinks, recent, rotary=rotary or Rotary())
    key, value, votes, score, position = merge_cache(*cache.tensors(), attributes=attributes)
    return Cache(
        key[:, :, :budget], value[:, :, :budget], votes[..., :budget], score[..., :budget], position[..., :budget]
    )


def appended(cache: Cache, new: Heads, method: Method, first: int) -> tuple[Tensor, Cache]:
    """Append the tokens `new` with VoteAttention, the first of them at position `first`."""
    tokens = new.key.shape[2]
    output, *state = vote_attention(
        new.query,
        new.key,
        new.value,
        torch.arange(first, first + tokens)[None],
        torch.tensor([[tokens]]),
        *cache.tensors(tokens),
        attributes=VoteAttentionAttributes(new.scale, method.vote_exponent, method.statistics),
    )
    return output, Cache(*state)


def empty(like: Heads, method: Method) -> Cache:
    """Return a cache without slots."""
    _, heads, _, size = like.key.shape
    votes = torch.zeros(1, heads, 0)
    score = torch.zeros(1, heads, len(method.statistics), 0)
    position = torch.zeros(1, heads, 0, dtype=torch.int32)
    return Cache(torch.zeros(1, heads, 0, size), torch.zeros(1, heads, 0, like.value.shape[3]), votes, score, position)


def prefilled(heads: Heads, method: Method, budget: int, chunk: int, *, sinks: int = 0, recent: int = 0) -> Cache:
    """Return the cache after a text has passed through both operators, `chunk` tokens at a time."""
    cache, length = empty(heads, method), heads.key.shape[2]
    for first in range(0, length, chunk):
        _, cache = appended(cache, heads.part(first, min(first + chunk, length)), method, first)
        if cache.votes.shape[2] > budget:
            cache = merged(cache, method, budget, sinks=sinks, recent=recent, rotary=heads.rotary)
    return cache


def jaccard(a: Tensor, b: Tensor) -> Tensor:
    """Return |A and B| / |A or B| of the sets in the last dimension of a [..., N] and b [..., M].

    The entries of a set are distinct. The result is 1 where both sets are empty.
    """
    both = (a[..., :, None] == b[..., None, :]).flatten(-2).sum(-1)
    either = a.shape[-1] + b.shape[-1] - both
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


@dataclass(frozen=True)
class Likeness:
    """The similarity of two caches, independent of the order of their slots.

    Each slot of one cache is paired with the nearest slot of the other.
    """

    shared: float  # share of slots whose pair is equal within the tolerance
    # Largest difference of paired keys, relative to the largest magnitude (at least 1). It is infinite if two slots of
    # one cache have the same nearest slot in the other.
    key: float
    value: float
    votes: float

    @property
    def same(self) -> bool:
        """Whether both caches are equal up to rounding."""
        return max(self.key, self.value, self.votes) <= TOLERANCE


def likeness(ours: Cache, theirs: Cache, tolerance: float = TOLERANCE) -> Likeness:
    """Compare two caches head by head, pairing the slots whose keys, values and votes together are nearest."""
    sides = [[c.key.double(), c.value.double(), c.votes[..., None].double()] for c in (ours, theirs)]
    sizes = [max(1.0, float(x.abs().max())) for x in sides[1]]
    a, b = ([x / size for x, size in zip(side, sizes, strict=True)] for side in sides)
    distance = torch.cdist(torch.cat(a, -1), torch.cat(b, -1), p=torch.inf)  # [1, H, N, M]
    there, back = distance.argmin(-1), distance.argmin(-2)
    paired = back.gather(-1, there) == torch.arange(there.shape[-1])
    shared = paired & (distance.gather(-1, there[..., None])[..., 0] <= tolerance)
    worst = []
    for x, y in zip(a, b, strict=True):
        gap = (x - y.gather(2, there[..., None].expand(*there.shape, y.shape[3]))).abs().amax(-1)
        worst.append(float(torch.where(paired, gap, torch.inf).max()))
    return Likeness(float(shared.double().mean()), *worst)


def read(cache: Cache, later: Heads, alpha: float) -> Tensor:
    """Return the outputs [1, Hq, T, Dv] of later queries over a cache alone, with the bias ``alpha ln votes``."""
    group = later.query.shape[1] // cache.key.shape[1]
    key, value, bias = (x.repeat_interleave(group, dim=1) for x in (cache.key, cache.value, alpha * cache.votes.log()))
    return (later.query @ key.transpose(-1, -2) * later.scale + bias[:, :, None]).softmax(-1) @ value


def output_gap(a: Tensor, b: Tensor, full: Tensor) -> float:
    """Return the mean over queries and heads of |a - b| / |full|; all tensors are [1, Hq, T, Dv]."""
    return float(((a - b).norm(dim=-1) / full.norm(dim=-1)).mean())


Row = dict[str, Any]


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    values = list(values)
    return sum(values) / len(values)


def row(code: str, compared: str, difference: str = "", *, holds: bool = True, **figures: Any) -> Row:
    """Return a row of the result."""
    return {"code": code, "compared": compared, "difference": difference, "holds": holds, **figures}


def same(code: str, compared: str, pairs: list[tuple[Cache, Cache]], **figures: Any) -> Row:
    """Return a row whose pairs of caches (kvexport's, the authors') must be equal."""
    likenesses = [likeness(ours, theirs) for ours, theirs in pairs]
    worst = {name: max(getattr(x, name) for x in likenesses) for name in ("key", "value", "votes")}
    return row(
        code,
        compared,
        holds=all(x.same for x in likenesses),
        shared=mean(x.shared for x in likenesses),
        **worst,
        **figures,
    )


def differing(
    code: str,
    compared: str,
    difference: str,
    caches: list[tuple[Cache, Cache, Heads, Heads]],
    alpha: float,
    *,
    tolerance: float = TOLERANCE,
    **figures: Any,
) -> Row:
    """Return a row of caches (kvexport's, the authors', the text, later tokens) that differ.

    Its figures: `shared` is the share of equal slots, `gap` the difference of the outputs of later queries over the two
    caches. `our_error` and `their_error` are the differences of each cache's outputs to those over the whole text.
    """
    gaps: dict[str, list[float]] = {"gap": [], "our_error": [], "their_error": []}
    for ours, theirs, text, later in caches:
        a, b, full = (read(cache, later, alpha) for cache in (ours, theirs, raw(text)))
        for name, (x, y) in {"gap": (a, b), "our_error": (a, full), "their_error": (b, full)}.items():
            gaps[name].append(output_gap(x, y, full))
    shared = mean(likeness(ours, theirs, tolerance).shared for ours, theirs, _, _ in caches)
    return row(code, compared, difference, shared=shared, **{name: mean(x) for name, x in gaps.items()}, **figures)
