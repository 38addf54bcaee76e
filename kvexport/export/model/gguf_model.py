"""A GGUF file as a checkpoint: its tensors under transformers' names, and its metadata as Hugging Face files.

The module gguf_architectures.py lists the model architectures that are read.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.errors import UsageError
from kvexport.export.model.cached import cache_folder, write_once
from kvexport.export.model.ggml_blocks import LAYOUTS
from kvexport.export.model.gguf import FLOATS, Gguf, GgufWeight
from kvexport.export.model.gguf_architectures import (
    ARCHITECTURES,
    BARE,
    DOWN_EXPERTS,
    EXPERTS,
    GATE_EXPERTS,
    GATE_UP_EXPERTS,
    KEY_EXPANSION,
    MIXTRAL,
    ONE_ROW,
    SQUEEZED,
    STACKED,
    UP_EXPERTS,
    VALUE_EXPANSION,
    Architecture,
    Meta,
    shortest,
)
from kvexport.export.model.gguf_linear_attention import (
    PROJECTIONS,
    TENSORS,
    LinearHeads,
    linear_attention_of,
    matrix_of,
    ordered,
    rearranged,
)
from kvexport.export.model.gguf_tokenizer import SPECIAL_IDS, end_ids, write_json, write_tokenizer
from kvexport.export.model.tensors import Array, Dense, PackedExperts, Source, Weight, dense_values, float_weight
from kvexport.tensor_files.casting import load_tensor, read_blocks
from kvexport.tensor_files.shards import TensorEntry

_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?")
_PAIRED_BIASES = ("_q.bias", "_k.bias")
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_FREQUENCIES = (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
# The rotary settings of Llama 3.1, EXAONE 4 and Llama 3.2. A GGUF file has only the factors that follow from these
# settings (transformers' _compute_llama3).
_LLAMA3 = [
    {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor in (8.0, 16.0, 32.0)
]
# GGUF files that are no models, by their general.type or general.architecture: what they are, and what to use instead.
_ENCODER = ("the encoder of images or sounds for a model", "kvexport build MODEL_FILE --mmproj this file")
_NO_MODELS = {
    "mmproj": _ENCODER,
    "clip": _ENCODER,
    "adapter": ("a LoRA adapter for a model", "the model's own file with --set adapters.count=1, and PEFT's adapter"),
    "imatrix": ("an importance matrix, by which llama.cpp rounds a model", "take the model's own file"),
}
MOST_LAYERS = 1024
GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
TEXTS_VERSION = 3  # version of the cached files that `write_texts` writes


def tensors_of(gguf: Gguf) -> tuple[dict[str, TensorEntry], dict[str, Source]]:
    """Return the float tensors of a GGUF file, and readers of its quantized weights, both by transformers' names."""
    plain: dict[str, TensorEntry] = {}
    computed: dict[str, Source] = {}
    experts: dict[str, dict[tuple[str, str], TensorEntry]] = {}
    expansions: dict[str, dict[str, TensorEntry]] = {}
    joined: dict[str, dict[str, TensorEntry]] = {}
    linear: dict[str, dict[str, TensorEntry]] = {}
    kind, architecture = _architecture(gguf)
    of_linear = (*TENSORS, *PROJECTIONS.get(architecture.linear, ())) if architecture.linear else ()
    drafts, layers = (gguf.metadata.get(f"{kind}.{key}", 0) for key in ("nextn_predict_layers", "block_count"))
    drafted = str(layers - 1) if drafts == 1 and type(layers) is int else None
    shared = {own for own, count in Counter(architecture.names.values()).items() if count > 1}
    for stored, entry in _apart(gguf, kind, architecture):
        match = _TENSOR.fullmatch(stored)
        if stored in _FREQUENCIES or (match and match[1] is not None and match[1] == drafted):
            continue
        if match and (part := stored.removeprefix(f"blk.{match[1]}.").removesuffix(".weight")) in of_linear:
            linear.setdefault(f"model.layers.{match[1]}.linear_attn", {})[part] = entry
            continue
        known = match and match[2] in architecture.names and (match[3] or architecture.names[match[2]] in BARE)
        if not match or not known or (architecture.pairs and stored.endswith(_PAIRED_BIASES)):
            raise UsageError(
                f"{gguf.file} has a tensor {stored[:80]!r}, which no {kind} that is read here has",
                "set model.path to the checkpoint that the file was made of",
            )
        if entry.dtype not in LAYOUTS and entry.dtype not in FLOATS:
            raise UsageError(
                f"tensor {stored!r} of {gguf.file} is {entry.dtype}, expected one of {', '.join((*FLOATS, *LAYOUTS))}",
                "take a file of type Q4_0, Q4_1, Q4_K_M, Q5_K_M, Q6_K or Q8_0, or the checkpoint it was made of",
            )
        own, ending = architecture.names[match[2]], match[3]
        name = f"{f'{architecture.layers}.{match[1]}.' if match[1] else ''}{own}"
        if match[2] in EXPERTS:
            experts.setdefault(name, {})[match[2], ending] = entry
            continue
        if match[2] in (KEY_EXPANSION, VALUE_EXPANSION):
            expansions.setdefault(f"{name}.{ending}", {})[match[2]] = entry
            continue
        if match[2] in STACKED and len(entry.shape) == 3:
            computed |= {f"{name}.{i}.{ending}": GgufWeight(_expert(entry, i)) for i in range(entry.shape[0])}
            continue
        if own in shared and (own in SQUEEZED or (match[2] != "attn_kv_b" and len(entry.shape) == 2)):
            joined.setdefault(f"{name}.{ending}", {})[match[2]] = entry  # as the gate and the ups of an MLP
            continue
        if own not in BARE:
            name = f"{name}.{ending}"
        heads = _paired_heads(gguf, kind, architecture, match[2], entry)
        if architecture.by_head and match[2] == "attn_qkv" and len(entry.shape) < 3:
            computed[name] = _by_head(name, entry, gguf.metadata.get(f"{kind}.attention.head_count"))
        elif match[2] in ("ssm_a", "ssm_d"):
            count = math.prod(entry.shape)
            rows = entry.shape if entry.shape[-1] > 1 else (count,)  # Mamba has a number for each channel and state
            whole: tuple[int, ...] = (1, 1, count, 1) if "forget_gate" in own else rows  # Kimi Linear's
            computed[name] = ordered(name, entry, whole, logarithm=match[2] == "ssm_a")
        elif match[2] == "ssm_norm":
            plain[name] = replace(entry, shape=(math.prod(entry.shape),))
        elif architecture.transposed and match[1] and len(entry.shape) == 2:
            computed[name] = _transposed(name, entry)
        elif len(entry.shape) == 2 and (heads or entry.dtype in LAYOUTS):
            computed[name] = GgufWeight(entry, heads)
        elif entry.dtype in LAYOUTS:
            raise UsageError(f"tensor {stored!r} of {gguf.file} is {entry.dtype} of shape {list(entry.shape)}")
        elif architecture.shifted and own.endswith("norm") and ending == "weight":
            computed[name] = _joined_floats(name, [entry], plus=-1.0)
        elif own in ONE_ROW and len(entry.shape) == 1:
            plain[name] = replace(entry, shape=(1, *entry.shape))
        elif own in SQUEEZED and ending == "weight":
            plain[name] = replace(entry, shape=(entry.shape[0], 1, *entry.shape[1:]))
        else:
            plain[name] = entry
    for prefix, parts in experts.items():
        computed |= experts_of(prefix, parts)
    for name, halves in expansions.items():
        computed[name] = _expansion(name, halves)
    for name, parts_of in joined.items():
        in_order = [parts_of[stored] for stored in architecture.names if stored in parts_of]
        if name.removesuffix(".weight").endswith(SQUEEZED):
            squeezed = [replace(x, shape=(math.prod(x.shape[:-1]), 1, x.shape[-1])) for x in in_order]
            computed[name] = _joined_floats(name, squeezed, axis=0)
        else:
            computed[name] = matrix_of(name, in_order)
    for own, shape in architecture.numbers.items():
        listed: Any = gguf.metadata.get(own.replace("mlp.act_fn", "xielu"))
        for i, number in enumerate(listed if isinstance(listed, list) else ()):
            if type(number) is float:
                name = f"{architecture.layers}.{i}.{own}"
                computed[name] = float_weight(name, shape, partial(np.full, shape, number, np.float32))
    for prefix, entries in linear.items():
        computed |= linear_attention_of(prefix, architecture.linear, _linear_heads(gguf, kind), entries)
    return plain, computed


def _apart(gguf: Gguf, kind: str, architecture: Architecture) -> Iterator[tuple[str, TensorEntry]]:
    """Yield tensors by name; a joint matrix or bias of queries, keys and values, which is allowed, is split."""
    heads: Any = gguf.metadata.get(f"{kind}.attention.head_count")
    kv_heads: Any = gguf.metadata.get(f"{kind}.attention.head_count_kv", heads)
    counts = {"attn_q": heads, "attn_k": kv_heads, "attn_v": kv_heads}
    split = "attn_q" in architecture.names and "attn_qkv" not in architecture.names and not architecture.linear
    for stored, entry in gguf.tensors.items():
        if not split or ".attn_qkv." not in stored:
            yield stored, entry
            continue
        if not all(type(x) is int and x > 0 for x in counts.values()) or entry.shape[0] % sum(counts.values()):
            raise _no_heads(entry, heads)
        size, first = entry.shape[0] // sum(counts.values()), 0
        for name, count in counts.items():
            yield stored.replace("attn_qkv", name), _rows(entry, first, first + count * size)
            first += count * size


def _no_heads(entry: TensorEntry, heads: Any) -> UsageError:
    return UsageError(
        f"tensor {entry.name!r} of {entry.file} has shape {list(entry.shape)}, which {str(heads)[:40]} heads do not "
        "share",
        f"download {entry.file.name} again",
    )


def _rows(entry: TensorEntry, start: int, stop: int) -> TensorEntry:
    size = entry.nbytes // entry.shape[0]
    shape, nbytes = (stop - start, *entry.shape[1:]), (stop - start) * size
    return replace(entry, shape=shape, offset=entry.offset + start * size, nbytes=nbytes)


def _joined_floats(name: str, parts: Sequence[TensorEntry], axis: int = -1, plus: float = 0.0) -> Weight:
    """Return tensors that are joined along a dimension, with the number `plus` added to every value."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)

    def values() -> Array:
        joined: Array = np.concatenate([load_tensor(part, "float32") for part in parts], axis) + np.float32(plus)
        return joined

    return float_weight(name, tuple(shape), values)


def _transposed(name: str, entry: TensorEntry) -> Weight:
    return float_weight(name, entry.shape[::-1], lambda: np.ascontiguousarray(dense_values(GgufWeight(entry)).T))


def _expansion(name: str, halves: Mapping[str, TensorEntry]) -> Weight:
    """Return the matrix of latent attention that expands latent vectors to keys and values, head by head.

    A GGUF file stores the matrix in two halves, of keys [heads, latent, size] and of values [heads, size, latent].
    """
    keys, values = (halves.get(half) for half in (KEY_EXPANSION, VALUE_EXPANSION))
    fits = keys and values and len(keys.shape) == len(values.shape) == 3
    if not keys or not values or not fits or keys.shape[:2] != (values.shape[0], values.shape[2]):
        held = ", ".join(f"{half} {list(entry.shape)}" for half, entry in sorted(halves.items()))
        raise UsageError(
            f"the file has no fitting {KEY_EXPANSION} and {VALUE_EXPANSION} for '{name}', of which it has {held}",
            "download the file again",
        )
    heads, latent, size = keys.shape
    stacked = keys, values

    def expansion() -> Array:
        parts = []
        for i in range(heads):
            key, value = (dense_values(GgufWeight(_expert(entry, i))) for entry in stacked)
            parts += [key.T, value]
        return np.concatenate(parts)

    return float_weight(name, (heads * (size + values.shape[1]), latent), expansion)


def _by_head(name: str, entry: TensorEntry, heads: Any) -> Source:
    """Return a matrix or bias of queries, keys and values whose rows are regrouped head by head."""
    rows = entry.shape[0]
    if type(heads) is not int or heads < 1 or rows % (3 * heads):
        raise _no_heads(entry, heads)
    order = tuple(np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1).tolist())
    if len(entry.shape) == 1:
        return ordered(name, entry, (rows,), order)
    return rearranged(name, [GgufWeight(entry)], order)


def experts_of(prefix: str, stored: Mapping[tuple[str, str], TensorEntry]) -> dict[str, Source]:
    """Return the weights and biases of a GGUF layer's experts in the layout of an artifact, by parameter name."""
    down = _required(stored, DOWN_EXPERTS, prefix)
    joined = stored.get((GATE_UP_EXPERTS, "weight"))
    if (GATE_EXPERTS, "weight") not in stored and len(stored) == 2:  # gates are with the ups, or missing (Nemotron-H)
        with_gates = joined is not None and len(joined.shape) == len(down.shape) == 3
        up = joined if joined is not None and with_gates else _required(stored, UP_EXPERTS, prefix)
        return {
            f"{prefix}.{name}": _joined(f"{prefix}.{name}", entry.shape, (entry,))
            for name, entry in ((GATE_UP if with_gates else UP, up), (DOWN, down))
        }
    gate, up = (_required(stored, name, prefix) for name in (GATE_EXPERTS, UP_EXPERTS))
    for entry in (gate, up, down):
        if len(entry.shape) != 3 or entry.shape[0] != down.shape[0] or (entry is up and up.shape != gate.shape):
            raise UsageError(
                f"tensor {entry.name!r} in {entry.file} has shape {list(entry.shape)}, and the experts of its layer "
                f"have {gate.name!r} {list(gate.shape)} and {down.name!r} {list(down.shape)}",
                f"download {entry.file.name} again",
            )
    count, inner, hidden = gate.shape
    sources: dict[str, Source] = {
        f"{prefix}.{GATE_UP}": _joined(f"{prefix}.{GATE_UP}", (count, 2 * inner, hidden), (gate, up)),
        f"{prefix}.{DOWN}": _joined(f"{prefix}.{DOWN}", down.shape, (down,)),
    }
    biases = [stored.get((name, "bias")) for name in (GATE_EXPERTS, UP_EXPERTS, DOWN_EXPERTS)]
    present = [bias for bias in biases if bias is not None]
    if present:
        if len(present) < len(biases):
            raise UsageError(f"the experts '{prefix}' have {len(present)} of {len(biases)} biases", "download it again")
        sources[f"{prefix}.{GATE_UP}_bias"] = _joined_floats(f"{prefix}.{GATE_UP}_bias", present[:2])
        sources[f"{prefix}.{DOWN}_bias"] = _joined_floats(f"{prefix}.{DOWN}_bias", present[2:])
    return sources


def _required(stored: Mapping[tuple[str, str], TensorEntry], name: str, prefix: str) -> TensorEntry:
    entry = stored.get((name, "weight"))
    if entry is None:
        names = ", ".join(sorted(repr(entry.name) for entry in stored.values()))
        raise UsageError(
            f"the file has no tensor {name}.weight for the experts '{prefix}', of which it has {names}",
            "download the file again",
        )
    return entry


def _joined(name: str, shape: tuple[int, ...], stacked: Sequence[TensorEntry]) -> PackedExperts:
    matrices: list[Source] = [GgufWeight(_expert(entry, i)) for i in range(shape[0]) for entry in stacked]
    if len({matrix.packing for matrix in matrices}) > 1:
        matrices = [matrix if matrix.packing is None else Dense(matrix) for matrix in matrices]
    return PackedExperts(name, shape, tuple(matrices))


def _expert(entry: TensorEntry, i: int) -> TensorEntry:
    return replace(_rows(entry, i, i + 1), shape=entry.shape[1:])


def _linear_heads(gguf: Gguf, kind: str) -> LinearHeads:
    names = ("group_count", "time_step_rank", "state_size", "inner_size")
    numbers: list[Any] = [gguf.metadata.get(f"{kind}.ssm.{name}") for name in names]
    if not all(type(x) is int and x > 0 for x in numbers) or numbers[1] % numbers[0] or numbers[3] % numbers[1]:
        described = ", ".join(f"{name} {str(x)[:20]}" for name, x in zip(names, numbers, strict=True))
        raise UsageError(
            f"{gguf.file} describes linear attention by {described}, which do not fit each other",
            f"download {gguf.file.name} again",
        )
    keys, values, size, inner = numbers
    return LinearHeads(keys, values, size, inner // values)


def _paired_heads(gguf: Gguf, kind: str, architecture: Architecture, name: str, entry: TensorEntry) -> int:
    if not architecture.pairs or name not in ("attn_q", "attn_k"):
        return 0
    heads: Any = gguf.metadata.get(f"{kind}.attention.head_count")
    if name == "attn_k":
        heads = gguf.metadata.get(f"{kind}.attention.head_count_kv", heads)
    if isinstance(heads, list) and heads and all(type(x) is int for x in heads):  # one number for each layer
        heads = max(heads)
    if type(heads) is not int or heads < 1 or entry.shape[0] % (2 * heads):
        raise _no_heads(entry, heads)
    return heads


def _architecture(gguf: Gguf) -> tuple[str, Architecture]:
    kind, content = (gguf.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if other := next((_NO_MODELS[name] for name in map(str, (content, kind)) if name in _NO_MODELS), None):
        raise UsageError(f"{gguf.file} is no model but {other[0]}", other[1])
    if kind not in ARCHITECTURES:
        raise UsageError(
            f"{gguf.file} holds a {str(kind)[:40]!r}, expected one of {', '.join(ARCHITECTURES)}",
            "set model.path to the checkpoint that the file was made of",
        )
    experts = kind == "llama" and gguf.metadata.get("llama.expert_count")
    return str(kind), MIXTRAL if experts else ARCHITECTURES[kind]


def cached_texts(gguf: Gguf) -> Path:
    folder = cache_folder("gguf") / f"{gguf.digest[:32]}-{TEXTS_VERSION}"
    what = f"the tokenizer of {gguf.file}"
    return write_once(folder, what, lambda staged, _: write_texts(gguf, staged), "some megabytes")


def write_texts(gguf: Gguf, folder: Path) -> None:
    meta = gguf.metadata
    try:
        write_tokenizer(gguf, folder, meta[f"{_architecture(gguf)[0]}.context_length"])
        ids = {
            f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
            for name, key in SPECIAL_IDS.items()
            if name != "unk" and f"tokenizer.ggml.{key}_token_id" in meta
        }
        config = {**_config(gguf), **ids}
    except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else f"unusable metadata: {error}"
        raise UsageError(f"{gguf.file} has {what}", f"download {gguf.file.name} again") from error
    ends = end_ids(meta)
    write_json(folder / "generation_config.json", {**ids, **({"eos_token_id": ends} if ends else {})})
    write_json(folder / "config.json", config)


def check_layers(count: Any) -> None:
    if type(count) is not int or not 0 < count <= MOST_LAYERS:
        raise ValueError(f"block_count should be from 1 to {MOST_LAYERS}, found {str(count)[:40]}")


def _config(gguf: Gguf) -> dict[str, Any]:
    kind, architecture = _architecture(gguf)
    meta = Meta(kind, gguf)
    check_layers(meta["block_count"])
    heads = meta["attention.head_count"]
    base = shortest(meta.get("rope.freq_base", 10000.0))
    rotated, size = meta.get("rope.dimension_count"), meta.get("attention.key_length")
    rope = {"rope_theta": base, "rope_type": "default", **_scaling(gguf, kind, base, rotated)}
    if architecture.partial and rotated:
        rope["partial_rotary_factor"] = rotated / (size or meta["embedding_length"] // heads)
    attention = {
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "rope_parameters": rope,
        **({"head_dim": size} if size else {}),
    }
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": meta["embedding_length"],
        **_inner_size(meta),
        "max_position_embeddings": meta["context_length"],
        "num_hidden_layers": meta["block_count"] - meta.get("nextn_predict_layers", 0),
        **(attention if heads else {}),  # files of models without attention say that they have 0 heads
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "vocab_size": meta.get("vocab_size") or gguf.tensors["token_embd.weight"].shape[0],
        **{name: meta[key] for name, key in architecture.keys.items()},
        **architecture.fixed,
        **{
            name: any(stored.endswith(tensor) for stored, _ in _apart(gguf, kind, architecture))
            for name, tensor in architecture.present.items()
        },
    }
    if architecture.norm:
        rms, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
        config[architecture.norm] = meta[other if other in meta and rms not in meta else rms]
    config |= architecture.config(meta, rope)
    return {key: shortest(value) if isinstance(value, float) else value for key, value in config.items()}


def _inner_size(meta: Mapping[str, Any]) -> dict[str, int]:
    if "expert_feed_forward_length" in meta and "feed_forward_length" not in meta:
        return {}
    inner = meta["feed_forward_length"]
    return {"intermediate_size": inner} if inner else {}


def _scaling(gguf: Gguf, kind: str, base: float, size: int | None) -> dict[str, Any]:
    meta = gguf.metadata
    factor = meta.get(f"{kind}.rope.scaling.factor") or meta.get(f"{kind}.rope.scale_linear") or 1.0
    named = meta.get(f"{kind}.rope.scaling.type", "linear")  # llama.cpp has the same default
    if _LONG_FACTORS in gguf.tensors and _SHORT_FACTORS in gguf.tensors:
        attention = meta.get(f"{kind}.rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "long_factor": [shortest(x) for x in _floats(gguf.tensors[_LONG_FACTORS])],
            "short_factor": [shortest(x) for x in _floats(gguf.tensors[_SHORT_FACTORS])],
            "original_max_position_embeddings": meta[f"{kind}.rope.scaling.original_context_length"],
            **({"attention_factor": shortest(attention)} if attention else {}),
        }
    if _ROPE_FACTORS in gguf.tensors and size:
        factors = _floats(gguf.tensors[_ROPE_FACTORS])
        rotated = int(np.count_nonzero(factors == 1))
        if rotated and (factors[:rotated] == 1).all() and (factors[rotated:] > 1e29).all():  # the rest is not rotated
            return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}
        for parameters in _LLAMA3:
            expected = _llama3_factors(base, size, parameters)
            if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
                return {"rope_type": "llama3", **parameters}
        raise UsageError(
            f"{gguf.file} has factors of rotary frequencies ({_ROPE_FACTORS}) that are not Llama 3's",
            "set model.path to the checkpoint that the file was made of",
        )
    if named == "yarn" and meta.get(f"{kind}.rope.scaling.attn_factor", 1.0) == 1:
        scaling = f"{kind}.rope.scaling."
        more = {"truncate": False} if kind == "gpt-oss" else {}
        return {
            "rope_type": "yarn",
            "factor": shortest(factor),
            "original_max_position_embeddings": meta.get(
                f"{scaling}original_context_length", meta[f"{kind}.context_length"]
            ),
            "beta_fast": shortest(meta.get(f"{scaling}yarn_beta_fast", 32.0)),
            "beta_slow": shortest(meta.get(f"{scaling}yarn_beta_slow", 1.0)),
            **more,
        }
    if named == "linear" and factor != 1:
        return {"rope_type": "linear", "factor": shortest(factor)}
    if named not in ("linear", "none"):
        raise UsageError(
            f"{gguf.file} scales rotary frequencies by {str(named)[:40]!r}, expected linear, yarn or none",
            "set model.path to the checkpoint that the file was made of",
        )
    return {}


def _floats(entry: TensorEntry) -> Array:
    return np.frombuffer(b"".join(read_blocks(entry)), np.float32) if entry.dtype == "F32" else np.zeros(0)


def _llama3_factors(base: float, size: int, parameters: Mapping[str, float]) -> Any:
    frequencies = base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    lengths = 2 * math.pi / frequencies
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    share = np.clip((parameters["original_max_position_embeddings"] / lengths - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / parameters["factor"] + share)
