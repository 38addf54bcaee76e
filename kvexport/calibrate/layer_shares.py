"""`kvexport calibrate --of text`: what each layer's evictions cost a text, and the shares of the budget that follow."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import LayerCache, plan_cache
from kvexport.engine.engine import Engine, load
from kvexport.engine.lanes import Lanes
from kvexport.errors import UsageError
from kvexport.evaluate.corpus import library_sources
from kvexport.evaluate.language import Ids, Language, Words, language_of
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.statistics import Estimate, mean
from kvexport.language.text import FILE_NAME, Tokenizer
from kvexport.methods.base import Method
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.report.sections import KeyValues, Section, Table
from kvexport.terminal import Progress, silent

LENGTH = 1024  # tokens of a text, where the recipe's sequences are not shorter
KEPT = 8  # a layer alone keeps one token in so many
CHUNKS = 32  # at least, so that merges come a few tokens at a time
LANES = 8  # the full cache and seven layers at a time
LEAST = 0.05  # of the mean share: a layer that cost nothing here may cost something elsewhere


@dataclass(frozen=True)
class Shares:
    """length: tokens of a text. slots: of the layer that alone is compressed. layers: the KL to the full cache then,
    nats, mean over texts. shares: of the budget, relative to their mean."""

    recipe: str
    length: int
    slots: int
    layers: list[Estimate]
    shares: list[float]

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {**asdict(self), "setting": setting_of(self.shares)}

    def sections(self) -> list[Section]:
        """For `kvexport.report`."""
        rows = [
            (i, e.value, f"{e.low:.3g} to {e.high:.3g}", share)
            for i, (e, share) in enumerate(zip(self.layers, self.shares, strict=True))
        ]
        note = f"KL to the full cache where that layer alone is compressed, to {self.slots} slots."
        heads = ("layer", "nats", "95 %", "share")
        said = said_of(self.recipe, self.layers[0].count, self.length, self.shares)
        return [said, Table("What a text loses", heads, rows, note)]


def setting_of(shares: Sequence[float] | Sequence[Sequence[float]]) -> str:
    """Shares, of layers or of their KV heads, as `--set` takes them."""
    return f"cache.allocation.shares={shares}"


def said_of(recipe: str, texts: int, length: int, shares: Sequence[float] | Sequence[Sequence[float]]) -> KeyValues:
    """What was read, so many texts of so many tokens, and what to write into the recipe."""
    said: dict[str, str] = {
        "recipe": recipe,
        "texts": f"{texts} of {length} tokens",
        "write": f"cache: {{allocation: {{kind: listed, shares: {shares}}}}}",
        "or": f"--set cache.allocation.kind=listed --set {setting_of(shares)}",
    }
    return KeyValues("Calibration", said)


def calibrate_text(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    length: int | None = None,
    passages: int = 4,
    seed: int = 0,
    text: str | None = None,
    progress: Callable[[str, int | None], Progress] = silent,
) -> Shares:
    """Build the recipe's model with its method and room for everything, compress one layer at a time to an eighth of
    `passages` texts, and share out the budget by what that costs.

    length: tokens of a text, default 1,024 or the recipe's longest sequence. text: what they are cut from, default the
    library's source that nothing is evaluated on. Raises UsageError for a recipe whose layers cannot have different
    budgets (it evicts nothing, its positions are those in the cache, an eighth cannot hold its sinks and recent slots),
    and a checkpoint without a tokenizer.
    """
    from kvexport.export.build import build, read_model

    own = load_recipe(recipe, overrides)
    require_budgets(own.recipe)
    with progress("reading the checkpoint", None):
        shape = read_model(own.recipe)
    length = length or min(LENGTH, own.recipe.limits.max_length)
    slots = max(1, length // KEPT)
    try:
        layers = plan_cache(sized(own.resolved, length, slots), shape.geometry).caches
    except UsageError as error:
        problem = f"an eighth of {length} tokens is too little for a layer alone: {error.problem}"
        raise UsageError(problem, "--length with more tokens, or fewer cache.sinks or cache.recent") from error
    language = text_language(shape.checkpoint.path, text)
    texts = [language.text(np.random.default_rng([seed, i]), length) for i in range(passages)]
    with tempfile.TemporaryDirectory(prefix="kvexport-calibrate-") as folder:
        made = build(sized(own.resolved, length, length), Path(folder) / "whole", progress=progress)
        engine = load(made, verify=False)
        with progress("compressing one layer after another", passages * len(layers)) as bar:
            losses = np.stack([text_losses(engine, ids, at, layers, bar.advance) for ids, at in texts])
    return Shares(own.name, length, slots, [mean(loss) for loss in losses.T], shares_of(losses.mean(0)))


def require_budgets(recipe: Recipe) -> None:
    """Raises UsageError for a recipe whose layers cannot have different budgets."""
    if not recipe.cache.build_method().compresses:
        problem = f"this recipe's cache evicts nothing (method {recipe.cache.method}), in no layer"
        raise UsageError(problem, "--set cache.method=ballot, or what you want to build")
    if recipe.cache.positions == "cache":
        problem = "cache.positions is cache, where all layers hold the same number of entries"
        raise UsageError(problem, "--set cache.positions=absolute")


def shares_of(losses: NDArray[np.float64]) -> list[float]:
    """Shares of the budget, relative to their mean: the square roots of the losses. Where a layer's loss falls as one
    over its slots, which is about what is measured, ``sum loss_i / slots_i`` is smallest so."""
    roots = np.sqrt(np.maximum(losses, 0.0))
    relative = roots / roots.mean() if roots.any() else np.ones_like(roots)
    return [round(max(float(x), LEAST), 2) for x in relative]


def text_losses(
    engine: Engine,
    ids: Ids,
    counted: Sequence[int],
    layers: Sequence[LayerCache],
    advance: Callable[[int], None] = lambda _: None,
) -> NDArray[np.float64]:
    """[layers]: KL(whole || compressed) in nats at the counted positions of a text, where the layer alone is brought
    within the budget of `layers` after every chunk. The engine evicts nothing, keeps the method's statistics, and gives
    the logits of every token."""
    method = engine.manifest.recipe.cache.build_method()
    found = np.zeros(len(layers))
    for first in range(0, len(layers), LANES - 1):
        alone = range(first, min(first + LANES - 1, len(layers)))
        lanes = engine.lanes(1 + len(alone))  # lane 0 is the whole cache
        for start in range(0, len(ids), lanes.prefill_chunk):
            part = ids[start : start + lanes.prefill_chunk]
            logits = lanes.append([part] * lanes.count, prefill=True)
            at = [p - start for p in counted if start <= p < start + len(part)]
            whole = log_softmax(logits[0, at])
            for lane, i in enumerate(alone, 1):
                found[i] += float((np.exp(whole) * (whole - log_softmax(logits[lane, at]))).sum())
                _merge(lanes, lane, i, layers[i], method)
        advance(len(alone))
    return found / len(counted)


def _merge(lanes: Lanes, lane: int, i: int, layer: LayerCache, method: Method) -> None:
    """Bring layer i of a lane within its budget, as the operator does."""
    import torch

    from kvexport.export.graph.graphs import merge_attributes
    from kvexport.ops.merge_cache import merge_cache

    state = lanes.read(lane, [tensor.past(i) for tensor in layer.state])
    if state[layer.state[2].past(i)].shape[-1] <= layer.budget:
        return
    before = [torch.from_numpy(state[tensor.past(i)])[None] for tensor in layer.state]
    with torch.inference_mode():
        merged = merge_cache(*before, attributes=merge_attributes(layer, method))
    kept = {}
    for tensor, x in zip(layer.state, merged, strict=True):
        axis = tensor.slot_axis
        kept[tensor.past(i)] = (x if axis is None else x.narrow(axis, 0, layer.budget))[0].contiguous().numpy()
    lanes.write(lane, kept)


def sized(recipe: dict[str, Any], length: int, slots: int) -> Recipe:
    """The recipe, as plain data, for texts of `length` in uniform budgets."""
    cache = {**recipe["cache"], "budget": slots, "slack": None, "allocation": {"kind": "uniform"}}
    limits = {**recipe["limits"], "max_length": length, "max_batch": LANES}
    chunk = max(1, min(recipe["export"]["prefill_chunk"], length // CHUNKS))
    export = {**recipe["export"], "prefill_chunk": chunk, "logits": "all"}
    return Recipe.model_validate({**recipe, "cache": cache, "limits": limits, "export": export})


def text_language(checkpoint: Path, text: str | None) -> Language:
    """What texts are cut from: `text`, or the library's source that nothing is evaluated on. Raises UsageError for a
    checkpoint without a tokenizer."""
    if not (checkpoint / FILE_NAME).exists():
        raise UsageError(f"{checkpoint} has no {FILE_NAME}, without which no text can be read", "put it there")
    tokenizer = Tokenizer.from_folder(checkpoint)
    language = language_of(tokenizer, text)
    if text is None and not isinstance(language, Words):
        return language_of(tokenizer, "\n".join(library_sources(held_out=False).values()))
    return language
