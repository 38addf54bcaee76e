"""A Llama checkpoint as a GGUF file in llama.cpp's types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.gguf_files import NAMES


def write_gguf(checkpoint: Path, file: Path, rest: str, head: str) -> Path:
    """Write a Llama checkpoint as GGUF with gguf's own quantization, rows of queries and keys in llama.cpp's order."""
    import gguf
    from safetensors import safe_open

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, "pt") as weights:
            for name in list(weights.keys()):
                *above, own = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
                own, prefix = (own, f"blk.{above[0]}.") if "layers" in name else (name.removesuffix(".weight"), "")
                stored, x = NAMES[own], weights.get_tensor(name).float().numpy()
                if stored in heads:
                    x = x.reshape(heads[stored], 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
                if x.ndim == 1:
                    writer.add_tensor(f"{prefix}{stored}.weight", x)
                    continue
                kind = gguf.GGMLQuantizationType[head if stored in ("token_embd", "output") else rest]
                writer.add_tensor(f"{prefix}{stored}.weight", gguf.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, description: dict[str, Any]) -> None:
    import gguf

    model, special = description["model"], {token["content"] for token in description["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_token_list(tokens)
    if model["type"] == "BPE":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * len(tokens))
        kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)]
        writer.add_token_types([int(kind) for kind in kinds])
