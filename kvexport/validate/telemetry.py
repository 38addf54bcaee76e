"""Perturbation telemetry: measurement of how each merge of KV-cache entries changes attention outputs.

The effect is compared with the bound of KeepKV's Theorem 5 (arXiv 2504.09936).

A `Telemetry` watches a run of the PyTorch reference. It recomputes attention in float64, one sequence and layer at a
time: over the cache before a merge, over the cache after it, and over all keys and values of the run so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvexport.export.graph.graphs import merge_attributes
from kvexport.export.graph.tracer import layer_attributes
from kvexport.methods.base import Method
from kvexport.methods.slots import Slots, corrected_log_ema
from kvexport.ops.merge_cache import merge_cache
from kvexport.ops.vote_attention import VoteAttentionAttributes, capped, vote_bias
from kvexport.plan.cache import CachePlan, LayerCache, LayerGeometry, resized
from kvexport.schema.state import STATE, StateTensor
from kvexport.validate.perturbation import QUERIES, Bound, Perturbation, theorem_5

When = Literal["current", "next"]


@dataclass(frozen=True)
class Cache:
    """The KV-cache slots of one sequence in one layer, in float64."""

    key: Tensor
    value: Tensor  # [H, C, Dv]
    votes: Tensor  # [H, C]; 0 marks an empty slot
    position: Tensor  # [H, C] int64


def joined(caches: Sequence[Cache]) -> Cache:
    """Concatenate the slots of several KV caches, in order, into one cache."""
    return Cache(*(torch.cat([getattr(cache, field.name) for cache in caches], dim=1) for field in fields(Cache)))


def _cache(key: Tensor, value: Tensor, votes: Tensor, _: Tensor, position: Tensor) -> Cache:
    return Cache(key.double(), value.double(), votes.double(), position.long())


@dataclass(frozen=True)
class Query:
    """The query vectors of one token's attention, with its position and sinks."""

    vector: Tensor  # [Hq, D] float64
    position: int  # position of the token
    sinks: Tensor | None  # [Hq] float64, the layer's sink logits; None if it has none


@dataclass(frozen=True)
class Attention:
    """The attention of one query over one KV cache: outputs and logarithms of weights."""

    output: Tensor  # [H, G, Dv], where G query heads share a KV head
    mass: Tensor  # [H, G, C], ``ln(votes^alpha exp(logit))``; -inf for invisible slots
    total: Tensor  # [H, G], the logarithm of the sum of all masses and of the sink's


def attend(query: Query, cache: Cache, attributes: VoteAttentionAttributes) -> Attention:
    heads, _, size = cache.key.shape
    logit = (query.vector * attributes.scale).reshape(heads, -1, size) @ cache.key.transpose(-1, -2)
    logit = capped(logit, attributes)
    visible = cache.votes > 0
    if attributes.sliding_window:
        visible = visible & (cache.position > query.position - attributes.sliding_window)
    bias = torch.where(visible, vote_bias(cache.votes, attributes), -torch.inf)
    mass = logit + bias[:, None]
    total = torch.logsumexp(mass, dim=-1)
    if query.sinks is not None:
        total = torch.logaddexp(total, query.sinks.reshape(heads, -1))
    return Attention(torch.exp(mass - total[..., None]) @ cache.value, mass, total)


@dataclass(frozen=True)
class _Followed:
    """The new place of each KV-cache slot of one sequence in one layer after a merge."""

    to: Tensor  # [H, C] int64, the slot after the merge; -1 if the entry was dropped
    estimate: Tensor  # [H, C] float64, the logarithm of the score that the method estimated


@dataclass(frozen=True)
class _Merge:
    """One merge of the KV cache of one sequence in one layer, as telemetry records it."""

    step: int
    layer: int  # number of the cache
    before: Cache
    after: Cache
    full: Cache  # all keys and values that the run has appended
    evicted: Tensor  # [H] bool, the heads that evicted entries
    followed: _Followed | None  # new slots; None if the method keeps no estimates


def _bounds(
    merge: _Merge,
    followed: _Followed,
    query: Query,
    before: Attention,
    after: Attention,
    attributes: VoteAttentionAttributes,
) -> Tensor:
    """Return two upper bounds [2, H, G] on the change of the attention output by a merge.

    The first bound is Theorem 5; it is infinite if the theorem does not apply. The second is the step of the theorem's
    proof before all errors are replaced by the largest. In it, a slot of mass w moves the output by ``|share w_r - w|
    |v - o|`` divided by the sum of masses after the merge. Here w_r is the mass of the merged slot, and share is the
    slot's share of its merge set by the estimates. Both bounds start from the cache without the dropped entries; the
    distance from there to the cache before the merge is computed and added.
    """
    slots = followed.to.shape[-1]  # tokens appended after the merge take no part in it
    stays = followed.to >= 0
    to = torch.where(stays, followed.to, 0)
    merged = torch.zeros_like(merge.before.votes[:, :slots]).scatter_add(1, to, stays.double()) > 1
    merges = stays & merged.gather(1, to)

    left = merge.before.votes.clone()
    left[:, :slots] *= stays
    rest = attend(query, replace(merge.before, votes=left), attributes)
    mass = rest.mass[..., :slots]
    predicted = torch.log(merge.before.votes[:, :slots]) + followed.estimate
    top = torch.where(stays, predicted, -torch.inf).amax(-1, keepdim=True)
    share = torch.where(stays, torch.exp(predicted - top), 0.0)
    group = torch.log(torch.zeros_like(share).scatter_add(1, to, share)) + top

    error = torch.expm1(mass - predicted[:, None]).abs()
    error_merged = torch.expm1(after.mass[..., :slots] - group[:, None]).abs()
    counted = (stays[:, None] & (mass > -torch.inf) & merges.any(-1)[:, None, None]) | merges[:, None]
    epsilon = torch.maximum(
        torch.where(counted, error, 0.0).amax(-1), torch.where(merged[:, None], error_merged, 0.0).amax(-1)
    )
    away = (merge.before.value[:, None, :slots] - rest.output[:, :, None]).norm(dim=-1)
    gamma = torch.where(merges[:, None], torch.exp(mass - rest.total[..., None]) * away, 0.0).sum(-1)

    masses = (predicted - group.gather(1, to))[:, None] + after.mass.gather(2, to[:, None].expand(mass.shape))
    moved = (torch.exp(masses - after.total[..., None]) - torch.exp(mass - after.total[..., None])).abs() * away
    by_slot = torch.where(merges[:, None], moved, 0.0).sum(-1)
    dropped: Tensor = (rest.output - before.output).norm(dim=-1)
    theorem = torch.where(epsilon < 1, theorem_5(epsilon, gamma), torch.inf)
    return dropped + torch.stack([theorem, by_slot])


def _by_heads(layer: LayerCache, tensor: StateTensor, x: NDArray[Any]) -> NDArray[Any]:
    """Return a copy [B, H, C, ...] of a state tensor; heads of fewer slots than others get empty ones."""
    axis, most = tensor.slot_axis, max(layer.capacity)
    if axis is None:
        return np.array(x)
    wide = resized(x, axis, layer.capacity, (most,) * layer.kv_heads)
    return np.array(np.moveaxis(wide.reshape(*x.shape[:axis], layer.kv_heads, most, *x.shape[axis + 1 :]), axis, 1))


class _Numbered:
    """A compression method over values extended by one-hot slot numbers, which show where a merge moves each slot.

    The method must not select by these numbers, so its keep score gets values without them. Methods with estimates
    choose merge targets by keys, which have no such numbers.
    """

    def __init__(self, method: Method, size: int) -> None:
        self.method, self.size = method, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        return self.method.keep_score(
            replace(slots, value=slots.value[..., : self.size].contiguous()), unprotected, count
        )


class Telemetry:
    """Observer of a PyTorch reference run that measures how each merge changes attention outputs.

    After the run the method `rows` returns the measured changes.
    """

    def __init__(self, plan: CachePlan, geometry: list[LayerGeometry], method: Method) -> None:
        self.plan, self.method = plan, method
        self.attributes = [layer_attributes(method, layer) for layer in geometry]
        # The theorem assumes votes with exponent 1, and values weighted by the estimates.
        self.estimates = method.statistics[-1].kind == "log_ema" and method.vote_exponent == 1.0
        # The keys of these dicts are (sequence, layer).
        self._appended: dict[tuple[int, int], list[Cache]] = {}
        self._query: dict[tuple[int, int], Query] = {}
        self._waiting: dict[tuple[int, int], _Merge] = {}
        self._steps = 0
        self._samples: dict[tuple[int, int, When], list[tuple[int, Tensor]]] = {}

    def attended(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        query_length: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Receive the inputs of a layer's attention, in the shapes of VoteAttention, before the layer computes it."""
        sink_logits = None if sinks is None else sinks.double()
        for lane, count in enumerate(query_length[:, 0].tolist()):
            if not count:
                continue
            at, places = (lane, layer), position[lane, :count]
            keys, values = key[lane, :, :count].double(), value[lane, :, :count].double()
            new = Cache(keys, values, torch.ones(keys.shape[:2], dtype=torch.float64), places.expand(keys.shape[:2]))
            merge = self._waiting.pop(at, None)
            if merge is not None:
                newest = Cache(*(x[:, :1] for x in (new.key, new.value, new.votes, new.position)))
                before, after, full = (joined([cache, newest]) for cache in (merge.before, merge.after, merge.full))
                following = replace(merge, before=before, after=after, full=full)
                self._note(following, Query(query[lane, :, 0].double(), int(places[0]), sink_logits), "next")
            self._appended.setdefault(at, []).append(new)
            self._query[at] = Query(query[lane, :, count - 1].double(), int(places[-1]), sink_logits)

    def merged(self, first: int, past: Mapping[str, NDArray[Any]], present: Mapping[str, NDArray[Any]]) -> None:
        """Receive the KV caches of the sequences from `first` on, before and after a merge, by merge.onnx's names."""
        for i, layer in enumerate(self.plan.caches):
            if not layer.merges:
                continue
            old, new = (
                [torch.from_numpy(_by_heads(layer, tensor, state[name(tensor, i)])) for tensor in layer.state]
                for name, state in ((StateTensor.past, past), (StateTensor.present, present))
            )
            if layer.value_in_key:
                old[1], new[1] = (state[0][..., : layer.value_size] for state in (old, new))
            for lane, evicted in enumerate((new[2] > 0).sum(-1) < (old[2] > 0).sum(-1)):
                if not evicted.any():
                    continue
                at = (first + lane, i)
                before, after = (_cache(*(x[lane] for x in state[: len(STATE)])) for state in (old, new))
                followed = self._followed(i, [x[lane : lane + 1] for x in old]) if self.estimates else None
                self._appended[at] = [joined(self._appended[at])]
                merge = self._waiting[at] = _Merge(
                    self._steps, i, before, after, self._appended[at][0], evicted, followed
                )
                self._note(merge, self._query[at], "current")
        self._steps += 1

    def _followed(self, layer: int, state: list[Tensor]) -> _Followed:
        """Return where a merge moved each KV-cache slot of one sequence in a layer.

        A merge of values with one-hot slot numbers appended shows where each slot went.
        """
        key, value, votes, score, position, *extra = state
        size, slots = value.shape[-1], votes.shape[-1]
        numbered = torch.cat([value.float(), torch.eye(slots).expand(*votes.shape, slots)], dim=-1)
        method = cast(Method, _Numbered(self.method, size))
        heads = [
            replace(x, value_prefix=0, method=method) for x in merge_attributes(self.plan.caches[layer], self.method)
        ]
        inputs = (key, numbered, votes, score, position, *extra)
        parts = [inputs] if len({*heads}) == 1 else [[x[:, h : h + 1] for x in inputs] for h in range(len(heads))]
        results = [merge_cache(*own, attributes=each) for own, each in zip(parts, heads, strict=False)]
        merged, filled = (torch.cat([result[i] for result in results], 1) for i in (1, 2))
        share, to = (merged[..., size:] * (filled > 0)[..., None]).max(dim=2)
        now = torch.where(votes > 0, position, -1).amax(-1, keepdim=True)
        seen = Slots(key, value, votes, score, position, now)
        estimate = corrected_log_ema(seen, -1, self.method.statistics[-1].decay)
        return _Followed(torch.where(share > 0, to, -1)[0], estimate[0].double())

    def _note(self, merge: _Merge, query: Query, when: When) -> None:
        attributes = self.attributes[merge.layer]
        before, after, full = (attend(query, cache, attributes) for cache in (merge.before, merge.after, merge.full))
        size = before.output.norm(dim=-1).clamp(min=1e-30)
        observed = (after.output - before.output).norm(dim=-1) / size
        to_full = (after.output - full.output).norm(dim=-1) / full.output.norm(dim=-1).clamp(min=1e-30)
        bounds = torch.full((2, *size.shape), torch.inf, dtype=torch.float64)
        if merge.followed is not None:
            bounds = _bounds(merge, merge.followed, query, before, after, attributes) / size
        figures = torch.stack([observed, to_full, *bounds])[:, merge.evicted].flatten(1)
        self._samples.setdefault((merge.step, merge.layer, when), []).append((query.position + 1, figures))

    def rows(self) -> list[Perturbation]:
        """Return how much each merge of KV-cache entries changed attention outputs, in order of merges and layers.

        Each merge and layer has two rows: one for the latest query before the merge, then one for the first query after
        it.
        """
        figures = []
        for step, layer, when in sorted(self._samples, key=lambda k: (k[0], k[1], QUERIES.index(k[2]))):
            samples = self._samples[step, layer, when]
            observed, to_full, bound, by_slot = torch.cat([figures for _, figures in samples], dim=1)
            errors = (len(observed), float(observed.mean()), float(observed.max()), float(to_full.mean()))
            row = Perturbation(step, max(tokens for tokens, _ in samples), layer, when, *errors)
            if self.estimates:
                known = torch.isfinite(bound)
                medians = (float(x[known].median()) if known.any() else None for x in (bound, observed))
                row = replace(
                    row,
                    by_slot=float(by_slot.mean()),
                    theorem=Bound(int(known.sum()), int((bound < 1).sum()), *medians),
                )
            figures.append(row)
        return figures
