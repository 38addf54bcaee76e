"""Every call of an engine, compared with PyTorch's call from the engine's state before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.backends.model_state import LaneState
from kvexport.backends.rows import MASS_ERROR, TopLogits
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.validate.compare import (
    FIRST_LAYER,
    MERGES,
    WHOLE,
    Difference,
    largest_differences,
    named_heads,
    norm,
    state_difference,
    tolerance_of,
    worst,
)
from kvexport.validate.merges import compare_merge
from kvexport.validate.reference import TorchReference
from kvexport.validate.result import Mismatch, Rounding, ValidationResult, quantiles_of
from kvexport.validate.slots import has_beyond, with_slots
from kvexport.validate.tokens import Ids

Arrays = dict[str, NDArray[Any]]


class Comparison(LaneState):
    """The engine's run over the validation sequences, in place as in production, and PyTorch's calls beside it.

    PyTorch makes every call and every merge from the engine's own state before it. Differences of earlier calls
    therefore do not add up, and a merge that rounding decides otherwise does not separate the two.
    """

    def __init__(self, engine: Engine, reference: TorchReference, result: ValidationResult) -> None:
        self.engine, self.reference, self.result = engine, reference, result
        # The reference's KV caches may have fewer slots than the engine's (`kvexport.validate.slots`).
        self.plan, self.method = reference.plan, reference.method
        recipe, limits, batch = engine.manifest.recipe, engine.manifest.limits, len(result.tokens)
        types = (recipe.model.dtype, recipe.cache_dtype)
        self.first, self.merged, self.whole = (tolerance_of(x, *types) for x in (FIRST_LAYER, MERGES, WHOLE))
        if self.plan.attention_layers:
            self.first = self.whole  # layers without a KV cache may come before the first layer that has one
        self.least = 2.0**-24 if {*types} == {"float32"} else 2.0**-11  # one rounding of the coarsest type
        self.state = engine.new_state(batch)
        self.lanes = Lanes(
            self,
            engine.plan,
            batch,
            prefill_chunk=limits.prefill_chunk,
            merge_every=limits.merge_every,
            merge_prompts=recipe.cache.merge_prompts,
        )
        self.past: Arrays = {
            name: np.zeros(layer.shapes(batch)[kind], layer.dtypes()[kind])
            for name, _, layer, kind in self.plan.state_names()
        }
        self.length = np.zeros((batch, 1), np.int64)
        self.logits: list[dict[int, NDArray[np.float32]]] = [{} for _ in range(batch)]  # after a call, by position
        self.in_float64 = False
        self.examined = 0
        self.errors: dict[tuple[str, str], list[tuple[NDArray[Any], NDArray[Any]]]] = defaultdict(list)

    def step(self, tokens: list[Ids], *, prefill: bool, unread: Collection[int], in_float64: bool) -> None:
        self.in_float64 = in_float64
        logits = self.lanes.append(tokens, prefill=prefill, unread=unread)
        for lane, ids in enumerate(tokens):
            if len(ids):
                row = len(ids) - 1 if logits.shape[1] > 1 else 0
                self.logits[lane][self.lanes.length[lane] - 1] = logits[lane, row].copy()

    def finish(self) -> None:
        for (phase, tensor), pairs in self.errors.items():
            engine, pytorch = (np.concatenate(side) for side in zip(*pairs, strict=True))
            quantiles = (quantiles_of(engine), quantiles_of(pytorch))
            self.result.rounding.append(Rounding(phase, tensor, len(engine), *quantiles, self.least))

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        phase = "decode" if query_length.max() == 1 else "prefill"
        feed = {"input_ids": input_ids, "query_length": query_length, "past_length": self.length, **self.past}
        logits = self._logits(input_ids, query_length)
        actual, expected = self._present(phase), self.reference.decode(feed)
        largest: dict[str, float] = {}
        for i, layer in enumerate(self.plan.caches):
            own, other = ([state[t.present(i)] for t in layer.state] for state in (actual, expected))
            tolerance = self.whole if i else self.first
            self._note(phase, i, state_difference(layer, self.method, own, other, tolerance))
            self._keep_largest(i, actual, expected, largest)
        every = logits.shape[1] == input_ids.shape[1]  # else the logits of a call's last token
        real = np.arange(logits.shape[1]) < query_length if every else query_length > 0
        gap = np.where(real, norm(logits.astype(np.float64) - expected["logits"]), 0.0)
        size = norm(expected["logits"])
        largest["logits"] = float(np.nan_to_num(gap / np.maximum(size, 1e-30), nan=np.inf).max())
        self._note(phase, None, worst("logits", gap, self.whole.vectors * size))
        if self.in_float64:
            self._against_float64(phase, feed, actual | {"logits": logits}, expected, real)
        self.length = self.length + query_length
        self._end_step(phase, actual, largest)
        return logits

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        raise NotImplementedError  # a validation fills every lane once

    def merge(self, first: int, last: int) -> None:
        self.state.merge(first, last)
        present, lanes, step = self._present("merge"), slice(first, last), len(self.result.steps)
        outside = np.delete(np.arange(len(self.length)), lanes)
        if any(x[outside].tobytes() != self.past[_past(name)][outside].tobytes() for name, x in present.items()):
            self.result.note(Mismatch(step, "merge", None, "state of other lanes", np.inf))
        names = [(name, name_after) for name, name_after, layer, _ in self.plan.state_names() if layer.merges]
        past = {name: np.ascontiguousarray(self.past[name][lanes]) for name, _ in names}
        actual = {name: present[name][lanes] for _, name in names}
        expected = self.reference.merge(past)
        flipped: set[tuple[int, int, int]] = set()
        for flip in compare_merge(self.plan, self.method, past, actual, expected, self.merged, self.examined):
            self.examined += 1
            flipped.add((flip.layer, flip.lane, flip.head))
            lane = first + flip.lane
            if flip.right:
                self.result.flips.append({**asdict(flip), "lane": lane, "step": step})
            else:
                fields = (flip.layer, flip.tensor, flip.difference, flip.allowed, lane, flip.head, flip.slot)
                self.result.note(Mismatch(step, "merge", *fields))
        largest: dict[str, float] = {}
        for i, layer in enumerate(self.plan.caches):
            if layer.merges:
                votes = layer.state[2]
                before, after = (
                    np.stack([(x[:, slots] > 0).sum(-1) for slots in layer.head_slots], 1)
                    for x in (past[votes.past(i)], expected[votes.present(i)])
                )
                self.result.head_merges += int((before > after).sum())
                alike = np.ones(before.shape, bool)
                alike[tuple(np.array([(b, h) for c, b, h in flipped if c == i], int).reshape(-1, 2).T)] = False
                self._keep_largest(i, actual, expected, largest, alike)
        self._end_step("merge", present, largest)

    def _logits(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run the engine's call, and check the largest logits that a device may find itself."""
        if input_ids.shape[1] > 1 or not self.state.top_logits:
            return np.array(self.state.decode(input_ids, query_length))
        rows = self.state.step(input_ids, query_length)
        logits = np.stack([rows.row(lane) for lane in range(len(input_ids))])[:, None]
        lanes = np.flatnonzero(query_length).tolist()
        right = all(_are_largest(rows.top_logits(lane), logits[lane, 0]) for lane in lanes)
        self.result.top_logits_hold = right and self.result.top_logits_hold is not False
        return logits

    def _present(self, phase: str) -> Arrays:
        """Return the engine's state, cut to the slots of the reference; note a mismatch if later slots are in use."""
        arrays = {name.replace("past_key_values.", "present."): x for name, x in self.state.get_state().items()}
        if self.plan == self.engine.plan:
            return arrays
        if has_beyond(self.engine.plan, self.plan, arrays):
            self.result.note(Mismatch(len(self.result.steps), phase, None, "unused slots", np.inf))
        return with_slots(self.engine.plan, self.plan, arrays)

    def _end_step(self, phase: str, present: Arrays, largest: dict[str, float]) -> None:
        self.past = {_past(name): x for name, x in present.items()}
        seen = int(self.length.max())
        self.result.steps.append({"step": len(self.result.steps), "phase": phase, "tokens": seen, "largest": largest})

    def _note(self, phase: str, layer: int | None, d: Difference | None) -> None:
        if d is not None:
            fields = (d.tensor, d.difference, d.allowed, d.lane, d.head, d.slot)
            self.result.note(Mismatch(len(self.result.steps), phase, layer, *fields))

    def _keep_largest(
        self, i: int, actual: Arrays, expected: Arrays, largest: dict[str, float], heads: NDArray[Any] | None = None
    ) -> None:
        first = 0
        for own, other in zip(self._named(i, actual), self._named(i, expected), strict=True):
            count = own["votes"].shape[1]
            which = None if heads is None else heads[:, first : first + count]
            first += count
            for name, x in own.items():
                largest[name] = max(largest.get(name, 0.0), largest_differences(name, x, other[name], which))

    def _named(self, i: int, present: Arrays) -> list[dict[str, NDArray[Any]]]:
        layer = self.plan.caches[i]
        return named_heads(layer, [present[tensor.present(i)] for tensor in layer.state])

    def _against_float64(
        self, phase: str, feed: Arrays, actual: Arrays, expected: Arrays, real: NDArray[np.bool_]
    ) -> None:
        exact = self.reference.decode_in_float64(feed)
        for i, layer in enumerate(self.plan.caches):
            past = named_heads(layer, [feed[tensor.past(i)] for tensor in layer.state])
            sides = (self._named(i, state) for state in (actual, expected, exact))
            for before, engine, pytorch, truth in zip(past, *sides, strict=True):
                for name in ("key",) if layer.value_in_key else ("key", "value"):
                    new = norm(pytorch[name].astype(np.float64) - before[name]) > 0
                    self._add_errors((phase, name), engine[name], pytorch[name], truth[name], new)
        self._add_errors((phase, "logits"), actual["logits"], expected["logits"], exact["logits"], real)

    def _add_errors(
        self,
        kind: tuple[str, str],
        engine: NDArray[Any],
        pytorch: NDArray[Any],
        truth: NDArray[Any],
        rows: NDArray[np.bool_],
    ) -> None:
        size = np.maximum(norm(truth)[rows], 1e-30)
        errors = [norm(x.astype(np.float64) - truth)[rows] / size for x in (engine, pytorch)]
        self.errors[kind].append((np.nan_to_num(errors[0], nan=np.inf), errors[1]))


def _past(name: str) -> str:
    return name.replace("present.", "past_key_values.")


def _are_largest(top: TopLogits | None, logits: NDArray[np.float32]) -> bool:
    """Return whether `top` has the n largest of `logits` [vocabulary], and the right sum of exponentials."""
    if top is None or not 0 <= top.ids.min() <= top.ids.max() < logits.size:
        return False
    largest = -np.sort(-logits)[: top.ids.size]
    mass = float(np.exp(logits.astype(np.float64) - logits.max()).sum())
    same = np.array_equal(top.values, largest) and np.array_equal(logits[top.ids], largest)
    return same and np.unique(top.ids).size == largest.size and abs(top.mass / mass - 1) < MASS_ERROR
