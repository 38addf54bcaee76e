"""The layouts of GPTQ and AWQ checkpoints: 32-bit words that pack a weight matrix [inputs, outputs].

GPTQ packs neighbouring inputs: word [k / 8, n] holds inputs k to k + 7 of output n, from the lowest bits up. Version 1
of GPTQ stores each zero point minus 1. The tensor `g_idx` has the group of every input. If groups are not contiguous
("act-order"), kvexport sorts the inputs by group. AWQ packs neighbouring outputs: word [k, n / 8] holds outputs n to n
+ 7 of input k, in the order 0, 2, 4, 6, 1, 3, 5, 7. In GPTQ and AWQ a weight is (code - zero) * scale, with an integer
code. Sources: AutoGPTQ's qlinear_cuda, GPTQModel's convert_gptq_v1_to_v2_format, AutoAWQ's packing_utils.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.quantized.reading import (
    Read,
    Tensors,
    column_bytes,
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
from kvexport.ops.packed import PackedFormat, pack
from kvexport.tensor_files.shards import TensorEntry

Layout = Literal["gptq", "gptq_v2", "awq"]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight outputs in a word of AWQ
_BLOCK_BYTES = 8 << 20


def _gptq_rows(qweight: TensorEntry, outputs: range) -> NDArray[np.uint8]:
    # The bytes of a word of GPTQ are already in the order of the inputs.
    words = column_bytes(qweight, outputs).reshape(-1, len(outputs), 4)
    return np.ascontiguousarray(words.swapaxes(0, 1)).reshape(len(outputs), -1)


def _awq_rows(qweight: TensorEntry, outputs: range) -> NDArray[np.uint8]:
    words = column_bytes(qweight, range(outputs.start // 8, -(-outputs.stop // 8)))
    packed: NDArray[np.uint8] = pack(np.ascontiguousarray(_awq_numbers(words).T), 4)
    return packed.reshape(len(outputs), -1)


def _awq_numbers(words: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the 4-bit codes [rows, outputs] of AWQ's words, which are given as bytes [rows, outputs / 2]."""
    numbers = halves(words)
    ordered: NDArray[np.uint8] = numbers.reshape(len(words), -1, 8)[..., _AWQ_ORDER]
    return ordered.reshape(len(words), -1)


def _zeros(entry: TensorEntry, bits: int, layout: Layout) -> NDArray[np.uint8]:
    words = whole(entry).view(np.uint8)
    if layout == "awq":
        return _awq_numbers(words)
    numbers: NDArray[np.uint8] = halves(words) if bits == 4 else words.copy()
    numbers += np.uint8(layout == "gptq")
    numbers &= np.uint8((1 << bits) - 1)
    return numbers


def read_columns(config: Mapping[str, Any], tensors: Tensors) -> Read:
    method = str(config.get("quant_method")).lower()
    layout = _layout(method, config)
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size", -1))
    if bits not in ((4,) if layout == "awq" else (4, 8)) or type(group) is not int:
        raise refused(f"{method} of {bits} bits in groups of {group}")
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for name, qweight in tensors.items():
        prefix = name.removesuffix(".qweight")
        if prefix == name:
            continue
        entries = {suffix: require(tensors, f"{prefix}.{suffix}", name) for suffix in ("qzeros", "scales")}
        g_idx = tensors.get(f"{prefix}.g_idx") if layout != "awq" else None
        sources[f"{prefix}.weight"] = _weight(qweight, entries["qzeros"], entries["scales"], g_idx, layout, bits, group)
        used |= {name, *(f"{prefix}.{suffix}" for suffix in ("qzeros", "scales", "g_idx"))}
    return sources, used, []


def _layout(method: str, config: Mapping[str, Any]) -> Layout:
    if method == "awq":
        if (version := str(config.get("version", "gemm")).lower()) != "gemm":
            raise refused(f"awq of version {version!r}")
        return "awq"
    kind = str(config.get("checkpoint_format") or "gptq")
    if config.get("dynamic"):
        raise refused("gptq of several widths (dynamic)")
    if kind not in ("gptq", "gptq_v2"):
        raise refused(f"gptq of format {kind!r}")
    return "gptq" if kind == "gptq" else "gptq_v2"


def _weight(
    qweight: TensorEntry,
    qzeros: TensorEntry,
    scales: TensorEntry,
    g_idx: TensorEntry | None,
    layout: Layout,
    bits: Any,
    group: int,
) -> Weight:
    """Return a weight whose 32-bit words pack the integer codes of a matrix [inputs, outputs]."""
    per_word = 32 // bits
    if qweight.dtype != "I32" or len(qweight.shape) != 2:
        raise wrong(qweight, "I32, a matrix")
    rows, columns = qweight.shape
    n, k = (columns * per_word, rows) if layout == "awq" else (columns, rows * per_word)
    group = k if group == -1 else group
    packing = PackedFormat(bits, False, group, "zero", "float16" if scales.dtype == "F16" else "float32")
    if n % per_word or (fault := packing.fault(k)):
        fault = fault if not n % per_word else f"{n} outputs do not fill words of {per_word}"
        raise UsageError(f"tensor {qweight.name!r} in {qweight.file} cannot be read: {fault}", "")
    require_shape(scales, ("F16", "BF16", "F32"), (k // group, n))
    require_shape(qzeros, ("I32",), (k // group, n // per_word))
    if g_idx is not None:
        require_shape(g_idx, ("I32", "I64"), (k,))
    order = None if g_idx is None else groups_in_order(g_idx, group)
    # If every zero point is the middle of the range, the numbers are stored as signed ones, and no zero point is
    # needed.
    signed = bool((_zeros(qzeros, bits, layout) == 1 << (bits - 1)).all())
    packing = PackedFormat(bits, signed, group, "none" if signed else "zero", packing.scale_dtype, order is not None)

    def blocks() -> Iterator[dict[str, NDArray[Any]]]:
        scale, zero = require_scales(scales.name, whole(scales)), _zeros(qzeros, bits, layout)
        step = max(8, _BLOCK_BYTES * 8 // (k * bits) // 8 * 8)
        for begin in range(0, n, step):
            outputs = range(begin, min(begin + step, n))
            stored = (_awq_rows if layout == "awq" else _gptq_rows)(qweight, outputs)
            own = slice(outputs.start, outputs.stop)
            parts = {"scale": np.ascontiguousarray(scale[:, own].T)}
            parts |= {} if signed else {"zero": np.ascontiguousarray(zero[:, own].T)}
            yield packed_block(stored, bits, order, parts, flipped=signed)

    return Weight(qweight.name, (n, k), blocks, packing)
