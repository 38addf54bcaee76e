"""The two operators on one sequence and one KV head, as plain arrays [slots, ...], for theorems about methods."""

from typing import Any

import numpy as np
import torch

from kvexport.methods.base import Method
from kvexport.methods.slots import Statistic
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import VoteAttentionAttributes, vote_attention
from kvexport.schema.state import STATE_NAMES

Arrays = dict[str, np.ndarray]
DECAY = 0.9


def cache_of(key: Any, value: Any = None, votes: Any = None, score: Any = None, position: Any = None) -> Arrays:
    """Return a cache of one sequence and one KV head: key [C, D], value [C, Dv], and votes, score, position [C]."""
    key = np.asarray(key, np.float64)
    count = len(key)
    return {
        "key": key,
        "value": np.asarray(key if value is None else value, np.float64),
        "votes": np.ones(count) if votes is None else np.asarray(votes, np.float64),
        "score": np.zeros(count) if score is None else np.asarray(score, np.float64),
        "position": np.arange(count) if position is None else np.asarray(position),
    }


def merged(cache: Arrays, method: Method, budget: int, *, sinks: int = 0, recent: int = 0) -> Arrays:
    attributes = MergeCacheAttributes(method, budget, sinks, recent)
    key, value, votes, score, position = merge_cache(*tensors_of(cache), attributes=attributes)
    used = int((votes > 0).sum())
    order = torch.argsort(position[0, 0, :used])
    rows = {
        "key": key[0, 0],
        "value": value[0, 0],
        "votes": votes[0, 0],
        "score": score[0, 0, 0],
        "position": position[0, 0],
    }
    return {name: x[order].numpy().astype(np.int64 if name == "position" else np.float64) for name, x in rows.items()}


def tensors_of(cache: Arrays, spare: int = 0) -> list[torch.Tensor]:
    def padded(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([x, np.zeros((spare, *x.shape[1:]), x.dtype)])).to(dtype)[None, None]

    key, value, votes, score = (padded(cache[name], torch.float32) for name in ("key", "value", "votes", "score"))
    return [key, value, votes, score[:, :, None], padded(cache["position"], torch.int32)]


def score_for(logit: Any, position: Any) -> np.ndarray:
    """Return the stored score whose bias-corrected average is exp(logit) when the latest token is at max(position)."""
    position = np.asarray(position)
    return np.asarray(logit, np.float64) + np.log1p(-(DECAY ** (position.max() - position + 1)))


def appended(
    cache: Arrays,
    query: Any,
    key: Any,
    value: Any,
    statistics: tuple[Statistic, ...],
    *,
    alpha: float = 1.0,
    query_length: int | None = None,
) -> tuple[np.ndarray, Arrays]:
    query, key, value = (torch.tensor(np.asarray(x), dtype=torch.float32)[None, None] for x in (query, key, value))
    tokens = query.shape[2]
    first = int(cache["position"].max(initial=-1)) + 1
    out = vote_attention(
        query,
        key,
        value,
        torch.arange(first, first + tokens)[None],
        torch.tensor([[tokens if query_length is None else query_length]]),
        *tensors_of(cache, spare=tokens),
        attributes=VoteAttentionAttributes(1.0, alpha, statistics),
    )
    used = int((out[3] > 0).sum())
    rows = dict(zip(STATE_NAMES, (out[1], out[2], out[3], out[4][:, :, 0], out[5]), strict=True))
    return out[0][0, 0].double().numpy(), {
        name: x[0, 0, :used].numpy().astype(np.int64 if name == "position" else np.float64) for name, x in rows.items()
    }


def random_cache(seed: int) -> Arrays:
    rng, count, size = np.random.default_rng(seed), 14, 6
    query = rng.normal(size=size)
    key = rng.normal(size=(count, size))
    position = np.sort(rng.choice(3 * count, count, replace=False))
    value, votes = rng.normal(size=(count, size)), np.exp(rng.normal(size=count))
    return cache_of(key, value, votes, score_for(key @ query, position), position)
