"""Tests of sessions in memory and then in a folder, within bounds: no failure loses another session."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import EnvironmentProblem, SnapshotError, UsageError
from kvexport.state.session_files import SUFFIX, SessionLost
from kvexport.state.session_store import SessionStore, next_turn
from kvexport.state.snapshot import Snapshot

PROMPTS = [[n] * (20 + n) for n in range(6)]


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact)


@pytest.fixture(scope="module")
def snapshots(engine: Engine) -> list[Snapshot]:
    return [turn(engine, ids, None) for ids in PROMPTS]


def turn(engine: Engine, ids: list[int], start: Snapshot | None) -> Snapshot:
    request = Request(ids, engine.settings(max_new_tokens=20), start=start, keep=True)
    engine.add(request)
    while engine.busy:
        engine.step()
    assert request.snapshot is not None
    return request.snapshot


def same(one: Snapshot | None, other: Snapshot) -> bool:
    return one is not None and one.to_bytes() == other.to_bytes()


def store(engine: Engine, folder: Path | None, memory: int, disk: int = 1 << 30) -> SessionStore:
    return SessionStore(engine.manifest, memory=memory, folder=folder, disk=disk)


def test_sessions_go_from_memory_to_the_folder_and_come_back(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    size, folder = max(s.nbytes for s in snapshots), tmp_path / "sessions"
    kept = store(engine, folder, 2 * size)
    for i, snapshot in enumerate(snapshots):
        kept.put(f"s{i}", snapshot)
        assert kept.memory_bytes <= 2 * size
    assert kept.names() == [f"s{i}" for i in range(6)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.glob(f"*{SUFFIX}"))
    assert [path.name for path in files] == [f"s{i}{SUFFIX}" for i in range(4)]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    for i in (0, 3, 5, 0, 1):
        assert same(kept.get(f"s{i}"), snapshots[i])
        assert kept.memory_bytes <= 2 * size
    assert kept.names()[-2:] == ["s0", "s1"]
    # The next turn of a session that was loaded again equals that of one that stayed.
    loaded = kept.get("s2")
    after, expected = (turn(engine, [5, 6], start) for start in (loaded, snapshots[2]))
    assert after.ids.tolist() == expected.ids.tolist()
    kept.put("s2", after)
    kept.flush()
    assert kept.memory_bytes == 0
    again = store(engine, folder, 2 * size)
    assert same(again.get("s2"), after) and all(same(again.get(f"s{i}"), snapshots[i]) for i in (0, 1, 3, 4, 5))
    assert again.delete("s2") and not again.delete("s2") and again.get("s2") is None
    assert not (folder / f"s2{SUFFIX}").exists()


def test_memory_and_disk_are_bounded_and_the_least_recently_used_session_goes_first(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    size, file = max(s.nbytes for s in snapshots), max(len(s.to_bytes()) for s in snapshots)
    kept = store(engine, tmp_path, size, 2 * file)
    for i, snapshot in enumerate(snapshots):
        kept.put(f"s{i}", snapshot)
        assert kept.disk_bytes <= 2 * file
    assert kept.names() == ["s3", "s4", "s5"] and kept.get("unknown") is None
    for known in (kept, store(engine, tmp_path, size, 2 * file)):  # after a restart too
        with pytest.raises(SessionLost, match="state of session s0 is gone"):
            known.get("s0")
    assert kept.delete("s0") and kept.get("s0") is None and not kept.delete("s0")
    in_memory = store(engine, None, 2 * size)
    for i, snapshot in enumerate(snapshots):
        in_memory.put(f"s{i}", snapshot)
    assert in_memory.names() == ["s4", "s5"]
    in_memory.flush()
    assert in_memory.names() == ["s4", "s5"]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_full_disk_is_an_error_and_no_session_is_lost(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    size = max(s.nbytes for s in snapshots)
    kept = store(engine, tmp_path, 2 * size)
    for i in range(3):
        kept.put(f"s{i}", snapshots[i])

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full) if fails == "replace" else patch.setattr(
            os, "fsync" if fails == "fsync" else "fdopen", full
        )
        with pytest.raises(EnvironmentProblem, match=r"s1 stays in memory.*No space left"):
            kept.put("new", snapshots[4])
        assert "new" not in kept.names()
        kept.put("s2", snapshots[5])  # a known session stays in its place
        with pytest.raises(EnvironmentProblem, match="stays in memory"):
            kept.flush()
        if fails != "write":
            assert same(kept.get("s0"), snapshots[0])
    assert [path.name for path in tmp_path.glob(f"*{SUFFIX}")] == [f"s0{SUFFIX}"]
    for i, expected in ((0, snapshots[0]), (1, snapshots[1]), (2, snapshots[5])):
        assert same(kept.get(f"s{i}"), expected)
    kept.put("new", snapshots[4])
    assert set(kept.names()) == {"s0", "s1", "s2", "new"}


def test_a_damaged_file_is_an_error_of_its_session_alone(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    kept = store(engine, tmp_path, 0)
    for i in range(3):
        kept.put(f"s{i}", snapshots[i])
    path = tmp_path / f"s0{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / f"s1{SUFFIX}").unlink()
    (tmp_path / f"s1{SUFFIX}").symlink_to(path)
    for _ in range(2):
        with pytest.raises(SnapshotError, match="the session s0 cannot be used: the snapshot is damaged"):
            kept.get("s0")
    with pytest.raises(EnvironmentProblem, match="the session s1"):
        kept.get("s1")
    assert same(kept.get("s2"), snapshots[2])
    assert kept.delete("s0") and kept.delete("s1") and path.exists() is False
    kept.put("s0", snapshots[0])
    assert same(kept.get("s0"), snapshots[0])


def test_a_session_larger_than_the_folder_may_be_stays_in_memory(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    kept = store(engine, tmp_path, 0, 1000)
    kept.put("a", snapshots[0])
    with pytest.raises(EnvironmentProblem, match="all files together may take 1000"):
        kept.put("b", snapshots[1])
    assert kept.names() == ["a"] and not list(tmp_path.glob(f"*{SUFFIX}"))


def test_a_process_that_is_killed_leaves_no_older_state_and_no_new_session(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path
) -> None:
    """The sessions that a killed process had only in memory are reported as lost."""
    kept = store(engine, tmp_path, 1 << 30)
    kept.put("a", snapshots[0])
    kept.flush()
    kept.put("a", snapshots[1])
    kept.put("b", snapshots[2])
    after_kill = store(engine, tmp_path, 1 << 30)
    for name in ("a", "b"):
        with pytest.raises(SessionLost, match=f"session {name} is gone"):
            after_kill.get(name)
    after_kill.put("a", snapshots[3])
    assert same(after_kill.get("a"), snapshots[3])


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "a.b", "-a", "a" * 65, "a\0", "ü", "a\n"])
def test_names_are_strict(engine: Engine, snapshots: list[Snapshot], name: str) -> None:
    kept = store(engine, None, 1 << 30)
    for attempt in (kept.get, kept.delete, lambda name: kept.put(name, snapshots[0])):
        with pytest.raises(UsageError, match="no session can have the name"):
            attempt(name)


def test_files_of_a_killed_process_are_removed_and_other_files_stay(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / f".a{SUFFIX}.123").write_text("half")
    (tmp_path / "notes").write_text("mine")
    assert store(engine, tmp_path, 0).names() == []
    assert [path.name for path in tmp_path.glob("*") if path.is_file()] == ["notes"]
    with pytest.raises(EnvironmentProblem, match="folder of sessions"):
        store(engine, tmp_path / "notes", 0)


class Template:
    """A chat template with one character per token: u and a begin a message, and a dot ends it."""

    def render(self, messages: Any, tools: Any = None, **_: Any) -> str:
        return "".join(f"{m['role'][0]}{m['content']}." for m in messages) + "a"


def test_the_next_turn_of_a_conversation_reads_only_its_own_tokens(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    assert engine.tokenizer is not None
    engine.__dict__["chat_template"] = Template()
    talk = [{"role": "user", "content": "hello"}]
    start = turn(engine, engine.encode_chat(talk).tolist(), None)
    answer = engine.tokenizer.decode(start.ids.tolist())[len("uhello.a") :]
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    ids = next_turn(engine, start, talk)
    assert ids is not None and engine.tokenizer.decode(ids.tolist()) == ".umore.a"
    talk[0]["content"] = "another"
    assert next_turn(engine, start, talk) is None
    engine.__dict__["chat_template"] = None
    assert next_turn(engine, start, talk) is None
