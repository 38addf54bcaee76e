"""The memory of this machine, the error if it is too small, and the memory that a server needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvexport.errors import EnvironmentProblem
from kvexport.units import format_bytes

TORCH_BYTES = 1 << 30
PROGRAM_BYTES = 512 << 20  # Python, the backend, and activations of a small model
KEPT_BYTES = 1 << 30  # the default for prefixes, and for sessions


@dataclass(frozen=True)
class ServerMemory:
    """An upper estimate of the memory that `kvexport serve` needs, in bytes."""

    weights: int  # size of the weights on disk
    state: int  # KV caches of all lanes
    prefixes: int = KEPT_BYTES  # limit for saved states of prompt prefixes
    sessions: int = KEPT_BYTES  # limit for sessions in memory
    adapters: int = 0  # matrices of all LoRA adapters

    @property
    def total(self) -> int:
        """The sum of all uses. Weights count twice, because kernels may keep a reordered copy of them."""
        return 2 * self.weights + self.state + self.prefixes + self.sessions + self.adapters + PROGRAM_BYTES

    def __str__(self) -> str:
        """Return the sum and its terms as text."""
        terms = {
            "2 times the weights": 2 * self.weights,
            "caches": self.state,
            "prefixes": self.prefixes,
            "sessions": self.sessions,
            **({"adapters": self.adapters} if self.adapters else {}),
            "the program": PROGRAM_BYTES,
        }
        return f"up to {format_bytes(self.total)}: " + ", ".join(f"{format_bytes(n)} {use}" for use, n in terms.items())


def machine_memory() -> tuple[int, int]:
    """Return the bytes of total and available memory: the smaller of the machine's and the control group's.

    Both are 0 if the system does not provide them.
    """
    text = read_system_file(Path("/proc/meminfo"))
    sizes = {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    group = Path("/sys/fs/cgroup")
    limit, used = (read_system_file(group / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit() and 0 < int(limit) < (total or int(limit) + 1):
        return int(limit), min(available or int(limit), max(0, int(limit) - int(used)))
    return total, available


def require_memory(size: int, purpose: str, fix: str) -> None:
    """Check that an allocation fits into the memory of this machine; otherwise the system would kill the process."""
    total, _ = machine_memory()
    if 0 < total < size:
        raise EnvironmentProblem(
            f"{purpose} takes {format_bytes(size)}, and this machine or its control group has {format_bytes(total)}",
            fix,
        )


def require_address_space() -> None:
    """Check that there is enough address space for PyTorch, which otherwise ends the process without a message."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < TORCH_BYTES:
        raise EnvironmentProblem(
            f"not enough memory: PyTorch takes {format_bytes(TORCH_BYTES)} of address space, and the limit is "
            f"{format_bytes(limit)}",
            f"ulimit -v {TORCH_BYTES >> 10}, or more",
        )


def read_system_file(path: Path) -> str:
    """Return the text of a file of the system, "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
