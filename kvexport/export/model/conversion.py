"""Parameters that transformers assembles from tensors of a checkpoint with other names or shapes.

transformers' conversion rules list the tensors of a parameter and the operations on them (stacked experts, concatenated
gate and up projections, chunks of a fused projection). kvexport runs the same operations when it writes the weight.
Operations that treat all experts alike run one expert at a time, so that only one expert is in memory.

If a checkpoint has a packed matrix for each expert, the weight of all experts of a layer stays packed where possible:
its outputs are those of the matrices, one matrix after another, so that a build copies integer codes and scales.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from kvexport.errors import UsageError
from kvexport.export.hooks.attention import output_projection
from kvexport.export.hooks.experts import Layout, expert_layouts
from kvexport.export.model.tensors import Array, Checkpoint, PackedExperts, Source, dense_values
from kvexport.tensor_files.casting import STORED, load_tensor, read_rows
from kvexport.tensor_files.shards import TensorEntry, some_names

Stored = TensorEntry | Source
PLAIN = Layout(transposed=False, interleaved=False)
_SHOWN = 3  # the most names of missing tensors in an error message
# Buffers that older versions of transformers stored, which its own lists name for some models alone; scales of a cache
# of FP8; and layers of multi-token prediction
_HARMLESS = (
    r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$",
    r"(^|\.)position_ids$",
    r"\.masked_bias$",
    r"\.(k|v|q|prob)_scale$",
    r"(^|\.)mtp(_\w+)?\.",
)


@dataclass(frozen=True)
class Assembled:
    """A parameter that is computed from several tensors of a checkpoint, seen as a matrix [rows, columns]."""

    name: str  # parameter
    full_shape: tuple[int, ...]  # shape in an artifact
    # (source pattern of the conversion rule, the checkpoint's tensors that match it, in order) of all tensors that are
    # read
    inputs: tuple[tuple[str, tuple[Stored, ...]], ...]
    experts: int  # number of experts that are computed one after another; 0: all at once
    stacked: bool  # whether each input is one tensor of all experts, not a tensor for each expert
    layout: Layout  # layout of the parameter in the module of transformers, if the parameter belongs to experts
    # The conversion rule of transformers; None if the only input is the parameter itself
    rule: Any = field(default=None, compare=False, repr=False)
    output: str = ""  # name of the parameter in the results of the rule
    # Arguments of the rule's operations other than tensors
    context: Any = field(default=None, compare=False, repr=False)
    packing: None = None

    @property
    def shape(self) -> tuple[int, int]:
        columns = self.full_shape[-1]
        return math.prod(self.full_shape) // max(columns, 1), columns

    def blocks(self) -> Iterator[dict[str, Array]]:
        for expert in range(self.experts) if self.experts else (None,):
            named = {pattern: self._read(tensors, expert) for pattern, tensors in self.inputs}
            value = self._convert(named)
            if self.layout != PLAIN:
                value = self.layout.to_artifact(value)
            yield {"weight": value.contiguous().reshape(-1, self.shape[1]).numpy()}

    def _read(self, tensors: tuple[Stored, ...], expert: int | None) -> list[Tensor]:
        if expert is not None and not self.stacked:
            tensors = (tensors[expert],)
        return [torch.from_numpy(_values(tensor, expert if self.stacked else None)) for tensor in tensors]

    def _convert(self, named: dict[str, list[Tensor]]) -> Tensor:
        if self.rule is None:
            return next(iter(named.values()))[0]
        return _run(self.rule, named, self.context)[self.output]


def _values(tensor: Stored, expert: int | None) -> Array:
    """Return a checkpoint tensor in float32: the whole tensor, or the slice [1, ...] of one expert."""
    if isinstance(tensor, TensorEntry):
        if not tensor.shape:
            raise UsageError(f"tensor {tensor.name!r} in {tensor.file} is a single number, expected a weight")
        rows = range(tensor.shape[0]) if expert is None else range(expert, expert + 1)
        return np.require(read_rows(tensor, rows), requirements=["C", "W"])
    return np.require(dense_values(tensor), requirements=["C", "W"])


def assembled_parameters(
    model: Any, tensors: Mapping[str, Stored], present: Mapping[str, str]
) -> dict[str, Assembled | PackedExperts]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    layouts = expert_layouts(model)
    result: dict[str, Assembled | PackedExperts] = {}
    for name, layout in layouts.items():
        if name in present and hasattr(tensors[present[name]], "full_shape"):
            continue  # packed experts of the checkpoint, which their source brings into an artifact's layout
        if name in present and (layout != PLAIN or parameters[name].ndim > 2):
            shape = tuple(parameters[name].shape)
            inputs = (("", (tensors[present[name]],)),)
            result[name] = Assembled(name, layout.artifact_shape(shape), inputs, shape[0], True, layout)
    for target, (rule, names_of) in _collected(model, tensors, parameters).items():
        if target in layouts and any(isinstance(operation, MergeModulelist) for operation in rule.operations):
            require_experts(names_of, parameters[target].shape[0], target)
        named = tuple((pattern, tuple(tensors[name] for name in names)) for pattern, names in names_of.items())
        context = SimpleNamespace(model=model, config=model.config, full_layer_name=target)
        try:
            meta = {pattern: [torch.empty(x.shape, device="meta") for x in stored] for pattern, stored in named}
            converted = _run(rule, meta, context)
        except Exception as error:
            first = next(iter(names_of.values()))[0]
            raise UsageError(
                f"the tensors of parameter '{target}' do not fit each other, the first is {first!r}: {error}",
                "use the config.json that belongs to these weights",
            ) from error
        base = next((key for key in converted if key in target), "")
        for key in converted:
            name = target.replace(base, key, 1)
            if name not in parameters or name in present:
                continue
            shape, layout = tuple(converted[key].shape), layouts.get(name, PLAIN)
            if (packed := kept_packed(name, rule, dict(named), shape, layout)) is not None:
                result[name] = packed
                continue
            experts, stacked = _by_expert(rule, named, shape)
            context_of = _of_one_expert(context, parameters) if experts else context
            result[name] = Assembled(
                name, layout.artifact_shape(shape), named, experts, stacked, layout, rule, key, context_of
            )
    return result


def renamed(model: Any, tensors: Iterable[str]) -> Iterator[tuple[str, str, tuple[Any, str] | None]]:
    """Yield each tensor, its name for transformers, and (conversion, name pattern) if it is part of a parameter."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    parameters: Any = dict(model.named_parameters(remove_duplicate=False))
    for tensor in tensors:
        name, pattern = rename_source_key(tensor, renamings, converters, str(model.base_model_prefix), parameters)
        yield tensor, name, None if pattern is None else (by_pattern[pattern], pattern)


def parameter_sources(model: Any, tensors: Iterable[str]) -> dict[str, str]:
    """Return the checkpoint's tensor of each parameter that one tensor holds whole; tied parameters share a tensor."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sources = {name: tensor for tensor, name, rule in renamed(model, tensors) if rule is None}
    by_identity = {id(parameters[name]): tensor for name, tensor in sources.items() if name in parameters}
    return {name: source for name, p in parameters.items() if (source := sources.get(name, by_identity.get(id(p))))}


def _collected(
    model: Any, tensors: Mapping[str, Stored], parameters: Mapping[str, Any]
) -> dict[str, tuple[Any, dict[str, list[str]]]]:
    collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for tensor, target, converted in renamed(model, sorted(tensors, key=dot_natural_key)):
        if converted is not None and target in parameters:
            rule, pattern = converted
            _, inputs = collected.setdefault(target, (deepcopy(rule), {}))
            inputs.setdefault(pattern, []).append(tensor)
    return collected


def _run(rule: Any, named: Mapping[str, list[Tensor]], context: Any) -> dict[str, Tensor]:
    results: Any = dict(named)
    for operation in rule.operations:
        results = operation.convert(
            results, source_patterns=rule.source_patterns, target_patterns=rule.target_patterns, missing_keys=None,
            **vars(context),
        )  # fmt: skip
    return {key: x[0] if isinstance(x, list) else x for key, x in results.items()}


def _by_expert(rule: Any, named: Any, shape: tuple[int, ...]) -> tuple[int, bool]:
    """Return how many experts are computed one by one, and whether the checkpoint's tensors stack experts.

    The number of experts is 0 if an operation of the conversion rule mixes experts.
    """
    first, *rest = rule.operations
    merges = isinstance(first, MergeModulelist) and first.dim == 0
    alone = (Concatenate, Chunk, Interleave, Transpose)
    for operation in rest if merges else rule.operations:
        dims = [getattr(operation, each) for each in ("dim", "dim0", "dim1") if hasattr(operation, each)]
        if not isinstance(operation, alone) or min(dims) < 1:
            return 0, False
    if merges:
        return (shape[0], False) if all(len(stored) == shape[0] for _, stored in named) else (0, False)
    fits = len(shape) == 3 and all(
        len(stored) == 1 and isinstance(stored[0], TensorEntry) and stored[0].shape[0] == shape[0]
        for _, stored in named
    )
    return (shape[0], True) if fits else (0, False)


def _of_one_expert(context: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the context of a rule for one expert, whose shapes operations compare with the tensors'."""
    shapes = {name: (1, *p.shape[1:]) for name, p in parameters.items() if p.ndim == 3}
    model = SimpleNamespace(get_parameter=lambda name: SimpleNamespace(shape=torch.Size(shapes[name])))
    return SimpleNamespace(**{**vars(context), "model": model})


def kept_packed(
    name: str, rule: Any, named: Mapping[str, Sequence[Any]], shape: tuple[int, ...], layout: Layout
) -> PackedExperts | None:
    """Return the weight of a layer's experts as one packed weight; None if it cannot be made of the packed matrices."""
    operations = [(type(operation), operation.dim) for operation in rule.operations if hasattr(operation, "dim")]
    joins = operations in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    if len(shape) != 3 or not joins or len(operations) != len(rule.operations):
        return None
    parts = [named[pattern] for pattern in rule.source_patterns if pattern in named]
    matrices = tuple(matrix for of_expert in zip(*parts, strict=True) for matrix in of_expert)
    formats = {getattr(matrix, "packing", None) for matrix in matrices}
    packing = next(iter(formats), None)
    if len(formats) != 1 or packing is None or packing.ordered or layout.transposed or layout.interleaved:
        return None
    return PackedExperts(name, shape, matrices)


def why_floats(matrices: Sequence[Any]) -> str:
    """Return why packed matrices of experts become floats in an artifact; "" if no matrix is packed."""
    formats = sorted({matrix.packing.label for matrix in matrices if getattr(matrix, "packing", None) is not None})
    if not formats:
        return ""
    if len(formats) > 1:
        return f"the experts of a layer are packed in several formats ({', '.join(formats)})"
    return f"experts are not kept in the format {formats[0]}"


def require_experts(named: Mapping[str, Sequence[str]], experts: int, parameter: str) -> None:
    numbered: dict[str, dict[int, str]] = {}
    for pattern, names in named.items():
        if "*" not in pattern:
            return
        wildcard = re.compile(re.escape(pattern.lstrip("^")).replace(r"\*", r"(\d+)"))
        matches = [(match, name) for name in names if (match := wildcard.search(name)) is not None]
        if names and not matches:  # names of the checkpoint that transformers changes before it applies the rule
            return
        numbered[pattern] = {int(match[1]): name for match, name in matches}
    example = next((names for numbers in numbered.values() for names in numbers.values()), parameter)
    count = max((number for numbers in numbered.values() for number in numbers), default=-1) + 1
    if count > experts:
        raise UsageError(
            f"the checkpoint has {count} experts of '{parameter}', config.json says {experts}",
            "use the config.json that belongs to these weights",
        )
    missing = [
        re.sub(r"(?<=experts\.)\d+", str(number), next(iter(numbers.values()), example))
        for numbers in numbered.values() for number in range(experts) if number not in numbers
    ]  # fmt: skip
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise UsageError(
            f"the checkpoint has no {', '.join(repr(name) for name in missing[:_SHOWN])}{more}: config.json says that "
            f"'{parameter}' has {experts} experts",
            "download the checkpoint again, or use the config.json that belongs to these weights",
        )


def refuse_unexpected(model: Any, checkpoint: Checkpoint) -> list[str]:
    """Refuse tensors of the decoder that the model lacks; return the names of others, as of a reward model's head."""
    known = dict(model.named_parameters(remove_duplicate=False)).keys() | dict(model.named_buffers()).keys()
    known |= set(getattr(model, "unread_parameters", ()))
    modules, head = dict(model.named_modules(remove_duplicate=False)), output_projection(model)
    whole, text = model.get_decoder(), model.config.get_text_config()
    decoder = next((name for name, module in modules.items() if module is whole), "") or str(model.base_model_prefix)
    ignored = re.compile("|".join([*_HARMLESS, *(model._keys_to_ignore_on_load_unexpected or ()), *_drafts(text)]))
    unexpected, outside = [], []
    tensors: dict[str, Stored] = {**checkpoint.tensors, **checkpoint.computed}
    for tensor, name, _ in renamed(model, tensors):
        if name in known or ignored.search(name) or ignored.search(tensor):
            continue
        parent, _, last = name.rpartition(".")
        while parent not in modules:
            parent = parent.rpartition(".")[0]
        inside = parent == decoder or parent.startswith(f"{decoder}.") or modules[parent] is head
        if not parent or not inside:
            outside.append(tensor)
        elif not _without_effect(tensors[tensor], last, quantized=bool(checkpoint.computed)):
            unexpected.append(tensor)
    if unexpected:
        raise UsageError(
            f"the checkpoint has {len(unexpected)} tensors that a {text.model_type} of its config.json does not have, "
            f"and without which it would compute something else: {some_names(unexpected)}",
            "use the config.json that belongs to these weights (it announces biases, norms, routers and the number of "
            "layers)",
        )
    return outside if model.config is text and "text_config" not in checkpoint.config else []


def _drafts(text: Any) -> list[str]:
    """Return patterns of the names of layers for multi-token prediction, which follow a text decoder's layers."""
    count, first = getattr(text, "num_nextn_predict_layers", None) or 0, text.num_hidden_layers
    return [rf"(^|\.)layers\.({'|'.join(str(first + i) for i in range(count))})\."] if count else []


def _without_effect(stored: Stored, last: str, *, quantized: bool) -> bool:
    # A quantizer wrote scales, such as those of inputs. AWQ's "scales" divide the outputs of activations, too.
    if quantized and last not in ("weight", "bias", "scales", "sinks"):
        return True
    if not isinstance(stored, TensorEntry):
        return False
    # Causal masks [1, 1, n, n] were once stored as a "bias", some as integers. Some quantizers write a bias of zeros
    # for each projection.
    mask = len(stored.shape) == 4 and stored.shape[:2] == (1, 1)
    return stored.dtype not in STORED or (last == "bias" and (mask or not load_tensor(stored, "float32").any()))
