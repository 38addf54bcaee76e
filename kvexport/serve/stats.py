"""The present occupancy of batch lanes and KV caches, for the server's chat page, /metrics and /stats."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.plan.planner import state_bytes
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
            "generated_tokens": worker.generated,
            "sessions": service.sessions.known,
            "merges": service.lanes.merges,
            "waiting": max(0, worker.pending - sum(lane["state"] != "idle" for lane in seen)),
            "state_bytes": state_bytes(service.engine.manifest.recipe, plan, service.lanes.count),
            "full_cache_bytes_per_token": sum(layer.slot_bytes() for layer in plan.caches),
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
