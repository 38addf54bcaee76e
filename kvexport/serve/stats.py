"""The present occupancy of batch lanes and KV caches, for the server's chat page, /metrics and /stats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.plan.cache import CachePlan, LayerCache, slots_of
from kvexport.plan.planner import state_bytes
from kvexport.schema.state import STATE
from kvexport.serve.errors import ApiError
from kvexport.serve.service import Service


async def stats(service: Service, _: Request) -> Response:
    worker = service.worker
    seen = await worker.call(lambda: lanes_now(service.engine, service.lanes))
    plan = service.engine.plan
    return JSONResponse(
        {
            "model": service.model,
            "chat": service.engine.chat_template is not None,
            "images": service.engine.manifest.images is not None,
            "time": time.time(),
            "max_length": service.engine.max_length,
            "layers": [{"heads": layer.kv_heads, "budget": list(layer.budget)} for layer in plan.caches],
            "generated_tokens": worker.generated,
            "sessions": service.sessions.known,
            "merges": service.lanes.merges,
            "waiting": max(0, worker.pending - sum(lane["state"] != "idle" for lane in seen)),
            "state_bytes": state_bytes(service.engine.manifest.recipe, plan, service.lanes.count),
            "full_cache_bytes_per_token": full_bytes_per_token(plan),
            "lanes": seen,
        }
    )


def measure(service: Service) -> None:
    engine, worker, lanes, metrics = service.engine, service.worker, service.lanes, service.metrics

    def running() -> int:
        return len(engine.running())

    metrics.gauge("vllm:num_requests_running", "Requests that have a lane.", running)
    metrics.gauge("vllm:num_requests_waiting", "Requests without a lane.", lambda: max(0, worker.pending - running()))
    metrics.gauge("vllm:kv_cache_usage_perc", "Share of the lanes in use.", lambda: running() / lanes.count)
    metrics.gauge("kvexport:lanes", "Sequences that can run at once.", lambda: lanes.count)
    taken = state_bytes(engine.manifest.recipe, engine.plan, lanes.count)
    metrics.gauge("kvexport:state_bytes", "Memory of the state of all lanes.", lambda: taken)
    metrics.gauge(
        "kvexport:tokens_per_slot",
        "Tokens per occupied slot of the lanes in use.",
        lambda: tokens_per_slot(engine, lanes),
    )
    if (prefixes := engine.prefixes) is not None:
        known = prefixes
        metrics.counter(
            "vllm:prefix_cache_queries",
            "Tokens of prompts that were looked up among the prefixes.",
            lambda: known.queries,
        )
        metrics.counter(
            "vllm:prefix_cache_hits", "Tokens of prompts that were found among the prefixes.", lambda: known.hits
        )
        metrics.gauge("kvexport:prefix_bytes", "Bytes of the states of prefixes.", lambda: known.nbytes)
    sessions = service.sessions
    metrics.gauge("kvexport:session_bytes", "Bytes of the sessions in memory.", lambda: sessions.memory_bytes)
    metrics.gauge("kvexport:session_disk_bytes", "Bytes of the session files.", lambda: sessions.disk_bytes)
    metrics.counter("kvexport:merges", "Merges, which bring a lane's cache back to its budget.", lambda: lanes.merges)


def lanes_now(engine: Engine, lanes: Lanes) -> list[dict[str, Any]]:
    holders = {request.lane: request for request in engine.running()}
    entries = []
    for lane in range(lanes.count):
        request = holders.get(lane)
        entry: dict[str, Any] = {"state": request.state.value if request else "idle", "tokens": lanes.length[lane]}
        entry["slots"] = lanes.occupied(lane)
        if request is not None:
            entry |= {"prompt": len(request.ids), "read": request.done, "generated": len(request.tokens)}
            entry["request"] = request.id  # the header X-Request-Number of its answer
        entries.append(entry)
    return entries


def tokens_per_slot(engine: Engine, lanes: Lanes) -> float:
    used = [request.lane for request in engine.running()]
    slots = sum(lanes.occupied(lane) for lane in used)
    return sum(lanes.length[lane] for lane in used) / slots if slots else 0.0


def full_bytes_per_token(plan: CachePlan) -> int:
    return sum(layer.slot_bytes() for layer in plan.caches)


async def slots(service: Service, request: Request) -> Response:
    """Answer /stats/slots: the KV-cache entries of one KV head of one lane (row of the batch), by position.

    An entry has the position of its latest token, and votes, the number of tokens that the entry stands for.
    """
    layers = service.engine.plan.caches
    lane = _number(request, "lane", service.lanes.count)
    layer = _number(request, "layer", len(layers))
    head = _number(request, "head", layers[layer].kv_heads)
    votes, positions = await service.worker.call(lambda: entries(service.lanes, layers[layer], lane, layer, head))
    return JSONResponse({"lane": lane, "layer": layer, "head": head, "position": positions, "votes": votes})


def entries(lanes: Lanes, cache: LayerCache, lane: int, layer: int, head: int) -> tuple[Sequence[float], Sequence[int]]:
    """Return the token counts (votes) and positions of a head's occupied KV-cache slots, oldest position first."""
    names = [tensor.past(layer) for tensor in STATE if tensor.name in ("votes", "position")]
    state = lanes.read(lane, names)
    slots = slots_of(cache.first_slots(cache.most_of(len(state[names[0]]))))[head]
    votes, position = (state[name][slots] for name in names)
    taken = np.flatnonzero((votes > 0) & np.isfinite(votes))
    taken = taken[np.argsort(position[taken], kind="stable")]
    return np.round(votes[taken].astype(float), 3).tolist(), position[taken].tolist()


def _number(request: Request, name: str, end: int) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < end):
        raise ApiError(400, f"{name}: expected a number from 0 to {end - 1}", param=name)
    return int(text)
