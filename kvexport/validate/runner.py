"""`kvexport validate`: an artifact against its PyTorch reference, step by step, far past the budget, in a ragged batch.

Every step feeds both with the same state, the reference's, so that a difference is seen where it arises and names its layer, step
and tensor. Beside it the engine runs on its own, in place, as it does in production.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.build.artifact import load_manifest
from kvexport.cache import STATE, CachePlan
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.native import implementations
from kvexport.recipe import Recipe
from kvexport.report import KeyValues, Plot, Section, Series, Table
from kvexport.runtime.engine import Engine, load
from kvexport.runtime.lanes import Lanes
from kvexport.terminal import Progress, silent

# By the engine's dtype, relative to the tensor's largest magnitude (at least 1): room for sums in another order, no more.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
NOTHING_YET = 1e29  # a logarithmic score beyond this is ln(0)
EXACT = ("position", "length")


@dataclass(frozen=True)
class Mismatch:
    """Where an engine and its reference first differ. step: number of the call; phase: prefill, decode or merge; layer: None for
    logits; largest: the largest absolute difference in the tensor."""

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
    """What was compared and how far apart it was. operators: what ran each of the two on this machine. steps: (step, phase, tokens seen
    by the longest sequence, largest absolute difference by kind of tensor). divergence: per sequence KL(full || engine) in nats and
    whether the top token agrees, by position."""

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
    own_run_logits: float = 0.0
    kl: list[list[float]] = field(default_factory=list)
    agrees: list[list[bool]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every tensor of every step within tolerance, and the in-place run bit-identical to the one with separate buffers."""
        return self.mismatch is None and self.in_place_identical

    @property
    def problem(self) -> str:
        """What failed, in one line."""
        if self.mismatch:
            return f"the engine differs from PyTorch: {self.mismatch}"
        return "" if self.in_place_identical else "bound in place, the engine computes something else than with separate buffers"

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
        """For `kvexport.report`: what was compared, the differences, and the distance to the uncompressed model."""
        calls = ", ".join(f"{n} {phase}" for phase, n in Counter(s["phase"] for s in self.steps).items())
        summary = {
            "result": "passed" if self.passed else f"FAILED: {self.problem}",
            "artifact": self.artifact,
            "engine": self.backend,
            **self.operators,
            "reference": "PyTorch, on the same state at every step",
            "tokens per sequence": ", ".join(map(str, self.tokens)),
            "budget, slots per layer": f"{min(self.budgets)} to {max(self.budgets)}" if len(set(self.budgets)) > 1 else self.budgets[0],
            "calls compared": f"{len(self.steps)} ({calls})",
            "bound in place": "bit-identical" if self.in_place_identical else "DIFFERS",
            "engine on its own, logits": f"within {self.own_run_logits:.2g} of PyTorch on its own",
            "KL(full cache || engine), mean": f"{self.mean_kl():.4g} nats",
            "top-1 agreement with full cache": f"{self.agreement():.1%}",
        }
        kinds = [k for k in ("logits", "length", *STATE) if any(k in s["largest"] for s in self.steps)]
        phases = list(dict.fromkeys(s["phase"] for s in self.steps))
        rows = [
            (
                kind,
                *(max((s["largest"][kind] for s in self.steps if s["phase"] == p and kind in s["largest"]), default=None) for p in phases),
            )
            for kind in kinds
        ]
        note = f"Allowed: {self.tolerance:g} times the tensor's largest magnitude (at least 1); positions and lengths exactly."
        sections: list[Section] = [KeyValues("Validation", summary), Table("Largest difference", ("tensor", *phases), rows, note)]
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
            series = [Series(f"sequence {i}", p, kl) for i, (p, kl) in enumerate(zip(self.positions, self.kl, strict=True)) if p]
            note = "Random tokens: a worst case for a trained model, which never saw such text."
            sections.append(Plot("Distance to the uncompressed model", "position", "KL, nats", series, y_log=True, note=note))
        return sections

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
    progress: Callable[[str, int | None], Progress] = silent,
) -> ValidationResult:
    """Compare the artifact at `path` with PyTorch.

    length: tokens of the longest sequence, default four times the largest capacity (at most limits.max_length). batch: sequences; the
    others are shorter, so that lanes fall idle. checkpoint: where the weights are, default the recipe's. Raises UsageError where they
    are not or do not belong to the artifact, EnvironmentProblem where torch, transformers or polygraphy are missing.
    """
    _require_packages()
    from kvexport.build.builder import read_model
    from kvexport.validate.reference import TorchReference, full_logits

    manifest = load_manifest(path)
    recipe = Recipe(**{k: v for k, v in manifest["recipe"].items() if k != "name"})
    if checkpoint:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": checkpoint})})
    with progress("loading PyTorch and the engine", None):
        shape = read_model(recipe)
        if shape.checkpoint.fingerprint != manifest["model"]["fingerprint"]:
            raise UsageError(f"{shape.checkpoint.path} is not the checkpoint of {path}", "--checkpoint DIR with the one it was built from")
        engine = load(path, verify=False)
        reference = TorchReference(shape.checkpoint.path, engine.plan, shape.geometry, recipe.cache.build_method(), recipe)
    tokens = _tokens(engine, length, batch, seed)
    result = ValidationResult(
        artifact=str(path),
        recipe=manifest["recipe"]["name"],
        backend=f"{recipe.backend.name} {recipe.backend.device}",
        tokens=[len(t) for t in tokens],
        budgets=[layer.budget for layer in engine.plan.layers],
        tolerance=TOLERANCE[recipe.model.dtype],
        operators={op: str(how) for op, how in implementations({"method": recipe.cache.method, **recipe.cache.parameters}).items()},
    )
    comparison = _Comparison(engine, reference, result, len(tokens))
    calls = list(_schedule(tokens, recipe.export.prefill_chunk))
    with progress("comparing step by step", len(calls)) as bar:
        for parts, prefill in calls:
            comparison.step(parts, prefill)
            bar.advance(1)
            if result.mismatch:
                return result
    with progress("comparing with the uncompressed model", None):
        full = full_logits(shape.checkpoint.path, recipe, tokens)
        _measure_divergence(result, comparison.own_logits, full)
    return result


def _require_packages() -> None:
    for package in ("torch", "transformers", "polygraphy", "onnx"):
        try:
            __import__(package)
        except ImportError as error:
            raise EnvironmentProblem(f"validate needs {package}: {error}", "pip install 'kvexport[export]'") from error


def _tokens(engine: Engine, length: int | None, batch: int, seed: int) -> list[NDArray[np.int64]]:
    """Random token ids: the longest sequence first, the others 2/3, 1/2, ... as long."""
    if not 1 <= batch <= engine.max_batch:
        raise UsageError(f"a batch of {batch}, but the artifact was built for 1 to {engine.max_batch}", f"--batch {engine.max_batch}")
    longest = min(length or 4 * max(layer.capacity for layer in engine.plan.layers), engine.max_length)
    rng = np.random.default_rng(seed)
    return [rng.integers(0, engine.vocabulary, max(1, 2 * longest // (i + 2))) for i in range(batch)]


def _schedule(tokens: list[NDArray[np.int64]], chunk: int) -> Iterator[tuple[list[NDArray[np.int64]], bool]]:
    """Calls of the decoder: the first two thirds of every sequence in chunks, the rest one by one. Shorter ones fall idle first."""
    split = [2 * len(t) // 3 for t in tokens]
    for start in range(0, max(split), chunk):
        yield [t[start : min(start + chunk, s)] if start < s else t[:0] for t, s in zip(tokens, split, strict=True)], True
    for i in range(max(len(t) - s for t, s in zip(tokens, split, strict=True))):
        yield [t[s + i : s + i + 1] for t, s in zip(tokens, split, strict=True)], False


class _Comparison:
    """A reference trajectory, the engine's graphs compared with it call by call, and the engine's own run beside it."""

    def __init__(self, engine: Engine, reference: Any, result: ValidationResult, batch: int) -> None:
        from polygraphy.backend.onnxrt import OnnxrtRunner
        from polygraphy.logger import G_LOGGER

        G_LOGGER.module_severity = G_LOGGER.CRITICAL
        self.engine, self.reference, self.result = engine, reference, result
        self.decoder = OnnxrtRunner(engine.sessions.decoder, name="engine")
        self.merger = OnnxrtRunner(engine.sessions.merge, name="engine") if engine.sessions.merge else None
        limits = engine.manifest["limits"]
        shared = {"prefill_chunk": limits["prefill_chunk"], "merge_every": limits["merge_every"]}
        # The reference decides when to merge by the same rule; its backend compares on the way.
        self.locked = Lanes(_LockedBackend(self, engine.plan, batch), engine.plan, batch, **shared)
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
                self.own_logits[lane][int(self.own.length[lane]) - 1] = own[lane, row].copy()


class _LockedBackend:
    """A `Backend` that computes with the reference and holds the engine's graphs against it on the same inputs."""

    def __init__(self, comparison: _Comparison, plan: CachePlan, lanes: int) -> None:
        self.comparison = comparison
        self.state = {name: np.zeros(layer.shapes(lanes)[kind], layer.dtypes()[kind]) for name, _, layer, kind in plan.state_names()}
        self.length = np.zeros((lanes, 1), dtype=np.int64)

    def decode(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64]) -> NDArray[np.float32]:
        feed = {"input_ids": input_ids, "query_length": query_length, "past_length": self.length, **self.state}
        reference = self.comparison.reference.decode(feed)
        phase = "decode" if query_length.max() == 1 else "prefill"
        engine = self._compare(self.comparison.decoder, feed, reference, phase)
        self._compare_in_place(input_ids, query_length, engine)
        self.length = reference["present_length"]
        self._take(reference, slice(None))
        logits: NDArray[np.float32] = reference["logits"]
        return logits

    def merge(self, first: int, last: int) -> None:
        session = self.comparison.engine.sessions.merge
        assert session is not None
        wanted = {i.name for i in session.get_inputs()}
        feed = {name: np.ascontiguousarray(array[first:last]) for name, array in self.state.items() if name in wanted}
        reference = self.comparison.reference.merge({**{n: a[first:last] for n, a in self.state.items()}, **feed})
        self._compare(self.comparison.merger, feed, reference, "merge")
        self._take(reference, slice(first, last))

    def reset(self) -> None:
        raise AssertionError("a comparison runs once")

    def _take(self, present: dict[str, NDArray[Any]], lanes: slice) -> None:
        for name, array in present.items():
            if name.startswith("present."):
                self.state[name.replace("present.", "past_key_values.")][lanes] = array

    def _compare(
        self, runner: Any, feed: dict[str, NDArray[Any]], reference: dict[str, NDArray[Any]], phase: str
    ) -> dict[str, NDArray[Any]]:
        from polygraphy.comparator import CompareFunc
        from polygraphy.comparator.struct import IterationResult

        result = self.comparison.result
        with runner:
            outputs: dict[str, NDArray[Any]] = runner.infer(OrderedDict(feed))
        allowed = {name: 0.0 if name.endswith(EXACT) else result.tolerance * _magnitude(reference[name]) for name in outputs}
        compare = CompareFunc.simple(atol=allowed, rtol=0.0, check_error_stat="max", infinities_compare_equal=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            matches = compare(
                IterationResult(OrderedDict(outputs), runner_name="engine"), IterationResult(OrderedDict(reference), runner_name="PyTorch")
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

    def _compare_in_place(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], separate: dict[str, NDArray[Any]]) -> None:
        """The production path on the same state, past and present bound to the same buffers: the same bits."""
        backend = self.comparison.engine.new_backend(len(input_ids))
        backend.past_length[...] = self.length
        for name, array in self.state.items():
            backend.state[name][...] = array
        same = np.array_equal(backend.decode(input_ids, query_length), separate["logits"])
        for name, array in backend.state.items():
            same &= array.tobytes() == separate[name.replace("past_key_values.", "present.")].tobytes()
        self.comparison.result.in_place_identical &= bool(same)


def _magnitude(x: NDArray[Any]) -> float:
    """The largest absolute value, at least 1; what stands for ln(0) does not count."""
    size = np.abs(x.astype(np.float64))
    return float(max(1.0, size[size < NOTHING_YET].max(initial=0.0)))


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest absolute difference; infinite where exactly one of two values is not finite."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    gap = np.abs(x - y, where=(x != y), out=np.zeros(x.shape))
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))


def _measure_divergence(result: ValidationResult, own: list[dict[int, NDArray[np.float32]]], full: list[NDArray[np.float32]]) -> None:
    """KL(full || engine) and top-1 agreement at every position whose logits the engine gave and that lies past the smallest budget (at
    all of them where nothing is compressed)."""
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
