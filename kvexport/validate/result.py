"""The result of a validation, the comparison of an exported model with PyTorch: its differences and problems."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLIPS_ALLOWED = 0.01  # share of KV heads' merges that may differ by ties; on SmolLM2 one of a thousand does
FAR = 0.5  # nats that a compressed KV cache may add to the loss of a text without a warning
FEW_FLIPS = 2  # this many differing merges pass, however few KV heads were merged
ROUNDING_RATIO = 3.0  # largest ratio of the engine's errors against float64 to PyTorch's, at the checked quantile
ABOVE = 10  # errors beyond the checked quantile if there are fewer than 1,000: their 99th percentile is chance
OUTLIERS = 10.0  # factor by which ROUNDING_RATIO is larger for the 99th percentile
KEPT = 50  # most mismatches that are stored with all details
KINDS = {"hidden": "hidden state", "key": "keys", "value": "values", "logits": "logits", "image": "images"}


@dataclass(frozen=True)
class Mismatch:
    step: int
    phase: str  # "prefill", "decode" or "merge"
    layer: int | None  # number of the KV cache; None for logits
    tensor: str
    largest: float  # largest difference of the tensor
    allowed: float = 0.0  # tolerance
    lane: int | None = None  # row of the batch
    head: int | None = None  # KV head; None for hidden states and logits
    slot: int | None = None  # KV-cache slot; for hidden states and logits, index of the token within the call

    def line(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}, "
        named = {"lane": self.lane, "head": self.head, "slot" if self.head is not None else "token": self.slot}
        at = "".join(f", {name} {number}" for name, number in named.items() if number is not None)
        return (
            f"{where}step {self.step} ({self.phase}), tensor {self.tensor}{at}: differs by {self.largest:.3g}, allowed "
            f"{self.allowed:.3g}"
        )


@dataclass(frozen=True)
class Quantiles:
    median: float
    checked: float  # quantile that the validation checks (`level_of`)
    p99: float  # 99th percentile
    largest: float  # largest error


def level_of(count: int) -> float:
    """Return which quantile of errors is checked: the 99th percentile, or a lower one that `ABOVE` errors exceed."""
    return max(0.5, min(0.99, 1.0 - ABOVE / max(count, 1)))


def quantiles_of(errors: NDArray[Any]) -> Quantiles:
    if not errors.size:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    levels = (0.5, level_of(errors.size), 0.99, 1.0)
    return Quantiles(*(float(np.quantile(errors, level, method="lower")) for level in levels))


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of engine and PyTorch against float64, from the same state, through all layers of the model."""

    phase: str  # "prefill" or "decode"
    tensor: str
    count: int  # number of vectors
    engine: Quantiles  # engine's errors
    pytorch: Quantiles  # PyTorch's errors
    least: float  # errors up to this size are insignificant: one rounding of the model's type

    @property
    def holds(self) -> bool:
        few = self.engine.p99 <= OUTLIERS * ROUNDING_RATIO * max(self.pytorch.p99, self.least)
        return self.ratio <= ROUNDING_RATIO and few

    @property
    def ratio(self) -> float:
        return self.engine.checked / max(self.pytorch.checked, self.least)


@dataclass
class ValidationResult:
    artifact: str  # path of the artifact
    recipe: str
    backend: str
    tokens: list[int]  # number of tokens of each sequence
    texts: list[str]  # kind of each sequence's tokens, "text" or "random", after IMAGE if it begins with a picture
    budgets: list[int]  # budget of each KV head of every layer, in slots
    tolerance: dict[str, float]  # tolerances, by kind of tensor
    operators: dict[str, str]  # how this machine runs each of kvexport's operators
    # For each call: its number, phase, tokens seen by the longest sequence, and largest difference by kind of tensor
    # (of vectors relative to their norm)
    steps: list[dict[str, Any]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)  # first `KEPT` mismatches
    mismatched: int = 0
    head_merges: int = 0  # number of merges of single KV heads that were compared
    # The merges of KV heads that evict other entries than PyTorch because of rounding
    flips: list[dict[str, Any]] = field(default_factory=list)
    rounding: list[Rounding] = field(default_factory=list)  # rounding errors against float64
    in_place_identical: bool = True  # whether the in-place run gave the same bits as separate buffers
    # Whether the top logits that a device returned are the largest of the row; None if the host has the whole row
    top_logits_hold: bool | None = None
    # Where the answers of the engine with CUDA graphs differ from those without; None on the CPU, which has no graphs
    shipped_difference: str | None = None
    # The mean KL(PyTorch || engine) in nats, with each running independently from the first token to the last
    own_kl: float = 0.0
    own_kl_allowed: float = 0.0  # largest value of `own_kl` that passes
    own_compared: int = 0  # number of logits rows behind `own_kl`
    # The mean KL(transformers || engine) in nats at the positions before which nothing was evicted. The model of
    # transformers runs with its own attention, KV cache and positions, and reads a whole sequence at once. The largest
    # value that passes is `own_kl_allowed`.
    first_kl: float = 0.0
    first_compared: int = 0  # number of logits rows behind `first_kl`
    # For each lane in which a tie made the engine's independent run evict other entries than PyTorch's: the numbers of
    # tokens seen each time. PyTorch's run then continues from the engine's KV caches of that lane, unless no tie
    # explains the difference.
    parted: dict[int, list[int]] = field(default_factory=dict)
    # For each sequence, KL(full cache || engine) in nats at `positions`
    kl: list[list[float]] = field(default_factory=list)
    # For each sequence, the mean losses of the next token at `positions`, with the full cache and with the engine, in
    # nats; None if no compared position has a next token
    losses: list[tuple[float, float] | None] = field(default_factory=list)
    # For each sequence, whether the most likely token equals the full cache's, at `positions`
    agrees: list[list[bool]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)  # for each sequence, the compared positions
    # (number of compared layers, number of the model's layers); None if all were compared
    layers: tuple[int, int] | None = None
    no_image: int = 0  # tokens of a picture that was not compared, because no sequence had room for it
    unmerged: int = 0  # number of KV heads that can merge, but have a budget as long as the longest sequence
    seconds: float = 0.0  # duration of the validation

    def note(self, mismatch: Mismatch) -> None:
        self.mismatched += 1
        if len(self.mismatches) < KEPT:
            self.mismatches.append(mismatch)

    @property
    def mismatch(self) -> Mismatch | None:
        return self.mismatches[0] if self.mismatches else None

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def problem(self) -> str:
        return next(iter(self.problems), "")

    @property
    def problems(self) -> list[str]:
        problems = []
        if self.mismatch:
            more = f" (the first of {self.mismatched})" if self.mismatched > 1 else ""
            problems.append(f"the engine differs from PyTorch: {self.mismatch.line()}{more}")
        if len(self.flips) > max(FEW_FLIPS, FLIPS_ALLOWED * self.head_merges):
            problems.append(
                f"{len(self.flips)} of {self.head_merges} head-merges select other entries than PyTorch; rounding "
                f"explains each of them, but more than {FLIPS_ALLOWED:.0%} is too many"
            )
        for r in self.rounding:
            if not r.holds:
                first = r.tensor == "image"  # the cause of differences in the decoder
                problems.insert(
                    0 if first else len(problems),
                    f"the engine's rounding errors of {KINDS[r.tensor]} ({r.phase}, {r.count} vectors) against float64 "
                    f"exceed PyTorch's: {level_of(r.count):.0%} quantile {r.engine.checked:.3g} against "
                    f"{r.pytorch.checked:.3g} (at most {ROUNDING_RATIO:g} times), 99 % quantile {r.engine.p99:.3g} "
                    f"against {r.pytorch.p99:.3g} (at most {OUTLIERS * ROUNDING_RATIO:g} times)",
                )
        if not self.in_place_identical:
            problems.append(
                "with past and present in the same buffers the engine computes other values than with separate buffers"
            )
        if self.top_logits_hold is False:
            problems.append("the top logits that the device returned are not the largest logits")
        if self.shipped_difference:
            problems.append(
                f"with CUDA graphs and steps ahead of the host the engine answers otherwise: {self.shipped_difference}"
            )
        if not self.own_kl <= self.own_kl_allowed:
            problems.append(
                f"an independent run of the engine is {self.own_kl:.3g} nats from an independent run of PyTorch, "
                f"allowed {self.own_kl_allowed:.3g}"
            )
        if not self.first_kl <= self.own_kl_allowed:
            problems.append(
                f"before anything was evicted the engine is {self.first_kl:.3g} nats from the model of transformers "
                f"with its own attention, cache and positions, allowed {self.own_kl_allowed:.3g}"
            )
        return problems

    @property
    def losses_of_text(self) -> tuple[float, float] | None:
        pairs = [pair for pair in self._rows(self.losses, "text") if pair is not None]
        return (float(np.mean([x[0] for x in pairs])), float(np.mean([x[1] for x in pairs]))) if pairs else None

    @property
    def warning(self) -> str:
        full, engine = self.losses_of_text or (0.0, 0.0)
        if engine <= full + FAR:
            return ""
        return (
            f"the compressed cache predicts text much worse than the full one: {engine:.3g} nats a token, with the "
            f"full cache {full:.3g}; build with a larger --budget, or --set cache.method=h2o, which merges nothing"
        )

    def largest(self, kind: str) -> float:
        return max((s["largest"][kind] for s in self.steps if kind in s["largest"]), default=0.0)

    def mean_kl(self, text: str | None = None) -> float:
        """Return the mean KL(full cache || engine) in nats over the compared positions of validation sequences."""
        values = [v for row in self._rows(self.kl, text) for v in row]
        return float(np.mean(values)) if values else 0.0

    def agreement(self, text: str | None = None) -> float:
        values = [v for row in self._rows(self.agrees, text) for v in row]
        return float(np.mean(values)) if values else 1.0

    def _rows(self, rows: Sequence[Any], text: str | None) -> list[Any]:
        return [row for row, kind in zip(rows, self.texts, strict=False) if text in (None, kind)]

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "mismatch": asdict(self.mismatch) if self.mismatch else None,
            "passed": self.passed,
            "problem": self.problem,
            "problems": self.problems,
            "warning": self.warning,
            "mean_kl": self.mean_kl(),
            "top1_agreement": self.agreement(),
        }
