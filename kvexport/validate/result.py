"""What a validation found, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.report.sections import KeyValues, Paragraph, Plot, Section, Series, Table
from kvexport.validate.perturbation import Perturbation, layer_sections

FLIPS_ALLOWED = 0.01  # of head-merges; on SmolLM2 one in a thousand is a tie that rounding decides
FEW_FLIPS = 2  # are no sign of anything, however few head-merges there were
ROUNDING_RATIO = 3.0  # the engine's errors against float64 over PyTorch's, at a percentile
ABOVE = 10  # errors lie above that percentile; of fewer than 1,000 the 99th is a matter of chance
OUTLIERS = 10.0  # times as much is allowed at the 99th percentile of so few
KEPT = 50  # differences that are kept with all their details; all are counted
KINDS = {"hidden": "hidden state", "key": "keys", "value": "values", "logits": "logits"}


@dataclass(frozen=True)
class Mismatch:
    """Where an engine differs from its reference by more than is allowed. step: number of the call; phase: prefill,
    decode or merge; layer: the number of the cache, None for logits; largest: the difference; slot: of the cache, or of
    the call's tokens where the tensor is the hidden state or logits; head: None for these."""

    step: int
    phase: str
    layer: int | None
    tensor: str
    largest: float
    allowed: float = 0.0
    lane: int | None = None
    head: int | None = None
    slot: int | None = None

    def said(self, of: str) -> str:
        """In a line; of: what has a cache, a "layer", or each of a layer's KV heads a "cache"."""
        where = "" if self.layer is None else f"{of} {self.layer}, "
        named = {"lane": self.lane, "head": self.head, "slot" if self.head is not None else "token": self.slot}
        at = "".join(f", {name} {number}" for name, number in named.items() if number is not None)
        return (
            f"{where}step {self.step} ({self.phase}), tensor {self.tensor}{at}: differs by {self.largest:.3g}, allowed "
            f"{self.allowed:.3g}"
        )


@dataclass(frozen=True)
class Quantiles:
    """Relative errors of vectors against float64: the median, the quantile that is held (`level_of`), the 99th
    percentile and the largest."""

    median: float
    held: float
    p99: float
    largest: float


def level_of(count: int) -> float:
    """The quantile of so many errors that is held: of 1,000 or more the 99th percentile, of fewer the one that ABOVE of
    them exceed, the median at the least."""
    return max(0.5, min(0.99, 1.0 - ABOVE / max(count, 1)))


def quantiles_of(errors: NDArray[Any]) -> Quantiles:
    """Of any number of errors."""
    if not errors.size:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    levels = (0.5, level_of(errors.size), 0.99, 1.0)
    return Quantiles(*(float(np.quantile(errors, level, method="lower")) for level in levels))


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of `count` vectors over the whole depth of the model, from the same state: the engine's and
    PyTorch's."""

    phase: str
    tensor: str
    count: int
    engine: Quantiles
    pytorch: Quantiles
    least: float  # errors that mean nothing: one rounding of the model's type

    @property
    def holds(self) -> bool:
        """Whether the engine is as exact as PyTorch, to a factor."""
        few = self.engine.p99 <= OUTLIERS * ROUNDING_RATIO * max(self.pytorch.p99, self.least)
        return self.ratio <= ROUNDING_RATIO and few

    @property
    def ratio(self) -> float:
        """Of the percentiles that are held."""
        return self.engine.held / max(self.pytorch.held, self.least)


@dataclass
class ValidationResult:
    """What was compared and how far apart it was.

    texts: of what each sequence is, "text" or "random". operators: what runs each operator on this machine. steps:
    (step, phase, tokens seen by the longest sequence, largest difference by kind of tensor: relative for vectors).
    mismatches: the first `KEPT` of `mismatched`. head_merges: heads whose merges were compared; flips: those whose
    choice differs from PyTorch's and that rounding explains, with the roundings it took. rounding: errors against
    float64. own_kl: mean KL(PyTorch || engine), each on its own from the first token to the last, and what is allowed.
    kl, agrees: per sequence KL(full cache || engine) in nats and whether the top token agrees, at `positions`.
    top_logits_hold: whether what a device chooses tokens from is a row's largest logits, None where it is the row.
    telemetry: what merges did to the reference's attention, None where nobody asked. layers: how many of the model's
    were held, and how many it has; None = all. caches_of: "layer" where each has one, "cache" where KV heads have
    their own, which are numbered through. seconds: what it took.
    """

    artifact: str
    recipe: str
    backend: str
    tokens: list[int]
    texts: list[str]
    budgets: list[int]
    tolerance: dict[str, float]
    operators: dict[str, str]
    steps: list[dict[str, Any]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    mismatched: int = 0
    head_merges: int = 0
    flips: list[dict[str, Any]] = field(default_factory=list)
    rounding: list[Rounding] = field(default_factory=list)
    in_place_identical: bool = True
    top_logits_hold: bool | None = None
    own_kl: float = 0.0
    own_kl_allowed: float = 0.0
    kl: list[list[float]] = field(default_factory=list)
    agrees: list[list[bool]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    telemetry: list[Perturbation] | None = None
    layers: tuple[int, int] | None = None
    caches_of: str = "layer"
    seconds: float = 0.0

    def note(self, mismatch: Mismatch) -> None:
        """Count a difference, and keep it where there are not too many."""
        self.mismatched += 1
        if len(self.mismatches) < KEPT:
            self.mismatches.append(mismatch)

    @property
    def mismatch(self) -> Mismatch | None:
        """The first."""
        return self.mismatches[0] if self.mismatches else None

    @property
    def passed(self) -> bool:
        """No problem was found."""
        return not self.problems

    @property
    def problem(self) -> str:
        """What failed first, in one line; "" where nothing did."""
        return next(iter(self.problems), "")

    @property
    def problems(self) -> list[str]:
        """Everything that failed, a line each."""
        found = []
        if self.mismatch:
            more = f" (the first of {self.mismatched})" if self.mismatched > 1 else ""
            found.append(f"the engine differs from PyTorch: {self.mismatch.said(self.caches_of)}{more}")
        if len(self.flips) > max(FEW_FLIPS, FLIPS_ALLOWED * self.head_merges):
            found.append(
                f"{len(self.flips)} of {self.head_merges} heads merge otherwise than in PyTorch, each as rounding may "
                f"have it, but that is more than {FLIPS_ALLOWED:.0%}"
            )
        for r in self.rounding:
            if not r.holds:
                found.append(
                    f"the engine's rounding errors of {KINDS[r.tensor]} ({r.phase}), {r.count} of them, have a "
                    f"{level_of(r.count):.0%} quantile of {r.engine.held:.3g} against float64, PyTorch's of "
                    f"{r.pytorch.held:.3g}, and a 99 % quantile of {r.engine.p99:.3g} and {r.pytorch.p99:.3g}; "
                    f"{ROUNDING_RATIO:g} times that is allowed, at 99 % of fewer than 1,000 "
                    f"{OUTLIERS * ROUNDING_RATIO:g} times"
                )
        if not self.in_place_identical:
            found.append("bound in place, the engine computes something else than with separate buffers")
        if self.top_logits_hold is False:
            found.append("the top logits that the device found are not the largest logits")
        if not self.own_kl <= self.own_kl_allowed:
            found.append(
                f"on its own the engine is {self.own_kl:.3g} nats from PyTorch on its own, allowed "
                f"{self.own_kl_allowed:.3g}"
            )
        return found

    def largest(self, kind: str) -> float:
        """The largest difference of one kind of tensor over all steps."""
        return max((s["largest"][kind] for s in self.steps if kind in s["largest"]), default=0.0)

    def mean_kl(self, text: str | None = None) -> float:
        """Mean KL(full || engine) over all compared positions of the sequences of one kind, in nats; all by
        default."""
        values = [v for row in self._rows(self.kl, text) for v in row]
        return float(np.mean(values)) if values else 0.0

    def agreement(self, text: str | None = None) -> float:
        """Share of compared positions at which the most likely token is the full cache's."""
        values = [v for row in self._rows(self.agrees, text) for v in row]
        return float(np.mean(values)) if values else 1.0

    def _rows(self, rows: Sequence[Any], text: str | None) -> list[Any]:
        return [row for row, kind in zip(rows, self.texts, strict=False) if text in (None, kind)]

    def to_json(self) -> dict[str, Any]:
        """Everything, with the summaries."""
        return {
            **asdict(self),
            "mismatch": asdict(self.mismatch) if self.mismatch else None,
            "passed": self.passed,
            "problem": self.problem,
            "problems": self.problems,
            "mean_kl": self.mean_kl(),
            "top1_agreement": self.agreement(),
        }

    def sections(self) -> list[Section]:
        """For `kvexport.report`: what was compared, the differences, and the distance to the uncompressed
        model."""
        sections: list[Section] = [KeyValues("Validation", self._summary()), self._largest()]
        if self.mismatches:
            rows = [
                (m.layer, m.step, m.phase, m.tensor, m.lane, m.head, m.slot, m.largest, m.allowed)
                for m in self.mismatches
            ]
            heads = (
                self.caches_of,
                "call",
                "phase",
                "tensor",
                "lane",
                "head",
                "slot or token",
                "difference",
                "allowed",
            )
            sections.append(Table(f"Differences, the first {len(rows)} of {self.mismatched}", heads, rows))
        if self.flips:
            names = ("layer", "step", "lane", "head", "slot", "tensor", "difference", "roundings")
            note = (
                "Heads that merge otherwise than in PyTorch. Roundings: to float32, of every operation of a merge in "
            )
            note += "float64, with which it makes the engine's choice; 0 where float64 makes it exactly."
            flips = [tuple(flip[name] for name in names) for flip in self.flips]
            sections.append(Table("Ties that rounding decides", (self.caches_of, *names[1:]), flips, note))
        if self.rounding:
            sections.append(self._rounding())
        sections += self._plots()
        return sections if self.telemetry is None else [*sections, *layer_sections(self.telemetry, self.caches_of)]

    def _summary(self) -> dict[str, Any]:
        calls = ", ".join(f"{n} {phase}" for phase, n in Counter(s["phase"] for s in self.steps).items())
        budgets, of = sorted(set(self.budgets)), self.caches_of
        distances = {
            f"KL(full cache || engine), {kind}": f"{self.mean_kl(kind):.4g} nats, top token the same at "
            f"{self.agreement(kind):.1%}"
            for kind in dict.fromkeys(self.texts)
            if any(self._rows(self.kl, kind))
        }
        return {
            "result": "passed" if self.passed else f"FAILED: {'; '.join(self.problems)}",
            "artifact": self.artifact,
            **self._layers(),
            "engine": self.backend,
            **self.operators,
            "reference": "PyTorch, on the same state at every step",
            "tokens per sequence": ", ".join(f"{n} ({kind})" for n, kind in zip(self.tokens, self.texts, strict=True)),
            f"budget, slots per {of}": budgets[0] if len(budgets) == 1 else f"{budgets[0]} to {budgets[-1]}",
            "calls compared": f"{len(self.steps)} ({calls})",
            "head-merges that differ from PyTorch's by a tie": f"{len(self.flips)} of {self.head_merges}",
            "bound in place": "bit-identical" if self.in_place_identical else "DIFFERS",
            **({} if self.top_logits_hold is None else {"top logits": "right" if self.top_logits_hold else "WRONG"}),
            "engine on its own": f"KL {self.own_kl:.2g} nats from PyTorch on its own, allowed {self.own_kl_allowed:g}",
            **distances,
            "time": f"{self.seconds:.0f} s",
        }

    def _layers(self) -> dict[str, str]:
        if self.layers is None:
            return {}
        held, total = self.layers
        return {
            "layers": f"the first {held} of {total}, built for this with the artifact's recipe and budgets; nothing "
            "is said of the others"
        }

    def _largest(self) -> Section:
        kinds = list(dict.fromkeys(kind for s in self.steps for kind in s["largest"]))
        phases = list(dict.fromkeys(s["phase"] for s in self.steps))

        def of(kind: str, phase: str) -> float | None:
            found = [s["largest"][kind] for s in self.steps if s["phase"] == phase and kind in s["largest"]]
            return max(found, default=None)

        rows = [(kind, *(of(kind, phase) for phase in phases)) for kind in kinds]
        allowed = ", ".join(f"{name} {size:g}" for name, size in self.tolerance.items())
        note = f"Every layer begins with PyTorch's hidden state. Vectors relative to their norm. Allowed: {allowed}; "
        note += "positions and lengths exactly."
        return Table("Largest difference", ("tensor", *phases), rows, note)

    def _rounding(self) -> Section:
        rows = [
            (
                r.phase,
                KINDS[r.tensor],
                r.count,
                *(getattr(side, name) for side in (r.engine, r.pytorch) for name in ("median", "p99", "largest")),
                r.ratio,
            )
            for r in self.rounding
        ]
        sides = ("engine, median", "99 %", "largest", "PyTorch, median", "99 %", "largest")
        heads = ("phase", "vectors", "errors", *sides, "ratio")
        note = (
            "Relative to the vector's norm, over the whole depth of the model, from the same state. Ratio: of the 99th "
        )
        note += (
            f"percentiles, of fewer than 1,000 errors that of the quantiles that {ABOVE} errors exceed (the median at "
        )
        note += f"the least); {ROUNDING_RATIO:g} is allowed, and {OUTLIERS * ROUNDING_RATIO:g} at the 99th percentile."
        return Table("Errors against float64", heads, rows, note)

    def _plots(self) -> list[Section]:
        kinds = list(dict.fromkeys(kind for s in self.steps for kind in s["largest"]))
        drawn = [
            Series(
                kind,
                [s["step"] for s in self.steps if kind in s["largest"]],
                [s["largest"][kind] for s in self.steps if kind in s["largest"]],
            )
            for kind in kinds
            if 0 < self.largest(kind) < np.inf
        ]
        sections: list[Section] = [Plot("Largest difference, call by call", "call", "difference", drawn, y_log=True)]
        if any(self.positions):
            series = [
                Series(f"sequence {i} ({kind})", p, kl)
                for i, (p, kl, kind) in enumerate(zip(self.positions, self.kl, self.texts, strict=True))
                if p
            ]
            note = "Random tokens are a worst case for a trained model, which never saw such text."
            sections.append(
                Plot("Distance to the uncompressed model", "position", "KL, nats", series, y_log=True, note=note)
            )
        elif not any(map(bool, self.kl)):
            sections.append(Paragraph("No position lies past the smallest budget: the cache compressed nothing."))
        return sections
