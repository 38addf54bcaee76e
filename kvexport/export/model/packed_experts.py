"""The weight of all experts of a layer, from a checkpoint that has a packed matrix for each expert.

The rows of the weight are those of the matrices, one matrix after another. A build therefore copies packed numbers and
scales, and dequantizes nothing. All matrices of a weight have one packed format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from kvexport.errors import UsageError
from kvexport.export.hooks.experts import Layout, expert_modules
from kvexport.export.model.tensors import PackedExperts

_SHOWN = 3  # the most names of missing tensors in an error message
_ROUTER = re.compile(r"\.(gate|router)\.")


def kept_packed(
    name: str, rule: Any, named: Mapping[str, Sequence[Any]], shape: tuple[int, ...], layout: Layout
) -> PackedExperts | None:
    """Return the weight of a layer's experts as one packed weight; None if it cannot be made of the packed matrices.

    This is possible if transformers' conversion rule only stacks and concatenates matrices, if all of them have one
    packed format, and if the weight keeps their layout.
    """
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
        re.sub(r"(?<=experts\.)\d+", str(number), _any_name(numbers, example))
        for numbers in numbered.values() for number in range(experts) if number not in numbers
    ]  # fmt: skip
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise UsageError(
            f"the checkpoint has no {', '.join(repr(name) for name in missing[:_SHOWN])}{more}: config.json says that "
            f"'{parameter}' has {experts} experts",
            "download the checkpoint again, or use the config.json that belongs to these weights",
        )


def _any_name(numbers: Mapping[int, str], example: str) -> str:
    return next(iter(numbers.values()), example)


def refuse_other_router(model: Any, tensors: Iterable[str]) -> None:
    """Raise UsageError if routers in the checkpoint have tensors that the model's routers lack, such as a bias."""
    parents = {prefix.rpartition(".")[0]: module for prefix, module in expert_modules(model)}
    rules = get_model_conversion_mapping(model) if parents else []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parameters: Any = dict(model.named_parameters(remove_duplicate=False))
    for tensor in tensors if parents else ():
        if not _ROUTER.search(tensor):
            continue
        name, _ = rename_source_key(tensor, renamings, converters, str(model.base_model_prefix), parameters)
        block, router, _ = _ROUTER.split(name, maxsplit=1) if _ROUTER.search(name) else ("", "", "")
        if block in parents and name not in parameters:
            kind = type(model.get_submodule(block)).__name__
            raise UsageError(
                f"the checkpoint has a tensor {tensor!r}, which the router '{block}.{router}' of {kind} does not have: "
                f"the weights belong to a router of another type than config.json's model_type",
                "use the config.json that belongs to these weights",
            )
