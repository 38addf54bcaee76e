"""`kvexport validate`: an artifact against its PyTorch reference, step by step, far past the budget, in a ragged batch.

Every step feeds both with the same state, the reference's, so that a difference is seen where it arises and names its
layer, step and tensor. Beside it the engine runs on its own, in place, as it does in production.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport import backends
from kvexport.artifact.reading import load_manifest
from kvexport.backends.base import Runners
from kvexport.backends.rows import MASS_ERROR, TopLogits
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.report.page import KeyValues, Plot, Section, Series, Table
from kvexport.runtime.engine import Engine, load
from kvexport.runtime.lanes import Lanes
from kvexport.terminal import Progress, silent
from kvexport.validate.backend import ReferenceBackend, schedule
from kvexport.validate.layers import require_checkpoint
from kvexport.validate.perturbation import Perturbation, layer_sections

# By the engine's dtype, relative to the tensor's largest magnitude (at least 1): room for sums in another order, no
# more.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
NOTHING_YET = 1e29  # a logarithmic score beyond this is ln(0)
EXACT = ("position", "length")


@dataclass(frozen=True)
class Mismatch:
    """Where an engine and its reference first differ. step: number of the call; phase: prefill, decode or merge; layer:
    None for logits; largest: the largest absolute difference in the tensor."""

    step: int
    phase: str
    layer: int | None
    tensor: str
    largest: float

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}, "
        return f"{where}step {self.step} ({self.phase}), tensor {self.tensor}: differs by {self.largest:.3g}"


@dataclass
class ValidationResult:
    """What was compared and how far apart it was. operators: what ran each of the two on this machine. steps: (step,
    phase, tokens seen by the longest sequence, largest absolute difference by kind of tensor). divergence: per sequence
    KL(full || engine) in nats and
    whether the top token agrees, by position. candidates_hold: whether what a device chooses tokens from is a row's
        largest logits, None
    where it is the row. telemetry: what merges did to the reference's attention, None where nobody asked. layers: how
    many of the model's were held, and how many it has; None = all."""

    artifact: str
    recipe: str
    backend: str
    tokens: list[int]
    budgets: list[int]
    tolerance: float
    operators: dict[str, str]
    steps: list[dict[str, Any]] = field(default_factory=list)
    mismatch: Mismatch | None = None
    in_place_identical: bool = True
    candidates_hold: bool | None = None
    own_run_logits: float = 0.0
    kl: list[list[float]] = field(default_factory=list)
    agrees: list[list[bool]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    telemetry: list[Perturbation] | None = None
    layers: tuple[int, int] | None = None

    @property
    def passed(self) -> bool:
        """Every tensor of every step within tolerance, the in-place run bit-identical to the one with separate buffers,
        and tokens chosen from the largest logits."""
        return self.mismatch is None and self.in_place_identical and self.candidates_hold is not False

    @property
    def problem(self) -> str:
        """What failed, in one line."""
        if self.mismatch:
            return f"the engine differs from PyTorch: {self.mismatch}"
        if not self.in_place_identical:
            return "bound in place, the engine computes something else than with separate buffers"
        return (
            "the candidates that the device found are not the largest logits" if self.candidates_hold is False else ""
        )

    def largest(self, kind: str) -> float:
        """The largest difference of one kind of tensor over all steps."""
        return max((s["largest"][kind] for s in self.steps if kind in s["largest"]), default=0.0)

    def mean_kl(self) -> float:
        """Mean KL(full || engine) over all compared positions, in nats."""
        values = [v for row in self.kl for v in row]
        return float(np.mean(values)) if values else float("nan")

    def agreement(self) -> float:
        """Share of compared positions at which the most likely token is the full cache's."""
        values = [v for row in self.agrees for v in row]
        return float(np.mean(values)) if values else float("nan")

    def sections(self) -> list[Section]:
        """For `kvexport.report.page`: what was compared, the differences, and the distance to the uncompressed
        model."""
        calls = ", ".join(f"{n} {phase}" for phase, n in Counter(s["phase"] for s in self.steps).items())
        summary = {
            "result": "passed" if self.passed else f"FAILED: {self.problem}",
            "artifact": self.artifact,
            **self._layers(),
            "engine": self.backend,
            **self.operators,
            "reference": "PyTorch, on the same state at every step",
            "tokens per sequence": ", ".join(map(str, self.tokens)),
            "budget, slots per layer": f"{min(self.budgets)} to {max(self.budgets)}"
            if len(set(self.budgets)) > 1
            else self.budgets[0],
            "calls compared": f"{len(self.steps)} ({calls})",
            "bound in place": "bit-identical" if self.in_place_identical else "DIFFERS",
            **(
                {}
                if self.candidates_hold is None
                else {"candidates for tokens": "right" if self.candidates_hold else "WRONG"}
            ),
            "engine on its own, logits": f"within {self.own_run_logits:.2g} of PyTorch on its own",
            "KL(full cache || engine), mean": f"{self.mean_kl():.4g} nats",
            "top-1 agreement with full cache": f"{self.agreement():.1%}",
        }
        kinds = list(dict.fromkeys(kind for s in self.steps for kind in s["largest"]))
        phases = list(dict.fromkeys(s["phase"] for s in self.steps))
        rows = [
            (
                kind,
                *(
                    max(
                        (s["largest"][kind] for s in self.steps if s["phase"] == p and kind in s["largest"]),
                        default=None,
                    )
                    for p in phases
                ),
            )
            for kind in kinds
        ]
        note = f"Allowed: {self.tolerance:g} times the tensor's largest magnitude (at least 1); "
        note += "positions and lengths exactly."
        sections: list[Section] = [
            KeyValues("Validation", summary),
            Table("Largest difference", ("tensor", *phases), rows, note),
        ]
        drawn = [
            Series(
                kind,
                [s["step"] for s in self.steps if kind in s["largest"]],
                [s["largest"][kind] for s in self.steps if kind in s["largest"]],
            )
            for kind in kinds
            if self.largest(kind) > 0
        ]
        sections.append(Plot("Largest difference, call by call", "call", "absolute difference", drawn, y_log=True))
        if any(self.positions):
            series = [
                Series(f"sequence {i}", p, kl)
                for i, (p, kl) in enumerate(zip(self.positions, self.kl, strict=True))
                if p
            ]
            note = "Random tokens: a worst case for a trained model, which never saw such text."
            sections.append(
                Plot("Distance to the uncompressed model", "position", "KL, nats", series, y_log=True, note=note)
            )
        return sections if self.telemetry is None else [*sections, *layer_sections(self.telemetry)]

    def _layers(self) -> dict[str, str]:
        if self.layers is None:
            return {}
        held, total = self.layers
        return {
            "layers": f"the first {held} of {total}, built for this with the artifact's recipe and budgets; nothing "
            "is said of the others"
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, with the summaries."""
        return {
            **asdict(self),
            "passed": self.passed,
            "problem": self.problem,
            "mean_kl": self.mean_kl(),
            "top1_agreement": self.agreement(),
        }


def validate_artifact(
    path: Path,
    *,
    length: int | None = None,
    batch: int = 3,
    checkpoint: str | None = None,
    seed: int = 0,
    telemetry: bool = False,
    backend: str | None = None,
    device: str | None = None,
    progress: Callable[[str, int | None], Progress] = silent,
) -> ValidationResult:
    """Compare the artifact at `path` with PyTorch.

    length: tokens of the longest sequence, default four times the largest capacity (at most limits.max_length). batch:
        sequences; the
    others are shorter, so that lanes fall idle. checkpoint: where the weights are, default the recipe's. telemetry:
        note what every merge
    does to the attention output. backend, device: None takes the recipe's. Raises UsageError where the weights are not
    or do not belong to the artifact, EnvironmentProblem where torch, transformers, polygraphy or what the backend needs
    are missing.
    """
    require_packages()
    from kvexport.export.build import read_model
    from kvexport.validate.reference import TorchReference, full_logits
    from kvexport.validate.telemetry import Telemetry

    manifest = load_manifest(path)
    recipe = manifest.recipe
    chosen = backends.get(backend or recipe.backend.name)
    where = device or chosen.device(recipe)
    if checkpoint:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": checkpoint})})
    with progress("loading PyTorch and the engine", None):
        shape = read_model(recipe)
        require_checkpoint(shape.checkpoint, manifest, path)
        # A session that captures CUDA graphs takes its inputs from fixed addresses, and here every call brings its own.
        engine = load(path, backend=backend, device=device, cuda_graph=False, verify=False)
        method = recipe.cache.build_method()
        reference = TorchReference(shape.checkpoint.path, engine.plan, shape.geometry, method, recipe)
    tokens = _tokens(engine, length, batch, seed)
    result = ValidationResult(
        artifact=str(path),
        recipe=manifest.name,
        backend=chosen.name if where is None else f"{chosen.name} {where}",
        tokens=[len(t) for t in tokens],
        budgets=[layer.budget for layer in engine.plan.layers],
        tolerance=TOLERANCE[recipe.model.dtype],
        operators=chosen.operators(manifest, device),
    )
    watching = Telemetry(engine.plan, shape.geometry, method) if telemetry else None
    _quiet_polygraphy()
    runners = chosen.runners(engine.sessions, manifest)
    comparison = _Comparison(engine, runners, reference, result, len(tokens), watching)
    calls = list(schedule(tokens, recipe.export.prefill_chunk))
    with progress("comparing step by step", len(calls)) as bar:
        for parts, prefill in calls:
            comparison.step(parts, prefill)
            bar.advance(1)
            if result.mismatch:
                break
    if watching:
        result.telemetry = watching.rows()
    if result.mismatch:
        return result
    with progress("comparing with the uncompressed model", None):
        full = full_logits(shape.checkpoint.path, recipe, tokens)
        _measure_divergence(result, comparison.own_logits, full)
    return result


def _quiet_polygraphy() -> None:
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL


def require_packages() -> None:
    """Raises EnvironmentProblem where one is missing that validating takes."""
    for package in ("torch", "transformers", "polygraphy", "onnx"):
        try:
            __import__(package)
        except ImportError as error:
            raise EnvironmentProblem(f"validate needs {package}: {error}", "pip install 'kvexport[export]'") from error


def _tokens(engine: Engine, length: int | None, batch: int, seed: int) -> list[NDArray[np.int64]]:
    """Random token ids: the longest sequence first, the others 2/3, 1/2, ... as long."""
    if not 1 <= batch <= engine.max_batch:
        raise UsageError(
            f"a batch of {batch}, but the artifact was built for 1 to {engine.max_batch}", f"--batch {engine.max_batch}"
        )
    longest = min(length or 4 * max(layer.capacity for layer in engine.plan.layers), engine.max_length)
    rng = np.random.default_rng(seed)
    return [rng.integers(0, engine.vocabulary, max(1, 2 * longest // (i + 2))) for i in range(batch)]


class _Comparison:
    """A reference trajectory, the engine's graphs compared with it call by call, and the engine's own run beside it."""

    def __init__(
        self, engine: Engine, runners: Runners, reference: Any, result: ValidationResult, batch: int, telemetry: Any
    ) -> None:
        self.engine, self.result = engine, result
        self.runners = runners
        limits = engine.manifest.limits
        shared = {"prefill_chunk": limits.prefill_chunk, "merge_every": limits.merge_every}
        # The reference decides when to merge by the same rule; its backend compares on the way.
        self.locked = Lanes(
            _LockedBackend(self, reference, engine.plan, batch, telemetry), engine.plan, batch, **shared
        )
        self.own = engine.lanes(batch)
        self.own_logits: list[dict[int, NDArray[np.float32]]] = [{} for _ in range(batch)]

    def step(self, parts: list[NDArray[np.int64]], prefill: bool) -> None:
        """One call of the decoder, and whatever merging it makes due."""
        reference = self.locked.append(parts, prefill=prefill)
        own = self.own.append(parts, prefill=prefill)
        for lane, part in enumerate(parts):
            if len(part):
                row = len(part) - 1 if own.shape[1] > 1 else 0
                difference = float(np.abs(own[lane, row] - reference[lane, row]).max())
                self.result.own_run_logits = max(self.result.own_run_logits, difference)
                self.own_logits[lane][self.own.length[lane] - 1] = own[lane, row].copy()


class _LockedBackend(ReferenceBackend):
    """A `LaneState` that computes with the reference and holds the engine's graphs against it on the same inputs."""

    def __init__(self, comparison: _Comparison, *reference: Any) -> None:
        super().__init__(*reference)
        self.comparison = comparison

    def decoded(self, feed: dict[str, NDArray[Any]], present: dict[str, NDArray[Any]]) -> None:
        phase = "decode" if feed["query_length"].max() == 1 else "prefill"
        runners = self.comparison.runners
        engine = self._compare(
            runners.decode if feed["input_ids"].shape[1] == 1 else runners.prefill, feed, present, phase
        )
        self._compare_in_place(feed["input_ids"], feed["query_length"], engine)

    def merged(self, feed: dict[str, NDArray[Any]], present: dict[str, NDArray[Any]]) -> None:
        names = [name for name, _, layer, _ in self.comparison.engine.plan.state_names() if layer.merges]
        given = {name: np.ascontiguousarray(feed[name]) for name in names}
        self._compare(self.comparison.runners.merge, given, present, "merge")

    def _compare(
        self, runner: Any, feed: dict[str, NDArray[Any]], reference: dict[str, NDArray[Any]], phase: str
    ) -> dict[str, NDArray[Any]]:
        from polygraphy.comparator import CompareFunc
        from polygraphy.comparator.struct import IterationResult

        result = self.comparison.result
        with runner:
            outputs: dict[str, NDArray[Any]] = runner.infer(OrderedDict(feed))
        allowed = {
            name: 0.0 if name.endswith(EXACT) else result.tolerance * _magnitude(reference[name]) for name in outputs
        }
        compare = CompareFunc.simple(atol=allowed, rtol=0.0, check_error_stat="max", infinities_compare_equal=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            matches = compare(
                IterationResult(OrderedDict(outputs), runner_name="engine"),
                IterationResult(OrderedDict(reference), runner_name="PyTorch"),
            )
        largest: dict[str, float] = {}
        for name in outputs:
            difference = _difference(outputs[name], reference[name])
            kind = name.rsplit(".", 1)[-1]
            largest[kind] = max(largest.get(kind, 0.0), difference)
            if not matches.get(name) and result.mismatch is None:
                layer = int(name.split(".")[1]) if name.startswith("present.") else None
                result.mismatch = Mismatch(len(result.steps), phase, layer, kind, difference)
        seen = int((self.length + feed.get("query_length", 0)).max())
        result.steps.append({"step": len(result.steps), "phase": phase, "tokens": seen, "largest": largest})
        return outputs

    def _compare_in_place(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], separate: dict[str, NDArray[Any]]
    ) -> None:
        """The production path on the same state, past and present bound to the same buffers: the same bits."""
        backend = self.comparison.engine.new_state(len(input_ids))
        backend.set_state(self.state, self.length)
        same = np.array_equal(backend.decode(input_ids, query_length), separate["logits"])
        for name, array in backend.get_state().items():
            same &= array.tobytes() == separate[name.replace("past_key_values.", "present.")].tobytes()
        result = self.comparison.result
        result.in_place_identical &= bool(same)
        if backend.top_logits and input_ids.shape[1] == 1:
            backend.set_state(self.state, self.length)
            rows = backend.step(input_ids, query_length)
            right = all(
                _found(rows.top_logits(lane), separate["logits"][lane, 0])
                for lane in np.flatnonzero(query_length).tolist()
            )
            result.candidates_hold = right and result.candidates_hold is not False


def _found(top: TopLogits | None, logits: NDArray[np.float32]) -> bool:
    """Whether these are the largest of `logits`, and what they say of the others is so."""
    if top is None or not 0 <= top.ids.min() <= top.ids.max() < logits.size:
        return False
    largest = -np.sort(-logits)[: top.ids.size]
    mass = float(np.exp(logits.astype(np.float64) - logits.max()).sum())
    same = np.array_equal(top.values, largest) and np.array_equal(logits[top.ids], largest)
    return same and np.unique(top.ids).size == largest.size and abs(top.mass / mass - 1) < MASS_ERROR


def _magnitude(x: NDArray[Any]) -> float:
    """The largest absolute value, at least 1; what stands for ln(0) does not count."""
    size = np.abs(x.astype(np.float64))
    return float(max(1.0, size[size < NOTHING_YET].max(initial=0.0)))


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest absolute difference; infinite where exactly one of two values is not finite."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    gap = np.abs(x - y, where=(x != y), out=np.zeros(x.shape))
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))


def _measure_divergence(
    result: ValidationResult, own: list[dict[int, NDArray[np.float32]]], full: list[NDArray[np.float32]]
) -> None:
    """KL(full || engine) and top-1 agreement at every position whose logits the engine gave and that lies past the
    smallest budget (at all of them where nothing is compressed)."""
    start = min(result.budgets) if min(result.budgets) < max(result.tokens) else 0
    for engine_rows, full_rows in zip(own, full, strict=True):
        positions = [p for p in sorted(engine_rows) if p >= start]
        result.positions.append(positions)
        result.kl.append([_kl(full_rows[p], engine_rows[p]) for p in positions])
        result.agrees.append([bool(full_rows[p].argmax() == engine_rows[p].argmax()) for p in positions])


def _kl(p_logits: NDArray[np.float32], q_logits: NDArray[np.float32]) -> float:
    """KL(softmax(p) || softmax(q)) in nats."""
    p, q = (x.astype(np.float64) - x.max() for x in (p_logits, q_logits))
    log_p, log_q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return float((np.exp(log_p) * (log_p - log_q)).sum())
