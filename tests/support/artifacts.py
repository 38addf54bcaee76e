"""Artifacts for tests of kvexport.artifact.publish, and processes that build artifacts and can be killed meanwhile."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvexport
from kvexport.artifact.digests import write_manifest
from kvexport.artifact.publish import staging
from kvexport.artifact.reading import load_checked

PYTHON_PATH = {**os.environ, "PYTHONPATH": str(Path(kvexport.__file__).parent.parent)}
NAMESPACE = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]

# A process that imports the package and forks one child per line of JSON. It prints the child's pid, and the child's
# wait status at the end.
FORKS = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
from kvexport.artifact import digests, publish as artifact
from kvexport.errors import KvexportError, UsageError

FILE_EVENTS = (
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree", "fcntl.flock",
    "os.truncate",
)  # fmt: skip

def build(target, label, pause=0.0):
    with artifact.staging(target) as work:
        for name in ("decoder.onnx", "weights/a.bin"):
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_text(f"{label} {name}\\n" * 50)
            time.sleep(pause)
        digests.write_manifest(work, {"label": label})
        time.sleep(pause)

def contend(target, times, inside):
    while times:
        try:
            with artifact.staging(target) as work:
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                (work / "a").write_text("a")
                digests.write_manifest(work, {"label": "contended"})
                os.unlink(inside)
            times -= 1
        except UsageError:
            time.sleep(0.0002)

def run(job):
    target, seen = Path(job["target"]), 0
    def event(*_):
        nonlocal seen
        seen += 1
        if seen == job.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
    # SIGKILL loses nothing that the kernel has, so the sync itself would only cost time here.
    os.fsync = event
    if job.get("die_at"):
        sys.addaudithook(lambda name, _: event() if name in FILE_EVENTS else None)
    if job.get("no_exchange"):
        ctypes.CDLL = lambda *_, **__: object()
    if "inside" in job:
        contend(target, job["times"], job["inside"])
    for turn in range(job.get("builds", 0)):
        build(target, f"{job['label']}{turn}", job.get("pause", 0.0))

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            run(json.loads(line))
            status = 0
        except KvexportError as error:
            status = error.exit_code
        finally:
            os._exit(status)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


class Forks:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=PYTHON_PATH
        )

    def start(self, target: Path, **job: Any) -> int:
        self.process.stdin.write(json.dumps({"target": str(target), **job}) + "\n")
        self.process.stdin.flush()
        return self._number()

    def wait(self) -> int:
        return self._number()

    def _number(self) -> int:
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate("")


def build(target: Path, label: str = "first") -> Path:
    with staging(target) as work:
        (work / "weights").mkdir()
        (work / "decoder.onnx").write_text(f"{label} decoder")
        (work / "weights" / "a.bin").write_text(f"{label} weights")
        write_manifest(work, {"label": label})
    return target


def assert_whole(target: Path) -> str:
    """Check that all files of the artifact are of one build, and return its label."""
    manifest = load_checked(target)
    for name in manifest["files"]:
        assert (target / name).read_text().startswith(manifest["label"])
    return str(manifest["label"])


def beside(target: Path) -> list[str]:
    return sorted(entry.name for entry in target.parent.iterdir())


def rewrite(target: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and recompute its own digest, as an attacker would."""
    path = target / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest.pop("manifest_sha256")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["manifest_sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(manifest, sort_keys=True, indent=1) + "\n")
