"""Comparison of an exported model with PyTorch: each layer and merge from the same state, and whole runs.

In a whole run the engine and PyTorch each go on from their own state, from the first token to the last.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.base import Runners
from kvexport.backends.model_state import LaneState
from kvexport.backends.rows import MASS_ERROR, TopLogits
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.images.rows import CallImages
from kvexport.plan.cache import CachePlan
from kvexport.schema.state import SMALL
from kvexport.validate.compare import (
    LAYERS,
    MERGES,
    WHOLE,
    Difference,
    Tolerance,
    largest_differences,
    named_heads,
    norm,
    state_difference,
    tolerance_of,
    worst,
)
from kvexport.validate.cut import CutDecoder
from kvexport.validate.divergence import kl
from kvexport.validate.float64 import in_float64
from kvexport.validate.images import Picture
from kvexport.validate.independent import IndependentRun, Merge, WatchedState
from kvexport.validate.merges import compare_merge
from kvexport.validate.reference import TorchReference
from kvexport.validate.result import Mismatch, Rounding, ValidationResult, quantiles_of
from kvexport.validate.slots import has_beyond, with_slots
from kvexport.validate.tokens import Ids

Arrays = dict[str, NDArray[Any]]
OWN_ROUNDINGS = 3.0  # allowed KL of the engine's independent run, as a multiple of PyTorch's from float64


class Comparison:
    """Comparison of PyTorch's calls with the engine's graphs from the same state, and with the engine's own run."""

    def __init__(
        self,
        engine: Engine,
        runners: Runners,
        cut: CutDecoder | None,
        reference: TorchReference,
        result: ValidationResult,
    ) -> None:
        self.cut = cut
        self.pictures: list[Picture] = []  # the picture in the first sequence with PyTorch's rows, and the engine's
        self.engine, self.runners, self.reference, self.result = engine, runners, reference, result
        # The reference's KV caches may have fewer slots than the engine's (`kvexport.validate.slots`).
        self.plan, self.method, self.dtype = reference.plan, reference.method, engine.manifest.recipe.model.dtype
        types = (self.dtype, engine.manifest.recipe.cache_dtype)
        self.tolerance, self.merge_tolerance, self.whole = (tolerance_of(x, *types) for x in (LAYERS, MERGES, WHOLE))
        self.quantized = types[1] in SMALL
        # Some methods compute votes from keys, and two runs round their keys to few bits differently.
        votes = self.merge_tolerance.vectors if self.quantized else self.whole.votes
        self.own_tolerance = replace(self.whole, votes=votes)
        if self.plan.attention_layers:
            # The decoder is cut before layers that have a KV cache. Layers with a recurrent state, or that read another
            # layer's cache, magnify rounding errors between two cuts, as the layers of an uncut decoder do.
            self.tolerance = self.whole
        limits, batch = engine.manifest.limits, len(result.tokens)
        shared: dict[str, Any] = {"prefill_chunk": limits.prefill_chunk, "merge_every": limits.merge_every}
        shared["merge_prompts"] = engine.manifest.recipe.cache.merge_prompts
        self.adapters = engine.adapters
        self.locked = LockedBackend(self, reference, self.plan, batch)
        # The reference merges after the same calls as the engine.
        self.reference_lanes = Lanes(self.locked, engine.plan, batch, **shared)
        own = WatchedState(engine.new_state(batch), engine.plan, self.plan)
        both = (engine.plan, self.plan, self.method, batch, self.merge_tolerance)
        self.independent = IndependentRun(own, *both, **shared)
        self.merges: list[Merge] = []  # the reference's merges in the current call
        self.examined = 0
        self.errors: dict[tuple[str, str], list[tuple[NDArray[Any], NDArray[Any]]]] = defaultdict(list)
        self.rounding_kl: list[float] = []  # KL(float64 || PyTorch) of a call from the same state, by sequence

    def step(self, tokens: list[Ids], *, prefill: bool, unread: Collection[int], whole: bool) -> None:
        self.locked.whole = whole
        self.merges.clear()
        images, own_images = [x.call(tokens, self.reference_lanes.length[0]) for x in self.pictures] or [None, None]
        reference = self.reference_lanes.append(tokens, prefill=prefill, unread=unread, images=images)
        call = (tokens, reference, self.merges)
        for lane, own, expected, caches in self.independent.append(
            *call, prefill=prefill, unread=unread, images=own_images
        ):
            tolerances = (self.own_tolerance, self.merge_tolerance)
            for i, d in self.independent.unexplained(own, expected, self.reference.merge, *tolerances):
                fields = (d.tensor, d.difference, d.allowed, lane, d.head, d.slot)
                self.result.note(Mismatch(len(self.result.steps) - 1, "independent run", i, *fields))
                self.independent.ended.add(lane)
            if lane not in self.independent.ended:
                for name, x in self.independent.state(lane, caches).items():
                    self.locked.state[name][lane] = x[0]

    def encode(self, picture: Picture, arguments: Mapping[str, Any]) -> None:
        rows = self.reference.image_rows(arguments)
        with in_float64():
            exact = self.reference.image_rows(arguments)
        self._add_errors(("encode", "image"), picture.images.rows, rows, exact, np.ones(len(exact), bool))
        self.pictures = [picture._replace(images=replace(picture.images, rows=rows)), picture]

    def finish(self) -> None:
        self.result.own_kl = float(np.mean(self.independent.kl)) if self.independent.kl else 0.0
        self.result.own_compared, self.result.parted = len(self.independent.kl), self.independent.parted
        if self.quantized:  # its steps of 8 or 4 bits magnify roundings of float32, in PyTorch as in the engine
            rounding_kl = float(np.mean([x for x in self.rounding_kl if np.isfinite(x)] or [0.0]))
            self.result.own_kl_allowed = max(self.result.own_kl_allowed, OWN_ROUNDINGS * rounding_kl)
        for (phase, tensor), pairs in self.errors.items():
            engine, pytorch = (np.concatenate(side) for side in zip(*pairs, strict=True))
            quantiles = (quantiles_of(engine), quantiles_of(pytorch))
            least = self.tolerance.rounding / 4
            self.result.rounding.append(Rounding(phase, tensor, len(engine), *quantiles, least))

    def decoded(self, feed: Arrays, present: Arrays, hidden: dict[int, NDArray[Any]], whole: bool) -> None:
        """Compare a call with PyTorch layer by layer, each from PyTorch's hidden state; if `whole`, all at once too."""
        phase = "decode" if feed["query_length"].max() == 1 else "prefill"
        feed = {**feed, **self.adapters.unused(len(feed["query_length"]))}
        largest: dict[str, float] = {}
        length: Any = None
        if self.cut is not None:
            outputs, reached = self.cut.infer(feed, hidden)
            for layer in range(len(self.plan.caches)):
                differences = self._layer(layer, feed, outputs, present, reached, hidden, largest)
                self._note(phase, layer, differences)
                self._largest(layer, outputs, present, largest)
            logits = (outputs["logits"], present["logits"])
            self._note(phase, None, self._logits(feed, *logits, largest, self.tolerance))
            length = outputs["present_length"]
            del outputs, reached, logits  # frees memory for the run over the full depth
        outputs_in_all = self._run(feed) if whole or self.cut is None else None
        separate = None if outputs_in_all is None else self._with_used_slots(phase, outputs_in_all)
        if self.cut is None and separate is not None:
            for layer in range(len(self.plan.caches)):
                tolerance = self.whole if layer else self.tolerance
                self._note(phase, layer, [self._state(layer, separate, present, tolerance)])
                self._largest(layer, separate, present, largest)
            logits = (separate["logits"], present["logits"])
            self._note(phase, None, self._logits(feed, *logits, largest, self.whole))
            length = separate["present_length"]
        if not np.array_equal(length, present["present_length"]):
            self.result.note(Mismatch(len(self.result.steps), phase, None, "length", 1.0))
        if separate is not None and outputs_in_all is not None and whole:
            self._in_place(feed, outputs_in_all)
            del outputs_in_all
            self._against_float64(phase, feed, separate, present)
        seen = int((feed["past_length"] + feed["query_length"]).max())
        self.result.steps.append({"step": len(self.result.steps), "phase": phase, "tokens": seen, "largest": largest})

    def merged(self, feed: Arrays, present: Arrays, first: int) -> None:
        past = {name: np.ascontiguousarray(feed[name]) for name, _, layer, _ in self.plan.state_names() if layer.merges}
        with self.runners.merge:
            in_all: Arrays = self.runners.merge.infer(OrderedDict(with_slots(self.plan, self.engine.plan, past)))
        outputs = self._with_used_slots("merge", in_all)
        self.merges.append(Merge(first, {name: x.copy() for name, x in feed.items()}, present))
        step, result = len(self.result.steps), self.result
        flipped: set[tuple[int, int, int]] = set()
        for flip in compare_merge(self.plan, self.method, past, outputs, present, self.merge_tolerance, self.examined):
            self.examined += 1
            flipped.add((flip.layer, flip.lane, flip.head))
            lane = first + flip.lane
            if flip.right:
                result.flips.append({**asdict(flip), "lane": lane, "step": step})
            else:
                fields = (flip.layer, flip.tensor, flip.difference, flip.allowed, lane, flip.head, flip.slot)
                result.note(Mismatch(step, "merge", *fields))
        largest: dict[str, float] = {}
        for i, layer in enumerate(self.plan.caches):
            if layer.merges:
                votes = [
                    state[name]
                    for state, name in ((past, layer.state[2].past(i)), (present, layer.state[2].present(i)))
                ]
                before, after = ([(x[:, slots] > 0).sum(-1) for slots in layer.head_slots] for x in votes)
                over = np.stack(before, 1) > np.stack(after, 1)
                result.head_merges += int(over.sum())
                skip = np.array([[(i, b, h) in flipped for h in range(over.shape[1])] for b in range(len(over))])
                self._largest(i, outputs, present, largest, ~skip)
        seen = int(self.locked.length.max())
        result.steps.append({"step": step, "phase": "merge", "tokens": seen, "largest": largest})
        self._merge_in_place(feed, in_all)

    def _run(self, feed: Arrays) -> Arrays:
        runner = self.runners.decode if feed["input_ids"].shape[1] == 1 else self.runners.prefill
        with runner:
            outputs: Arrays = runner.infer(OrderedDict(with_slots(self.plan, self.engine.plan, feed)))
        return outputs

    def _with_used_slots(self, phase: str, outputs: Arrays) -> Arrays:
        """Cut the engine's KV caches to the reference's slots; note a mismatch if later slots are not empty."""
        if self.plan == self.engine.plan:
            return outputs
        if has_beyond(self.engine.plan, self.plan, outputs):
            self.result.note(Mismatch(len(self.result.steps), phase, None, "unused slots", np.inf))
        return with_slots(self.engine.plan, self.plan, outputs)

    def _layer(
        self,
        i: int,
        feed: Arrays,
        outputs: Arrays,
        present: Arrays,
        reached: Mapping[int, NDArray[Any]],
        hidden: Mapping[int, NDArray[Any]],
        largest: dict[str, float],
    ) -> list[Difference | None]:
        differences = [self._state(i, outputs, present, self.tolerance)]
        if i + 1 in reached:
            # [B, T, hidden]; of a model with several residual streams, [B, T, streams * hidden]
            begin, end, own = (
                x.astype(np.float64).reshape(*x.shape[:2], -1)
                for x in (hidden[max((b for b in reached if b <= i), default=0)], hidden[i + 1], reached[i + 1])
            )
            allowed = self.tolerance.hidden * norm(end - begin) + self.tolerance.rounding * norm(end)
            gap = np.where(_real(feed), norm(own - end), 0.0)
            _keep(largest, "hidden", gap / np.maximum(norm(end - begin), 1e-30))
            differences.append(worst("hidden", gap, allowed))
        return differences

    def _state(self, i: int, outputs: Arrays, present: Arrays, tolerance: Tolerance) -> Difference | None:
        layer = self.plan.caches[i]
        actual, expected = ([state[t.present(i)] for t in layer.state] for state in (outputs, present))
        return state_difference(layer, self.method, actual, expected, tolerance)

    def _logits(
        self,
        feed: Arrays,
        actual: NDArray[Any],
        expected: NDArray[Any],
        largest: dict[str, float],
        tolerance: Tolerance,
    ) -> list[Difference | None]:
        real = _real_logits(feed, actual)
        gap = np.where(real, norm(actual.astype(np.float64) - expected), 0.0)
        _keep(largest, "logits", gap / np.maximum(norm(expected), 1e-30))
        return [worst("logits", gap, tolerance.hidden * norm(expected))]

    def _note(self, phase: str, layer: int | None, differences: list[Difference | None]) -> None:
        for d in differences:
            if d is not None:
                fields = (d.tensor, d.difference, d.allowed, d.lane, d.head, d.slot)
                self.result.note(Mismatch(len(self.result.steps), phase, layer, *fields))

    def _largest(
        self, i: int, outputs: Arrays, present: Arrays, largest: dict[str, float], heads: NDArray[Any] | None = None
    ) -> None:
        first = 0
        for actual, expected in zip(*(self._named(i, state) for state in (outputs, present)), strict=True):
            count = actual["votes"].shape[1]
            own = None if heads is None else heads[:, first : first + count]
            first += count
            for name, x in actual.items():
                largest[name] = max(largest.get(name, 0.0), largest_differences(name, x, expected[name], own))

    def _named(self, i: int, present: Arrays) -> list[dict[str, NDArray[Any]]]:
        layer = self.plan.caches[i]
        return named_heads(layer, [present[tensor.present(i)] for tensor in layer.state])

    def _against_float64(self, phase: str, feed: Arrays, separate: Arrays, present: Arrays) -> None:
        exact = self.reference.decode_in_float64(feed)
        for i, layer in enumerate(self.plan.caches):
            past = named_heads(layer, [feed[tensor.past(i)] for tensor in layer.state])
            others = (self._named(i, state) for state in (separate, present, exact))
            for before, actual, expected, truth in zip(past, *others, strict=True):
                for name in ("key",) if layer.value_in_key else ("key", "value"):
                    new = norm(expected[name].astype(np.float64) - before[name]) > 0
                    self._add_errors((phase, name), actual[name], expected[name], truth[name], new)
        logits = exact["logits"]
        self._add_errors((phase, "logits"), separate["logits"], present["logits"], logits, _real_logits(feed, logits))
        for lane in np.flatnonzero(feed["query_length"]):
            row = feed["query_length"][lane, 0] - 1 if logits.shape[1] > 1 else 0
            self.rounding_kl.append(kl(logits[lane, row], present["logits"][lane, row]))

    def _add_errors(
        self,
        fields: tuple[str, str],
        actual: NDArray[Any],
        expected: NDArray[Any],
        truth: NDArray[Any],
        rows: NDArray[Any],
    ) -> None:
        size = np.maximum(norm(truth)[rows], 1e-30)
        engine, pytorch = (norm(x.astype(np.float64) - truth)[rows] / size for x in (actual, expected))
        self.errors[fields].append((np.nan_to_num(engine, nan=np.inf), pytorch))

    def _in_place(self, feed: Arrays, separate: Arrays) -> None:
        """Run a graph again with past and present in the same buffers, as in production, and require the same bits."""
        input_ids, query_length = feed["input_ids"], feed["query_length"]
        state, past = self.engine.new_state(len(input_ids)), with_slots(self.plan, self.engine.plan, self.locked.state)
        state.set_state(past, self.locked.length)
        if given := {name: feed[name] for name in CallImages._fields if name in feed}:
            logits = state.decode_images(input_ids, query_length, 0, CallImages(**given))
        else:
            logits = state.decode(input_ids, query_length)
        same = np.array_equal(logits, separate["logits"], equal_nan=True)
        for name, array in state.get_state().items():
            same &= array.tobytes() == separate[name.replace("past_key_values.", "present.")].tobytes()
        self.result.in_place_identical &= bool(same)
        if state.top_logits and input_ids.shape[1] == 1:
            state.set_state(past, self.locked.length)
            rows = state.step(input_ids, query_length)
            lanes = np.flatnonzero(query_length).tolist()
            right = all(_are_largest(rows.top_logits(lane), separate["logits"][lane, 0]) for lane in lanes)
            self.result.top_logits_hold = right and self.result.top_logits_hold is not False

    def _merge_in_place(self, feed: Arrays, separate: Arrays) -> None:
        lanes = len(next(iter(feed.values())))
        state = self.engine.new_state(lanes)
        state.set_state(with_slots(self.plan, self.engine.plan, feed), np.zeros((lanes, 1), dtype=np.int64))
        state.merge(0, lanes)
        for name, array in state.get_state().items():
            present = name.replace("past_key_values.", "present.")
            if present in separate:
                self.result.in_place_identical &= array.tobytes() == separate[present].tobytes()


class LockedBackend(LaneState):
    """A run of the PyTorch reference that also hands each of its calls and merges to a comparison with the engine."""

    whole = False

    def __init__(self, comparison: Comparison, reference: TorchReference, plan: CachePlan, lanes: int) -> None:
        self.comparison, self.reference = comparison, reference
        self.hidden: dict[int, NDArray[Any]] = {}  # hidden states of the last call at the start of every layer
        self.state = {
            name: np.zeros(layer.shapes(lanes)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in plan.state_names()
        }
        self.length = np.zeros((lanes, 1), dtype=np.int64)

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        return self.decode_images(input_ids, query_length, first, None)

    def decode_images(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int, images: CallImages | None
    ) -> NDArray[np.float32]:
        assert first == 0 and len(input_ids) == len(self.length), "a reference runs all its lanes"
        feed = {"input_ids": input_ids, "query_length": query_length, "past_length": self.length, **self.state}
        if (spec := self.comparison.engine.manifest.images) is not None:
            feed |= (images or CallImages.none(spec, *input_ids.shape)).inputs()
        present = self.reference.decode(feed, self.hidden)
        self.comparison.decoded(feed, present, self.hidden, self.whole)
        self.length = present["present_length"]
        self._take(present, slice(None))
        logits: NDArray[np.float32] = present["logits"]
        return logits

    def merge(self, first: int, last: int) -> None:
        feed = {name: array[first:last] for name, array in self.state.items()}
        present = self.reference.merge(feed)
        self.comparison.merged(feed, present, first)
        self._take(present, slice(first, last))

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        raise AssertionError("a reference runs once")

    def _take(self, present: Arrays, lanes: slice) -> None:
        for name, array in present.items():
            if name.startswith("present."):
                self.state[name.replace("present.", "past_key_values.")][lanes] = array


def _keep(largest: dict[str, float], kind: str, sizes: NDArray[Any]) -> None:
    size = float(np.nan_to_num(sizes, nan=np.inf).max(initial=0.0))
    largest[kind] = max(largest.get(kind, 0.0), size)


def _real(feed: Arrays) -> NDArray[Any]:
    real: NDArray[Any] = np.arange(feed["input_ids"].shape[1]) < feed["query_length"]
    return real


def _real_logits(feed: Arrays, logits: NDArray[Any]) -> NDArray[Any]:
    return _real(feed) if logits.shape[1] == feed["input_ids"].shape[1] else feed["query_length"] > 0


def _are_largest(top: TopLogits | None, logits: NDArray[np.float32]) -> bool:
    if top is None or not 0 <= top.ids.min() <= top.ids.max() < logits.size:
        return False
    largest = -np.sort(-logits)[: top.ids.size]
    mass = float(np.exp(logits.astype(np.float64) - logits.max()).sum())
    same = np.array_equal(top.values, largest) and np.array_equal(logits[top.ids], largest)
    return same and np.unique(top.ids).size == largest.size and abs(top.mass / mass - 1) < MASS_ERROR
