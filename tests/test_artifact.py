"""Artifacts are published whole or not at all, and damage of any kind is found before a file of theirs is used."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.build.artifact import HashingWriter, load_manifest, stage, write_manifest
from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError, UsageError

PYTHON_PATH = {**os.environ, "PYTHONPATH": str(Path(kvexport.__file__).parent.parent)}
NAMESPACE = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]

# A process that has imported the package and forks one child per line of JSON: it prints the child's pid, and its wait status at the end.
FORKS = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
from kvexport.build import artifact
from kvexport.errors import KvexportError, UsageError

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree", "fcntl.flock", "os.truncate")

def build(target, label, pause=0.0):
    with artifact.stage(target) as work:
        for name in ("decoder.onnx", "weights/a.bin"):
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_text(f"{label} {name}\\n" * 50)
            time.sleep(pause)
        artifact.write_manifest(work, {"label": label})
        time.sleep(pause)

def contend(target, times, inside):
    while times:
        try:
            with artifact.stage(target) as work:
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                (work / "a").write_text("a")
                artifact.write_manifest(work, {"label": "contended"})
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
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"target": str(target), **job}) + "\n")
        self.process.stdin.flush()
        return self._number()

    def wait(self) -> int:
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate("")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses power; on a busy disk syncs would be most of the time of these tests."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def build(target: Path, label: str = "first") -> Path:
    with stage(target) as work:
        (work / "weights").mkdir()
        (work / "decoder.onnx").write_text(f"{label} decoder")
        (work / "weights" / "a.bin").write_text(f"{label} weights")
        write_manifest(work, {"label": label})
    return target


def assert_whole(target: Path) -> str:
    """The label of the artifact, after checking that every file is of the same build."""
    manifest = load_manifest(target)
    for name in manifest["files"]:
        assert (target / name).read_text().startswith(manifest["label"])
    return str(manifest["label"])


def beside(target: Path) -> list[str]:
    return sorted(entry.name for entry in target.parent.iterdir())


def rewrite(target: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest the way an attacker would: with its own digest made right again."""
    path = target / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest.pop("manifest_sha256")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["manifest_sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(manifest, sort_keys=True, indent=1) + "\n")


# Publishing.


def test_manifest_lists_every_file_with_digest_and_size(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    manifest = load_manifest(target)
    assert manifest["label"] == "first"
    assert manifest["files"] == {
        name: {"sha256": hashlib.sha256((target / name).read_bytes()).hexdigest(), "bytes": (target / name).stat().st_size}
        for name in ("decoder.onnx", "weights/a.bin")
    }
    assert beside(target) == ["out"]


def test_old_artifact_is_whole_until_the_new_one_takes_its_place(tmp_path: Path) -> None:
    target = build(tmp_path / "out", "old")
    with stage(target) as work:
        assert work.parent == target.parent
        (work / "only.bin").write_text("new")
        assert assert_whole(target) == "old"
        write_manifest(work, {"label": "new"})
        assert assert_whole(target) == "old"
    assert assert_whole(target) == "new"
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "only.bin"]
    assert beside(target) == ["out"]


def test_everything_is_synced_before_it_is_published_and_the_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, bool] = {}
    target = build(tmp_path / "out", "old")
    old = target.stat().st_ino
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.update({os.fstat(descriptor).st_ino: target.stat().st_ino == old}))
    build(target, "new")
    contents = {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert len(contents) == 5
    assert {inode for inode, before in synced.items() if before} == contents
    assert {inode for inode, before in synced.items() if not before} == {tmp_path.stat().st_ino}


def test_an_empty_directory_and_a_damaged_artifact_can_be_built_over(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    build(target)
    text = (target / "manifest.json").read_text()
    (target / "manifest.json").write_text(text[: len(text) - 20])
    (target / "decoder.onnx").unlink()
    build(target, "again")
    assert assert_whole(target) == "again"


def test_readers_see_only_whole_artifacts_while_builds_replace_each_other(tmp_path: Path, forks: Forks) -> None:
    for no_exchange in (False, True):
        target = build(tmp_path / f"out{no_exchange}", "old")
        forks.start(target, label="new", builds=40, pause=0.0005, no_exchange=no_exchange)
        labels = {load_manifest(target)["label"]}
        while "new39" not in labels:
            if not no_exchange:
                assert target.is_dir()
            labels.add(load_manifest(target)["label"])
        assert len(labels) > 2
        assert forks.wait() == 0


def test_digests_may_be_handed_over_by_the_writer(tmp_path: Path) -> None:
    for known, fits in ((None, True), ("0" * 64, False)):
        target = tmp_path / f"out{fits}"
        with stage(target) as work:
            with (work / "big.bin").open("wb") as file:
                writer = HashingWriter(file)
                assert [writer.write(b"ab" * 5), writer.write(memoryview(b"cd"))] == [10, 2]
            write_manifest(work, {}, known={"big.bin": known or writer.hexdigest()})
        if fits:
            load_manifest(target)
        else:
            with pytest.raises(ArtifactError, match=r"big\.bin.*SHA-256"):
                load_manifest(target)


@pytest.mark.parametrize(
    "content, known",
    [({"files": {}}, {}), ({"manifest_sha256": ""}, {}), ({"contract_version": -1}, {}), ({}, {"absent": "0" * 64}), ({}, {"a": "short"})],
)
def test_write_manifest_refuses_what_a_reader_could_not_trust(tmp_path: Path, content: dict[str, Any], known: dict[str, str]) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(KvexportError):
        write_manifest(tmp_path, content, known=known)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("name", ["back\\slash", "new\nline", os.fsdecode(b"not-utf8-\xff")])
def test_write_manifest_refuses_names_and_links_a_reader_would_refuse(tmp_path: Path, name: str) -> None:
    (tmp_path / "good").write_text("a")
    (tmp_path / name).write_text("a")
    with pytest.raises(KvexportError, match="cannot be part"):
        write_manifest(tmp_path, {})
    (tmp_path / name).unlink()
    (tmp_path / "link").symlink_to("good")
    with pytest.raises(KvexportError, match="symbolic link"):
        write_manifest(tmp_path, {})
    (tmp_path / "link").unlink()
    work = tmp_path / "stage"
    work.mkdir()
    (work / "manifest.json").symlink_to(tmp_path / "good")
    write_manifest(work, {})
    assert (tmp_path / "good").read_text() == "a"


def test_content_that_json_changes_can_still_be_loaded(tmp_path: Path) -> None:
    content = {"layers": {10: (1, 2), 9: [1e-7, 1e22, -0.0]}, "name": "größe \ud800"}
    with stage(tmp_path / "out") as work:
        write_manifest(work, content)
    loaded = load_manifest(tmp_path / "out")
    assert loaded["layers"] == {"10": [1, 2], "9": [1e-7, 1e22, -0.0]}
    assert loaded["name"] == content["name"]


def forget_manifest(work: Path) -> None:
    (work / "a").write_text("a")


def write_after_manifest(work: Path) -> None:
    write_manifest(work, {})
    (work / "late").write_text("a")


def resize_after_manifest(work: Path) -> None:
    (work / "a").write_text("a")
    write_manifest(work, {})
    (work / "a").write_text("aa")


@pytest.mark.parametrize("body", [forget_manifest, write_after_manifest, resize_after_manifest])
def test_a_stage_whose_manifest_does_not_fit_is_not_published(tmp_path: Path, body: Callable[[Path], None]) -> None:
    target = build(tmp_path / "out", "old")
    with pytest.raises(KvexportError, match="did not finish"), stage(target) as work:
        body(work)
    assert assert_whole(target) == "old"
    assert beside(target) == ["out"]


# Refusals.


def test_what_is_not_an_artifact_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text('{"format": "another"}')
    build(tmp_path / "artifact")
    (tmp_path / "link").symlink_to("artifact")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = beside(tmp_path / "x")
    for name in ("file", "full", "link", "dangling", "missing/out", "file/out", "n" * 250):
        with pytest.raises(UsageError) as caught, stage(tmp_path / name):
            pytest.fail("the stage was opened")
        assert caught.value.fix, name
    assert beside(tmp_path / "x") == before
    assert (tmp_path / "file").read_text() == "mine"
    assert assert_whole(tmp_path / "artifact") == "first"


def test_unwritable_parent_mount_point_and_current_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, why in (
        ("/proc/out", "cannot be written"),
        ("/proc", "mount point"),
        (".", "current directory"),
        ("/", "cannot be written"),
    ):
        with pytest.raises(UsageError, match=why) as caught, stage(Path(place)):
            pytest.fail("the stage was opened")
        assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_second_build_of_one_target_is_refused_by_pid(tmp_path: Path, forks: Forks) -> None:
    target = tmp_path / "out"
    pid = forks.start(target, label="theirs", builds=1, pause=0.1)
    while not (tmp_path / ".out.lock").exists() or not (tmp_path / ".out.lock").read_text():
        time.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    (tmp_path / "elsewhere").symlink_to(".")
    for spelling in (target, tmp_path / "elsewhere" / "out"):
        with pytest.raises(UsageError, match=rf"process {pid}\b"), stage(spelling):
            pytest.fail("the stage was opened")
    build(tmp_path / "another")
    os.kill(pid, signal.SIGCONT)
    assert forks.wait() == 0
    assert assert_whole(target) == "theirs0"
    assert beside(target) == ["another", "elsewhere", "out"]


def test_builds_exclude_each_other_while_lock_files_come_and_go(tmp_path: Path) -> None:
    crowd = [Forks() for _ in range(3)]
    for forks in crowd:
        forks.start(tmp_path / "out", inside=str(tmp_path / "inside"), times=15)
    assert [forks.wait() for forks in crowd] == [0, 0, 0]
    for forks in crowd:
        forks.close()
    assert beside(tmp_path / "out") == ["out"]


def test_a_lock_file_that_was_replaced_while_it_was_opened_gives_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    flock = fcntl.flock

    def another_build_is_quicker(descriptor: int, operation: int) -> None:
        if not held:
            (tmp_path / ".out.lock").unlink()
            held.append(os.open(tmp_path / ".out.lock", os.O_RDWR | os.O_CREAT))
            flock(held[0], fcntl.LOCK_EX)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", another_build_is_quicker)
    with pytest.raises(UsageError, match="another build"), stage(tmp_path / "out"):
        pytest.fail("the stage was opened")
    os.close(held[0])
    build(tmp_path / "out")
    assert beside(tmp_path / "out") == ["out"]


def test_a_reader_waits_for_a_build_between_its_two_renames(tmp_path: Path) -> None:
    target = build(tmp_path / "out", "old")
    target.rename(tmp_path / ".out.old")
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        timer = threading.Timer(0.05, lambda: (tmp_path / ".out.old").rename(target))
        timer.start()
        assert assert_whole(target) == "old"
        timer.join()


def test_what_came_to_the_target_during_the_build_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(UsageError, match="is no artifact"), stage(target) as work:
        write_manifest(work, {})
        target.mkdir()
        (target / "file").write_text("mine")
    assert (target / "file").read_text() == "mine"
    assert beside(target) == ["out"]


def test_only_stages_of_the_same_target_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / f".out.stage-{'0' * 16}"
    others = [
        tmp_path / f".out.stage-x.stage-{'0' * 16}",
        tmp_path / f".out2.stage-{'0' * 16}",
        tmp_path / ".out.stage-notes",
        tmp_path / ".out.old",
    ]
    for path in (stale, *others):
        path.mkdir()
        (path / "file").write_text("a")
    build(tmp_path / "out")
    assert beside(stale) == sorted(["out", *(path.name for path in others)])


# Interruptions.


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_build_leaves_the_old_artifact_and_nothing_else(tmp_path: Path, raised: type[BaseException]) -> None:
    for target in (build(tmp_path / "out", "old"), tmp_path / "fresh"):
        with pytest.raises(raised), stage(target) as work:
            (work / "half").write_text("half")
            write_manifest(work, {"label": "new"})
            raise raised
    assert assert_whole(tmp_path / "out") == "old"
    assert beside(tmp_path / "out") == ["out"]


def after_kill(target: Path, labels: set[str], load_first: bool) -> None:
    """What a kill may leave: a whole artifact or none, which the next build clears up. load_first: a reader comes before it."""
    absent_allowed = "absent" in labels
    if not load_first:
        with pytest.raises(ZeroDivisionError), stage(target):
            raise ZeroDivisionError
        assert beside(target) in ([[], [target.name]] if absent_allowed else [[target.name]])
    try:
        assert re.sub(r"\d+$", "", assert_whole(target)) in labels
    except UsageError:
        assert absent_allowed
    build(target, "old")
    assert assert_whole(target) == "old"
    assert beside(target) == [target.name]


@pytest.mark.parametrize("no_exchange", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
def test_kill_before_every_file_operation(tmp_path: Path, forks: Forks, replaces: bool, no_exchange: bool) -> None:
    target = tmp_path / "out"
    if replaces:
        build(target, "old")
    for die_at in itertools.count(1):
        if not replaces and target.exists():
            shutil.rmtree(target)
        forks.start(target, label="new", builds=1, die_at=die_at, no_exchange=no_exchange)
        status = forks.wait()
        after_kill(target, {"old", "new"} if replaces else {"absent", "new"}, load_first=bool(die_at % 2))
        if status != signal.SIGKILL:
            break
    assert status == 0
    assert die_at > 25


@pytest.mark.parametrize("no_exchange", [False, True])
def test_kill_at_any_time(tmp_path: Path, forks: Forks, no_exchange: bool) -> None:
    target = tmp_path / "out"
    for turn in range(24):
        pid = forks.start(target, label="new", builds=1000, pause=0.0005, no_exchange=no_exchange)
        time.sleep(0.0013 * turn)
        os.kill(pid, signal.SIGKILL)
        assert forks.wait() == signal.SIGKILL
        after_kill(target, {"old", "new"} if turn else {"absent", "new"}, load_first=bool(turn % 2))


# Full disks.


def write_to_full_device(work: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"a")


def write_without_name(work: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exceed_quota(work: Path) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(work / "big.bin"))


def fail_in_another_language(work: Path) -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def fail_behind_another_error(work: Path) -> None:
    try:
        write_without_name(work)
    except OSError as error:
        raise RuntimeError("the export failed") from error


@pytest.mark.parametrize(
    "fail", [write_to_full_device, write_without_name, exceed_quota, fail_in_another_language, fail_behind_another_error]
)
def test_full_disk_is_an_environment_problem_with_the_file_and_the_room_left(tmp_path: Path, fail: Callable[[Path], None]) -> None:
    target = build(tmp_path / "out", "old")
    with (
        pytest.raises(EnvironmentProblem, match=r"^disk (full|quota used up) while writing big\.bin: \d+ bytes free") as caught,
        stage(target) as work,
    ):
        (work / "big.bin").write_text("a")
        fail(work)
    assert "--out" in caught.value.fix
    assert assert_whole(target) == "old"
    assert beside(target) == ["out"]


def test_full_disk_found_by_the_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = build(tmp_path / "out", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="disk full while writing"):
        build(target, "new")
    assert assert_whole(target) == "old"
    assert beside(target) == ["out"]


def namespaces_allowed() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


MOUNTED = """
import sys
from pathlib import Path
from kvexport.build.artifact import load_manifest, stage, write_manifest
from kvexport.errors import EnvironmentProblem, UsageError

root = Path(sys.argv[1])
for size in (1000, 3 << 20):
    try:
        with stage(root / "out") as work:
            (work / "big.bin").write_bytes(bytes(size))
            write_manifest(work, {})
    except EnvironmentProblem as error:
        print(error.problem)
assert load_manifest(root / "out")["files"]["big.bin"]["bytes"] == 1000
try:
    with stage(root / "bound") as work:
        pass
except UsageError as error:
    print(error.problem)
print(sorted(path.name for path in root.iterdir()))
"""


# Not collected where no process may mount: the same paths are covered above with the kernel's own ENOSPC, from /dev/full.
if namespaces_allowed():

    def test_on_a_disk_of_one_mebibyte_and_a_bind_mount(tmp_path: Path) -> None:
        script = 'mount -t tmpfs -o size=1m none "$0"; mkdir "$0/bound"; mount --bind "$0/bound" "$0/bound"; "$1" -c "$2" "$0"'
        done = subprocess.run(
            [*NAMESPACE, script, str(tmp_path), sys.executable, MOUNTED], capture_output=True, text=True, check=False, env=PYTHON_PATH
        )
        assert done.returncode == 0, done.stderr
        full, mount, names = done.stdout.splitlines()
        assert re.match(r"disk full while writing big\.bin: \d+ bytes free", full)
        assert "bound is a mount point" in mount
        assert names == "['bound', 'out']"


# Damage.


def test_a_byte_altered_anywhere_is_found(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    for path in [path for path in target.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        for position, byte in enumerate(good):
            bad = bytearray(good)
            # A blank becomes a tab, which JSON reads the same; every other letter changes its case.
            bad[position] ^= 0x29 if byte == 0x20 else (0x01, 0x20)[position % 2]
            path.write_bytes(bad)
            with pytest.raises(ArtifactError) as caught:
                load_manifest(target)
            assert path.name in caught.value.problem or path.name == "manifest.json"
            assert "build" in caught.value.fix
        path.write_bytes(good)
    load_manifest(target)


@pytest.mark.parametrize("verify", [True, False])
def test_truncated_extended_missing_and_extra_files_are_found(tmp_path: Path, verify: bool) -> None:
    target = build(tmp_path / "out")
    for path in [path for path in target.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        for bad in (b"", good[:-1], good + b"\n", None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            with pytest.raises(ArtifactError, match=path.name):
                load_manifest(target, verify=verify)
            path.write_bytes(good)
    for extra in (target / "decoder.onnx.data", target / "weights" / "b.bin", target / "new" / "file"):
        extra.parent.mkdir(exist_ok=True)
        extra.write_text("a")
        with pytest.raises(ArtifactError, match=f"{extra.name}.*not listed"):
            load_manifest(target, verify=verify)
        extra.unlink()
    load_manifest(target, verify=verify)


def test_verify_false_reads_no_file_but_the_manifest(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    (target / "decoder.onnx").write_text("FIRST decoder")
    assert load_manifest(target, verify=False)["label"] == "first"


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/hostname",
        "weights/../../outside",
        "./decoder.onnx",
        "weights//a.bin",
        "a\\b",
        "C:x",
        "",
        ".",
        "a/",
        "a\0b",
        "manifest.json",
    ],
)
def test_a_name_that_could_leave_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    target = build(tmp_path / "out")
    (tmp_path / "outside").write_text("secret")
    entry = {"sha256": hashlib.sha256(b"secret").hexdigest(), "bytes": 6}
    rewrite(target, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(ArtifactError, match=r"manifest\.json lists"):
        load_manifest(target)


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    for name in ("decoder.onnx", "weights", "manifest.json"):
        (target / name).rename(tmp_path / name)
        (target / name).symlink_to(tmp_path / name)
        with pytest.raises(ArtifactError, match="symbolic link"):
            load_manifest(target)
        (target / name).unlink()
        (tmp_path / name).rename(target / name)
    for name in ("pipe", "manifest.json"):
        (target / name).unlink(missing_ok=True)
        os.mkfifo(target / name)
        with pytest.raises(ArtifactError, match="not an ordinary file"):
            load_manifest(target)
        (target / name).unlink()


def test_an_artifact_may_be_named_by_a_link(tmp_path: Path) -> None:
    build(tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    assert assert_whole(tmp_path / "current") == "first"


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"contract_version": 999},
        {"contract_version": True},
        {"contract_version": "1"},
        {"files": []},
        {"files": {"decoder.onnx": None}},
        {"files": {"decoder.onnx": {"sha256": "0" * 64, "bytes": -1}}},
        {"files": {"decoder.onnx": {"sha256": "0" * 63, "bytes": 13}}},
        {"files": {"decoder.onnx": {"sha256": ["0" * 64], "bytes": 13}}},
        {"files": {"decoder.onnx": {"sha256": "0" * 64, "bytes": 13.0}}},
    ],
)
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    target = build(tmp_path / "out")
    rewrite(target, lambda manifest: manifest.update(change))
    with pytest.raises(ArtifactError):
        load_manifest(target)


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"a": NaN}', b"1" * 1_000_000, b" " * (17 << 20)],
    ids=["empty", "utf8", "null", "list", "object", "nested-lists", "nested-objects", "nan", "digits", "huge"],
)
def test_hostile_manifests_end_in_an_artifact_error_at_once(tmp_path: Path, raw: bytes) -> None:
    target = build(tmp_path / "out")
    (target / "manifest.json").write_bytes(raw)
    started = time.monotonic()
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load_manifest(target)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "content, why", [({"big": "a" * (16 << 20)}, "larger than"), ({"long": 10**60}, "61 digits")], ids=["large", "long"]
)
def test_limits_hold_even_where_the_digest_is_right(tmp_path: Path, content: dict[str, Any], why: str) -> None:
    target = build(tmp_path / "out")
    rewrite(target, lambda manifest: manifest.update(content))
    with pytest.raises(ArtifactError, match=why):
        load_manifest(target)


def test_a_manifest_no_reader_would_accept_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(KvexportError, match="more than"), stage(tmp_path / "out") as work:
        write_manifest(work, {"big": "a" * (16 << 20)})
    assert list(tmp_path.iterdir()) == []


def test_nested_and_repeated_content_with_a_right_digest_is_refused(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    path = target / "manifest.json"

    def nest(manifest: dict[str, Any]) -> None:
        inner: list[Any] = [0] * 10_000
        for _ in range(400):
            inner = [inner]
        manifest["deep"] = inner

    good = path.read_text()
    rewrite(target, nest)
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest, sort_keys=True))
    with pytest.raises(ArtifactError, match="not written the way"):
        load_manifest(target)
    path.write_text(good.replace('"label": "first"', '"label": "other",\n "label": "first"'))
    with pytest.raises(ArtifactError, match="not written the way"):
        load_manifest(target)


def test_nothing_there_is_a_usage_error_and_no_artifact_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("absent", "absent/below", "file", "file/below", "dangling"):
        with pytest.raises(UsageError) as caught:
            load_manifest(tmp_path / name)
        assert "kvexport build" in caught.value.fix
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"no manifest\.json"):
        load_manifest(tmp_path / "empty")
    assert beside(tmp_path / "x") == ["dangling", "empty", "file"]
