"""Tests of folders that cannot be written, full disks, and too little memory: one error each, and no partial files."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvexport.artifact.reading import load_manifest
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import EnvironmentProblem, UsageError, lacks_memory
from kvexport.export import build as building
from kvexport.export import stages, texts
from kvexport.export.build import build
from kvexport.recipe.load import load_recipe
from kvexport.state.periodic import mapped
from kvexport.state.sessions import SUFFIX, SessionStore
from tests.support.artifacts import NAMESPACE, PYTHON_PATH
from tests.support.command_line import ENVIRONMENT, ROOT
from tests.support.http_server import running
from tests.support.permissions import permissions_hold

COMPLETE = "/v1/completions"


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact, threads=1)


# Folders that cannot be written.


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that cannot be written, not even by root."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    with permissions_hold():
        with pytest.raises(PermissionError):
            (folder / "file").touch()
        yield folder
    folder.chmod(0o755)


def test_a_build_into_a_folder_that_cannot_be_written(tiny_recipe: Path, read_only: Path) -> None:
    with pytest.raises(UsageError, match=f"{read_only} cannot be written: Permission denied") as caught:
        build(load_recipe(str(tiny_recipe)).recipe, read_only / "artifact")
    assert "--out" in caught.value.fix
    assert list(read_only.iterdir()) == []


@pytest.mark.parametrize("shared", [True, False])
def test_sessions_in_a_folder_that_cannot_be_written(engine: Engine, read_only: Path, shared: bool) -> None:
    with pytest.raises(EnvironmentProblem, match=r"the folder of sessions .* cannot be used: Permission denied"):
        SessionStore(engine.manifest, memory=0, folder=read_only, disk=1 << 30, shared=shared)


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_of_sessions_that_becomes_read_only_is_an_error_of_each_turn(
    engine: Engine, tmp_path: Path, shared: bool
) -> None:
    """The state before the turn stays, and the session continues when the folder can be written again."""
    turn = {"prompt": "ab", "session_id": "s", "max_tokens": 3}
    with permissions_hold(), running(engine, session_folder=str(tmp_path), session_shared=shared) as server:
        assert server.ask(COMPLETE, turn)[0] == 200
        before = (tmp_path / f"s{SUFFIX}").read_bytes()
        tmp_path.chmod(0o555)
        status, _, body = server.ask(COMPLETE, turn)
        assert (status, body["error"]["code"]) == (507, "session_not_kept")
        assert (tmp_path / f"s{SUFFIX}").read_bytes() == before
        status, _, body = server.ask("/v1/sessions/s", method="DELETE")
        assert (status, body["error"]["code"]) == (503, "overloaded")
        tmp_path.chmod(0o755)
        answer = server.ask(COMPLETE, turn)
        assert answer[0] == 200 and answer[2]["usage"]["prompt_tokens"] == 2 + 3 + 2


# Disks without room.


PHASES: dict[str, tuple[Any, str]] = {
    "tokenizer": (texts, "copy_texts"),
    "weights": (stages, "write_weights"),
    "graphs": (stages, "write_graphs"),
    "manifest": (building, "write_manifest"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_build_whose_disk_is_full_leaves_the_artifact_before_it(
    tiny_recipe: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """A build whose disk is full keeps the previous artifact. Each stage meets the full disk after its first file."""
    out = tmp_path / "out" / "artifact"
    out.parent.mkdir()
    recipe = load_recipe(str(tiny_recipe)).recipe
    build(recipe, out)
    before = load_manifest(out)
    module, name = PHASES[phase]

    def full(*arguments: Any, **_: Any) -> Any:
        folder = next(a for a in arguments if isinstance(a, Path))
        (folder / "half").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "half"))

    monkeypatch.setattr(module, name, full)
    with pytest.raises(EnvironmentProblem, match=r"^disk full while writing half: \d+ bytes free"):
        build(recipe, out)
    assert load_manifest(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["artifact"]


def test_the_file_of_a_full_cache_takes_all_its_blocks_at_once(tmp_path: Path) -> None:
    """A cache that is larger than its disk is an error at the start instead of a signal in the middle of a step."""
    with pytest.raises(EnvironmentProblem, match=r"the full cache takes .* in cache.periodic.store"):
        mapped(1 << 60, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


SMALL_DISK = """
import sys
from pathlib import Path
import numpy as np
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import EnvironmentProblem
from kvexport.state.sessions import SessionStore

engine, disk = load(sys.argv[1], threads=1), Path(sys.argv[2])

def turn(start):
    request = Request([1, 2, 3], engine.settings(max_new_tokens=4), start=start, keep=True)
    engine.add(request)
    while engine.busy:
        engine.step()
    return request.snapshot

kept, failed = {}, 0
store = SessionStore(engine.manifest, memory=0, folder=disk / "kept", disk=1 << 40)
for i in range(400):
    name = f"s{i % 100}"
    state = turn(kept.get(name))
    try:
        store.put(name, state, store.mark(name))
        kept[name] = state
    except EnvironmentProblem as error:
        assert "No space left on device" in error.problem, error
        failed += 1
store.close()
again = SessionStore(engine.manifest, memory=0, folder=disk / "kept", disk=1 << 40)
assert all(again.get(name).to_bytes() == state.to_bytes() for name, state in kept.items())
assert not list((disk / "kept").glob(".*.session.*"))
print(len(kept), failed)
"""


def test_sessions_on_a_disk_that_fills(tiny_artifact: Path, tmp_path: Path) -> None:
    """On a disk that the kernel reports as full, each state is saved completely or refused with an error."""
    mount = "mount -t tmpfs -o size=1m none /mnt"
    try:
        allowed = subprocess.run([*NAMESPACE, mount], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("not reached: no process may mount a file system here")
    command = [*NAMESPACE, f'{mount}; exec "$0" "$@"', sys.executable, "-c", SMALL_DISK, str(tiny_artifact), "/mnt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=PYTHON_PATH)
    assert done.returncode == 0, done.stderr
    kept, failed = map(int, done.stdout.split())
    assert kept > 5 and failed > 0


# Memory.


@pytest.mark.parametrize("megabytes", [200, 400, 700])
def test_too_little_address_space_is_a_named_error(tiny_recipe: Path, tmp_path: Path, megabytes: int) -> None:
    """PyTorch would end the process, so the build requests memory before."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    command = [sys.executable, "-m", "kvexport", "build", "--recipe", str(tiny_recipe), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, preexec_fn=limit)
    assert done.returncode == 3, done.stderr
    assert "memory" in done.stderr and "fix: " in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_cache_larger_than_the_machine_is_refused_before_its_allocation(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvexport.machine.machine_memory", lambda: (1000, 500))
    with pytest.raises(EnvironmentProblem, match=r"the cache of one sequence takes .* has 1 kB"):
        load(tiny_artifact)
    monkeypatch.setattr("kvexport.machine.machine_memory", lambda: (0, 0))  # a system that does not report its memory
    load(tiny_artifact)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("PosixThread pthread_create failed, error code: 11"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_errors_of_libraries_without_memory_are_known(error: Exception) -> None:
    assert lacks_memory(error)
    assert not lacks_memory(RuntimeError("shape mismatch"))
