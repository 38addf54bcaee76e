"""Rules of newer papers beside and on top of kvexport's methods: KL and loss of SmolLM2-135M-Instruct at equal bytes.

    python benchmarks/newer_methods.py [--budgets 128] [--once 77] [--rows A,B] [--threads 1]

Four texts of 1,024 tokens are read: two of Python's manual, and one of each kind in `KINDS`. In the first part the
texts are read in chunks of 32 tokens with a merge after each, as in `budget_kinds.py`. In the second part 768 tokens
are read with the full cache, which is then compressed once; the next 256 tokens are read without another merge. The
figures are the KL to the full cache and the added loss in nats per token, by text and block of 32 tokens: over
the second half in the first part, over the 256 tokens in the second.

PyTorch computes all figures with the operators' definitions. The state of a rule that no kernel has (statistics of
queries, reference queries) is not counted as bytes. Results are added to benchmarks/results/newer-methods.json row by
row. Rows that the file already holds are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from typing import Any, ClassVar

import newer_rules
import numpy as np
import torch
from budget_kinds import BLOCK, COMMON, HELD_OUT, RECIPE, texts
from common import RESULTS, save
from fitted_keys import FittedKeys
from newer_rules import FUTURE, Given, Largest, Newer, Queries
from torch import Tensor, nn

from kvexport.evaluate.settings import equal_bytes, load_setting
from kvexport.export.build import read_model
from kvexport.export.graph.graphs import merge_attributes
from kvexport.export.graph.tracer import layer_attributes
from kvexport.export.hooks.attention import PassThroughCache, attending
from kvexport.language.tokenizer import Tokenizer
from kvexport.methods.attention_matching import AttentionMatching
from kvexport.methods.ballot import Ballot
from kvexport.methods.base import Method
from kvexport.methods.h2o import H2O
from kvexport.methods.slots import Statistic
from kvexport.methods.snapkv import SnapKV
from kvexport.ops.layer_state import split_state
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import vote_attention
from kvexport.plan.cache import CachePlan, LayerCache, LayerGeometry
from kvexport.plan.planner import plan_cache
from kvexport.recipe.load import load_recipe
from kvexport.schema.state import STATE
from kvexport.validate.reference import TorchReference

NAME, LENGTH, CHUNK, CONTEXT = "newer-methods", 1024, 32, 768
MANUALS, KINDS = 2, ("chat", "c++")
REPEAT = "\n\nRepeat the previous context:\n\n"
HEADS = "ballot, budgets of heads"
# The rows of the first part: name and label of the method.
ROWS = {
    "ballot": "ballot",
    "h2o": "h2o",
    "ballot, large values kept": "newer_ballot:rules=values",
    "ballot, largest probability": "newer_ballot:rules=largest",
    "ballot, largest probability and prior": "newer_ballot:rules=largest+prior",
    "ballot, both ends": "newer_ballot:rules=ends",
    "DefensiveKV": "newer:rules=largest+prior+norms",
    "random for each head, redrawn": "newer:rules=redrawn",
    "VaSE": "newer:rules=norms+noise+values",
    "h2o, both ends": "newer:rules=ends",
    "ballot, norms of values": "newer_ballot:rules=norms",
    "Expected Attention": "newer:rules=expected+norms",
    "ballot, expected attention": "newer_ballot:rules=expected",
    HEADS: "ballot",
    "keepkv": "keepkv",
    "ballot, noise": "newer_ballot:rules=noise",
    "random": "random",
    "oldest first, both ends": "newer:rules=oldest+ends",
    "snapkv": "snapkv",
    "zeromerge": "zeromerge",
}
FITTED: dict[str, Any] = {"after": "ballot", "change_max": 10.0, "bias_max": 6.0}
# The rows of the second part: the method, and the rules of `newer`.
ONCE: dict[str, Method] = {
    "random for each head": Newer(rules="redrawn"),
    "h2o": H2O(),
    "snapkv": SnapKV(),
    "DefensiveKV": Newer(rules="largest+prior+norms"),
    "Expected Attention": Newer(rules="expected+norms"),
    "KVzip": Newer(rules="given"),
    "ballot": Ballot(),
    "ballot, KVzip": newer_rules.NewerBallot(rules="given"),
    "ballot, expected attention": newer_rules.NewerBallot(rules="expected"),
    "ballot, votes and values fitted to 96 queries": AttentionMatching(queries=96, **FITTED),
    "ballot, votes and values fitted to 192 queries": AttentionMatching(queries=192, **FITTED),
    "ballot, keys, votes and values fitted to 192 queries": FittedKeys(queries=192, **FITTED),
}


def parts_of(layer: LayerGeometry, cache: LayerCache) -> list[tuple[LayerGeometry, LayerCache]]:
    """Return a layer with its cache; if its KV heads have budgets of their own, each head as a layer of one."""
    if len({*zip(cache.capacity, cache.budget, strict=True)}) == 1:
        return [(layer, cache)]
    one = replace(layer, query_heads=layer.query_heads // layer.kv_heads, kv_heads=1)
    sizes = zip(cache.budget, cache.capacity, cache.recent, strict=True)
    return [(one, replace(cache, budget=(b,), capacity=(c,), recent=(r,))) for b, c, r in sizes]


class Reader:
    """The model, with the caches of a plan. Their state has the dimensions [B, H, C, ...]."""

    def __init__(self, reference: TorchReference, plan: CachePlan, method: Method, batch: int) -> None:
        self.model: Any = reference.model
        self.method = method
        parts = [parts_of(*layer) for layer in zip(reference.geometry, plan.caches, strict=True)]
        ends = [0, *itertools.accumulate(map(len, parts))]
        self.caches = [range(*pair) for pair in itertools.pairwise(ends)]
        self.geometry = [layer for own in parts for layer, _ in own]
        self.plan = CachePlan(tuple(cache for own in parts for _, cache in own))
        self.position, self.first = 0, plan.caches[0].sinks
        frequencies = self.model.model.rotary_emb.inv_freq
        self.queries = [Queries(frequencies, x.kv_heads) for x in self.plan.caches]
        self.state: list[tuple[Tensor, ...]] = []
        for layer in self.plan.caches:
            flat = [torch.from_numpy(np.zeros(x, layer.dtypes()[n])) for n, x in layer.shapes(batch).items()]
            self.state.append(split_state(flat, layer.state, layer.capacity, together=True)[0])

    @property
    def watches_queries(self) -> bool:
        """Whether the method has the rule `expected`."""
        return "expected" in getattr(self.method, "rules", "") or isinstance(self.method, Everything)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the attention output of one layer, and update its caches; see `Attending`."""
        caches, outputs = self.caches[options["layer"]], []
        lengths = torch.full((len(query), 1), query.shape[2])
        position = (self.position + torch.arange(query.shape[2])).expand(len(query), -1)
        for cache, q, k, v in zip(caches, *(x.chunk(len(caches), 1) for x in (query, key, value)), strict=True):
            attributes = layer_attributes(self.method, self.geometry[cache])
            if self.watches_queries:
                self.queries[cache].add(q.float() * attributes.scale, position[0], self.first)
            own, extra = self.state[cache][: len(STATE)], self.state[cache][len(STATE) :]
            output, *state = vote_attention(q, k, v, position, lengths, *own, None, *extra, attributes=attributes)
            outputs.append(output)
            self.state[cache] = tuple(state)
        return torch.cat(outputs, 1)

    def mask(self, mask_function: Any) -> Any:
        """Return no mask, because the operator knows what is visible."""
        return None

    def read(self, ids: Tensor, judged: bool) -> Tensor | None:
        """Read tokens [B, T]; return their log-probabilities [B, T, vocabulary] if they are judged."""
        positions = self.position + torch.arange(ids.shape[1])[None]
        model = self.model if judged else self.model.model
        with attending(self), torch.no_grad():
            found = model(input_ids=ids, position_ids=positions, **PassThroughCache().as_arguments(model))
        self.position += ids.shape[1]
        return found.logits.float().log_softmax(-1) if judged else None

    def merge(self) -> None:
        """Compress all caches."""
        for cache, layer in enumerate(self.plan.caches):
            if int((self.state[cache][2] > 0).sum(-1).max()) > layer.budget[0]:
                Queries.now = self.queries[cache]
                with torch.no_grad():
                    self.state[cache] = merge_cache(
                        *self.state[cache], attributes=merge_attributes(layer, self.method)[0]
                    )


class Figures:
    """KL and added loss in nats per token, by text and block of `BLOCK` tokens."""

    def __init__(self, full: Tensor, tokens: Tensor, first: int) -> None:
        self.full, self.tokens, self.first = full, tokens, first
        self.blocks: list[Tensor] = []

    def add(self, at: int, found: Tensor) -> None:
        """Add the log-probabilities [B, T, vocabulary] of the tokens from `at` on.

        The last block is left out, because the text's last token predicts nothing.
        """
        for start in range(at, min(at + found.shape[1], LENGTH - BLOCK), BLOCK):
            own = found[:, start - at : start - at + BLOCK]
            full = self.full[:, start - self.first : start - self.first + BLOCK]
            kl = (full.exp() * (full - own)).sum(-1).mean(-1)
            truth = self.tokens[:, start + 1 : start + 1 + BLOCK, None]
            self.blocks.append(torch.stack([kl, (full - own).gather(-1, truth)[..., 0].mean(-1)]))

    def row(self) -> dict[str, list[list[float]]]:
        """Return the figures by text and block."""
        kl, loss = torch.stack(self.blocks, -1).double().tolist()
        return {name: [[round(x, 5) for x in text] for text in x] for name, x in (("kl", kl), ("loss", loss))}


class Everything(AttentionMatching):
    """A method with the statistics of all rows of the second part, and with their reference queries."""

    name: ClassVar[str] = "everything"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sum, the sum over the last queries, the largest probability, and the average of exp(logit)."""
        window = SnapKV().statistics[0]
        return (Statistic("probability"), window, Largest("probability"), Ballot().own_statistics[-1])

    def columns(self, method: Method) -> list[int]:
        """Return the columns of the score that another method has."""
        return [self.statistics.index(x) for x in method.statistics]


def plan_of(reference: TorchReference, method: Method, capacity: int, budget: int) -> CachePlan:
    """Return a plan with one cache for each layer, whose caches have given capacities and budgets."""
    recipe = load_setting(RECIPE, "ballot", 128, COMMON)
    plan = plan_cache(recipe, reference.geometry)
    extra, statistics = method.extra_state, len(method.statistics)
    changes = {"extra": extra, "statistics": statistics}
    return replace(
        plan,
        caches=tuple(
            replace(x, capacity=(capacity,) * x.kv_heads, budget=(budget,) * x.kv_heads, **changes) for x in plan.caches
        ),
    )


class Run:
    """The model, the texts and the full cache's predictions."""

    def __init__(self) -> None:
        newer_rules.register()
        self.recipe = load_setting(RECIPE, "ballot", 128, COMMON)
        self.shape = read_model(self.recipe)
        plan, method = plan_cache(self.recipe, self.shape.geometry), self.recipe.cache.build_method()
        self.reference = TorchReference(self.shape.checkpoint, plan, self.shape.geometry, method, self.recipe)
        kinds = texts(self.shape.checkpoint.path)
        chosen = [*kinds[HELD_OUT][:MANUALS], *(kinds[kind][0] for kind in KINDS)]
        self.names = [*(f"manual {i + 1}" for i in range(MANUALS)), *KINDS]
        self.tokens = torch.tensor([sample.ids[:LENGTH] for sample in chosen])
        full = H2O()
        reader = Reader(self.reference, plan_of(self.reference, full, LENGTH, LENGTH), full, len(self.tokens))
        rows = []
        for at in range(0, LENGTH, 64):
            found = reader.read(self.tokens[:, at : at + 64], judged=at >= LENGTH // 2)
            rows += [] if found is None else [found]
        self.full = torch.cat(rows, 1)

    def figures(self) -> Figures:
        """Return empty figures."""
        return Figures(self.full, self.tokens, LENGTH // 2)

    def streamed(self, plan: CachePlan, method: Method) -> dict[str, list[list[float]]]:
        """Return the figures of texts that are read in chunks with a merge after each."""
        reader, figures = Reader(self.reference, plan, method, len(self.tokens)), self.figures()
        for at in range(0, LENGTH, CHUNK):
            found = reader.read(self.tokens[:, at : at + CHUNK], judged=at >= LENGTH // 2)
            if found is not None:
                figures.add(at, found)
            reader.merge()
        return figures.row()

    def settings(self, slots: int) -> dict[str, Any]:
        """Return by row the recipe with `slots` slots; all caches have equal bytes."""
        shares = load_recipe("smollm2-135m-heads", []).recipe.cache.allocation.shares
        listed = json.dumps(shares).replace(" ", "")
        labels = {
            name: f"{label}:kept={slots}:prompt={LENGTH // 2}" if label.startswith("newer") else label
            for name, label in ROWS.items()
        }
        labels[HEADS] = f"ballot:cache.allocation.kind=listed:cache.allocation.shares={listed}"
        found = equal_bytes(RECIPE, list(labels.values()), [slots], LENGTH, self.shape.geometry, COMMON)
        return {name: next(x for x in found if x.label == label) for name, label in labels.items()}


class Compressed:
    """The cache after `CONTEXT` tokens, for the rows of the second part."""

    def __init__(self, run: Run) -> None:
        self.run, self.everything = run, Everything(queries=192, **FITTED)
        plan = plan_of(run.reference, self.everything, CONTEXT, CONTEXT)
        reader = Reader(run.reference, plan, self.everything, len(run.tokens))
        for at in range(0, CONTEXT, 64):
            if at == CONTEXT - 64:  # only the last queries of the prompt count in this statistic
                for state in reader.state:
                    state[3][:, :, 1:2] = 0.0
            reader.read(run.tokens[:, at : at + 64], judged=False)
        self.state, self.queries = reader.state, reader.queries
        self.given = self._repeated()

    def _repeated(self) -> list[Tensor]:
        """Return by layer the largest probability of every slot while the context is read again (KVzip)."""
        tokenizer = Tokenizer.from_folder(self.run.shape.checkpoint.path)
        words = torch.tensor(tokenizer.encode(REPEAT)).expand(len(self.run.tokens), -1)
        again = torch.cat([words, self.run.tokens[:, :CONTEXT]], 1)
        method = Newer(rules="largest")
        plan = plan_of(self.run.reference, method, CONTEXT + again.shape[1], LENGTH)
        reader = Reader(self.run.reference, plan, method, len(again))
        reader.position = CONTEXT
        for cache, state in enumerate(self.state):
            for empty, filled in zip(reader.state[cache][:3], state[:3], strict=True):
                empty[:, :, :CONTEXT] = filled
            reader.state[cache][4][:, :, :CONTEXT] = state[4]
        for at in range(0, again.shape[1], 64):
            reader.read(again[:, at : at + 64], judged=False)
        return [state[3][:, :, 0, :CONTEXT] for state in reader.state]

    def figures(self, method: Method, slots: int) -> dict[str, list[list[float]]]:
        """Return the figures of the tokens after the context, whose cache is compressed by a method."""
        plan = plan_of(self.run.reference, method, slots + LENGTH - CONTEXT, slots)
        reader = Reader(self.run.reference, plan, method, len(self.run.tokens))
        columns, recent = self.everything.columns(method), self.run.recipe.cache.recent
        for cache, state in enumerate(self.state):
            Queries.now, Given.now = self.queries[cache], self.given[cache]
            score = state[3][:, :, columns]
            extra = tuple(x[:, :, -method.reference_queries :] for x in state[5:]) if method.extra_state else ()
            layer = plan.caches[cache]
            attributes = MergeCacheAttributes(method, slots, layer.sinks, int(recent * slots))
            with torch.no_grad():
                merged = merge_cache(*state[:3], score, state[4], *extra, attributes=attributes)
            axes = [tensor.slot_axis for tensor in layer.state]
            for empty, x, axis in zip(reader.state[cache], merged, axes, strict=True):
                if axis is None:
                    empty.copy_(x)
                else:
                    empty.narrow(axis + 1, 0, slots).copy_(x.narrow(axis + 1, 0, slots))
        reader.position = CONTEXT
        figures = self.run.figures()
        for at in range(CONTEXT, LENGTH, 64):
            found = reader.read(self.run.tokens[:, at : at + 64], judged=True)
            assert found is not None
            figures.add(at, found)
        return figures.row()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="128", help="slots of the first part")
    parser.add_argument("--once", default="77", help="slots of the second part")
    parser.add_argument("--rows", help="names of rows, separated by ';'; all by default")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = RESULTS / f"{NAME}.json"

    def measured() -> dict[str, Any]:
        parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
        return {"streamed": {}, "once": {}} | parts

    parts = measured()
    only = options.rows.split(";") if options.rows else [*ROWS, *ONCE]
    run = Run()

    def keep(part: str, slots: str, name: str, row: dict[str, Any], started: float) -> None:
        parts = measured()  # another process may measure the other part
        parts[part].setdefault(slots, {})[name] = row
        save(NAME, {"recipe": RECIPE, "length": LENGTH, "texts": run.names, "future": FUTURE, "parts": parts})
        kl = np.mean(row["kl"], 1)
        print(f"{part} {slots} {name}: KL {kl.mean():.4f} {kl.round(4)} {time.time() - started:.0f} s", flush=True)

    compressed = None
    for slots in filter(None, options.once.split(",")):
        for name in ONCE:
            if name in parts["once"].get(slots, {}) or name not in only:
                continue
            compressed = compressed or Compressed(run)
            started = time.time()
            keep("once", slots, name, compressed.figures(ONCE[name], int(slots)), started)
    for slots in filter(None, options.budgets.split(",")):
        settings = run.settings(int(slots))
        for name in ROWS:
            if name in parts["streamed"].get(slots, {}) or name not in only:
                continue
            started, setting = time.time(), settings[name]
            plan = plan_cache(setting.recipe, run.shape.geometry)
            row = run.streamed(plan, setting.recipe.cache.build_method())
            keep("streamed", slots, name, {**row, "slots": setting.slots, "bytes": setting.bytes}, started)


if __name__ == "__main__":
    main()
