"""What becomes of every parameter of a model: copied, cast, rounded, or taken over as the checkpoint has packed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from kvexport.errors import UsageError
from kvexport.export.computed import ComputedSpec
from kvexport.export.graph.tracer import initializer_names
from kvexport.export.model.checkpoint import Checkpoint
from kvexport.export.model.hf_model import parameter_sources
from kvexport.export.model.tensors import Dense, Source
from kvexport.export.quantize import Rounded, fitting_group
from kvexport.export.weights import Spec, TensorSpec, check_specs, total_bytes
from kvexport.ops.packed import PackedFormat

if TYPE_CHECKING:
    from kvexport.recipe.fields import WeightsSection


def weight_specs(checkpoint: Checkpoint, model: Any, section: WeightsSection) -> list[Spec]:
    """What the checkpoint must give for every initializer. Raises UsageError naming parameters it does not have, or
    whose dtype or shape is another."""
    tensors = {**checkpoint.tensors, **checkpoint.computed}
    if section.bits and any(source.packing for source in checkpoint.computed.values()):
        raise UsageError(
            f"weights.bits is {section.bits}, and the weights of {checkpoint.path} are quantized already",
            "take weights.bits out of the recipe: they are kept as they are",
        )
    sources = parameter_sources(model, tensors)
    names = initializer_names(model)
    missing = [name for name in names if name not in sources]
    if missing:
        found = ", ".join(sorted(tensors)[:3])
        raise UsageError(
            f"the checkpoint has no tensor for {len(missing)} parameters of the model, the first is '{missing[0]}' "
            f"(it holds {found}, ...)",
            "use a checkpoint saved with save_pretrained() of the same model class",
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rounded = dict(rounded_formats(model, section))
    embeddings = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, nn.Embedding)}
    specs: list[Spec] = []
    for name, initializer in names.items():
        parameter = parameters[name]
        dtype: Any = str(parameter.dtype).removeprefix("torch.")  # a few of a float16 model stay float32
        shape, tensor = tuple(parameter.shape), sources[name]
        if tensor in checkpoint.computed:
            source = checkpoint.computed[tensor]
            if (packing := rounded.get(name)) is not None:
                source = Rounded(source, packing)
            elif name in embeddings and not _rows_can_be_picked(source):
                source = Dense(source)
            specs.append(ComputedSpec(initializer, source, dtype, shape))
            continue
        entry = checkpoint.tensors[tensor]
        plain = TensorSpec(initializer, entry, dtype, shape)
        check_specs([plain])
        packing = rounded.get(name)
        specs.append(plain if packing is None else ComputedSpec(initializer, Rounded(entry, packing), dtype, shape))
    check_specs(specs)
    return specs


def rounded_formats(model: Any, section: WeightsSection) -> Iterator[tuple[str, PackedFormat | None]]:
    """(parameter, its format) of every projection, the head and the embeddings, where the recipe rounds; None: no group
    fits it."""
    if section.bits is None:
        return
    head = model.get_output_embeddings()
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or module.weight is None:
            continue
        asked: Any = section.head if module is head or isinstance(module, nn.Embedding) else "same"
        if asked == "float":
            continue
        bits = section.bits if asked == "same" else asked
        group = fitting_group(section.group, module.weight.shape[1])
        # Rows of an embedding are picked one by one, and zeros of four bits could begin within a byte.
        zero = not section.symmetric and asked == "same" and module is not head and isinstance(module, nn.Linear)
        yield (
            f"{prefix}.weight",
            None if group is None else PackedFormat(bits, not zero, group, "zero" if zero else "none"),
        )


def weight_bytes(checkpoint: Checkpoint | None, model: Any, section: WeightsSection) -> int:
    """What the weights take in an artifact, tied ones once. checkpoint: None where only the config is at hand, which is
    not to say that weights are quantized."""
    if checkpoint is not None:
        return total_bytes(weight_specs(checkpoint, model, section))
    formats = dict(rounded_formats(model, section))
    count = 0
    for name, parameter in model.named_parameters():
        packing = formats.get(name)
        count += parameter.nbytes if packing is None else packing.nbytes(*parameter.shape)
    return count


def packings(specs: Sequence[Spec]) -> dict[str, PackedFormat]:
    """Of the packed ones, by initializer."""
    return {
        spec.name: spec.source.packing
        for spec in specs
        if isinstance(spec, ComputedSpec) and spec.source.packing is not None
    }


def _rows_can_be_picked(source: Source) -> bool:
    """Whether single rows can be dequantized: columns are in their order, and no row of zeros begins within a byte."""
    packing = source.packing
    if packing is None:
        return True
    halves = packing.offset == "zero" and packing.bits == 4 and source.shape[1] // packing.group % 2 == 1
    return not packing.ordered and not halves


def packed_formats(specs: Sequence[Spec]) -> dict[str, int]:
    """How many weights are packed, by their format; tied ones once."""
    sources = dict.fromkeys(spec.source for spec in specs if isinstance(spec, ComputedSpec))
    return dict(sorted(Counter(source.packing.label for source in sources if source.packing is not None).items()))


def weight_notes(checkpoint: Checkpoint, model: Any, section: WeightsSection) -> list[str]:
    """What a user should know: weights that are not kept as the checkpoint has them, or not rounded as the recipe
    says."""
    notes = list(checkpoint.notes)
    formats = dict(rounded_formats(model, section))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    if unfit := [name for name, packing in formats.items() if packing is None]:
        notes.append(
            f"{len(unfit)} weights stay floats, because no group of 16 to {section.group} inputs divides theirs; the "
            f"first is {unfit[0]} {list(shapes[unfit[0]])}"
        )
    if other := _other_groups(formats, section):
        notes.append(f"weights.group {section.group} does not divide the inputs of {other}")
    return notes


def _other_groups(formats: Mapping[str, PackedFormat | None], section: WeightsSection) -> str:
    other = [(name, packing.group) for name, packing in formats.items() if packing and packing.group != section.group]
    if not other:
        return ""
    name, group = other[0]
    return f"{len(other)} weights, whose groups are smaller: of {name} {group}"
