"""Readers of compressed-tensors checkpoints and of 8-bit floats: packed weight matrices [outputs, inputs].

`pack-quantized` packs integer codes along the inputs in words of 32 bits, from the lowest bits up. Half of the range
was added to each code. Its zero points are packed in the same way along the outputs. `int-quantized` stores int8. The
module float4.py reads 4-bit floats. 8-bit floats (`float-quantized`, ModelOpt's FP8, transformers' fp8) are cast: a
weight is float * scale, with one scale for the tensor, an output, or a block. Sources: compressed-tensors'
pack_to_int32, dequantize; transformers' finegrained_fp8; ModelOpt's hf_quant_config.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.quantized.float4 import float4
from kvexport.export.model.quantized.reading import (
    ACTIVATIONS,
    Read,
    Tensors,
    float8_values,
    groups_in_order,
    halves,
    packed_block,
    refused,
    require,
    require_scales,
    require_shape,
    whole,
    wrong,
)
from kvexport.export.model.tensors import Source, Weight
from kvexport.ops.packed import PackedFormat
from kvexport.tensor_files.casting import BLOCK_BYTES, byte_rows, row_blocks
from kvexport.tensor_files.shards import TensorEntry

_FLOATS = ("F16", "BF16", "F32")
_FP8 = "F8_E4M3"


def _signed_zeros(entry: TensorEntry, n: int, bits: int) -> NDArray[np.int8]:
    stored = whole(entry)
    if entry.dtype == "I8":
        return stored
    words = np.ascontiguousarray(stored.T).view(np.uint8)  # [groups, words of outputs]
    numbers = halves(words) if bits == 4 else words
    shifted = numbers[:, :n].astype(np.int16) - (1 << (bits - 1))
    return np.ascontiguousarray(shifted.astype(np.int8).T)


def read_compressed(config: Mapping[str, Any], tensors: Tensors) -> Read:
    groups = config.get("config_groups")
    schemes = (
        [scheme for scheme in groups.values() if isinstance(scheme, Mapping)] if isinstance(groups, Mapping) else []
    )
    formats = {str(config.get("format")), *(str(scheme["format"]) for scheme in schemes if scheme.get("format"))}
    known = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
    known |= {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}
    if bad := formats - known:
        raise refused(f"compressed-tensors of format {min(bad)[:80]!r}")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise refused("compressed-tensors with sparsity")
    _refuse_rotations(config.get("transform_config"))
    arguments = [options for scheme in schemes if isinstance(options := scheme.get("weights"), Mapping)]
    widths = {options["num_bits"] for options in arguments if type(options.get("num_bits")) is int}
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name, entry in tensors.items():
        if name.endswith(".weight_packed"):
            prefix = name.removesuffix(".weight_packed")
            sources[f"{prefix}.weight"] = (
                float4(name, entry, tensors, prefix, "weight_global_scale", divides=True)
                if entry.dtype == "U8"
                else _in_words(prefix, entry, tensors, widths)
            )
        elif name.endswith(".weight") and entry.dtype == "I8":
            prefix = name.removesuffix(".weight")
            sources[name] = _in_bytes(prefix, entry, tensors)
        else:
            continue
        suffixes = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
        used |= {f"{prefix}.{suffix}" for suffix in (*suffixes, "weight_global_scale", "input_global_scale")}
    blocks = [options.get("block_structure") for options in arguments]
    floats, more, notes = read_float8({"weight_block_size": next(filter(None, blocks), None)}, tensors)
    if any(scheme.get("input_activations") for scheme in schemes) and sources:
        notes.append(ACTIVATIONS)
    return {**sources, **floats}, used | more, notes


def _refuse_rotations(transforms: Any) -> None:
    """Raise UsageError for rotations of activations; rotations of weights are already part of the stored weights."""
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        for step in group.get("apply") or [] if isinstance(group, Mapping) else []:
            where = step.get("location") if isinstance(step, Mapping) else None
            if not str(where).startswith("weight"):
                raise refused(f"compressed-tensors whose transform_config rotates at run time ({name}: {where!r})")


def _in_words(prefix: str, entry: TensorEntry, tensors: Tensors, widths: set[Any]) -> Weight:
    sizes = whole(require(tensors, f"{prefix}.weight_shape", entry.name))
    n, k = (int(size) for size in sizes.reshape(-1)) if sizes.size == 2 else (0, 0)
    packed = entry.shape[1] if len(entry.shape) == 2 else 0
    bits: Any = next((b for b in (4, 8) if b in widths and k and packed * 32 == k * b), None)
    if entry.dtype != "I32" or bits is None or entry.shape[0] != n:
        raise wrong(entry, f"I32, {n} rows of {k} numbers of {' or '.join(map(str, sorted(widths))) or '4 or 8'} bits")
    return _packed(prefix, entry, tensors, (n, k), bits)


def _in_bytes(prefix: str, entry: TensorEntry, tensors: Tensors) -> Weight:
    if len(entry.shape) != 2:
        raise wrong(entry, "a matrix")
    n, k = entry.shape
    return _packed(prefix, entry, tensors, (n, k), 8)


def _packed(prefix: str, entry: TensorEntry, tensors: Tensors, shape: tuple[int, int], bits: Any) -> Weight:
    """Return a weight of integers [outputs, inputs], packed in 32-bit words or stored as int8."""
    n, k = shape
    scale = require(tensors, f"{prefix}.weight_scale", entry.name)
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.dtype not in _FLOATS or scale.shape not in ((1,), (), (n, groups)) or not groups or k % groups:
        raise wrong(scale, f"floats, one or {n} rows whose number divides {k}")
    zero = tensors.get(f"{prefix}.weight_zero_point")
    if zero is not None:
        if zero.dtype == "I32":
            require_shape(zero, ("I32",), (-(-n * bits // 32), groups))
        else:
            require_shape(zero, ("I8",), (n, groups))
        zero = None if not _signed_zeros(zero, n, bits).any() else zero
    g_idx = tensors.get(f"{prefix}.weight_g_idx")
    if g_idx is not None:
        require_shape(g_idx, ("I32", "I64"), (k,))
    group = k // groups
    kept: Any = "float16" if scale.dtype == "F16" else "float32"
    order = None if g_idx is None else groups_in_order(g_idx, group)
    packing = PackedFormat(bits, True, group, "none" if zero is None else "zero", kept, order is not None)
    if fault := packing.fault(k):
        raise UsageError(f"tensor {entry.name!r} in {entry.file} cannot be read: {fault}", "")

    def blocks() -> Iterator[dict[str, NDArray[Any]]]:
        scales = np.broadcast_to(require_scales(scale.name, whole(scale)), (n, groups))
        zeros = None if zero is None else _signed_zeros(zero, n, bits)
        in_words = entry.dtype == "I32"  # numbers plus half of the range
        for rows in row_blocks(n, k * bits // 8, BLOCK_BYTES):
            own = slice(rows.start, rows.stop)
            parts: dict[str, Any] = (
                {"scale": scales[own]} if zeros is None else {"scale": scales[own], "zero": zeros[own]}
            )
            yield packed_block(byte_rows(entry, rows), bits, order, parts, flipped=in_words)

    return Weight(entry.name, shape, blocks, packing)


def _float8_blocks(
    weight: TensorEntry, scale: TensorEntry, block: tuple[int, int]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield rows of 8-bit floats as float32; `block` rows and columns share a scale."""
    (n, k), (tall, wide) = weight.shape, block
    scales = require_scales(scale.name, whole(scale)).astype(np.float32).reshape(-(-n // tall), -(-k // wide))
    for rows in row_blocks(n, 4 * k, BLOCK_BYTES):
        own = scales[np.arange(rows.start, rows.stop) // tall]
        yield {"weight": float8_values()[byte_rows(weight, rows)] * np.repeat(own, wide, axis=1)[:, :k]}


def read_float8(config: Mapping[str, Any], tensors: Tensors) -> Read:
    """Return the 8-bit float weights of a checkpoint, which are cast to floats when the artifact is written."""
    size = config.get("weight_block_size")
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name, entry in tensors.items():
        if not name.endswith(".weight") or not entry.dtype.startswith("F8_"):
            continue
        if entry.dtype != _FP8 or len(entry.shape) != 2:
            raise wrong(entry, f"{_FP8}, a matrix", "")
        inverse = f"{name}_scale_inv"
        scale = tensors[inverse] if inverse in tensors else require(tensors, f"{name}_scale", name)
        n, k = entry.shape
        tall, wide = n, k
        if isinstance(size, list) and len(size) == 2 and all(type(x) is int for x in size):
            tall, wide = size
        if scale.shape in ((n,), (n, 1)) and n > 1:
            tall, wide = 1, k
        count = int(np.prod(scale.shape))
        if scale.dtype not in _FLOATS or tall < 1 or wide < 1 or count != -(-n // tall) * -(-k // wide):
            raise wrong(scale, f"floats, one for the tensor, for each of {n} rows or each block of {tall} x {wide}")
        sources[name] = Weight(name, (n, k), partial(_float8_blocks, entry, scale, (tall, wide)))
        used |= {name, scale.name}
    notes = (
        [f"{len(sources)} weights in 8-bit floats are cast to model.dtype, or rounded where weights.bits says so"]
        if sources
        else []
    )
    return sources, used, notes
