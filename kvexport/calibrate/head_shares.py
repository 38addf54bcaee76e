"""`kvexport calibrate --of heads`: budgets of KV heads in proportion to the loss that evictions from each head cause.

A text is read once with the full cache. For every head, small caches are computed from the same queries; with such a
cache the head's output differs from that with the full cache by d. To second order this costs a KL divergence of half
the square of g d, where g is the gradient of a random projection of the logits whose mean square is their Fisher
information. One forward pass and a few backward passes thus measure all heads and several budgets. The estimate
neglects interactions between the d of two tokens or two heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvexport.allocation import least_slots
from kvexport.cache import CachePlan, LayerGeometry
from kvexport.cache_planning import plan_cache
from kvexport.calibrate.layer_shares import LENGTH, require_budgets, setting_of, sized, summary_of, text_language
from kvexport.calibrate.recall_layers import fact_passages
from kvexport.errors import UsageError
from kvexport.evaluate.language import Ids
from kvexport.evaluate.recall import Passage
from kvexport.evaluate.tasks import TASKS, Sample
from kvexport.methods.base import Method
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.report.sections import Section, Table
from kvexport.terminal import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor, nn

TIMES = (0.5, 1.0, 2.0, 4.0, 8.0)  # the measured budgets, relative to the recipe's share of the text
PROBES = 2  # random projections of the logits
RECALL = "recall"  # `kvexport calibrate --of recall`: questions about facts in a text


@dataclass(frozen=True)
class HeadShares:
    """The measured costs of evictions by KV head, and the shares of the cache budget that follow.

    Attributes:
        recipe: Name of the recipe.
        length: Tokens of a text.
        texts: The number of texts of each task.
        budgets: The measured budgets, in slots of a head.
        costs: By task, layer, KV head and budget: nats, mean over texts.
        shares: Shares of the budget by layer and KV head, relative to their mean.
    """

    recipe: str
    length: int
    texts: int
    budgets: list[int]
    costs: dict[str, list[list[list[float]]]]
    shares: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """Return the measured costs and the budget shares of all KV heads as JSON values."""
        return {**asdict(self), "setting": setting_of(self.shares)}

    def sections(self) -> list[Section]:
        """Return the sections of the report on the costs and budget shares of KV heads."""
        cost = np.concatenate([np.array(costs) for costs in self.costs.values()], -1)
        rows: list[Sequence[str | int | float]] = [
            (layer, head, *(f"{x:.3g}" for x in cost[layer, head]), share)
            for layer, shares in enumerate(self.shares)
            for head, share in enumerate(shares)
        ]
        heads = ("layer", "KV head", *(f"{task}, {n} slots" for task in self.costs for n in self.budgets), "share")
        note = "Loss in nats if that head alone has this many slots, to second order."
        summary = summary_of(self.recipe, self.texts * len(self.costs), self.length, self.shares)
        return [summary, Table("Cost of evictions", heads, rows, note)]


def calibrate_heads(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    length: int | None = None,
    passages: int = 4,
    seed: int = 0,
    text: str | None = None,
    tasks: Sequence[str] = ("text",),
    progress: Callable[[str, int | None], Progress] = silent,
) -> HeadShares:
    """Measure the cost of evictions in every KV head, and share the recipe's cache budget accordingly.

    The recipe's model runs in PyTorch over `passages` texts of each task. All tasks have the same weight: the costs of
    a task are relative to its loss if every head has the recipe's mean budget.

    Args:
        recipe: Name or file of the recipe.
        overrides: Changes of the recipe, as `--set` takes them.
        length: Tokens of a text; None for 1,024, or the recipe's longest sequence if that is shorter.
        passages: The number of texts of each task.
        seed: Seed of the texts and random projections.
        text: The text that samples are cut from; None for source of Python's library that no evaluation uses, and
            Python's manual for RECALL.
        tasks: RECALL, or names of `kvexport.evaluate.tasks`.
        progress: Shows the stages.

    Raises:
        UsageError: Heads of the recipe cannot have different budgets, its budget cannot hold sinks and recent slots, a
            layer does not attend to every position alike (sliding windows, soft caps, sink logits), the checkpoint has
            no tokenizer, or a task is unknown.
    """
    from kvexport.export.build import read_model
    from kvexport.export.hooks.attention import IMPLEMENTATION
    from kvexport.export.model.hf_model import fix_rotary_frequencies
    from kvexport.validate.weights import load_model

    own = load_recipe(recipe, overrides)
    require_budgets(own.recipe)
    with progress("reading the checkpoint", None):
        shape = read_model(own.recipe)
    for i, layer in enumerate(shape.geometry):
        if layer.sliding_window or layer.softcap or layer.sink_logits:
            problem = f"layer {i} has a sliding window, a softcap or sink logits, of which this knows nothing"
            raise UsageError(problem, "--of text, which measures layers")
    length = length or min(LENGTH, own.recipe.limits.max_length)
    budgets = measured_budgets(own.recipe, length)
    plans = [plan_cache(sized(own.resolved, length, slots), shape.geometry) for slots in budgets]
    chunk = sized(own.resolved, length, length).export.prefill_chunk
    samples_of = {task: _samples(task, shape.checkpoint.path, text, length, passages, seed) for task in tasks}
    model = load_model(shape.checkpoint, own.recipe, IMPLEMENTATION).float().requires_grad_(False)
    fix_rotary_frequencies(model, own.recipe.rotary_length)
    method, costs = own.recipe.cache.build_method(), dict[str, NDArray[np.float64]]()
    with progress("reading texts", passages * len(tasks)) as bar:
        for task, samples in samples_of.items():
            text_costs = []
            for sample in samples:
                text_costs.append(head_costs(model, shape.geometry, method, plans, sample.ids, sample.counted, chunk))
                bar.advance(1)
            costs[task] = np.mean(text_costs, 0)
    cost = sum(each / max(each[..., 1].sum(), 1e-12) for each in costs.values())
    shares = head_shares_of(np.asarray(cost), budgets, budgets[1], least_slots(own.recipe), length)
    nats = {task: np.vectorize(lambda x: float(f"{x:.4g}"))(each).tolist() for task, each in costs.items()}
    return HeadShares(own.name, length, passages, budgets, nats, shares)


def _samples(task: str, checkpoint: Path, text: str | None, length: int, count: int, seed: int) -> list[Sample]:
    """Return the texts of a calibration task. For RECALL these are passages with room for six questions and answers."""
    if task == RECALL:
        return [asked_and_answered(each) for each in fact_passages(checkpoint, text, length * 7 // 8, count, seed)]
    language = text_language(checkpoint, text)
    known = [RECALL, *(name for name in TASKS if name not in language.lacks)]
    if task not in known:
        raise UsageError(f"there is no task {task!r} for this model", f"--tasks with some of {', '.join(known)}")
    make, depths = TASKS[task].make, TASKS[task].depths
    return [make(language, np.random.default_rng([seed, i]), length, depths[i % len(depths)]) for i in range(count)]


def asked_and_answered(passage: Passage) -> Sample:
    """Return a passage followed by every question about it and the answer. Only the answers' tokens are evaluated."""
    ids, counted = list(passage.ids), list[int]()
    for question in passage.questions:
        ids += question.ids
        counted += range(len(ids) - 1, len(ids) - 1 + len(question.answer))
        ids += question.answer
    return Sample(ids, len(passage.ids), counted)


def measured_budgets(recipe: Recipe, length: int) -> list[int]:
    """Return the cache budgets to measure, in slots of a head. The second is the recipe's share of `length` tokens.

    Raises:
        UsageError: That share cannot hold sinks, recent slots and two more.
    """
    at, least = recipe.budget / recipe.limits.max_length * length, math.ceil(least_slots(recipe))
    if not least < at < length:
        raise UsageError(
            f"{recipe.budget} slots of {recipe.limits.max_length} positions are {at:.0f} of a text of {length} tokens, "
            f"which should be above {least}, and less than the text",
            "--length with more tokens, or another cache.budget",
        )
    return sorted({min(max(round(at * times), least), (round(at) + length) // 2) for times in TIMES} | {round(at)})


def head_costs(
    model: Any,
    geometry: Sequence[LayerGeometry],
    method: Method,
    plans: Sequence[CachePlan],
    ids: Ids,
    counted: Sequence[int],
    chunk: int,
) -> NDArray[np.float64]:
    """Return the cost [layers, heads, plans] of every head's evictions, in nats per evaluated position.

    Args:
        model: The model in float32, with the attention hook.
        geometry: The attention geometry of every layer.
        method: The compression method.
        plans: Cache plans, one for each measured budget.
        ids: Token ids of the text.
        counted: The evaluated positions.
        chunk: Tokens between merges.
    """
    import torch

    from kvexport.export.hooks.attention import PassThroughCache, attending

    full = _Full(geometry)
    with torch.enable_grad(), attending(full):
        position = torch.arange(len(ids))[None]
        kept = torch.tensor(counted)
        inputs = {"input_ids": torch.tensor([ids]), "position_ids": position, "logits_to_keep": kept}
        logits = model(**inputs, past_key_values=PassThroughCache(), use_cache=True).logits.float()
    probability = torch.softmax(logits.detach(), -1)
    rng, gradients = torch.Generator().manual_seed(0), []
    for probe in range(PROBES):
        drawn = probability.sqrt() * (torch.randint(0, 2, probability.shape, generator=rng) * 2 - 1)
        along = drawn - probability * (probability.sqrt() * drawn).sum(-1, keepdim=True)
        outputs = [call[-1] for call in full.calls]
        gradients.append(torch.autograd.grad((logits * along).sum(), outputs, retain_graph=probe + 1 < PROBES))
    costs = np.zeros((len(geometry), geometry[0].kv_heads, len(plans)))
    with torch.no_grad():
        for i, (query, key, value, output) in enumerate(full.calls):
            for p, plan in enumerate(plans):
                d = _compressed(plan, i, geometry[i], method, (query, key, value), chunk) - output
                for gradient in gradients:
                    change = (gradient[i] * d).reshape(costs.shape[1], -1, *d.shape[2:]).sum((1, 3))  # [H, T]
                    costs[i, :, p] += 0.5 * change.square().sum(1).double().numpy() / PROBES / len(counted)
    return costs


class _Full:
    """Full attention that stores every layer's query, key, value and output."""

    def __init__(self, geometry: Sequence[LayerGeometry]) -> None:
        self.geometry = geometry
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Return causal attention [1, Hq, T, Dv] over all positions, and store the layer's tensors.

        The stored tensors are query, key, value and output.
        """
        from torch.nn.functional import scaled_dot_product_attention

        layer: int = module.layer_idx  # type: ignore[assignment]
        scale = self.geometry[layer].scale
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        output.requires_grad_(True)
        self.calls.append((query.detach(), key.detach(), value.detach(), output))
        return output

    def mask(self, mask_function: Any) -> Any:
        """Return None in place of an attention mask, because `attend` is causal itself."""
        return None


def _compressed(
    plan: CachePlan, i: int, layer: LayerGeometry, method: Method, inputs: Sequence[Tensor], chunk: int
) -> Tensor:
    """Return the attention output [1, Hq, T, Dv] of layer i with the compressed cache of `plan`."""
    import torch

    from kvexport.export.graph.graphs import merge_attributes
    from kvexport.export.graph.tracer import layer_attributes
    from kvexport.ops.merge_cache import merge_cache
    from kvexport.ops.vote_attention import vote_attention

    cache, parts = plan.caches[i], []
    dtypes = cache.dtypes()
    state: Sequence[Tensor] = [torch.from_numpy(np.zeros(x, dtypes[name])) for name, x in cache.shapes(1).items()]
    for first in range(0, inputs[0].shape[2], chunk):
        new = [x[:, :, first : first + chunk] for x in inputs]
        tokens = new[0].shape[2]
        position = torch.arange(first, first + tokens)[None]
        arguments: Any = (*new, position, torch.tensor([[tokens]]), *state[:5], None, *state[5:])
        output, *state = vote_attention(*arguments, attributes=layer_attributes(method, layer))
        parts.append(output)
        if int((state[2] > 0).sum(-1).max()) > cache.budget:
            state = merge_cache(*state, attributes=merge_attributes(cache, method))
    return torch.cat(parts, 2)


def head_shares_of(
    cost: NDArray[np.float64], budgets: Sequence[int], slots: int, least: float, most: int
) -> list[list[float]]:
    """Return the cheapest budget shares [layers, heads], relative to their mean, at `slots` mean slots of a head."""
    each = cost.reshape(-1, cost.shape[-1])
    chosen = cheapest(each, budgets, slots * len(each), math.ceil(least), most)
    return (chosen / slots).round(2).reshape(cost.shape[:2]).tolist()  # type: ignore[no-any-return]


def cheapest(cost: NDArray[np.float64], budgets: Sequence[int], total: int, least: int, most: int) -> NDArray[np.int64]:
    """Return the cache budgets in slots, [n] for n heads, with the least sum of eviction costs.

    Args:
        cost: [n, budgets] nats. Between the measured budgets the logarithm of the cost is linear; beyond them it is
            extrapolated.
        budgets: The measured budgets, in slots.
        total: The sum of all slots.
        least: The smallest number of slots of a head.
        most: The largest number; it costs nothing.
    """
    slots = np.arange(least, most + 1)
    x, y = np.log(budgets), np.log(np.maximum(np.minimum.accumulate(cost, -1), 1e-12))
    piece = np.clip(np.searchsorted(x, np.log(slots)) - 1, 0, len(budgets) - 2)
    slope = (y[:, 1:] - y[:, :-1]) / (x[1:] - x[:-1])
    curve = np.exp(y[:, piece] + slope[:, piece] * (np.log(slots) - x[piece]))
    curve[:, -1] = 0.0
    low, high = -40.0, 10.0
    for _ in range(100):
        price = (low + high) / 2
        enough = slots[(curve + np.exp(price) * slots).argmin(-1)].sum() >= total
        low, high = (price, high) if enough else (low, price)
    chosen: NDArray[np.int64] = slots[(curve + np.exp(high) * slots).argmin(-1)].astype(np.int64)
    rest = total - int(chosen.sum())  # slots left over because a head's best budget jumps
    for n in range(abs(rest)):
        chosen[n % len(chosen)] += np.sign(rest)
    return chosen
