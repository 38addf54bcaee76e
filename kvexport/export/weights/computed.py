"""Weights of an artifact that are not copies of one tensor of the checkpoint.

Such weights are packed weights of a quantized checkpoint, weights that the build rounds to fewer bits, and weights that
are assembled from several tensors. They are computed in blocks of rows while they are written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.tensors import Source
from kvexport.ops.packed import PackedTensor, pack
from kvexport.tensor_files.casting import WANTED, Dtype

Array = NDArray[Any]


@dataclass(frozen=True)
class ComputedSpec:
    """An initializer whose bytes are computed from a weight of the checkpoint instead of copied."""

    name: str  # name in the ONNX graph
    source: Source  # source of the initializer's rows
    dtype: Dtype  # dtype that the ONNX graph declares
    shape: tuple[int, ...]  # shape that the ONNX graph declares

    @property
    def components(self) -> dict[str, PackedTensor]:
        packing = self.source.packing
        return (
            {"weight": PackedTensor(self.dtype, self.shape)} if packing is None else packing.tensors(*self.source.shape)
        )

    @property
    def nbytes(self) -> int:
        return sum(component.nbytes for component in self.components.values())


def component_name(initializer: str, component: str) -> str:
    return initializer if component == "weight" else f"{initializer.removesuffix('.weight')}.{component}"


def component_blocks(spec: ComputedSpec) -> Iterator[tuple[str, Iterator[Array]]]:
    """Yield (name, blocks of bytes) of each tensor of an initializer; each must be read before the next."""
    packing, source = spec.source.packing, spec.source
    if packing is None:
        yield "weight", _floats(spec)
        return
    rest: dict[str, list[Array]] = {name: [] for name in spec.components if name not in ("weight", "table", "order")}
    order: Array | None = None

    def weight() -> Iterator[Array]:
        nonlocal order
        for block in source.blocks():
            order = block.get("order")
            for name, kept in rest.items():
                kept.append(block[name])
                _require_finite(source.name, name, block[name])
            yield block["weight"]

    yield "weight", weight()
    for name, kept in rest.items():
        whole, dtype = np.concatenate(kept), spec.components[name].dtype
        if name == "zero":
            whole = pack(whole, packing.bits)
        yield name, iter([whole if dtype in ("int4", "uint4") else whole.astype(dtype)])
    if packing.table:
        yield "table", iter([np.array(packing.table, np.int8)])
    if order is not None:
        yield "order", iter([order])


def _floats(spec: ComputedSpec) -> Iterator[Array]:
    for block in spec.source.blocks():
        with np.errstate(over="ignore"):
            cast: Array = block["weight"].astype(WANTED[spec.dtype])
        if not np.isfinite(cast).all():
            raise UsageError(
                f"tensor {spec.source.name!r} has values that are infinite or NaN, or exceed the largest {spec.dtype}",
                "download the checkpoint again, or --set model.dtype=float32",
            )
        yield cast


def _require_finite(tensor: str, component: str, values: Array) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UsageError(
            f"the {component}s of tensor {tensor!r} hold values that are infinite or NaN",
            "download the checkpoint again",
        )
