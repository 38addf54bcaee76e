"""Tiny checkpoints in the layouts of quantizers, written from the descriptions of these layouts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Made = tuple[dict[str, Array], NDArray[np.float32]]  # tensors by the end of their names; the values that they represent
PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Pack numbers [..., n] into words of 32 bits along the last axis, from the lowest bits up."""
    per_word = 32 // bits
    split = numbers.astype(np.uint64).reshape(*numbers.shape[:-1], -1, per_word)
    packed = np.zeros(split.shape[:-1], np.uint64)
    for place in range(per_word):
        packed |= split[..., order[place] if order else place] << np.uint64(bits * place)
    return packed.astype(np.uint32).view(np.int32)


def numbers_of(n: int, k: int, group: int, bits: int, seed: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Return unsigned numbers [n, k], zero points [n, groups] and float16 scales [n, groups]."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 1 << bits, (n, k))
    zeros = np.full((n, k // group), 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, (n, k // group))
    scales = (rng.uniform(0.5, 2, (n, k // group)) * 0.3 * 2.0**-bits).astype(np.float16)
    return numbers, zeros, scales


def gptq(n: int, k: int, seed: int, *, bits: int = 4, group: int = 16, act_order: bool = False, version: int = 1,
         symmetric: bool = False) -> Made:  # fmt: skip
    numbers, zeros, scales = numbers_of(n, k, group, bits, seed, symmetric)
    groups = np.arange(k) // group
    if act_order:
        groups = np.random.default_rng(k).permutation(groups)  # all products of one input have the same order
    values = (numbers - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
    stored = {
        "qweight": words(numbers, bits).T,
        "qzeros": words((zeros - (version == 1)).T, bits),
        "scales": scales.T,
        "g_idx": groups.astype(np.int32),
    }
    return {name: np.ascontiguousarray(x) for name, x in stored.items()}, values


def awq(n: int, k: int, seed: int, *, group: int = 16) -> Made:
    numbers, zeros, scales = numbers_of(n, k, group, 4, seed, symmetric=False)
    groups = np.arange(k) // group
    values = (numbers - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
    stored = {"qweight": words(numbers.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    return {name: np.ascontiguousarray(x) for name, x in stored.items()}, values


def quantized(
    source: Path, folder: Path, config: dict[str, Any], make: Callable[[int, int, int], Made]
) -> dict[str, Array]:
    """Write the checkpoint `source` to `folder` with every projection replaced by `make(outputs, inputs, seed)`."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    represented = dict(tensors)
    for i, name in enumerate([name for name in tensors if name.endswith(PROJECTIONS)]):
        stored, represented[name] = make(*tensors.pop(name).shape, i)
        tensors |= {f"{name.removesuffix('weight')}{part}": x for part, x in stored.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    original = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**original, "quantization_config": config}))
    return represented
