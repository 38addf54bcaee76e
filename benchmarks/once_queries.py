"""The table of docs/measurements/once.md: reference queries for the fit of a context that is compressed once.

    python benchmarks/once_queries.py [--rows 3,4]

The first text of `once.py`, 2,000 tokens, is compressed to a tenth of the slots. PyTorch reads it once with the
operators' reference functions, so that no artifact is built, and all queries are recorded. The rows differ in the
queries that the merge (the native operator) gets as reference queries. Results are added to
benchmarks/results/once-queries.json row by row. Rows that the file already holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import RESULTS, save
from once import CHUNK, FOLLOWING, LENGTH, SHARES, text_of
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvexport.cache_planning import plan_cache
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.settings import overrides_of
from kvexport.export.build import read_model
from kvexport.export.graph.graphs import merge_attributes
from kvexport.language.tokenizer import Tokenizer
from kvexport.methods.primitives.pairs import rotated
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.validate.backend import ReferenceBackend
from kvexport.validate.reference import TorchReference
from tests.conformance.backends import NativeCpu

NAME, PART = "once-queries", 10
AGAIN = 1000  # tokens of the text that are read a second time
FITTED = "attention_matching:after=ballot:change_max=10:bias_max=6"
VALUES, UNBOUND = f"{FITTED}:steps=0", "attention_matching:change_max=1000"


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        label: Its text in the table.
        method: The method, with its settings.
        of: The kind of reference queries, see `Read.chosen`.
        queries: The number of reference queries.
        listed: Whether layers have measured budgets.
    """

    label: str
    method: str
    of: str = ""
    queries: int = 0
    listed: bool = False


ROWS = (
    Row("`attention_matching`, by the last 33 queries", "attention_matching", "last", 33),
    Row("... the last 192", "attention_matching", "last", 192),
    Row("... 192 from all over the prompt, each over the slots that it had seen", "attention_matching", "spread", 192),
    Row("... 192 from all over the prompt, rotated to its end, over all slots", "attention_matching", "turned", 192),
    Row("... 192, half of them the last, half from all over the prompt", "attention_matching", "half", 192),
    Row(
        "... 192 keys in place of queries, scaled to their mean norm and rotated to the end",
        "attention_matching",
        "keys",
        192,
    ),
    Row("... 192 queries of the prompt read a second time", "attention_matching", "again", 192),
    Row("... the last 960, values without a bound on their change", UNBOUND, "last", 960),
    Row("... 960 rotated to the end, values without a bound", UNBOUND, "turned", 960),
    Row("... 960 of the second reading, values without a bound", UNBOUND, "again", 960),
    Row("`ballot`", "ballot"),
    Row("... then values fitted to the last 192", VALUES, "last", 192),
    Row("... then votes and values fitted to the last 192", FITTED, "last", 192),
    Row("`ballot` in measured budgets of layers", "ballot", listed=True),
    Row("... then votes and values fitted to the last 96", FITTED, "last", 96, listed=True),
    Row("... then votes and values fitted to the last 192", FITTED, "last", 192, listed=True),
    Row("... then fitted to 960 rotated to the end", FITTED, "turned", 960, listed=True),
)


def recipe_of(row: Row, length: int = LENGTH + FOLLOWING) -> Recipe:
    """Return the recipe of a row: a cache that reads up to `length` tokens and merges only at the end of a prompt."""
    ring = [f"cache.parameters.queries={row.queries}"] if row.queries else []
    shares = load_recipe(SHARES["listed"], []).recipe.cache.allocation.shares
    listed = ["cache.allocation.kind=listed", f"cache.allocation.shares={shares}"] if row.listed else []
    whole = ["cache.merge_prompts=end", f"limits.max_length={length}", "export.logits=all"]
    settings = [*overrides_of(row.method), *ring, *listed, *whole, f"cache.budget={LENGTH // PART}"]
    return load_recipe("smollm2-135m-base", settings).recipe


class Noted:
    """A recorder of every layer's queries, stored as reference queries: [1, H, rows, D], times the logits' scale."""

    def __init__(self, scales: Sequence[float]) -> None:
        self.scales, self.calls = scales, [list[Tensor]() for _ in scales]

    def attended(self, layer: int, query: Tensor, key: Tensor, *rest: Any) -> None:
        """Record the queries of one call of attention; see `kvexport.validate.telemetry.Telemetry`."""
        heads, (_, _, tokens, size) = key.shape[1], query.shape
        by_token = query.reshape(1, heads, -1, tokens, size).transpose(2, 3)
        self.calls[layer].append(by_token.reshape(1, heads, -1, size) * self.scales[layer])

    def taken(self) -> list[Tensor]:
        """Return the queries of every layer since the last call of this method."""
        joined = [torch.cat(calls, 2) for calls in self.calls]
        self.calls = [list[Tensor]() for _ in self.scales]
        return joined


class Read:
    """A text that the full cache has read: its state, and every layer's queries of the first and the second reading."""

    def __init__(self) -> None:
        instruction = "\n\nRepeat the text from its beginning.\n\n"
        recipe = recipe_of(Row("", FITTED, queries=1), LENGTH + AGAIN + CHUNK)
        self.shape = read_model(recipe)
        self.rotary = read_model(load_recipe("smollm2-135m-base", ["cache.method=asymkv"]).recipe).geometry[0].rotary
        method = recipe.cache.build_method()
        self.torch = TorchReference(self.shape.checkpoint, self.shape.plan, self.shape.geometry, method, recipe)
        tokenizer = Tokenizer.from_folder(self.shape.checkpoint.path)
        ids = text_of(tokenizer, 0)
        self.following = np.array(ids[LENGTH:], np.int64)[None]
        notes: Any = Noted([layer.scale for layer in self.shape.geometry])
        lane = ReferenceBackend(self.torch, self.shape.plan, 1, notes)
        for start in range(0, LENGTH, CHUNK):
            self._append(lane, ids[start : min(start + CHUNK, LENGTH)])
        self.group = self.shape.geometry[0].query_heads // self.shape.geometry[0].kv_heads
        self.queries, slots = notes.taken(), np.arange(LENGTH + FOLLOWING)
        axes = {t.past(i): t.slot_axis for i, layer in enumerate(self.shape.plan.caches) for t in layer.state}
        self.state = {
            name: x.copy() if axes[name] is None else x.take(slots, axes[name]) for name, x in lane.state.items()
        }
        again = [*tokenizer.encode(instruction, add_special_tokens=False), *ids[:AGAIN]]
        for start in range(0, len(again), CHUNK):
            self._append(lane, again[start : start + CHUNK])
        self.again = notes.taken()
        self.right = self._follow(self.state)

    @staticmethod
    def _append(lane: ReferenceBackend, ids: Sequence[int]) -> None:
        lane.decode(np.array(ids, np.int64)[None], np.array([[len(ids)]]))

    def _follow(self, state: dict[str, Any]) -> Any:
        lengths = {"query_length": np.array([[FOLLOWING]]), "past_length": np.array([[LENGTH]])}
        return log_softmax(self.torch.decode({"input_ids": self.following, **lengths, **state})["logits"][0])

    def kl(self, row: Row) -> float:
        """Return the mean KL of the tokens that follow, in nats per token, after a merge as the row says."""
        recipe = recipe_of(row)
        plan, method = plan_cache(recipe, self.shape.geometry), recipe.cache.build_method()
        state = {}
        for i, layer in enumerate(plan.caches):
            held = {t.name: self.state[t.past(i)] for t in self.shape.plan.caches[i].state}
            held["score"] = held["score"][:, :, : layer.statistics]  # one score if the method selects by queries
            if row.queries:
                held["query"], held["query_seen"] = (x.numpy() for x in self.chosen(i, row.of, row.queries))
            state |= {t.past(i): held[t.name] for t in layer.state}
            if layer.merges:
                tensors = {t.name: np.ascontiguousarray(held[t.name]) for t in layer.state}
                merged = NativeCpu().merge_cache(tensors, merge_attributes(layer, method))
                state |= {t.past(i): merged[f"present_{t.name}"] for t in layer.state}
        self.torch.plan, self.torch.method = plan, method
        rows = self._follow(state)
        return float((np.exp(self.right) * (self.right - rows)).sum(-1).mean())

    def chosen(self, i: int, of: str, rows: int) -> tuple[Tensor, Tensor]:
        """Return the reference queries [1, H, rows, D] of layer `i`, and the tokens that each has seen [1, H, rows]."""
        tokens = rows // self.group
        if of == "keys":
            at = of_row = spread(LENGTH, rows)
            key = torch.from_numpy(self.state[f"past_key_values.{i}.key"])[:, :, :LENGTH]
            ring = key[:, :, at] * (self.queries[i].norm(dim=-1).mean() / key.norm(dim=-1).mean())
        else:
            queries = (self.again if of == "again" else self.queries)[i]
            last = torch.arange(LENGTH - tokens, LENGTH)
            at = last if of == "last" else spread(queries.shape[2] // self.group, tokens)
            if of == "half":
                at = torch.cat([spread(LENGTH - tokens // 2, tokens - tokens // 2), last[-(tokens // 2) :]])
            ring = queries[:, :, (at[:, None] * self.group + torch.arange(self.group)).flatten()]
            of_row = at.repeat_interleave(self.group)
        if of in ("turned", "keys"):
            ring = rotated(ring, (LENGTH - of_row).expand(ring.shape[:3]), self.rotary)
        seen = of_row + 1 if of in ("last", "spread", "half") else torch.full((rows,), LENGTH)
        return ring.contiguous(), seen.to(torch.int32).expand(ring.shape[:3]).contiguous()


def spread(count: int, n: int) -> Tensor:
    """Return n evenly spaced indices below `count`, with the last one among them."""
    return torch.linspace(count / n - 1, count - 1, n).round().long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="numbers of the rows to measure, counted from 0; default: all")
    options = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    results = {Row(**{name: row[name] for name in Row._fields}): row["kl"] for row in rows}
    selected = [ROWS[int(n)] for n in options.rows.split(",")] if options.rows else ROWS
    read = None
    for row in selected:
        if row in results:
            continue
        read, start = read or Read(), time.process_time()
        results[row] = round(read.kl(row), 6)
        save(NAME, {"rows": [{**one._asdict(), "kl": results[one]} for one in ROWS if one in results]})
        print(f"{row.label}: {results[row]} ({time.process_time() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
