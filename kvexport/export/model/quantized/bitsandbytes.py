"""Reader of bitsandbytes' weights of 4 bits, NF4 and FP4.

A 4-bit code of bitsandbytes is an index into a table of sixteen floats. Its blocks of 64 codes run over the flattened
matrix, with the first code of a byte in the high half. The weights are therefore cast to floats. Source: bitsandbytes'
QuantState and dequantize_4bit.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.export.model.quantized.reading import Read, Tensors, refused, require, require_shape, whole, wrong
from kvexport.export.model.tensors import Source, Weight
from kvexport.tensor_files.casting import BLOCK_BYTES, byte_rows, read_blocks, row_blocks
from kvexport.tensor_files.shards import TensorEntry


def read_bitsandbytes(config: Mapping[str, Any], tensors: Tensors) -> Read:
    """Return the 4-bit weights of a bitsandbytes checkpoint, which are cast to floats when the artifact is written."""
    if not config.get("load_in_4bit"):
        raise refused("bitsandbytes of 8 bits")
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name in tensors:
        kind = next(
            (kind for kind in ("nf4", "fp4") if name.endswith(f".weight.quant_state.bitsandbytes__{kind}")), None
        )
        if kind is not None:
            weight = name.removesuffix(f".quant_state.bitsandbytes__{kind}")
            sources[weight] = _table_of_16(tensors, weight, tensors[name])
            used |= {other for other in tensors if other == weight or other.startswith(f"{weight}.")}
    note = (
        f"{len(sources)} weights in bitsandbytes' 4 bits are cast to model.dtype, or rounded where weights.bits says so"
    )
    return sources, used, [note]


def _table_of_16(tensors: Tensors, name: str, state: TensorEntry) -> Weight:
    """Return a weight [outputs, inputs] of 4-bit indices into a table of 16 floats, which is read as floats."""
    try:
        fields = json.loads(b"".join(read_blocks(state)))
        n, k = (int(size) for size in fields["shape"])
        block, nested_block = int(fields["blocksize"]), int(fields.get("nested_blocksize", 0))
        offset = float(fields["nested_offset"]) if nested_block else 0.0  # added to quantized scales
    except (ValueError, KeyError, TypeError) as error:
        raise wrong(state, f"what bitsandbytes writes of a weight ({type(error).__name__}: {error})") from error
    weight = require(tensors, name, state.name)
    if min(n, k, block) < 1 or nested_block < 0 or k % 2:
        raise wrong(state, "sizes above 0, an even number of inputs")
    blocks = -(-n * k // block)
    require_shape(weight, ("U8",), (n * k // 2, 1))
    table, scale = (require(tensors, f"{name}.{suffix}", name) for suffix in ("quant_map", "absmax"))
    require_shape(table, ("F32",), (16,))
    require_shape(scale, ("U8",) if nested_block else ("F32",), (blocks,))
    nested = None
    if nested_block:
        nested = (require(tensors, f"{name}.nested_quant_map", name), require(tensors, f"{name}.nested_absmax", name))
        require_shape(nested[0], ("F32",), (256,))
        require_shape(nested[1], ("F32",), (-(-blocks // nested_block),))

    def rows_of() -> Iterator[dict[str, NDArray[Any]]]:
        scales = whole(scale).reshape(-1)
        if nested is not None:
            means, own = map(whole, nested)
            scales = means[scales] * np.repeat(own, nested_block)[: scales.size] + np.float32(offset)
        floats, scales = whole(table).astype(np.float32), scales.astype(np.float32)
        for rows in row_blocks(n, 4 * k, BLOCK_BYTES):
            first, end = rows.start * k, rows.stop * k
            stored = byte_rows(weight, range(first // 2, end // 2)).reshape(-1)
            numbers = np.stack([stored >> 4, stored & 15], axis=-1).reshape(-1)
            yield {"weight": (floats[numbers] * scales[np.arange(first, end) // block]).reshape(len(rows), k)}

    return Weight(name, (n, k), rows_of)
