"""The stages of a build, which `kvexport.export.build` runs one after another.

The stages trace the model while its weights are written, write the ONNX graphs, and describe the artifact. This module
imports torch and transformers, which commands that only read an artifact do without.
"""

import gc
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from kvexport import backends
from kvexport.artifact.manifest import Graphs, Limits, Manifest, ModelFacts
from kvexport.export.forked import forked
from kvexport.export.graph import tracer
from kvexport.export.graph.adapters import put_adapters
from kvexport.export.graph.graphs import (
    MOST_LOGITS,
    Attention,
    attentions_of,
    finish_decoder,
    finish_encoder,
    merge_model,
    open_slots,
    top_logits_model,
)
from kvexport.export.model.hf_model import length_notes
from kvexport.export.model.tensors import ModelShape
from kvexport.export.passes import DECODER_PASSES, GRAPH_CHECKS
from kvexport.export.passes.fusions import add_adapters
from kvexport.export.vision import Vision
from kvexport.export.weights.specs import packed_formats, packings, stored_specs, weight_notes, weight_specs
from kvexport.export.weights.write import (
    DATA_FILE,
    SharedWeights,
    Spec,
    WrittenWeights,
    link_shared,
    total_bytes,
    write_weights,
)
from kvexport.ops.onnx_function import keep_merge_functions
from kvexport.packages import installed_version
from kvexport.plan.cache import CachePlan
from kvexport.plan.planner import cache_notes, plain_attention, selected_plan
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.shards import some_names
from kvexport.terminal import Progress
from kvexport.version import __version__

ShowProgress = Callable[[str, int | None], Progress]


@dataclass(frozen=True)
class Traced:
    decoder: ir.Model
    # (inputs, outputs) of each projection that takes LoRA adapters, by the name of its module
    adapters: dict[str, tuple[int, int]]
    attentions: list[Attention]  # of each layer
    merge: onnx.ModelProto | None  # merge graph, or None if no layer merges
    written: WrittenWeights  # weights in the artifact


def vocabulary_of(shape: ModelShape) -> int:
    count: int = shape.model.config.get_text_config().vocab_size
    return count


def choose_weights(
    shape: ModelShape, recipe: Recipe, progress: ShowProgress, vision: Vision | str, left_out: Sequence[str]
) -> list[Spec]:
    """Decide for each weight of an artifact whether it is copied, cast or rounded; show notes for the user."""
    chosen = weight_specs(shape.checkpoint, shape.model, recipe)
    specs, config = stored_specs(chosen, recipe), shape.model.config
    notes = length_notes(config, recipe.rotary_length)
    if isinstance(vision, Vision):
        own = {spec.name for spec in specs}
        specs += [spec for spec in vision.weights if spec.name not in own]
    elif vision:
        notes.insert(0, f"the text part of {config.model_type} is built, which reads no images: {vision}")
    notes += [plain] if (plain := plain_attention(shape.geometry, shape.plan)) else []
    notes += [*cache_notes(recipe, shape.plan), *weight_notes(shape.checkpoint, shape.model, recipe, chosen)]
    if left_out:
        notes.append(f"left out, because the decoder has no part for them: {some_names(left_out)}")
    for note in notes:
        with progress(f"note: {note}", None):
            pass
    return specs


def trace_and_write(
    shape: ModelShape,
    specs: list[Spec],
    recipe: Recipe,
    folder: Path,
    shared: SharedWeights | None,
    progress: ShowProgress,
    vision: Vision | str = "",
) -> Traced:
    """Trace the model while one process writes the weights into `folder` and another makes the merge graph."""
    method, data = recipe.cache.build_method(), folder / DATA_FILE
    advance: Callable[[int], None] = lambda _: None  # noqa: E731
    size = 0

    def write() -> bytes:
        data.unlink(missing_ok=True)  # of a process that failed
        if shared is not None and shared.specs == tuple(specs):
            return link_shared(shared, folder, advance).to_json()
        return write_weights(specs, folder, advance).to_json()

    def watch() -> None:
        nonlocal size
        before, size = size, data.stat().st_size if data.exists() else 0
        advance(size - before)

    with (
        # A process with threads, such as that of a progress bar, cannot fork.
        forked(partial(_merge_bytes, shape.plan, method)) as merge_bytes,
        forked(write, watch) as weights,
        progress("tracing the model, writing its weights", total_bytes(specs)) as bar,
    ):
        advance = bar.advance
        attributes = [
            tracer.layer_attributes(method, layer, cache.value_prefix)
            for layer, cache in zip(shape.geometry, shape.plan.caches, strict=True)
        ]
        decoder = tracer.trace_decoder(
            shape.model,
            shape.mode,
            shape.plan,
            last_logits=not recipe.all_logits,
            attributes=attributes,
            row_size=vision.spec.hidden if isinstance(vision, Vision) else 0,
            bidirectional=isinstance(vision, Vision) and vision.spec.bidirectional,
        )
        taken = put_adapters(decoder.graph, recipe.adapters.targets) if recipe.adapters.count else {}
        attentions = attentions_of(shape.plan, attributes, shape.geometry, recipe.model.dtype)
        merge = _parse_merge(merge_bytes(), method)
        gc.collect(0)  # frees the traces, since the collector is paused; the weights may still be being written
        return Traced(decoder, taken, attentions, merge, WrittenWeights.from_json(weights()))


def write_graphs(
    traced: Traced, shape: ModelShape, specs: list[Spec], recipe: Recipe, folder: Path, vision: Vision | str = ""
) -> Graphs:
    # On GPUs, the matrix products of LoRA adapters stay nodes of their own.
    on_gpu = backends.get(recipe.backend.name).needs_gpu(recipe)
    passes = [one for one in DECODER_PASSES if not (on_gpu and one is add_adapters)]
    decoder = finish_decoder(
        traced.decoder,
        traced.written.locations,
        folder,
        traced.attentions,
        packings(specs),
        passes,
        library=backends.get(recipe.backend.name).library_products(recipe),
    )
    if selected_plan(recipe, shape.plan) is not None:
        open_slots(decoder, shape.plan)
    graphs = Graphs("decoder.onnx", None if traced.merge is None else "merge.onnx", "top_logits.onnx")
    models = {"decoder": decoder, "merge": traced.merge, "top_logits": top_logits_model(vocabulary_of(shape))}
    if isinstance(vision, Vision):
        graphs = replace(graphs, vision="vision.onnx")
        models["vision"] = finish_encoder(vision.graph, traced.written.locations, folder)
    for kind, file in graphs.files():
        model = models[kind]
        assert model is not None
        for check in GRAPH_CHECKS:
            check(model)
        (folder / file).write_bytes(model.SerializeToString(deterministic=True))
    return graphs


def describe(
    recipe: Recipe,
    name: str,
    shape: ModelShape,
    graphs: Graphs,
    specs: Sequence[Spec],
    traced: Traced,
    vision: Vision | str = "",
) -> Manifest:
    own = ("onnx", "onnxscript", "torch", "transformers", "numpy")
    of_backends = (package.name for backend in backends.all_backends() for package in backend.packages)
    return Manifest(
        name=name,
        recipe=recipe,
        model=ModelFacts(
            type=shape.model.config.get_text_config().model_type,
            fingerprint=shape.checkpoint.fingerprint,
            vocabulary=vocabulary_of(shape),
            layers=len(shape.geometry),
            query_heads=tuple(x.query_heads for x in shape.geometry),
            packed=packed_formats(specs),
        ),
        cache=shape.plan,
        adapters=traced.adapters,
        images=vision.spec if isinstance(vision, Vision) else None,
        no_images=vision if isinstance(vision, str) else "",
        plain_attention=plain_attention(shape.geometry, shape.plan),
        graphs=graphs,
        top_logits=min(MOST_LOGITS, vocabulary_of(shape)),
        limits=Limits(
            max_length=recipe.limits.max_length,
            max_batch=recipe.limits.max_batch,
            prefill_chunk=recipe.export.prefill_chunk,
            merge_every=recipe.cache.merge_every,
        ),
        operators={
            "VoteAttention": "function" if shape.geometry else None,
            "MergeCache": "function" if graphs.merge else None,
        },
        versions={
            "kvexport": __version__,
            "python": platform.python_version(),
            **{package: installed_version(package) for package in own},
            **{package: version for package in of_backends if (version := installed_version(package))},
        },
    )


def _merge_bytes(plan: CachePlan, method: Any) -> bytes:
    model = merge_model(plan, method)
    return b"" if model is None else model.SerializeToString()


def _parse_merge(model: bytes, method: Any) -> onnx.ModelProto | None:
    if not model:
        return None
    parsed: onnx.ModelProto = onnx.ModelProto.FromString(model)
    keep_merge_functions(method, parsed.functions)
    return parsed
