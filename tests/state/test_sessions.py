"""Tests of stored sessions: in memory, in a folder of one process, and in a folder that several processes share."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvexport.engine.core import EngineCore
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.engine.request import Request
from kvexport.errors import EnvironmentProblem, SnapshotError, UsageError
from kvexport.language.chat import ChatTemplate
from kvexport.state.sessions import SUFFIX, SessionConflict, SessionLost, SessionStore, _locked, next_turn
from kvexport.state.snapshot import Snapshot
from tests.support.answers import answers
from tests.support.artifacts import PYTHON_PATH
from tests.support.tokenizers import FAMILIES, tokenizer_of

INSTRUCT = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PROMPTS = [[n] * (20 + n) for n in range(6)]


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return load(tiny_artifact)


@pytest.fixture(scope="module")
def snapshots(engine: Engine) -> list[Snapshot]:
    return [turn(engine, ids, None) for ids in PROMPTS]


class Stores:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.open = engine, list[SessionStore]()

    def __call__(
        self, folder: Path | None, memory: int = 1 << 30, disk: int = 1 << 30, shared: bool = False
    ) -> SessionStore:
        self.open.append(SessionStore(self.engine.manifest, memory=memory, folder=folder, disk=disk, shared=shared))
        return self.open[-1]


@pytest.fixture
def store(engine: Engine) -> Iterator[Stores]:
    stores = Stores(engine)
    yield stores
    for one in stores.open:
        one.close()


def turn(engine: Engine, ids: list[int], start: Snapshot | None) -> Snapshot:
    request = Request(ids, engine.settings(max_new_tokens=20), start=start, keep=True)
    answers(engine, request)
    assert request.snapshot is not None
    return request.snapshot


def same(one: Snapshot | None, other: Snapshot) -> bool:
    return one is not None and one.to_bytes() == other.to_bytes()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{SUFFIX}"))


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_every_state_is_in_the_folder_at_once_and_memory_is_bounded(
    engine: Engine, snapshots: list[Snapshot], tmp_path: Path, store: Stores
) -> None:
    size, folder = max(s.nbytes for s in snapshots), tmp_path / "sessions"
    kept = store(folder, 2 * size)
    for i, snapshot in enumerate(snapshots):
        kept.put(f"s{i}", snapshot)
        assert kept.memory_bytes <= 2 * size
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert files(folder) == [f"s{i}{SUFFIX}" for i in range(6)]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.glob(f"*{SUFFIX}"))
    for i in (0, 3, 5, 0, 1):
        assert same(kept.get(f"s{i}"), snapshots[i])
        assert kept.memory_bytes <= 2 * size
    assert [*kept._loaded] == ["s0", "s1"]
    # The next turn of a session that was loaded again equals that of one that stayed.
    after, expected = (turn(engine, [5, 6], start) for start in (kept.get("s2"), snapshots[2]))
    assert after.ids.tolist() == expected.ids.tolist()
    kept.put("s2", after)
    kept.close()  # as a process that was killed: nothing is written any more
    again = store(folder, 2 * size)
    assert same(again.get("s2"), after) and all(same(again.get(f"s{i}"), snapshots[i]) for i in (0, 1, 3, 4, 5))
    assert again.delete("s2") and not again.delete("s2") and again.get("s2") is None
    assert not (folder / f"s2{SUFFIX}").exists()


def test_memory_without_a_folder_is_bounded_and_an_evicted_session_is_lost(
    snapshots: list[Snapshot], store: Stores
) -> None:
    kept = store(None, 2 * max(s.nbytes for s in snapshots))
    for i, snapshot in enumerate(snapshots):
        kept.put(f"s{i}", snapshot)
    assert [*kept._loaded] == ["s4", "s5"]
    with pytest.raises(SessionLost, match="state of session s0 is gone"):
        kept.get("s0")
    assert kept.delete("s0") and kept.get("s0") is None and not kept.delete("s0")
    begun = kept.mark("s5")
    kept.put("s5", snapshots[0])
    with pytest.raises(SessionConflict):
        kept.put("s5", snapshots[1], begun)
    with pytest.raises(SessionConflict):
        kept.put("s4", snapshots[1], None)
    kept.put("new", snapshots[1], None)
    assert same(kept.get("s5"), snapshots[0]) and same(kept.get("new"), snapshots[1])


@pytest.mark.parametrize("shared", [False, True])
def test_the_folder_is_bounded(snapshots: list[Snapshot], tmp_path: Path, store: Stores, shared: bool) -> None:
    size, file = max(s.nbytes for s in snapshots), max(len(s.to_bytes()) for s in snapshots)
    kept = store(tmp_path, 2 * size, 2 * file, shared)
    for i, snapshot in enumerate(snapshots):
        kept.put(f"s{i}", snapshot)
        os.utime(tmp_path / f"s{i}{SUFFIX}", ns=(i, i))  # a coarse clock may give all files one time
        assert kept.memory_bytes <= 2 * size and kept.disk_bytes <= 2 * file
    assert files(tmp_path) == [f"s{i}{SUFFIX}" for i in (4, 5)]
    with pytest.raises(SessionLost, match="session s0 is gone"):
        kept.get("s0")
    kept.close()
    again = store(tmp_path, disk=file, shared=shared)
    assert again.disk_bytes <= file and files(tmp_path) == [f"s5{SUFFIX}"]
    with pytest.raises(SessionLost, match="session s4 is gone"):  # after a restart too
        again.get("s4")
    again.close()
    with pytest.raises(EnvironmentProblem, match="all files together may take 10"):
        store(tmp_path, disk=10, shared=shared).put("s9", snapshots[0])


def test_other_processes_files_count_towards_the_bound(
    snapshots: list[Snapshot], tmp_path: Path, store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = max(len(s.to_bytes()) for s in snapshots)
    monkeypatch.setattr("kvexport.state.sessions._SCAN_SECONDS", 0.0)
    one, other = (store(tmp_path, disk=3 * file, shared=True) for _ in range(2))
    for i, snapshot in enumerate(snapshots):
        (one, other)[i % 2].put(f"s{i}", snapshot)
        os.utime(tmp_path / f"s{i}{SUFFIX}", ns=(i, i))
    assert files(tmp_path) == [f"s{i}{SUFFIX}" for i in (3, 4, 5)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_full_disk_is_an_error_and_the_state_before_stays(
    snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Stores, fails: str, shared: bool
) -> None:
    kept = store(tmp_path, shared=shared)
    kept.put("a", snapshots[0])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full) if fails == "replace" else patch.setattr(
            os, "fsync" if fails == "fsync" else "fdopen", full
        )
        for name in ("a", "b"):
            with pytest.raises(EnvironmentProblem, match=rf"the session {name}.*No space left"):
                kept.put(name, snapshots[1])
    assert files(tmp_path) == [f"a{SUFFIX}"] and not list(tmp_path.glob(f".*{SUFFIX}.*"))
    assert same(kept.get("a"), snapshots[0]) and kept.get("b") is None
    kept.close()
    again = store(tmp_path, shared=shared)
    assert same(again.get("a"), snapshots[0]) and again.get("b") is None
    again.put("b", snapshots[1])
    assert same(again.get("b"), snapshots[1])


@pytest.mark.parametrize("fails", ["a", ".known"])
def test_a_session_that_cannot_be_deleted_stays(
    snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Stores, fails: str
) -> None:
    kept, real = store(tmp_path), Path.unlink
    kept.put("a", snapshots[0])

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if fails == (path.parent.name if path.parent.name == ".known" else path.stem):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(EnvironmentProblem, match="the session a cannot be used: Read-only file system"):
            kept.delete("a")
    assert same(kept.get("a"), snapshots[0])
    kept.close()
    again = store(tmp_path)
    assert same(again.get("a"), snapshots[0])
    (tmp_path / f"a{SUFFIX}").unlink()
    with pytest.raises(SessionLost):  # its name is still known
        again.get("a")


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_is_no_session_is_an_error_of_its_name_only(
    snapshots: list[Snapshot], tmp_path: Path, store: Stores, shared: bool
) -> None:
    kept = store(tmp_path, 0, shared=shared)
    for name in ("good", "bad", "cut"):
        kept.put(name, snapshots[0])
    (tmp_path / f"bad{SUFFIX}").write_bytes(b"no snapshot")
    cut = tmp_path / f"cut{SUFFIX}"
    cut.write_bytes(cut.read_bytes()[:-1])
    (tmp_path / f"link{SUFFIX}").symlink_to(tmp_path / f"good{SUFFIX}")
    kept.put("other", snapshots[1])  # only the session used last is in memory
    for name in ("bad", "cut", "bad"):
        with pytest.raises(SnapshotError, match=f"the session {name} cannot be used: the snapshot is damaged"):
            kept.get(name)
    with pytest.raises(EnvironmentProblem, match="the session link"):
        kept.get("link")
    assert kept.delete("bad") and kept.delete("link") and same(kept.get("good"), snapshots[0])
    kept.put("cut", snapshots[2])
    assert same(kept.get("cut"), snapshots[2])


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "a.b", "-a", "a" * 65, "a\0", "ü", "a\n"])
def test_names_are_strict(snapshots: list[Snapshot], name: str, store: Stores) -> None:
    kept = store(None)
    for attempt in (kept.get, kept.delete, lambda name: kept.put(name, snapshots[0])):
        with pytest.raises(UsageError, match="no session can have the name"):
            attempt(name)


def test_files_of_a_killed_process_are_removed_and_other_files_stay(tmp_path: Path, store: Stores) -> None:
    begun, old = tmp_path / f".a{SUFFIX}.0", tmp_path / f".b{SUFFIX}.0"
    for path in (begun, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    (tmp_path / "notes").write_text("mine")
    shared = store(tmp_path, shared=True)
    assert begun.exists() and not old.exists(), "another process may be writing it"
    shared.close()
    store(tmp_path)
    assert not begun.exists() and (tmp_path / "notes").exists()
    with pytest.raises(EnvironmentProblem, match="folder of sessions"):
        store(tmp_path / "notes")


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_a_folder_has_one_store_unless_all_share_it(tmp_path: Path, store: Stores, first: bool, second: bool) -> None:
    one = store(tmp_path, shared=first)
    with pytest.raises(EnvironmentProblem, match="another server uses the folder of sessions") as caught:
        store(tmp_path, shared=second)
    assert "--session-shared" in caught.value.fix
    one.close()
    store(tmp_path, shared=second)


# A folder that several processes share.


def test_a_session_stored_by_one_process_is_read_by_another_at_once(
    snapshots: list[Snapshot], tmp_path: Path, store: Stores
) -> None:
    one, other = (store(tmp_path, shared=True) for _ in range(2))
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


def test_an_unchanged_session_is_not_read_again(snapshots: list[Snapshot], tmp_path: Path, store: Stores) -> None:
    one, other = (store(tmp_path, shared=True) for _ in range(2))
    one.put("a", snapshots[0])
    assert one.get("a") is snapshots[0]
    cached = other.get("a")
    assert other.get("a") is cached
    one.put("a", snapshots[1])
    assert same(other.get("a"), snapshots[1])


def test_a_turn_that_began_from_a_replaced_state_is_refused(
    snapshots: list[Snapshot], tmp_path: Path, store: Stores
) -> None:
    one, other = (store(tmp_path, shared=True) for _ in range(2))
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
    begun = one.mark("a")
    one.put("a", snapshots[3], begun)
    begun = one.mark("a")
    other.delete("a")
    with pytest.raises(SessionConflict):
        one.put("a", snapshots[1], begun)
    assert one.get("a") is None and not list(tmp_path.glob(f".*{SUFFIX}.*"))


def test_a_process_that_is_stopped_with_the_lock_delays_others_and_loses_nothing(
    snapshots: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Stores
) -> None:
    monkeypatch.setattr("kvexport.state.sessions._LOCK_SECONDS", 0.05)
    kept = store(tmp_path, shared=True)
    kept.put("a", snapshots[0])
    with _locked(tmp_path), pytest.raises(EnvironmentProblem, match="another process holds the lock"):
        kept.put("a", snapshots[1])
    assert same(kept.get("a"), snapshots[0])
    kept.put("a", snapshots[1])
    assert same(store(tmp_path, shared=True).get("a"), snapshots[1])


OTHER_PROCESS = """
import sys
from functools import partial
from pathlib import Path
from kvexport.artifact.reading import load_manifest
from kvexport.state.sessions import SessionStore

kept = SessionStore(load_manifest(Path(sys.argv[1])), memory=0, folder=Path(sys.argv[2]), disk=1 << 30, shared=True)
print(kept.begin_turn("a"), flush=True)
sys.stdin.readline()
kept.end_turn("a")
print(kept.begin_turn("b"), flush=True)
sys.stdin.readline()
"""


def test_turns_of_a_session_exclude_one_another_among_processes(
    tiny_artifact: Path, tmp_path: Path, store: Stores
) -> None:
    kept = store(tmp_path, shared=True)
    command = [sys.executable, "-c", OTHER_PROCESS, str(tiny_artifact), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=PYTHON_PATH, bufsize=1
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert not kept.begin_turn("a") and kept.begin_turn("another")
        other.stdin.write("\n")
        assert other.stdout.readline() == "True\n"
        assert kept.begin_turn("a") and not kept.begin_turn("b")
        other.kill()
        other.wait()
        assert kept.begin_turn("b"), "the system releases the lock of a process that was killed"


class Template:
    """A chat template with one character per token: u and a begin a message, and a dot ends it."""

    def render(self, messages: Any, tools: Any = None, **_: Any) -> str:
        return "".join(f"{m['role'][0]}{m['content']}." for m in messages) + "a"


def stand_in(template: Any, tokenizer: Any) -> Any:
    engine: Any = SimpleNamespace(chat_template=template, tokenizer=tokenizer, max_length=1000, vocabulary=5000)
    engine.manifest = SimpleNamespace(images=None)
    engine.chat_text = partial(Engine.chat_text, engine)
    engine._chat_parts = partial(Engine._chat_parts, engine)
    return engine


def after(seen: list[int]) -> Snapshot:
    return cast(Snapshot, SimpleNamespace(ids=np.array(seen), images=()))


def test_the_next_turn_of_a_conversation_reads_only_its_own_tokens(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    assert engine.tokenizer is not None
    engine.__dict__["chat_template"] = Template()
    talk = [{"role": "user", "content": "hello"}]
    start = turn(engine, engine.encode_chat(talk).tolist(), None)
    answer = engine.tokenizer.decode(start.ids.tolist())[len("uhello.a") :]
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    new = next_turn(engine, start, talk)
    assert new is not None and engine.tokenizer.decode(new[0].tolist()) == ".umore.a" and new[1] is None
    talk[0]["content"] = "another"
    assert next_turn(engine, start, talk) is None
    engine.__dict__["chat_template"] = None
    assert next_turn(engine, start, talk) is None


def test_a_conversation_gets_no_spaces_between_its_turns() -> None:
    """In every turn the session's tokens are those of the whole conversation, encoded at once."""
    for name in FAMILIES:
        tokenizer = tokenizer_of(name)
        talk: list[dict[str, str]] = []
        template = ChatTemplate({"default": INSTRUCT}, {}, "here")
        engine = stand_in(template, tokenizer)
        seen: list[int] = []
        for i in range(4):
            talk.append({"role": "user", "content": f"count {i} from JSON"})
            new = next_turn(engine, after(seen), talk) if seen else None
            whole = tokenizer.encode(template.render(talk), add_special_tokens=False)
            assert new is not None or not seen, name
            assert whole == [*seen, *(whole if new is None else new[0].tolist())], name
            talk.append({"role": "assistant", "content": "team red"})
            seen = tokenizer.encode(template.render(talk).removesuffix("</s>"), add_special_tokens=False)


@pytest.mark.parametrize("name", ["Mistral", "Gemma", "GPT-2"])
def test_a_turn_after_an_answer_in_other_tokens_gets_no_space(name: str) -> None:
    tokenizer = tokenizer_of(name)
    engine = stand_in(Template(), tokenizer)
    talk = [{"role": "user", "content": "team"}]
    seen = tokenizer.encode(Template().render(talk), add_special_tokens=False)
    seen += [i for letter in "count" for i in tokenizer.encode_within(letter)]
    for _ in range(3):
        talk += [{"role": "assistant", "content": "count"}, {"role": "user", "content": "more"}]
        new = next_turn(engine, after(seen), talk)
        assert new is not None
        assert tokenizer.decode([*seen, *new[0]], skip_special_tokens=False) == Template().render(talk)
        assert EngineCore.encode(engine, ".umore.a", after=after(seen)).tolist() == [*seen, *new[0]]
        seen += [*new[0].tolist(), *(i for letter in "count" for i in tokenizer.encode_within(letter))]
