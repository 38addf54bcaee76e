"""The limits of the CUDA kernels of MergeCache (the operator that compresses KV caches), by kind of GPU.

No GPU is needed to know these limits: they follow from the shared memory of a thread block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvexport.methods.base import Method
    from kvexport.plan.cache import CachePlan

# Bytes of shared memory that a thread block may have, by compute capability (NVIDIA's CUDA programming guide).
SHARED = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (11, 0): 227 << 10,
    (12, 0): 99 << 10,
    (12, 1): 99 << 10,
}
RESERVED = 16  # bytes of a thread block's shared memory that every kernel uses (plugins/cuda/core/launch.h)
# Shared memory in bytes: of the selection of evicted slots, fixed and for each slot (plugins/cuda/merge/select.h), and
# of the merge of rows, fixed and for each evicted slot (plugins/cuda/merge/sets.h).
SELECTION, PER_SLOT = 2064, 5
MERGED, PER_EVICTED = 536, 8


def most_slots(shared: int) -> int:
    """Return how many slots per KV head MergeCache's CUDA kernels support with `shared` bytes of shared memory."""
    return (shared - RESERVED - SELECTION) // PER_SLOT


def most_evicted(shared: int) -> int:
    """Return how many slots MergeCache's CUDA kernels can evict per KV head with `shared` bytes of shared memory."""
    return (shared - RESERVED - MERGED) // PER_EVICTED


def merge_problem(cache: CachePlan, method: Method, capability: tuple[int, int] | None = None) -> str:
    """Return why MergeCache's CUDA kernels cannot merge some KV caches of a cache plan; "" if they can.

    Without a compute capability, the text names all kinds of GPU whose thread blocks have too little shared memory.
    """
    policy = method.policy()
    if policy is None:
        return ""
    sizes = set(SHARED.values()) if capability is None else {SHARED[capability]} if capability in SHARED else set()
    for shared in sorted(sizes, reverse=True):
        if problem := _lacking(cache, shared, merges=policy.merge != "drop"):
            kinds = [capability] if capability else [kind for kind, size in SHARED.items() if size <= shared]
            names = ", ".join(f"{major}.{minor}" for major, minor in kinds)
            memory = f"{shared >> 10} KiB of shared memory{'' if capability else ' or less'}"
            return f"{problem} where a thread block has {memory} (compute capability {names})"
    return ""


def _lacking(cache: CachePlan, shared: int, *, merges: bool) -> str:
    for i, layer in enumerate(cache.caches):
        slots = max(layer.capacity)
        evicted = max(own - budget for own, budget in zip(layer.capacity, layer.budget, strict=True))
        if layer.merges and slots > most_slots(shared):
            return f"cache {i} has {slots} slots, and the kernels take {most_slots(shared)}"
        if layer.merges and merges and evicted > most_evicted(shared):
            return f"cache {i} may merge {evicted} slots at once, and the kernels take {most_evicted(shared)}"
    return ""
