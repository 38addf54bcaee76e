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
from kvexport.export.model.conversion import (
    PLAIN,
    Assembled,
    assembled_parameters,
    parameter_sources,
    refuse_unexpected,
    why_floats,
)
from kvexport.export.model.tensors import Checkpoint, Dense, Source
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.nbits import NBits, nbits_specs
from kvexport.export.weights.quantize import Rounded, fitting_group
from kvexport.export.weights.write import Spec, TensorSpec, check_specs, total_bytes
from kvexport.ops.packed import PackedFormat
from kvexport.tensor_files.shards import TensorEntry

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe, WeightsSection


EXPANSION = "latent attention multiplies queries and outputs with it, head by head"


def weight_specs(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> list[Spec]:
    """Return where each initializer's bytes come from: a checkpoint tensor to copy or cast, or a computed weight."""
    section, positive = recipe.weights, backends.get(recipe.backend.name).positive_scales(recipe)
    tensors: dict[str, TensorEntry | Source] = {**checkpoint.tensors, **checkpoint.computed}
    if section.bits and any(source.packing for source in checkpoint.computed.values()):
        raise UsageError(
            f"weights.bits is {section.bits}, and the weights of {checkpoint.path} are quantized already",
            "take weights.bits out of the recipe: they are kept as they are",
        )
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
    embeddings = {f"{prefix}.weight" for prefix, x in model.named_modules() if isinstance(x, nn.Embedding)}
    layouts, expansions = expert_layouts(model), expansion_weights(model)
    specs: list[Spec] = []
    for name, initializer in names.items():
        dtype: Any = str(parameters[name].dtype).removeprefix("torch.")  # a float16 model has a few in float32
        layout, packing = layouts.get(name, PLAIN), rounded.get(name)
        shape = layout.artifact_shape(tuple(parameters[name].shape))
        if name in assembled and (name not in sources or layout != PLAIN or packing is not None):
            source: TensorEntry | Source = assembled[name]
        else:
            source = tensors[sources[name]]
        if packing is not None:
            if isinstance(source, TensorEntry):
                check_specs([TensorSpec(initializer, source, dtype, shape)])
            source = Rounded(source, packing, positive=positive)
        elif not isinstance(source, TensorEntry) and source.packing is not None:
            why = EXPANSION if name in expansions else ""
            if not why and name not in layouts:  # an Experts node reads every packed format
                why = _why_floats(source, recipe, picked=name in embeddings)
            source = Dense(source, why) if why else source
        if isinstance(source, TensorEntry):
            specs.append(TensorSpec(initializer, source, dtype, shape))
        else:
            specs.append(ComputedSpec(initializer, source, dtype, shape))
    check_specs(specs)
    return specs


def stored_specs(specs: list[Spec], recipe: Recipe) -> list[Spec]:
    return nbits_specs(specs) if backends.get(recipe.backend.name).library_products(recipe) else specs


def rounded_formats(model: Any, recipe: Recipe) -> Iterator[tuple[str, PackedFormat | str]]:
    """Yield (parameter, its packed format or why it stays in floats) if the recipe rounds weights."""
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
    return backends.get(recipe.backend.name).packing_problem(
        recipe,
        packing.dtype,
        packing.group,
        has_offset=packing.offset != "none",
        has_table=bool(packing.table),
        picked=picked,
    )


def planned_bytes(checkpoint: Checkpoint, model: Any, recipe: Recipe) -> tuple[int, int, int]:
    """Return the bytes of all weights, of the experts, and of the experts that a token's decode step reads."""
    if checkpoint.files:
        refuse_unexpected(model, checkpoint)
        specs = weight_specs(checkpoint, model, recipe)
        total = total_bytes(stored_specs(specs, recipe))
        sizes = {spec.name.removeprefix("model."): spec.nbytes for spec in specs}
    else:
        sizes = _parameter_bytes(model, recipe)
        total = sum(sizes.values())
    shares = {name: share for name, share in chosen_shares(model).items() if name in sizes}
    return total, sum(sizes[name] for name in shares), round(sum(sizes[name] * x for name, x in shares.items()))


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


def _why_floats(source: Source, recipe: Recipe, *, picked: bool) -> str:
    """Return why a packed weight becomes floats; "" if it stays packed. `picked`: its rows are read one by one."""
    packing = source.packing
    assert packing is not None
    halves = packing.offset == "zero" and packing.bits == 4 and source.shape[1] // packing.group % 2 == 1
    if picked and (packing.ordered or halves):
        return "its rows cannot be picked one by one"
    problem = _problem(packing, recipe, picked=picked)
    return problem[0] if problem else ""


def packed_formats(specs: Sequence[Spec]) -> dict[str, int]:
    computed = [spec.source for spec in specs if isinstance(spec, ComputedSpec)]
    sources = dict.fromkeys(source.source if isinstance(source, NBits) else source for source in computed)
    return dict(sorted(Counter(source.packing.label for source in sources if source.packing is not None).items()))


def weight_notes(checkpoint: Checkpoint, model: Any, recipe: Recipe, specs: Sequence[Spec]) -> list[str]:
    formats, group = dict(rounded_formats(model, recipe)), recipe.weights.group
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    floats: dict[str, list[str]] = {}
    for name, packing in formats.items():
        if isinstance(packing, str):
            floats.setdefault(f"kept in floats, because {packing}", []).append(f"{name} {list(shapes[name])}")
    notes = [*checkpoint.notes, *_each(floats)]
    if other := [(name, x.group) for name, x in _packed_only(formats.items()).items() if x.group != group]:
        smaller = f"{len(other)} weights, whose groups are smaller: of {other[0][0]} {other[0][1]}"
        notes.append(f"weights.group {group} does not divide the inputs of {smaller}")
    cast: dict[str, list[str]] = {}
    experts: dict[str, list[str]] = {}
    for spec in specs:
        source, name = getattr(spec, "source", None), spec.name.removeprefix("model.")
        if isinstance(source, Dense) and source.why and source.packed.packing is not None:
            label = f"{source.packed.packing.label}, cast to {recipe.model.dtype}, because {source.why}"
            cast.setdefault(label, []).append(name)
        matrices = [x for _, stored in source.inputs for x in stored] if isinstance(source, Assembled) else []
        if why := why_floats(matrices):
            experts.setdefault(f"cast to {recipe.model.dtype}, because {why}", []).append(name)
    return [*notes, *_each(cast), *_each(experts)]


def _each(reasons: Mapping[str, Sequence[str]]) -> list[str]:
    more = {why: f" and {len(names) - 1} more" if len(names) > 1 else "" for why, names in reasons.items()}
    return [f"{why}: {names[0]}{more[why]}" for why, names in reasons.items()]
