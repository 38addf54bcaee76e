"""`kvexport calibrate --of text`: budgets of layers in proportion to the loss that evictions from each layer cause."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.cache import LayerCache, resized
from kvexport.cache_planning import plan_cache
from kvexport.engine.engine import Engine
from kvexport.engine.lanes import Lanes
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.evaluate.corpus import library_sources
from kvexport.evaluate.language import Ids, Language, Words, language_of
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.statistics import Estimate, mean
from kvexport.language.tokenizer import FILE_NAME, Tokenizer
from kvexport.methods.base import Method
from kvexport.recipe.fields import Recipe
from kvexport.recipe.load import load_recipe
from kvexport.report.sections import KeyValues, Section, Table
from kvexport.terminal import Progress, silent

LENGTH = 1024  # tokens of a text, unless the recipe's sequences are shorter
KEPT = 8  # the compressed layer keeps one token of this many
CHUNKS = 32  # least number of chunks of a text, so that each merge evicts few tokens
LANES = 8  # lanes of one run: the full cache and seven compressed layers
LEAST = 0.05  # least share relative to the mean: a layer that costs nothing on these texts may matter on others


@dataclass(frozen=True)
class Shares:
    """The measured costs of evictions by layer, and the shares of the cache budget that follow.

    Attributes:
        recipe: Name of the recipe.
        length: Tokens of a text.
        slots: Slots of the one layer that is compressed.
        layers: KL to the full cache with that layer compressed: nats, mean over texts.
        shares: Shares of the budget by layer, relative to their mean.
    """

    recipe: str
    length: int
    slots: int
    layers: list[Estimate]
    shares: list[float]

    def to_json(self) -> dict[str, Any]:
        """Return the measured costs and the budget shares of all layers as JSON values."""
        return {**asdict(self), "setting": setting_of(self.shares)}

    def sections(self) -> list[Section]:
        """Return the sections of the report on the costs and budget shares of layers."""
        rows = [
            (i, e.value, f"{e.low:.3g} to {e.high:.3g}", share)
            for i, (e, share) in enumerate(zip(self.layers, self.shares, strict=True))
        ]
        note = f"KL to the full cache if that layer alone is compressed, to {self.slots} slots."
        heads = ("layer", "nats", "95 %", "share")
        summary = summary_of(self.recipe, self.layers[0].count, self.length, self.shares)
        return [summary, Table("Cost of evictions", heads, rows, note)]


def setting_of(shares: Sequence[float] | Sequence[Sequence[float]]) -> str:
    """Return budget shares of layers, or of their KV heads, as an argument of the option `--set`."""
    return f"cache.allocation.shares={shares}"


def summary_of(recipe: str, texts: int, length: int, shares: Sequence[float] | Sequence[Sequence[float]]) -> KeyValues:
    """Return the summary of a calibration report: the texts that were read, and the lines to write into the recipe."""
    summary: dict[str, str] = {
        "recipe": recipe,
        "texts": f"{texts} of {length} tokens",
        "write": f"cache: {{allocation: {{kind: listed, shares: {shares}}}}}",
        "or": f"--set cache.allocation.kind=listed --set {setting_of(shares)}",
    }
    return KeyValues("Calibration", summary)


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
    """Measure the cost of evictions in every layer, and share the recipe's cache budget accordingly.

    The recipe's model is built with its method and a full cache. One layer at a time is compressed to an eighth of the
    tokens of each of `passages` texts.

    Args:
        recipe: Name or file of the recipe.
        overrides: Changes of the recipe, as `--set` takes them.
        length: Tokens of a text; None for 1,024, or the recipe's longest sequence if that is shorter.
        passages: The number of texts.
        seed: Seed of the texts.
        text: The text that samples are cut from; None for source of Python's library that no evaluation uses.
        progress: Shows the stages.

    Raises:
        UsageError: Layers of the recipe cannot have different budgets (it evicts nothing, its positions are those in
            the cache, or an eighth cannot hold sinks and recent slots), or the checkpoint has no tokenizer.
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
        problem = f"an eighth of {length} tokens is too little for one layer: {error.problem}"
        raise UsageError(problem, "--length with more tokens, or fewer cache.sinks or cache.recent") from error
    language = text_language(shape.checkpoint.path, text)
    texts = [language.text(np.random.default_rng([seed, i]), length) for i in range(passages)]
    with tempfile.TemporaryDirectory(prefix="kvexport-calibrate-") as folder:
        artifact = build(sized(own.resolved, length, length), Path(folder) / "whole", progress=progress)
        engine = load(artifact, verify=False)
        with progress("compressing one layer after another", passages * len(layers)) as bar:
            losses = np.stack([text_losses(engine, ids, at, layers, bar.advance) for ids, at in texts])
    return Shares(own.name, length, slots, [mean(loss) for loss in losses.T], shares_of(losses.mean(0)))


def require_budgets(recipe: Recipe) -> None:
    """Raise UsageError if the layers of a recipe cannot have different cache budgets."""
    if not recipe.cache.build_method().compresses:
        problem = f"this recipe's cache evicts nothing (method {recipe.cache.method}), in no layer"
        raise UsageError(problem, "--set cache.method=ballot, or what you want to build")
    if recipe.cache.positions == "cache":
        problem = "cache.positions is cache, where all layers hold the same number of entries"
        raise UsageError(problem, "--set cache.positions=absolute")


def shares_of(losses: NDArray[np.float64]) -> list[float]:
    """Return shares of the cache budget, relative to their mean, from the eviction loss of each layer.

    The shares are the square roots of the losses. If a layer's loss is inversely proportional to its slots, which is
    about what measurements show, these shares minimize ``sum loss_i / slots_i``.
    """
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
    """Return the loss [layers] of compressing the cache of a single layer: KL(full || compressed) in nats.

    Args:
        engine: An engine that evicts nothing, keeps the method's statistics, and returns the logits of every token.
        ids: Token ids of the text.
        counted: The evaluated positions.
        layers: The compressed cache of each layer; merges bring a layer within its budget after every chunk.
        advance: Called with the number of finished runs.
    """
    method = engine.manifest.recipe.cache.build_method()
    losses = np.zeros(len(layers))
    for first in range(0, len(layers), LANES - 1):
        compressed = range(first, min(first + LANES - 1, len(layers)))
        lanes = engine.lanes(1 + len(compressed))  # lane 0 has the full cache
        for start in range(0, len(ids), lanes.prefill_chunk):
            tokens = ids[start : start + lanes.prefill_chunk]
            logits = lanes.append([tokens] * lanes.count, prefill=True)
            at = [p - start for p in counted if start <= p < start + len(tokens)]
            whole = log_softmax(logits[0, at])
            for lane, i in enumerate(compressed, 1):
                losses[i] += float((np.exp(whole) * (whole - log_softmax(logits[lane, at]))).sum())
                _merge(lanes, lane, i, layers[i], method)
        advance(len(compressed))
    return losses / len(counted)


def _merge(lanes: Lanes, lane: int, i: int, layer: LayerCache, method: Method) -> None:
    """Evict and merge entries of layer i of a lane until its cache is within its budget, as MergeCache does."""
    import torch

    from kvexport.export.graph.graphs import merge_attributes
    from kvexport.ops.layer_state import layer_merge_cache

    state = lanes.read(lane, [tensor.past(i) for tensor in layer.state])
    used = (len(state[layer.state[2].past(i)]) // layer.kv_heads,) * layer.kv_heads
    if used[0] <= layer.budget[0]:
        return
    before = [torch.from_numpy(state[tensor.past(i)])[None] for tensor in layer.state]
    with torch.inference_mode():
        merged = layer_merge_cache(*before, attributes=merge_attributes(layer, method))
    kept = {}
    for tensor, x in zip(layer.state, merged, strict=True):
        axis, array = tensor.slot_axis, x.numpy()
        kept[tensor.past(i)] = (array if axis is None else resized(array, axis, used, layer.budget))[0]
    lanes.write(lane, kept)


def sized(recipe: dict[str, Any], length: int, slots: int) -> Recipe:
    """Return the recipe with a budget of `slots` in every layer, for texts of `length` tokens.

    `recipe` is given as plain data.
    """
    cache = {**recipe["cache"], "budget": slots, "slack": None, "allocation": {"kind": "uniform"}}
    limits = {**recipe["limits"], "max_length": length, "max_batch": LANES}
    chunk = max(1, min(recipe["export"]["prefill_chunk"], length // CHUNKS))
    export = {**recipe["export"], "prefill_chunk": chunk, "logits": "all"}
    return Recipe.model_validate({**recipe, "cache": cache, "limits": limits, "export": export})


def text_language(checkpoint: Path, text: str | None) -> Language:
    """Return the source of calibration texts: `text`, or library source that no evaluation uses.

    Raises:
        UsageError: The checkpoint has no tokenizer.
    """
    if not (checkpoint / FILE_NAME).exists():
        raise UsageError(f"{checkpoint} has no {FILE_NAME}, without which no text can be read", "put it there")
    tokenizer = Tokenizer.from_folder(checkpoint)
    language = language_of(tokenizer, text)
    if text is None and not isinstance(language, Words):
        return language_of(tokenizer, "\n".join(library_sources(held_out=False).values()))
    return language
