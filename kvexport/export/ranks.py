"""Tensor parallelism: the model of one of several ranks, and its share of the weights.

transformers' `base_model_tp_plan` defines how a model is split. Some projections are split by outputs (queries, keys
and values by heads, the first ones of the MLP by features). The projections that read these outputs are split by
inputs, and the ranks add up their products. Every rank has all other weights as a whole, also embeddings and head. All
ranks have the same shapes, so the model is traced once; the ONNX graphs of ranks differ only in the places of the
weights. See docs/tasks/tensor-parallel.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kvexport.cache import LayerGeometry
from kvexport.errors import UsageError
from kvexport.export.graph.layers import layer_list
from kvexport.export.graph.tracer import ALL_REDUCE
from kvexport.export.model.probe import probe_layers
from kvexport.export.model.shape import ModelShape
from kvexport.export.model.tensors import Source
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.specs import weight_bytes, weight_specs
from kvexport.export.weights.write import Location, Spec, TensorSpec, total_bytes
from kvexport.ops.packed import PackedFormat, PackedTensor, pack, unpack
from kvexport.tensor_files.casting import read_rows, row_blocks
from kvexport.tensor_files.entry import TensorEntry

if TYPE_CHECKING:
    from kvexport.recipe.fields import Recipe

COLUMNS, ROWS = "colwise", "rowwise"
WHOLE = "replicated_with_grad_allreduce"  # in training; here the same as not to be named
SETTING = "backend.tensor_parallel"


def split_model(shape: ModelShape, ranks: int) -> tuple[ModelShape, dict[str, int]]:
    """Return the model of one rank of tensor parallelism, and the dimension along which each parameter is split.

    The PyTorch model `shape.model` is changed in place to that of a rank.

    Args:
        shape: The description of the whole model: the PyTorch model, its attention geometry and its cache plan.
        ranks: The number of ranks.

    Returns:
        The description of one rank's model, and the split dimension of every split parameter, by its initializer.

    Raises:
        UsageError: Heads or features cannot be divided equally, or transformers has no plan for the model.
    """
    heads = {(layer.kv_heads, layer.query_heads) for layer in shape.geometry}
    if uneven := sorted(kv for kv, queries in heads if kv % ranks or queries % ranks):
        fitting = [n for n in range(2, min(uneven) + 1) if all(kv % n == 0 for kv, _ in heads)]
        raise UsageError(
            f"{SETTING} is {ranks}, and {uneven[0]} KV heads cannot be shared equally by as many ranks (a head of "
            "which several ranks keep a copy is not built)",
            f"--set {SETTING}={fitting[-1] if fitting else 1}",
        )
    splits = _splits(shape.model, ranks)
    _shrink(shape.model, shape.mode, splits, ranks)
    rank_geometry = [
        replace(layer, query_heads=layer.query_heads // ranks, kv_heads=layer.kv_heads // ranks)
        for layer in shape.geometry
    ]
    _require_heads(shape, rank_geometry)
    return (
        shape._replace(geometry=rank_geometry, plan=shape.plan.rank_plan(ranks)),
        {f"model.{name}": dimension for name, dimension in splits.items()},
    )


def _splits(model: Any, ranks: int) -> dict[str, int]:
    """Return the dimension along which tensor parallelism splits each split parameter (0 outputs, 1 inputs)."""
    kind, plan = model.config.model_type, getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    name, layers = layer_list(model)
    if not plan or not layers:
        raise UsageError(
            f"{SETTING} is {ranks}, and transformers does not say how {kind} is split", f"--set {SETTING}=1"
        )
    splits: dict[str, int] = {}
    for i, layer in enumerate(layers):
        for inner, module in layer.named_modules():
            how = plan.get(f"{name.rpartition('.')[2]}.*.{inner}", WHOLE)
            if how == WHOLE:
                continue
            if how not in (COLUMNS, ROWS) or not isinstance(module, nn.Linear):
                raise UsageError(
                    f"{SETTING} is {ranks}, and transformers splits '{inner}' of {kind} by {how}, which mixes heads or "
                    "features of several ranks; only plain projections are split",
                    f"--set {SETTING}=1",
                )
            splits[f"{name}.{i}.{inner}.weight"] = 0 if how == COLUMNS else 1
            if how == COLUMNS and module.bias is not None:
                splits[f"{name}.{i}.{inner}.bias"] = 0
    return splits


def _shrink(model: Any, mode: FakeTensorMode, splits: Mapping[str, int], ranks: int) -> None:
    """Cut the parameters of a PyTorch model, in place, to the shapes of one tensor-parallel rank's share.

    Projections that are split by inputs get a forward that adds up the products of all ranks.
    """
    for name, dimension in splits.items():
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix)
        shape = list(module._parameters[leaf].shape)
        if shape[dimension] % ranks:
            raise UsageError(
                f"{SETTING} is {ranks}, which does not divide the {shape[dimension]} "
                f"{'inputs' if dimension else 'outputs'} of '{prefix}'",
                f"--set {SETTING}=1",
            )
        shape[dimension] //= ranks
        with mode:
            share = torch.empty(shape, dtype=module._parameters[leaf].dtype)
        module._parameters[leaf] = nn.Parameter(share, requires_grad=False)
        if dimension == 1:
            module.forward = partial(_added_up, module)


def _added_up(module: nn.Linear, data: Tensor) -> Tensor:
    """Return the output of a projection that is split by inputs: products summed over all ranks, plus the bias once."""
    whole: Tensor = ALL_REDUCE(nn.functional.linear(data, module.weight))
    return whole if module.bias is None else whole + module.bias


def _require_heads(shape: ModelShape, expected_layers: Sequence[LayerGeometry]) -> None:
    """Raise UsageError unless a forward pass of a rank's model has the numbers of heads in `expected_layers`."""
    probed = probe_layers(shape.model, shape.mode).geometry
    for i, (layer, expected) in enumerate(zip(probed, expected_layers, strict=True)):
        heads = (layer.query_heads, layer.kv_heads, layer.key_size, layer.value_size)
        if heads != (expected.query_heads, expected.kv_heads, expected.key_size, expected.value_size):
            raise UsageError(
                f"{SETTING} does not split {shape.model.config.model_type}: layer {i} of a rank has "
                f"{layer.query_heads} query heads and {layer.kv_heads} KV heads, expected {expected.query_heads} and "
                f"{expected.kv_heads}",
                f"--set {SETTING}=1",
            )


# ---- the weights of a rank ----


def rank_specs(specs: Sequence[Spec], splits: Mapping[str, int], ranks: int) -> list[list[Spec]]:
    """Return the weight specs (where each initializer's bytes come from) of every rank of tensor parallelism.

    Raises:
        UsageError: A group of a packed weight would be cut.
    """
    return [
        [spec if spec.name not in splits else _rank_share(spec, splits[spec.name], rank, ranks) for spec in specs]
        for rank in range(ranks)
    ]


def joined_specs(specs: Sequence[Sequence[Spec]]) -> list[Spec]:
    """Return the weight specs of all tensor-parallel ranks as one list.

    Each name begins with the number of its rank, which `locations_of_rank` removes.
    """
    return [replace(spec, name=f"{rank}/{spec.name}") for rank, own in enumerate(specs) for spec in own]


def locations_of_rank(locations: Mapping[str, Location], rank: int) -> dict[str, Location]:
    """Return the places of one rank's weights in the files, by initializer, from the list of all ranks."""
    start = f"{rank}/"
    return {name.removeprefix(start): at for name, at in locations.items() if name.startswith(start)}


def _rank_share(spec: Spec, dimension: int, rank: int, ranks: int) -> Spec:
    size = spec.shape[dimension] // ranks
    shape = tuple(size if i == dimension else n for i, n in enumerate(spec.shape))
    if isinstance(spec, TensorSpec) and dimension == 0:  # lies in one piece
        entry, nbytes = spec.entry, spec.entry.nbytes // ranks
        own = replace(entry, shape=shape, offset=entry.offset + rank * nbytes, nbytes=nbytes)
        return replace(spec, entry=own, shape=shape)
    if isinstance(spec, TensorSpec):
        return ComputedSpec(spec.name, Columns(spec.entry, rank * size, (rank + 1) * size), spec.dtype, shape)
    packing = spec.source.packing
    if packing is not None and dimension == 1 and (packing.ordered or size % packing.group):
        why = "columns in an order of its own" if packing.ordered else f"groups of {packing.group} inputs"
        raise UsageError(
            f"{SETTING} is {ranks}, and '{spec.name.removeprefix('model.')}' [{', '.join(map(str, spec.shape))}] has "
            f"{why}, which the ranks' {size} inputs would cut",
            f"--set {SETTING}=1, or a weights.group that divides {size}",
        )
    return replace(spec, source=Slice(spec.source, dimension, rank * size, (rank + 1) * size), shape=shape)


def rank_weight_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Return the bytes of one rank's weights in an artifact.

    The model in `shape` is changed in place to that of a rank.

    Raises:
        UsageError: See `split_model` and `rank_specs`.
    """
    ranks = recipe.backend.tensor_parallel
    if shape.checkpoint is None:
        return weight_bytes(None, split_model(shape, ranks)[0].model, recipe)
    specs = weight_specs(shape.checkpoint, shape.model, recipe)
    return total_bytes(rank_specs(specs, split_model(shape, ranks)[1], ranks)[0])


@dataclass(frozen=True)
class Columns:
    """A range of the columns of a checkpoint's tensor, read as float32: one rank's share of a weight."""

    entry: TensorEntry
    begin: int
    end: int
    packing: None = None

    @property
    def name(self) -> str:
        """The name of the tensor in the checkpoint."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [outputs, inputs] of the tensor's range of columns."""
        return self.entry.shape[0], self.end - self.begin

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the weight's rows in float32, cut to the range of columns, block by block."""
        n, k = self.entry.shape
        for rows in row_blocks(n, 4 * k):
            yield {"weight": read_rows(self.entry, rows)[:, self.begin : self.end]}

    def order(self) -> NDArray[np.int64]:
        """Raise NotImplementedError: the columns of a float weight are in the order of the input features."""
        raise NotImplementedError


@dataclass(frozen=True)
class Slice:
    """A range of the rows (dimension 0) or columns (dimension 1) of a weight: one rank's share.

    The range of a packed weight consists of whole groups.
    """

    whole: Source
    dimension: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """The name of the whole weight's tensor in the checkpoint."""
        return self.whole.name

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [outputs, inputs] of this rank's share of the weight."""
        n, k = self.whole.shape
        size = self.end - self.begin
        return (size, k) if self.dimension == 0 else (n, size)

    @property
    def packing(self) -> PackedFormat | None:
        """The packed format of the whole weight; None for floats."""
        return self.whole.packing

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the rows of this rank's share of the weight, block by block."""
        packing, (_, k) = self.packing, self.whole.shape
        begin, end = (0, self.whole.shape[0]) if self.dimension else (self.begin, self.end)
        start = 0
        for block in self.whole.blocks():
            n = len(block["weight" if packing is None else packing.scale])
            rows = slice(max(begin - start, 0), min(end - start, n))
            start += n
            if rows.start >= rows.stop:
                continue
            yield {name: self._cut(name, values, rows, (n, k)) for name, values in block.items()}

    def _cut(self, name: str, values: NDArray[Any], rows: slice, shape: tuple[int, int]) -> NDArray[Any]:
        packing = self.packing
        if packing is not None and name == "weight":
            numbers = unpack(values, PackedTensor(packing.dtype, shape))[rows]
            return pack(numbers[:, self.begin : self.end] if self.dimension else numbers, packing.bits)
        group = 1 if packing is None else packing.group
        columns = slice(self.begin // group, self.end // group) if self.dimension else slice(None)
        return values[rows, columns]

    def order(self) -> NDArray[np.int64]:
        """Return the stored order [inputs] of the whole weight's columns.

        A weight with such an order is not split by columns.
        """
        return self.whole.order()
