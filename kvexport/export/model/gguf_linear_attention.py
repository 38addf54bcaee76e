"""Layers with linear attention in GGUF files (qwen3next, qwen35, qwen35moe), rearranged as in transformers.

llama.cpp splits and orders the tensors of such a layer in its own way:

- `ssm_a` is -exp(A_log), and `ssm_conv1d` lacks a dimension of 1.
- In qwen3next, `attn_qkv` and `attn_gate` have all queries, all keys, all values and all gates, one kind after another.
  transformers has one matrix, in which the rows of a key head and of its value heads are neighbours.
- In qwen35, the value heads of a key head are not neighbours. Value head r of key head k has the number
  r * (key heads) + k in a file, and k * (value heads of a key head) + r in transformers. Rows have this order, and also
  the columns of `ssm_out`.

Sources: llama.cpp's convert_hf_to_gguf.py, and transformers' integrations/gguf/gguf_conversion_mapping.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.gguf import GgufWeight
from kvexport.export.model.tensors import Array, Dense, Source, Weight, float_weight
from kvexport.tensor_files.casting import load_tensor
from kvexport.tensor_files.shards import TensorEntry

Indices = NDArray[np.int64]
Order = Sequence[int] | Indices
Entries = Mapping[str, TensorEntry]
"""The tensors of a layer's linear attention, by llama.cpp's name without the layer's number and `.weight`."""
TENSORS = ("attn_qkv", "attn_gate", "ssm_a", "ssm_dt.bias", "ssm_conv1d", "ssm_norm", "ssm_out")
PROJECTIONS = {"qwen3next": ("ssm_ba",), "qwen35": ("ssm_beta", "ssm_alpha")}
"""llama.cpp's names of the projections of beta and of the decay, which are one matrix or two."""


@dataclass(frozen=True)
class LinearHeads:
    keys: int
    values: int
    key_size: int
    value_size: int

    @property
    def query_key_rows(self) -> int:
        return 2 * self.keys * self.key_size

    @property
    def value_rows(self) -> int:
        return self.values * self.value_size

    def apart(self) -> Indices:
        head = np.arange(self.values)
        of_key = self.values // self.keys
        return head % of_key * self.keys + head // of_key

    def split(self) -> Indices:
        """Return the order of rows in which the GGUF matrices `attn_qkv` and `attn_gate` form transformers' matrix.

        The rows of `attn_gate` are numbered after those of `attn_qkv`. The architecture is qwen3next.
        """
        size, of_key = self.key_size, self.values // self.keys * self.value_size
        queries = np.arange(self.keys * size).reshape(self.keys, size)
        values = self.query_key_rows + np.arange(self.value_rows).reshape(self.keys, of_key)
        each = (queries, queries + self.keys * size, values, values + self.value_rows)
        return np.concatenate(each, axis=1).reshape(-1)


def rearranged(name: str, parts: Sequence[Source], rows: Order = (), columns: Order = ()) -> Weight:
    """Return a matrix that consists of matrices of a GGUF file, with rows or columns in another order.

    The rows of `parts` follow each other. All parts have one packed format, or all are floats. `rows` has, for each
    row, its number in the joined parts, and `columns` the same for blocks of columns (such as heads); empty: the order
    is the same.
    """
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]

    def reordered(pieces: list[Array]) -> Array:
        width = sum(piece.size for piece in pieces) // shape[0]
        whole = np.concatenate([piece.reshape(-1, width) for piece in pieces])
        if len(rows):
            whole = whole[list(rows)]
        if len(columns):
            whole = whole.reshape(shape[0], len(columns), -1)[:, list(columns)]
        return np.ascontiguousarray(whole.reshape(shape[0], width))

    def read() -> Iterator[dict[str, Array]]:
        blocks = [block for part in parts for block in part.blocks()]
        yield {part: reordered([block[part] for block in blocks]) for part in blocks[0]}

    return Weight(name, shape, read, parts[0].packing)


def ordered(
    name: str, entry: TensorEntry, shape: tuple[int, ...], first: Order = (), *, logarithm: bool = False
) -> Weight:
    """Return a weight of another shape or order than the tensor of the GGUF file.

    `first` has, for each index of the first dimension, its index in the file; empty: the order is the same. With
    `logarithm` the weight is the logarithm of minus the stored values.
    """

    def values() -> Array:
        stored = load_tensor(entry, "float32").reshape(shape[0], -1)
        if len(first):
            stored = stored[list(first)]
        if not logarithm:
            return stored
        if not (stored < 0).all():
            raise UsageError(
                f"tensor {entry.name!r} of {entry.file} has values that are not below 0",
                f"download {entry.file.name} again",
            )
        logs: Array = np.log(-stored)
        return logs

    return float_weight(name, shape, values)


def linear_attention_of(prefix: str, kind: str, heads: LinearHeads, entries: Entries) -> dict[str, Source]:
    _check(prefix, kind, heads, entries)
    apart = kind == "qwen35"
    head = heads.apart() if apart else np.arange(heads.values)
    value = (head[:, None] * heads.value_size + np.arange(heads.value_size)).reshape(-1)
    channel = np.concatenate([np.arange(heads.query_key_rows), heads.query_key_rows + value])
    channels, taps = entries["ssm_conv1d"].shape
    sources: list[Source] = [
        ordered(f"{prefix}.A_log", entries["ssm_a"], (heads.values,), head, logarithm=True),
        ordered(f"{prefix}.dt_bias", entries["ssm_dt.bias"], (heads.values,), head),
        ordered(f"{prefix}.conv1d.weight", entries["ssm_conv1d"], (channels, 1, taps), channel),
        ordered(f"{prefix}.norm.weight", entries["ssm_norm"], (heads.value_size,)),
    ]
    if apart:
        projected: list[tuple[str, tuple[str, ...], Order]] = [
            ("in_proj_qkv", ("attn_qkv",), channel),
            ("in_proj_z", ("attn_gate",), value),
            ("in_proj_b", ("ssm_beta",), head),
            ("in_proj_a", ("ssm_alpha",), head),
        ]
    else:
        projected = [("in_proj_qkvz", ("attn_qkv", "attn_gate"), heads.split()), ("in_proj_ba", ("ssm_ba",), ())]
    sources += [matrix_of(f"{prefix}.{name}.weight", [entries[x] for x in own], rows) for name, own, rows in projected]
    columns: Order = head if apart else ()
    sources.append(matrix_of(f"{prefix}.out_proj.weight", [entries["ssm_out"]], columns=columns))
    return {source.name: source for source in sources}


def matrix_of(name: str, stored: list[TensorEntry], rows: Order = (), *, columns: Order = ()) -> Weight:
    parts: list[Source] = [GgufWeight(entry) for entry in stored]
    packings = {part.packing for part in parts}
    # A group of inputs that share a scale must not extend over two heads.
    whole = all(p is None or not len(columns) or parts[0].shape[1] // len(columns) % p.group == 0 for p in packings)
    if len(packings) > 1 or not whole:
        parts = [part if part.packing is None else Dense(part) for part in parts]
    return rearranged(name, parts, rows, columns)


def _check(prefix: str, kind: str, heads: LinearHeads, entries: Entries) -> None:
    count, values = heads.values, heads.value_rows
    shapes = {
        "attn_qkv": (heads.query_key_rows + values, -1), "attn_gate": (values, -1), "ssm_a": (count,),
        "ssm_dt.bias": (count,), "ssm_conv1d": (heads.query_key_rows + values, -1), "ssm_norm": (heads.value_size,),
        "ssm_out": (-1, values), "ssm_ba": (2 * count, -1), "ssm_beta": (count, -1), "ssm_alpha": (count, -1),
    }  # fmt: skip
    for name in (*TENSORS, *PROJECTIONS[kind]):
        if name not in entries:
            held = ", ".join(sorted(repr(entry.name) for entry in entries.values()))
            raise UsageError(
                f"the file has no tensor {name} for the layer '{prefix}', of which it has {held}",
                "download the file again",
            )
        entry, expected = entries[name], shapes[name]
        fits = len(entry.shape) == len(expected) and all(
            size in (-1, actual) for size, actual in zip(expected, entry.shape, strict=True)
        )
        if not fits:
            raise UsageError(
                f"tensor {entry.name!r} of {entry.file} has shape {list(entry.shape)}, which does not fit {heads.keys} "
                f"key heads of {heads.key_size} and {count} value heads of {heads.value_size} numbers",
                f"download {entry.file.name} again",
            )
