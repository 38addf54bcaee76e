"""Tests of sessions in a folder that two processes use: each sees the other's complete files, and no older state."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import EnvironmentProblem, SnapshotError, UsageError
from kvexport.state.session_files import SUFFIX, SessionConflict, SessionLost, locked
from kvexport.state.shared_sessions import SharedSessions
from kvexport.state.snapshot import Snapshot


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact)


@pytest.fixture(scope="module")
def snapshots(engine: Engine) -> list[Snapshot]:
    requests = [Request([n] * (20 + n), engine.settings(max_new_tokens=4), keep=True) for n in range(4)]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [request.snapshot for request in requests if request.snapshot is not None]


def store(engine: Engine, folder: Path, memory: int = 1 << 30, disk: int = 1 << 30) -> SharedSessions:
    return SharedSessions(engine.manifest, memory=memory, folder=folder, disk=disk)


def same(one: Snapshot | None, other: Snapshot) -> bool:
    return one is not None and one.to_bytes() == other.to_bytes()


def test_a_session_stored_by_one_server_is_read_by_another_at_once(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    one, other = store(engine, tmp_path / "s"), store(engine, tmp_path / "s")
    assert one.get("a") is None and not one.delete("a")
    rng = np.random.default_rng(0)
    newest: dict[str, Snapshot | None] = {}
    for _ in range(120):
        name, kept = "ab"[rng.integers(2)], (one, other)[rng.integers(2)]
        if rng.random() < 0.4:
            newest[name] = snapshots[rng.integers(len(snapshots))]
            kept.put(name, newest[name])
        elif rng.random() < 0.2:
            assert kept.delete(name) is (newest.get(name) is not None)
            newest[name] = None
        else:
            actual, expected = kept.get(name), newest.get(name)
            assert actual is None if expected is None else same(actual, expected)
    one.put("a", snapshots[0])
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "s" / f"a{SUFFIX}").stat().st_mode) == 0o600
    assert same(store(engine, tmp_path / "s").get("a"), snapshots[0]), "the state after a kill"


def test_an_unchanged_session_is_not_read_again(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = store(engine, tmp_path), store(engine, tmp_path)
    one.put("a", snapshots[0])
    assert one.get("a") is snapshots[0]
    cached = other.get("a")
    assert other.get("a") is cached
    one.put("a", snapshots[1])
    assert same(other.get("a"), snapshots[1])


def test_memory_and_disk_are_bounded(engine: Engine, snapshots: list[Snapshot], tmp_path: Path) -> None:
    size, file = max(s.nbytes for s in snapshots), max(len(s.to_bytes()) for s in snapshots)
    kept = store(engine, tmp_path, 2 * size, 2 * file)
    for i, snapshot in enumerate(snapshots):
        kept.put(f"s{i}", snapshot)
        os.utime(tmp_path / f"s{i}{SUFFIX}", ns=(i, i))  # a coarse clock may give all files one time
        assert kept.memory_bytes <= 2 * size and kept.disk_bytes <= 2 * file
    assert sorted(path.name for path in tmp_path.glob(f"*{SUFFIX}")) == [f"s{i}{SUFFIX}" for i in (2, 3)]
    with pytest.raises(SessionLost, match="session s0 is gone"):
        store(engine, tmp_path).get("s0")
    assert same(kept.get("s2"), snapshots[2])
    assert store(engine, tmp_path, disk=file).disk_bytes <= file
    with pytest.raises(EnvironmentProblem, match="all files together may take 10"):
        store(engine, tmp_path, disk=10).put("s9", snapshots[0])


def test_a_full_disk_is_an_error_and_the_state_before_stays(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, other = store(engine, tmp_path), store(engine, tmp_path)
    kept.put("a", snapshots[0])

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for name in ("a", "b"):
            with pytest.raises(EnvironmentProblem, match=rf"the session {name} is not kept.*No space left"):
                kept.put(name, snapshots[1])
    assert [path.name for path in tmp_path.glob("*.*") if path.suffix == SUFFIX] == [f"a{SUFFIX}"]
    for reader in (kept, other):
        assert same(reader.get("a"), snapshots[0]) and reader.get("b") is None
    other.put("a", snapshots[2])
    assert same(kept.get("a"), snapshots[2]), "another process has continued it"


def test_a_file_that_is_no_session_is_an_error_of_its_name_only(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    begun, old = tmp_path / f".a{SUFFIX}.0", tmp_path / f".b{SUFFIX}.0"
    for path in (begun, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    kept = store(engine, tmp_path)
    assert begun.exists() and not old.exists(), "another process may be writing it"
    kept.put("good", snapshots[0])
    (tmp_path / f"bad{SUFFIX}").write_bytes(b"no snapshot")
    (tmp_path / f"link{SUFFIX}").symlink_to(tmp_path / f"good{SUFFIX}")
    with pytest.raises(SnapshotError, match="the session bad cannot be used"):
        kept.get("bad")
    with pytest.raises(EnvironmentProblem, match="the session link"):
        kept.get("link")
    with pytest.raises(UsageError, match="no session can have the name"):
        kept.get("../good")
    assert kept.delete("bad") and kept.delete("link") and same(kept.get("good"), snapshots[0])
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match="the folder of sessions"):
        store(engine, tmp_path / "file")


def test_a_turn_that_began_from_a_replaced_state_is_refused(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    one, other = store(engine, tmp_path), store(engine, tmp_path)
    first = one.mark("a")
    assert first is None
    other.put("a", snapshots[0], first)
    with pytest.raises(SessionConflict, match="session a was changed by another turn"):
        one.put("a", snapshots[1], first)
    begun = one.mark("a")
    other.put("a", snapshots[2], begun)
    other.delete("b")
    with pytest.raises(SessionConflict):
        one.put("a", snapshots[1], begun)
    assert same(one.get("a"), snapshots[2])
    one.put("a", snapshots[3], one.mark("a"))
    other.delete("a")
    with pytest.raises(SessionConflict):
        one.put("a", snapshots[1], one.mark("x" * 3) or b"other")
    assert one.get("a") is None and not list(tmp_path.glob(f".*{SUFFIX}.*"))


def test_a_process_that_is_stopped_with_the_lock_delays_others_and_loses_nothing(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvexport.state.session_files._LOCK_SECONDS", 0.05)
    kept = store(engine, tmp_path)
    kept.put("a", snapshots[0])
    with locked(tmp_path), pytest.raises(EnvironmentProblem, match="another process holds the lock"):
        kept.put("a", snapshots[1])
    assert same(kept.get("a"), snapshots[0])
    kept.put("a", snapshots[1])
    assert same(store(engine, tmp_path).get("a"), snapshots[1])
