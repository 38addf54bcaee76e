"""The decision for every parameter of a model: copied, cast, rounded, or kept packed as in the checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from kvexport import backends
from kvexport.errors import UsageError
from kvexport.export.graph.tracer import initializer_names
from kvexport.export.hooks.attention import output_projection
from kvexport.export.hooks.experts import chosen_shares, expert_layouts
from kvexport.export.hooks.latent import expansion_weights
from kvexport.export.model.conversion import PLAIN, assembled_parameters
from kvexport.export.model.hf_model import parameter_sources
from kvexport.export.model.packed_experts import refuse_other_router, why_floats
from kvexport.export.model.tensors import Checkpoint, Dense, Source
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.nbits import NBits, nbits_specs
from kvexport.export.weights.quantize import Rounded, fitting_group
from kvexport.export.weights.write import Spec, TensorSpec, check_specs, total_bytes
from kvexport.ops.packed import PackedFormat
from kvexport.tensor_files.entry import TensorEntry

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe, WeightsSection


EXPANSION = "latent attention multiplies queries and outputs with it, head by head"


def weight_specs(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> list[Spec]:
    """Return the source of every initializer's bytes: a checkpoint tensor to copy or cast, or a computed weight."""
    section, positive = recipe.weights, backends.get(recipe.backend.name).positive_scales(recipe)
    tensors: dict[str, TensorEntry | Source] = {**checkpoint.tensors, **checkpoint.computed}
    if section.bits and any(source.packing for source in checkpoint.computed.values()):
        raise UsageError(
            f"weights.bits is {section.bits}, and the weights of {checkpoint.path} are quantized already",
            "take weights.bits out of the recipe: they are kept as they are",
        )
    refuse_other_router(model, tensors)
    sources = parameter_sources(model, tensors)
    names = initializer_names(model)
    assembled = assembled_parameters(model, tensors, sources)
    missing = [name for name in names if name not in sources and name not in assembled]
    if missing:
        examples = ", ".join(sorted(tensors)[:3])
        raise UsageError(
            f"the checkpoint has no tensor for {len(missing)} parameters of the model, the first is '{missing[0]}' "
            f"(it holds {examples}, ...)",
            "use a checkpoint saved with save_pretrained() of the same model class",
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rounded = _packed_only(rounded_formats(model, recipe))
    embeddings, layouts, expansions = _embeddings(model), expert_layouts(model), expansion_weights(model)

    def whole(source: Source, name: str) -> Source:
        return source if name not in rounded else Rounded(source, rounded[name], positive=positive)

    specs: list[Spec] = []
    for name, initializer in names.items():
        parameter = parameters[name]
        dtype: Any = str(parameter.dtype).removeprefix("torch.")  # a few parameters of a float16 model stay float32
        shape = tuple(parameter.shape)
        plain = name in sources and getattr(assembled.get(name), "layout", PLAIN) == PLAIN
        if name in assembled and not plain:
            layout = layouts.get(name, PLAIN)
            specs.append(ComputedSpec(initializer, whole(assembled[name], name), dtype, layout.artifact_shape(shape)))
            continue
        if name in assembled and name in rounded:
            specs.append(ComputedSpec(initializer, whole(assembled[name], name), dtype, shape))
            continue
        tensor = sources[name]
        if tensor in checkpoint.computed:
            source = checkpoint.computed[tensor]
            if (packing := rounded.get(name)) is not None:
                source = Rounded(source, packing, positive=positive)
            elif source.packing is not None and (
                name in expansions or (name not in layouts and _why_floats(source, recipe, picked=name in embeddings))
            ):
                source = Dense(source)
            layout = layouts.get(name, PLAIN)
            specs.append(ComputedSpec(initializer, source, dtype, layout.artifact_shape(shape)))
            continue
        entry = checkpoint.tensors[tensor]
        copied = TensorSpec(initializer, entry, dtype, shape)
        check_specs([copied])
        if (packing := rounded.get(name)) is None:
            specs.append(copied)
        else:
            specs.append(ComputedSpec(initializer, Rounded(entry, packing, positive=positive), dtype, shape))
    check_specs(specs)
    return specs


def stored_specs(specs: list[Spec], recipe: Recipe) -> list[Spec]:
    return nbits_specs(specs) if backends.get(recipe.backend.name).library_products(recipe) else specs


def rounded_formats(model: Any, recipe: Recipe) -> Iterator[tuple[str, PackedFormat | str]]:
    """Yield (parameter, its packed format or why it stays in floats) if the recipe rounds weights.

    The parameters are projections, the output head, the embeddings and the experts.
    """
    section = recipe.weights
    if section.bits is None:
        return
    packing = PackedFormat(section.bits, section.symmetric, section.group, "none" if section.symmetric else "zero")
    if problem := _problem(packing, recipe):
        raise UsageError(f"weights are to be rounded to {packing.label}, and {problem[0]}", problem[1])
    head = output_projection(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, layout in expert_layouts(model).items():
        if name in parameters and parameters[name].ndim == 3:
            inputs = layout.artifact_shape(tuple(parameters[name].shape))[-1]
            group = fitting_group(section.group, inputs)
            yield name, replace(packing, group=group) if group else _no_group(section)
    expansions = expansion_weights(model)
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or module.weight is None:
            continue
        bits_setting: Any = section.head if module is head or isinstance(module, nn.Embedding) else "same"
        if bits_setting == "float":
            continue
        if f"{prefix}.weight" in expansions:
            yield f"{prefix}.weight", EXPANSION
            continue
        bits = section.bits if bits_setting == "same" else bits_setting
        group = fitting_group(section.group, module.weight.shape[1])
        # Rows of an embedding are read one by one, and a row of 4-bit zero points could begin in the middle of a byte.
        zero = not section.symmetric and bits_setting == "same" and module is not head and isinstance(module, nn.Linear)
        if group is None:
            yield f"{prefix}.weight", _no_group(section)
            continue
        packing = PackedFormat(bits, not zero, group, "zero" if zero else "none")
        problem = _problem(packing, recipe, picked=isinstance(module, nn.Embedding))
        yield f"{prefix}.weight", problem[0] if problem else packing


def _no_group(section: WeightsSection) -> str:
    return f"no group of 16 to {section.group} inputs divides theirs"


def _packed_only(formats: Iterable[tuple[str, PackedFormat | str]]) -> dict[str, PackedFormat]:
    return {name: packing for name, packing in formats if isinstance(packing, PackedFormat)}


def _problem(packing: PackedFormat, recipe: Recipe, *, picked: bool = False) -> tuple[str, str] | None:
    """Return why the recipe's backend cannot read a packed weight of this format, and the fix; None if it can."""
    return backends.get(recipe.backend.name).packing_problem(
        recipe,
        packing.dtype,
        packing.group,
        has_offset=packing.offset != "none",
        has_table=bool(packing.table),
        picked=picked,
    )


def weight_bytes(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> int:
    """Return the bytes of the weights in an artifact; tied weights (one tensor for several parameters) count once."""
    if checkpoint.files:
        return total_bytes(stored_specs(weight_specs(checkpoint, model, recipe), recipe))
    return sum(_parameter_bytes(model, recipe).values())


def expert_bytes(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of the experts' weights in an artifact, and the bytes that a decode step of one token reads."""
    shares = chosen_shares(model)
    if not shares:
        return 0, 0
    if not checkpoint.files:
        sizes = _parameter_bytes(model, recipe)
    else:
        written = {spec.name: spec.nbytes for spec in weight_specs(checkpoint, model, recipe)}
        sizes = {name: written[initializer] for name, initializer in initializer_names(model).items()}
    expert_sizes = {name: sizes[name] for name in shares if name in sizes}
    return sum(expert_sizes.values()), round(sum(size * shares[name] for name, size in expert_sizes.items()))


def _parameter_bytes(model: Any, recipe: Recipe) -> dict[str, int]:
    formats, layouts = _packed_only(rounded_formats(model, recipe)), expert_layouts(model)
    sizes = {}
    for name, parameter in model.named_parameters():
        *outputs, inputs = layouts.get(name, PLAIN).artifact_shape(tuple(parameter.shape))
        packing = formats.get(name)
        sizes[name] = parameter.nbytes if packing is None else packing.nbytes(math.prod(outputs), inputs)
    return sizes


def packings(specs: Sequence[Spec]) -> dict[str, PackedFormat]:
    return {
        spec.name: spec.source.packing
        for spec in specs
        if isinstance(spec, ComputedSpec) and spec.source.packing is not None
    }


def _embeddings(model: Any) -> set[str]:
    return {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, nn.Embedding)}


def _why_floats(source: Source, recipe: Recipe, *, picked: bool) -> str:
    """Return why a packed weight of the checkpoint is stored as floats in the artifact; "" if it stays packed.

    `picked` marks an embedding, whose rows are read one by one. Its columns must not be reordered, and every row of
    zero points has to begin at a byte.
    """
    packing = source.packing
    assert packing is not None
    halves = packing.offset == "zero" and packing.bits == 4 and source.shape[1] // packing.group % 2 == 1
    if picked and (packing.ordered or halves):
        return "its rows cannot be picked one by one"
    problem = _problem(packing, recipe, picked=picked)
    return problem[0] if problem else ""


def packed_formats(specs: Sequence[Spec]) -> dict[str, int]:
    """Return the number of weights that are packed in each format; tied weights count once."""
    computed = [spec.source for spec in specs if isinstance(spec, ComputedSpec)]
    sources = dict.fromkeys(source.source if isinstance(source, NBits) else source for source in computed)
    return dict(sorted(Counter(source.packing.label for source in sources if source.packing is not None).items()))


def weight_notes(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> list[str]:
    """Return notes for the user on weights that the build changes, or does not round although the recipe says so."""
    notes, section = list(checkpoint.notes), recipe.weights
    formats = dict(rounded_formats(model, recipe))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    unfit: dict[str, list[str]] = {}
    for name, packing in formats.items():
        if isinstance(packing, str):
            unfit.setdefault(packing, []).append(f"{name} {list(shapes[name])}")
    notes += [f"kept in floats, because {why}: {_and_more(names)}" for why, names in unfit.items()]
    if other := _other_groups(_packed_only(formats.items()), section):
        notes.append(f"weights.group {section.group} does not divide the inputs of {other}")
    return [*notes, *_cast(checkpoint, model, recipe), *_unpacked_experts(checkpoint, model, recipe)]


def _cast(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> list[str]:
    cast: dict[tuple[str, str], list[str]] = {}
    embeddings, sources = _embeddings(model), parameter_sources(model, [*checkpoint.tensors, *checkpoint.computed])
    expansions, layouts = expansion_weights(model), expert_layouts(model)
    for name in initializer_names(model):
        source = checkpoint.computed.get(sources.get(name, ""))
        if source is None or source.packing is None or name in layouts:  # an Experts node reads every packed format
            continue
        why = EXPANSION if name in expansions else _why_floats(source, recipe, picked=name in embeddings)
        if why:
            cast.setdefault((source.packing.label, why), []).append(name)
    dtype = recipe.model.dtype
    return [f"{label}, cast to {dtype}, because {why}: {_and_more(names)}" for (label, why), names in cast.items()]


def _unpacked_experts(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> list[str]:
    if not checkpoint.computed or not expert_layouts(model):
        return []
    tensors: dict[str, TensorEntry | Source] = {**checkpoint.tensors, **checkpoint.computed}
    reasons: dict[str, list[str]] = {}
    for name, weight in assembled_parameters(model, tensors, parameter_sources(model, tensors)).items():
        matrices = [matrix for _, stored in getattr(weight, "inputs", ()) for matrix in stored]
        if why := why_floats(matrices):
            reasons.setdefault(why, []).append(name)
    return [f"cast to {recipe.model.dtype}, because {why}: {_and_more(names)}" for why, names in reasons.items()]


def _and_more(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _other_groups(formats: Mapping[str, PackedFormat], section: WeightsSection) -> str:
    other = [(name, packing.group) for name, packing in formats.items() if packing.group != section.group]
    if not other:
        return ""
    name, group = other[0]
    return f"{len(other)} weights, whose groups are smaller: of {name} {group}"
