"""Tests of publishing artifacts: the content, the moment, and the files that a build must not touch."""

import fcntl
import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.publish import staging
from kvexport.artifact.reading import load_checked
from kvexport.errors import ArtifactError, KvexportError, UsageError
from tests.support.artifacts import Forks, assert_whole, beside, build

# Publishing.


def test_manifest_lists_every_file_with_digest_and_size(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    manifest = load_checked(target)
    assert manifest["label"] == "first"
    assert manifest["files"] == {
        name: {
            "sha256": hashlib.sha256((target / name).read_bytes()).hexdigest(),
            "bytes": (target / name).stat().st_size,
        }
        for name in ("decoder.onnx", "weights/a.bin")
    }
    assert beside(target) == ["out"]


def test_old_artifact_is_whole_until_the_new_one_takes_its_place(tmp_path: Path) -> None:
    target = build(tmp_path / "out", "old")
    with staging(target) as work:
        assert work.parent == target.parent
        (work / "only.bin").write_text("new")
        assert assert_whole(target) == "old"
        write_manifest(work, {"label": "new"})
        assert assert_whole(target) == "old"
    assert assert_whole(target) == "new"
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "only.bin"]
    assert beside(target) == ["out"]


def test_everything_is_synced_before_it_is_published_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, bool] = {}
    target = build(tmp_path / "out", "old")
    old = target.stat().st_ino
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.update({os.fstat(descriptor).st_ino: target.stat().st_ino == old})
    )
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
    target = build(tmp_path / "out", "old")
    forks.start(target, label="new", builds=40, pause=0.0005)
    labels = {load_checked(target)["label"]}
    while "new39" not in labels:
        assert target.is_dir()
        labels.add(load_checked(target)["label"])
    assert len(labels) > 2
    assert forks.wait() == 0


def test_digests_may_come_from_the_writer(tmp_path: Path) -> None:
    for digest, fits in ((hashlib.sha256(b"data").hexdigest(), True), ("0" * 64, False)):
        target = tmp_path / f"out{fits}"
        with staging(target) as work:
            (work / "big.bin").write_bytes(b"data")
            write_manifest(work, {}, known={"big.bin": digest})
        if fits:
            load_checked(target)
        else:
            with pytest.raises(ArtifactError, match=r"big\.bin.*SHA-256"):
                load_checked(target)


@pytest.mark.parametrize("content, known", [
    ({"files": {}}, {}), ({"manifest_sha256": ""}, {}), ({"contract_version": -1}, {}), ({}, {"absent": "0" * 64}),
    ({}, {"a": "short"}),
])  # fmt: skip
def test_write_manifest_refuses_fields_and_digests_that_a_reader_would_refuse(
    tmp_path: Path, content: dict[str, Any], known: dict[str, str]
) -> None:
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
    with staging(tmp_path / "out") as work:
        write_manifest(work, content)
    loaded = load_checked(tmp_path / "out")
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
    with pytest.raises(KvexportError, match="did not finish"), staging(target) as work:
        body(work)
    assert assert_whole(target) == "old"
    assert beside(target) == ["out"]


# Refusals.


def test_a_folder_that_is_no_artifact_stays_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text('{"format": "another"}')
    build(tmp_path / "artifact")
    (tmp_path / "link").symlink_to("artifact")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = beside(tmp_path / "x")
    for name in ("file", "full", "link", "dangling", "missing/out", "file/out", "n" * 250):
        with pytest.raises(UsageError) as caught, staging(tmp_path / name):
            pytest.fail("the stage was opened")
        assert caught.value.fix, name
    assert beside(tmp_path / "x") == before
    assert (tmp_path / "file").read_text() == "mine"
    assert assert_whole(tmp_path / "artifact") == "first"


def test_unwritable_parent_mount_point_and_current_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, why in (
        ("/proc/out", "cannot be written"),
        ("/proc", "mount point"),
        (".", "current directory"),
        ("/", "cannot be written"),
    ):
        with pytest.raises(UsageError, match=why) as caught, staging(Path(place)):
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
        with pytest.raises(UsageError, match=rf"process {pid}\b"), staging(spelling):
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


def test_a_lock_file_that_was_replaced_while_it_was_opened_gives_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    flock = fcntl.flock

    def another_build_is_quicker(descriptor: int, operation: int) -> None:
        if not held:
            (tmp_path / ".out.lock").unlink()
            held.append(os.open(tmp_path / ".out.lock", os.O_RDWR | os.O_CREAT))
            flock(held[0], fcntl.LOCK_EX)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", another_build_is_quicker)
    with pytest.raises(UsageError, match="another build"), staging(tmp_path / "out"):
        pytest.fail("the stage was opened")
    os.close(held[0])
    build(tmp_path / "out")
    assert beside(tmp_path / "out") == ["out"]


def test_files_that_appear_at_the_target_during_a_build_stay_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(UsageError, match="is no artifact"), staging(target) as work:
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
