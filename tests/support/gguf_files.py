"""GGUF files as bytes, written by the format's specification, and a tiny Llama in one."""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRING, ARRAY, UINT32, FLOAT32, INT32 = 8, 9, 4, 6, 5
F32, Q8_0 = 0, 8
Tensors = dict[str, tuple[tuple[int, ...], int, bytes]]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return STRING, text(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    if isinstance(value, list) and value and type(value[0]) is int:
        return ARRAY, struct.pack(f"<IQ{len(value)}i", INT32, len(value), *value)
    if isinstance(value, list):
        kind = entry(value[0])[0]
        return ARRAY, struct.pack("<IQ", kind, len(value)) + b"".join(entry(item)[1] for item in value)
    return UINT32, struct.pack("<I", value)


def gguf(entries: dict[str, tuple[int, bytes]], tensors: Tensors) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, (kind, value) in entries.items())
    data = b""
    for name, (dims, kind, value) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += value + b"\0" * (-len(value) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def q8_0(weight: NDArray[np.float32]) -> tuple[bytes, NDArray[np.float32]]:
    """Return a weight as Q8_0 blocks, and the values that the blocks represent."""
    groups = weight.reshape(-1, 32)
    scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
    levels = np.rint(groups / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    blocks = np.concatenate([scale.view(np.uint8), levels.view(np.uint8)], axis=1)
    return blocks.tobytes(), (scale.astype(np.float32) * levels).reshape(weight.shape)


# llama.cpp's names of weights, by the names of transformers
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "lm_head": "output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip


def decoder(
    config: dict[str, Any],
    weights: dict[str, NDArray[np.float32]],
    tokens: list[str],
    matrices: tuple[int, Callable[[NDArray[np.float32]], tuple[bytes, NDArray[np.float32]]]] = (Q8_0, q8_0),
    **more: Any,
) -> tuple[bytes, dict[str, NDArray[np.float32]]]:
    """Return a decoder as a GGUF file, and the values that its weights represent.

    `matrices` is the type of its matrices and the function that returns their blocks and values. A Llama's query and
    key weights have their rows in llama.cpp's order.
    """
    kind_of_model = config["model_type"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: Tensors = {}
    represented = {}
    for name, weight in weights.items():
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
        layer, own, part = match.groups()
        stored = NAMES[own]
        data, kind = weight.tobytes(), F32
        represented[name] = weight
        if weight.ndim == 2:
            kind, blocks_of = matrices
            data, represented[name] = blocks_of(weight)
            if (
                kind_of_model == "llama" and stored in heads
            ):  # LlamaModel.permute of convert_hf_to_gguf.py, on the blocks of each row
                half = weight.shape[0] // heads[stored] // 2
                rows = np.frombuffer(data, np.uint8).reshape(heads[stored], 2, half, -1)
                data = rows.swapaxes(1, 2).tobytes()
        prefix = f"blk.{layer}." if layer else ""
        tensors[f"{prefix}{stored}.{part}"] = (weight.shape[::-1], kind, data)
    metadata = {
        "general.architecture": kind_of_model,
        **{f"{kind_of_model}.{key}": config[name] for key, name in SIZES.items() if config.get(name)},
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [f"{tokens[1]} {tokens[2]}"], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": True, **more,
    }  # fmt: skip
    return gguf({key: entry(value) for key, value in metadata.items() if value is not None}, tensors), represented


def tiny_gguf(checkpoint: Path, file: Path, **more: Any) -> dict[str, NDArray[np.float32]]:
    import json

    from safetensors.numpy import load_file

    tokens = ["<|end|>", "a", "b", "ab", *(chr(i) for i in range(ord("c"), ord("c") + 60))]
    config = json.loads((checkpoint / "config.json").read_text())
    data, represented = decoder(config, load_file(checkpoint / "model.safetensors"), tokens, **more)
    file.write_bytes(data)
    return represented
