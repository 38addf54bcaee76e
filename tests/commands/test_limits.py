"""Tests of folders that cannot be written, full disks, too many open files, and too little memory.

Each is one error, and leaves no partial files.
"""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from kvexport.artifact.reading import load_manifest
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import ArtifactError, EnvironmentProblem, UsageError, lacks_files, lacks_memory
from kvexport.export import build as building
from kvexport.export import stages, texts
from kvexport.export.build import build
from kvexport.recipe.load import load_recipe
from kvexport.serve.errors import api_error
from kvexport.state.sessions import SUFFIX, SessionStore
from tests.support.artifacts import NAMESPACE, PYTHON_PATH
from tests.support.command_line import ENVIRONMENT, ROOT, failure, ok
from tests.support.http_server import running
from tests.support.permissions import permissions_hold

COMPLETE = "/v1/completions"


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact, threads=1)


# Folders that cannot be written.


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
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


# Open files.


@contextmanager
def no_files_left() -> Iterator[int]:
    """Let this process open no more files, and yield how many it may have open."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    most = os.open(os.devnull, os.O_RDONLY) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in [most - 20, *held]:
            os.close(number)


def test_too_many_open_files_are_named_and_the_fix_helps(tiny_artifact: Path) -> None:
    """An artifact whose files cannot be opened for that reason is not called damaged."""
    ok("inspect", tiny_artifact)
    with no_files_left() as most:
        message = failure(3, "inspect", tiny_artifact)
        assert f"error: this process may open {most} files at once, and needs more" in message
        larger = re.search(r"fix: ulimit -n (\d+)$", message, re.M)
        assert larger is not None and int(larger[1]) > most and "damaged" not in message.splitlines()[-1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(larger[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        ok("inspect", tiny_artifact)


def test_a_server_with_too_many_open_files_names_them_and_loses_no_turn(engine: Engine, tmp_path: Path) -> None:
    turn = json.dumps({"prompt": "ab", "session_id": "s", "max_tokens": 3})
    with running(engine, session_folder=str(tmp_path)) as server:
        client = HTTPConnection(server.url.removeprefix("http://"), timeout=60)

        def ask(method: str = "POST", path: str = COMPLETE) -> tuple[int, Any]:
            client.request(method, path, turn if method == "POST" else None, {"Content-Type": "application/json"})
            answer = client.getresponse()
            return answer.status, json.loads(answer.read())

        assert ask()[0] == 200
        before = (tmp_path / f"s{SUFFIX}").read_bytes()
        with no_files_left():
            for method, path in (("POST", COMPLETE), ("DELETE", "/v1/sessions/s")):
                status, body = ask(method, path)
                assert status in (503, 507) and "Too many open files" in body["error"]["message"], body
        assert (tmp_path / f"s{SUFFIX}").read_bytes() == before
        status, body = ask()
        assert status == 200 and body["usage"]["prompt_tokens"] == 2 + 3 + 2
        client.close()


def test_errors_that_come_from_too_many_open_files_are_known() -> None:
    cause = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/a/file")
    try:
        raise ArtifactError("x is damaged", "build it again") from cause
    except ArtifactError as error:
        assert lacks_files(error)
        answer = api_error(error)
        assert (answer.status, answer.code) == (503, "overloaded") and "ulimit -n" in answer.message
    assert lacks_files(RuntimeError("open(weights): Too many open files"))
    assert not lacks_files(OSError(errno.ENOENT, os.strerror(errno.ENOENT))) and not lacks_files(None)


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


@pytest.mark.parametrize("error", [
    RuntimeError("can't start new thread"), ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("PosixThread pthread_create failed, error code: 11"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
])  # fmt: skip
def test_errors_of_libraries_without_memory_are_known(error: Exception) -> None:
    assert lacks_memory(error)
    assert not lacks_memory(RuntimeError("shape mismatch"))
