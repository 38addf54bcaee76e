"""Budgets of layers and of single KV heads on SmolLM2-135M-Instruct, simulated in PyTorch.

    python benchmarks/head_budgets.py costs [--texts 0,1,2,3]
    python benchmarks/head_budgets.py shares [--slots 51]     # as a recipe's cache.allocation.shares
    python benchmarks/head_budgets.py compare [--slots 51,128,256] [--variants uniform,shipped,layers,heads,prompt]
        [--texts 0,1] [--judged]

`costs` measures the loss that evictions of every head cause, as `kvexport calibrate` does, on other texts
and in caches of GRID slots. With --recall it is the loss of the answers to six questions about a text.

`shares` prints shares of the budget that follow from these costs: `heads` from texts, `facts` from texts and answers.
For `facts` both costs count relative to their sums in caches of GRID[1] slots.

`compare` measures the KL to the full cache at equal slots in all, in nats over the second half. Variants: `heads` and
`layers` have the least sum of costs, where `layers` gives all heads of a layer the same budget. KIND@SLOTS takes the
ratios for another number of slots. KIND/SHARE sets the share of recent slots. `shipped` has the budgets of the recipe.
In `prompt`, the slots of a layer go at every merge to the entries with the largest mean probability in all its heads
(AdaKV, arXiv 2407.11550).

Texts of 1,024 tokens are read in chunks of 32 with a merge after each. Budgets are chosen on pieces of Python's manual
and library that are not used to judge them. --judged reads the texts of docs/measurements/budgets.md. Rows are added to
those of earlier runs in benchmarks/results/head-budgets.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, TEST_RECIPES, save
from numpy.typing import NDArray
from torch import Tensor

from kvexport.calibrate.allotment import cheapest, curves_of
from kvexport.calibrate.facts import fact_passages
from kvexport.calibrate.head_costs import HeadCosts
from kvexport.calibrate.head_shares import asked_and_answered
from kvexport.evaluate.corpus import library_sources, manual
from kvexport.evaluate.language import Ids, Text
from kvexport.evaluate.tasks import TASKS, Sample
from kvexport.export.build import read_model
from kvexport.export.graph.tracer import layer_attributes
from kvexport.export.hooks.attention import IMPLEMENTATION, PassThroughCache, attending
from kvexport.language.tokenizer import Tokenizer
from kvexport.methods.base import Method
from kvexport.methods.primitives.select import mean_per_observation
from kvexport.methods.slots import Slots, gather_slots
from kvexport.ops.merge_cache import MergeCacheAttributes, merge_cache
from kvexport.ops.vote_attention import vote_attention
from kvexport.plan.budgets import allocate
from kvexport.plan.cache import LayerGeometry
from kvexport.recipe.load import load_recipe
from kvexport.validate.weights import load_model

NAME, RECIPE, LISTED = "head-budgets", "smollm2-135m-base", str(TEST_RECIPES / "smollm2-135m-listed.yaml")
BALLOT = "cache.method=ballot"
LENGTH, CHUNK, SINKS = 1024, 32, 4
FACTS_LENGTH = 900  # tokens of a passage; questions and answers follow it
GRID = (24, 48, 96, 192, 384)
RECENT = 0.5
LEAST = 12  # the fewest slots of a head
FLOOR = 0.2  # the part of a uniform budget that `prompt` leaves every head
NOTHING = 1e-30  # votes that make a slot invisible to queries

State = tuple[Tensor, ...]


class Heads:
    """Caches of all layers whose heads have budgets of their own.

    A head is filled up to its layer's largest budget with slots without influence: their votes are NOTHING, and their
    position -1 makes them sinks, which are neither evicted nor merged into. So the operators are those of the engine.
    """

    def __init__(self, geometry: Sequence[LayerGeometry], method: Method, lanes: int) -> None:
        self.geometry, self.method, self.lanes = geometry, method, lanes
        self.state: list[State] = []
        self.most: list[int] = []
        self.recent: list[Tensor] = []

    def begin(self, budgets: NDArray[np.int64], recent: Sequence[float], room: float = 1.0) -> None:
        """Empty all caches and set the budgets."""
        self.state, self.most, self.recent = [], [], []
        self.budgets = torch.from_numpy(budgets)
        share = torch.tensor(recent, dtype=torch.float64)[:, None]
        for i, layer in enumerate(self.geometry):
            budgets = self.budgets[:, i]
            most = int(budgets.max() * room)
            state = empty(self.lanes, layer, most + CHUNK, len(self.method.statistics))
            self.state.append(filled(state, most - budgets))
            self.most.append(most)
            self.recent.append((share * budgets).to(torch.int32)[..., None])

    def append(self, i: int, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        """Append tokens to the cache of layer i and return their attention output [B, Hq, T, D]."""
        lengths = torch.full((len(query), 1), query.shape[2])
        output, *state = vote_attention(
            *(query, key, value, position, lengths),
            *self.state[i],  # type: ignore[arg-type]
            attributes=layer_attributes(self.method, self.geometry[i]),
        )
        self.state[i] = tuple(state)
        return output

    def merge(self, i: int, by_prompt: Sequence[bool] = ()) -> None:
        """Bring layer i within its budgets; lanes marked in `by_prompt` choose their budgets first."""
        attributes = MergeCacheAttributes(self.method, self.most[i], SINKS)
        state, capacity = self.state[i], self.state[i][2].shape[-1]
        if int((state[2] > 0).sum(-1).max()) <= self.most[i]:
            return
        if any(by_prompt):
            budgets = self._chosen(i)
            budgets = torch.where(torch.tensor(by_prompt)[:, None], budgets, self.budgets[:, i])
            wider = [torch.nn.functional.pad(x, (0, 0, 0, self.most[i])) for x in state[:2]]
            rest = [torch.nn.functional.pad(x, (0, self.most[i])) for x in state[2:]]
            state = filled((*wider, *rest), self.most[i] - budgets)
        merged = merge_cache(*state, attributes=attributes, recent=self.recent[i])
        self.state[i] = tuple(x.narrow(axis, 0, capacity) for x, axis in zip(merged, (2, 2, 2, 3, 2), strict=True))

    def _chosen(self, i: int) -> Tensor:
        """Return budgets [B, H] of layer i that follow from the entries of its heads."""
        key, value, votes, score, position = self.state[i]
        real = (votes > 0) & (position >= 0)
        now = position.amax(-1, keepdim=True)
        protected = real & ((position < SINKS) | (position > now - self.recent[i]))
        budgets = self.budgets[:, i]
        mean = mean_per_observation(Slots(key, value, votes, score, position, now))
        mean = torch.where(real & ~protected, mean, -torch.inf)
        least = (FLOOR * budgets.float().mean(-1)).to(torch.int64)[:, None, None]
        rank = mean.argsort(-1, descending=True).argsort(-1)
        mean = torch.where((rank < least) & torch.isfinite(mean), torch.inf, mean)
        free = budgets.sum(-1) - protected.sum((-1, -2))
        order = mean.flatten(1).argsort(-1, descending=True).argsort(-1)
        taken = (order < free[:, None]).reshape(mean.shape) & (mean > -torch.inf)
        return torch.minimum((taken | protected).sum(-1), torch.tensor(self.most[i]))


def empty(batch: int, layer: LayerGeometry, slots: int, statistics: int) -> State:
    """Return an empty cache."""
    head = (batch, layer.kv_heads)
    return (
        torch.zeros(*head, slots, layer.key_size),
        torch.zeros(*head, slots, layer.value_size),
        torch.zeros(*head, slots),
        torch.zeros(*head, statistics, slots),
        torch.zeros(*head, slots, dtype=torch.int32),
    )


def filled(state: State, fill: Tensor) -> State:
    """Return `state` with `fill` [B, H] slots without influence behind the entries of each head."""
    real = (state[2] > 0) & (state[4] >= 0)
    order = (~real).to(torch.int8).sort(dim=-1, stable=True).indices
    slots = gather_slots(Slots(*state, state[4][..., :1]), order)
    row, count = torch.arange(real.shape[-1]), real.sum(-1, keepdim=True)
    held, fills = row < count, (row >= count) & (row < count + fill[..., None])
    return (
        torch.where(held[..., None], slots.key, 0.0),
        torch.where(held[..., None], slots.value, 0.0),
        torch.where(held, slots.votes, torch.where(fills, NOTHING, 0.0)),
        torch.where(held[:, :, None], slots.score, 0.0),
        torch.where(held, slots.position, torch.where(fills, -1, 0)).to(torch.int32),
    )


class Model:
    """SmolLM2 in PyTorch; its layers call `attend`."""

    def __init__(self) -> None:
        recipe = load_recipe(RECIPE, [BALLOT]).recipe
        shape = read_model(recipe)
        self.recipe, self.geometry = recipe, shape.geometry
        self.method = recipe.cache.build_method()
        self.tokenizer = Tokenizer.from_folder(shape.checkpoint.path)
        self.model = load_model(shape.checkpoint, recipe, IMPLEMENTATION).requires_grad_(False)
        self.heads: Heads | None = None  # None: every token sees all tokens before it

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        """Compute the attention of one layer, as `kvexport.export.hooks.attention.Attending` requires."""
        i: int = module.layer_idx
        if self.heads is not None:
            return self.heads.append(i, query, key, value, self.position)
        scale = self.geometry[i].scale
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )

    def mask(self, mask_function: Any) -> Any:
        """Return None: `attend` masks by itself."""
        return None

    def hidden(self, ids: Tensor, first: int = 0) -> Tensor:
        """Return the hidden states [B, T, hidden] of tokens at positions from `first` on."""
        self.position = torch.arange(first, first + ids.shape[1]).expand(ids.shape)
        with attending(self):
            return self.model.model(  # type: ignore[no-any-return]
                input_ids=ids, position_ids=self.position, **PassThroughCache().as_arguments(self.model.model)
            ).last_hidden_state

    def logs(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities [B, T, vocabulary]."""
        return torch.log_softmax(self.model.lm_head(hidden).float(), -1)


def judged_texts(tokenizer: Tokenizer) -> list[Ids]:
    """Return the texts of docs/measurements/budgets.md."""
    return [x.ids for x in TASKS["text"].samples(Text(tokenizer, manual()), 8, LENGTH, 0)]


def other_texts(tokenizer: Tokenizer, numbers: Iterable[int]) -> list[Ids]:
    """Return texts by which budgets are chosen.

    Even numbers are texts of `unjudged`, odd numbers of the library's sources that no evaluation uses.
    """
    prose = Text(tokenizer, unjudged())
    source = Text(tokenizer, "\n".join(library_sources(held_out=False).values()))
    return [(source if n % 2 else prose).text(np.random.default_rng([17, n]), LENGTH)[0] for n in numbers]


def unjudged() -> str:
    """Return Python's manual without the lines of `judged_texts`."""
    tokenizer = Tokenizer.from_folder(checkpoint())
    judged = {line for ids in judged_texts(tokenizer) for line in tokenizer.decode(ids).splitlines() if line.strip()}
    return "\n".join(line for line in manual().splitlines() if line not in judged)


def checkpoint() -> Path:
    """Return the folder of SmolLM2."""
    return read_model(load_recipe(RECIPE, [BALLOT]).recipe).checkpoint.path


def recall_texts(numbers: Sequence[int]) -> list[Sample]:
    """Return passages of `unjudged` with six facts, followed by a question and answer about each."""
    passages = fact_passages(checkpoint(), unjudged(), FACTS_LENGTH, max(numbers) + 1, 17)
    return [asked_and_answered(passages[n]) for n in numbers]


def costs(model: Model, ids: Ids, counted: Sequence[int] = range(LENGTH // 2, LENGTH)) -> NDArray[np.float64]:
    """Return the costs [layers, heads, GRID] of `HeadCosts`, by default of a text's second half."""
    return HeadCosts(model.recipe, read_model(model.recipe)).of_text(ids, counted, lambda _: GRID)


def shares_of(kind: str, slots: int, cost: NDArray[np.float64]) -> list[Any]:
    """Return the best `cache.allocation.shares` of layers or of heads at `slots` slots, relative to their mean."""
    counted = cost if kind == "heads" else cost.mean(1, keepdims=True)
    curves = curves_of(counted.reshape(-1, len(GRID)), GRID, LEAST, LENGTH)
    shares = (cheapest(curves, slots, LEAST) / slots).round(2).reshape(counted.shape[:2])
    return shares.repeat(cost.shape[1] // shares.shape[1], 1).tolist()


def budgets_of(variant: str, slots: int, cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the budgets [layers, heads] of a variant."""
    layers, heads = cost.shape[:2]
    kind, _, at = variant.partition("/")[0].partition("@")
    sets = [BALLOT, f"cache.budget={slots}"]
    if kind in ("layers", "heads"):
        sets += ["cache.allocation.kind=listed", f"cache.allocation.shares={shares_of(kind, int(at or slots), cost)}"]
    recipe = load_recipe(LISTED if kind in ("shipped", "prompt") else RECIPE, sets).recipe
    each = np.array(allocate(recipe, layers), np.int64).reshape(layers, -1)
    return np.broadcast_to(each, (layers, heads)).copy()


@torch.no_grad()
def compare(model: Model, texts: Sequence[Ids], slots: int, variants: Sequence[str]) -> dict[str, list[float]]:
    """Return the KL of every variant, text by text.

    A variant is its kind, optionally with the share of recent slots after a slash.
    """
    cost = mean_cost()
    model.heads = None
    right = model.logs(model.hidden(torch.tensor(texts))[:, LENGTH // 2 :]).split(CHUNK, 1)
    count = len(texts)
    budgets = np.repeat(np.stack([budgets_of(v, slots, cost) for v in variants]), count, 0)
    recent = np.repeat([float(v.partition("/")[2] or RECENT) for v in variants], count).tolist()
    by_prompt = np.repeat([v.startswith("prompt") for v in variants], count).tolist()
    heads = Heads(model.geometry, model.method, len(budgets))
    heads.begin(budgets, recent, 2.5 if any(by_prompt) else 1.0)
    lanes = torch.tensor([*texts] * len(variants))
    total = torch.zeros(len(variants), count, dtype=torch.float64)
    model.heads = heads
    for n, first in enumerate(range(0, LENGTH, CHUNK)):
        hidden = model.hidden(lanes[:, first : first + CHUNK], first)
        for i in range(len(heads.geometry)):
            heads.merge(i, by_prompt)
        if first < LENGTH // 2:
            continue
        full = right[n - LENGTH // 2 // CHUNK]
        for v in range(len(variants)):
            logs = model.logs(hidden[v * count : (v + 1) * count])
            total[v] += (full.exp() * (full - logs)).sum((1, 2)).double()
    return {v: (total[n] / (LENGTH // 2)).tolist() for n, v in enumerate(variants)}


def stored() -> dict[str, Any]:
    """Return the results of earlier runs."""
    path = RESULTS / f"{NAME}.json"
    empty: dict[str, Any] = {"costs": {}, "recall": {}, "kl": {}}
    return empty | (json.loads(path.read_text()) if path.exists() else {})


def mean_cost(of: str = "costs") -> NDArray[np.float64]:
    """Return the mean costs [layers, heads, GRID] of all texts in nats; `of` is costs or recall."""
    return np.mean([np.array(x) for x in stored()[of].values()], 0)


def both_costs() -> NDArray[np.float64]:
    """Return the costs [layers, heads, GRID] of texts plus recall, each relative to its sum in GRID[1] slots."""
    return np.sum([x / x[..., 1].sum() for x in (mean_cost(), mean_cost("recall"))], 0)


def keep(figures: dict[str, Any]) -> None:
    """Write the results, without the description of an earlier run."""
    kept = {key: figures[key] for key in ("costs", "recall", "kl")}
    save(NAME, {"recipe": RECIPE, "length": LENGTH, "grid": GRID, **kept})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("costs", "shares", "compare"))
    parser.add_argument("--texts", default="0,1,2,3", help="the numbers of the texts")
    parser.add_argument("--recall", action="store_true", help="measure the costs of answers")
    parser.add_argument("--judged", action="store_true", help="compare on the texts of docs/measurements/budgets.md")
    parser.add_argument("--slots", default="51,128,256")
    parser.add_argument(
        "--variants", default="uniform,shipped,layers,heads", help="the variants of `compare`, see above"
    )
    arguments = parser.parse_args()
    if arguments.what == "shares":
        cost = mean_cost()
        for slots in map(int, arguments.slots.split(",")):
            print(*(json.dumps({kind: shares_of(kind, slots, cost)}) for kind in ("layers", "heads")), sep="\n")
            print(json.dumps({"facts": shares_of("heads", slots, both_costs())}))
        return
    model = Model()
    numbers = [int(n) for n in arguments.texts.split(",")]
    if arguments.what == "costs":
        texts = [(ids, range(LENGTH // 2, LENGTH)) for ids in other_texts(model.tokenizer, numbers)]
        answers = [(x.ids, x.counted) for x in recall_texts(numbers)] if arguments.recall else []
        for n, (ids, counted) in zip(numbers, answers or texts, strict=True):
            cost = costs(model, ids, counted)
            print(n, np.array2string(cost.sum((0, 1)), precision=4), flush=True)
            figures = stored()
            figures["recall" if arguments.recall else "costs"][str(n)] = cost.round(7).tolist()
            keep(figures)
        return
    judged = judged_texts(model.tokenizer) if arguments.judged else []
    texts = [judged[n] for n in numbers] if judged else other_texts(model.tokenizer, numbers)
    for slots in map(int, arguments.slots.split(",")):
        for variant, kl in compare(model, texts, slots, arguments.variants.split(",")).items():
            figures = stored()
            rows = figures["kl"].setdefault("judged" if arguments.judged else "other", {})
            row = rows.setdefault(f"{slots} slots, {variant}", {})
            row |= {str(n): round(x, 5) for n, x in zip(numbers, kl, strict=True)}
            keep(figures)
            print(slots, variant, f"{np.mean(kl):.4f}", [f"{x:.4f}" for x in kl], flush=True)


if __name__ == "__main__":
    main()
