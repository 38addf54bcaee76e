"""The present occupancy of batch lanes, KV caches, prefixes and sessions, for /metrics."""

from __future__ import annotations

from kvexport.plan.planner import state_bytes
from kvexport.serve.service import Service


def measure(service: Service) -> None:
    engine, worker, lanes, metrics = service.engine, service.worker, service.lanes, service.metrics

    def running() -> int:
        return len(engine.running())

    def tokens_per_slot() -> float:
        used = [request.lane for request in engine.running()]
        slots = sum(lanes.occupied(lane) for lane in used)
        return sum(lanes.length[lane] for lane in used) / slots if slots else 0.0

    metrics.gauge("vllm:num_requests_running", "Requests that have a lane.", running)
    metrics.gauge("vllm:num_requests_waiting", "Requests without a lane.", lambda: max(0, worker.pending - running()))
    metrics.gauge("vllm:kv_cache_usage_perc", "Share of the lanes in use.", lambda: running() / lanes.count)
    metrics.gauge("kvexport:lanes", "Sequences that can run at once.", lambda: lanes.count)
    taken = state_bytes(engine.manifest.recipe, engine.plan, lanes.count)
    metrics.gauge("kvexport:state_bytes", "Memory of the state of all lanes.", lambda: taken)
    metrics.gauge("kvexport:tokens_per_slot", "Tokens per occupied slot of the lanes in use.", tokens_per_slot)
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
