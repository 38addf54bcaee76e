"""Sessions: conversations whose KV cache and other state are stored between turns.

A session is a snapshot with a name. The session's next turn is a request that starts from the snapshot, reads only the
new tokens, and produces the next snapshot.

The most recently used sessions are in memory. With a folder every state is also written to a file of its own, whole or
not at all, before `put` returns. A killed process therefore loses no acknowledged turn, and an error of one session
does not affect other sessions. Memory and folder have a limit in bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvexport.artifact.manifest import Manifest
from kvexport.errors import EnvironmentProblem, SnapshotError, UsageError
from kvexport.files import new_file, sync, sync_folder
from kvexport.language.chat import Message
from kvexport.state.lane import Pins, joined, within
from kvexport.state.snapshot import MARK, Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport.engine.engine import Engine
    from kvexport.images.rows import PromptImages

SUFFIX = ".session"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
ANY = b""  # No state has this mark. `put` with ANY replaces any state.
_MOST_NAMES = 10_000
_LOCK_SECONDS = 5.0  # a process that is stopped while it has the lock keeps others from writing
_LEFT_BEHIND = 3600  # seconds; an older half-written file is of a process that was killed
_SCAN_SECONDS = 1.0  # between two looks at the sizes of files that other processes write
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class SessionLost(SnapshotError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"the state of session {name} is gone: it was evicted, or the server that had it in memory was killed",
            "delete the session and begin again, or use another name",
        )


class SessionConflict(SnapshotError):
    def __init__(self, name: str) -> None:
        super().__init__(f"session {name} was changed by another turn while this turn ran", "send the turn again")


class SessionStore:
    def __init__(
        self, manifest: Manifest, *, memory: int, folder: Path | None = None, disk: int = 0, shared: bool = False
    ) -> None:
        self._manifest, self._memory, self._folder, self._disk = manifest, memory, folder, disk
        self._shared = shared
        # With the mark of the state in the folder, and the session used last at the end.
        self._loaded: OrderedDict[str, tuple[bytes, Snapshot]] = OrderedDict()
        self._claim = self._turns = -1  # open files whose locks are held until `close`
        self._scanned = 0.0
        self.disk_bytes = 0  # of all files; other processes' files as of the last scan
        if folder is not None:
            with problems(f"the folder of sessions {folder}"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._claim = _claimed(folder, shared)
                self._turns = _open_lock(folder / ".turns")
                for path in folder.glob(f".*{SUFFIX}.*"):  # half-written files of a process that was killed
                    with contextlib.suppress(FileNotFoundError):
                        if not shared or path.stat().st_mtime < time.time() - _LEFT_BEHIND:
                            path.unlink()
        with problems(f"the folder of sessions {folder}"):
            self._known = _KnownNames(folder)
        if folder is not None:
            with _locked(folder):
                self._bound_disk("")

    @property
    def memory_bytes(self) -> int:
        return sum(snapshot.nbytes for _, snapshot in self._loaded.values())

    def get(self, name: str) -> Snapshot | None:
        """Return the stored state of a session (conversation) as a snapshot; None if no session had this name yet."""
        mark = self.mark(name)
        if mark is None:
            self._loaded.pop(name, None)
            if name in self._known:
                raise SessionLost(name)
            return None
        loaded_mark, snapshot = self._loaded.get(name, (None, None))
        if snapshot is None or loaded_mark != mark:  # another process may have replaced the file
            snapshot = _read_session(name, self._path(name), self._manifest)
        self._load(name, mark, snapshot)
        return snapshot

    def mark(self, name: str) -> bytes | None:
        """Return bytes that identify a session's stored state, by which `put` detects that another turn changed it."""
        check_name(name)
        if self._folder is not None:
            return _read_mark(name, self._path(name))
        return self._loaded[name][0] if name in self._loaded else None

    def put(self, name: str, snapshot: Snapshot, expected: bytes | None = ANY) -> None:
        """Store a conversation's new state. If storing fails, the session keeps its earlier state."""
        check_name(name)
        if self._folder is None:
            self._check_mark(name, expected)
            self._known.add(name)
            self._load(name, secrets.token_bytes(MARK), snapshot)
            return
        data, path = snapshot.to_bytes(), self._path(name)
        with problems(f"the session {name} is not kept: its file"):
            if len(data) > self._disk:
                raise OSError(f"it takes {len(data)} bytes, all files together may take {self._disk}")
            is_new = False
            with contextlib.ExitStack() as lock:
                try:
                    with new_file(path, 0o600) as file:
                        file.write(data)
                        sync(file)  # before the lock, for which other processes wait
                        lock.enter_context(_locked(self._folder))
                        self._check_mark(name, expected)
                        before = _size(path)
                        is_new = name not in self._known
                        self._known.add(name)
                except OSError:
                    if is_new:  # a name without a state would be of a session that was lost
                        with contextlib.suppress(OSError):
                            self._known.remove(name)
                    raise
                self._load(name, data[:MARK], snapshot)
                self.disk_bytes += len(data) - before
                self._bound_disk(name)

    def delete(self, name: str) -> bool:
        check_name(name)
        known = name in self._known
        if self._folder is None:
            self._known.remove(name)
            return self._loaded.pop(name, None) is not None or known
        path = self._path(name)
        with problems(f"the session {name}"), _locked(self._folder):
            before = _size(path)
            self._known.remove(name)
            try:
                path.unlink()
            except FileNotFoundError:
                self._loaded.pop(name, None)
                return known
            except OSError:
                if known:
                    with contextlib.suppress(OSError):
                        self._known.add(name)
                raise
            sync_folder(self._folder)
            self._loaded.pop(name, None)
            self.disk_bytes -= before
        return True

    def begin_turn(self, name: str) -> bool:
        """Lock a session (conversation) for a turn. Return False if another process of the folder holds the lock.

        The system releases the lock if this process ends. On a file system without locks nothing is locked.
        """
        return not self._shared or _lock_turn(self._turns, name, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def end_turn(self, name: str) -> None:
        if self._shared:
            _lock_turn(self._turns, name, fcntl.LOCK_UN)

    def close(self) -> None:
        for number in (self._claim, self._turns):
            if number >= 0:
                os.close(number)
        self._claim = self._turns = -1

    def _check_mark(self, name: str, expected: bytes | None) -> None:
        if expected != ANY and self.mark(name) != expected:
            raise SessionConflict(name)

    def _load(self, name: str, mark: bytes, snapshot: Snapshot) -> None:
        """Keep a session's state in memory, and drop the least recently used other states if memory is short."""
        self._loaded[name] = mark, snapshot
        self._loaded.move_to_end(name)
        while self.memory_bytes > self._memory and len(self._loaded) > 1:
            self._loaded.popitem(last=False)

    def _bound_disk(self, newest: str) -> None:
        """Delete the session files that were written longest ago until the others are within the disk limit.

        The caller holds the lock of the folder of sessions. The sizes of all files are read only if the limit is
        reached, or if other processes may have written files: reading 10,000 sizes takes longer than a turn.
        """
        assert self._folder is not None
        due = self._shared and time.monotonic() > self._scanned + _SCAN_SECONDS
        if self.disk_bytes <= self._disk and self._scanned and not due:
            return
        self._scanned = time.monotonic()
        with problems("the folder of sessions"):
            files = []
            for path in self._folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):
                    if NAME.fullmatch(path.stem):
                        status = path.lstat()
                        files.append((status.st_mtime_ns, status.st_size, path))
            self.disk_bytes = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if self.disk_bytes <= self._disk:
                    break
                if path.stem != newest:
                    path.unlink(missing_ok=True)
                    self._loaded.pop(path.stem, None)
                    self.disk_bytes -= size

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{SUFFIX}"


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(f"no session can have the name {name[:80]!r}", "1 to 64 letters, digits, - and _")


def next_turn(
    engine: Engine,
    snapshot: Snapshot,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[int], None] | None = None,
    **variables: Any,
) -> tuple[NDArray[np.int64], PromptImages | None, str] | None:
    """Return the token ids and encoded images that a conversation adds to a snapshot, and its whole text; or None.

    The ids follow the snapshot's last token: the end of the model's answer, and all later messages. The result is None
    if the conversation does not begin like the snapshot, or if there is no chat template or tokenizer.
    """
    if engine.chat_template is None or engine.tokenizer is None:
        return None
    tokenizer, seen = engine.tokenizer, snapshot.ids.tolist()
    text, images = engine.chat_text(messages, tools, variables, read=snapshot.images, check=check)
    digests, read = (() if images is None else images.digests), len(snapshot.images)
    if digests[:read] != snapshot.images:
        return None
    images = None if images is None or len(digests) == read else replace(images, digests=digests[read:])
    # Such tokenizers put spaces behind special tokens too, and then a decoded prompt is not the text that it came from.
    if tokenizer.adds_spaces and tokenizer.least_tokens(text) < engine.max_length:
        whole = tokenizer.encode(text, add_special_tokens=False)
        if whole[: len(seen)] == seen and len(whole) > len(seen):
            return np.array(whole[len(seen) :], np.int64), images, text
    known = tokenizer.decode(seen, skip_special_tokens=False)
    if not text.startswith(known) or len(text) == len(known):
        return None
    return np.array(tokenizer.encode_within(text[len(known) :]), np.int64), images, text


def pins_after(
    snapshot: Snapshot, ids: NDArray[np.int64], whole: NDArray[np.int64], pins: Iterable[tuple[int, int]]
) -> Pins | None:
    """Return the pinned ranges of `ids`, which continue a snapshot; None if the snapshot has other pinned tokens.

    Pinned tokens are never evicted from the KV cache. A snapshot with other pinned tokens cannot be continued, because
    a token that was not pinned when it was read may be merged already. `pins` are ranges of `whole`, the ids of the
    whole conversation as the tokenizer encodes it. Within answers they may differ from the snapshot's ids, because a
    model may write a text in other tokens than the tokenizer.
    """
    sequence, seen = np.concatenate([snapshot.ids, ids]), len(snapshot.ids)
    begins, ends = _alike(sequence, whole), len(whole) - _alike(sequence[::-1], whole[::-1])
    moved = []
    for first, end in pins:
        if end > begins and first < ends:
            return None
        by = 0 if end <= begins else len(sequence) - len(whole)
        moved.append((first + by, end + by))
    known = joined(moved)
    if within(known, 0, seen) != snapshot.counters.pins:
        return None
    return tuple((first - seen, end - seen) for first, end in within(known, seen, len(sequence)))


def _alike(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    n = min(len(a), len(b))
    other = np.flatnonzero(a[:n] != b[:n])
    return int(other[0]) if other.size else n


class _KnownNames:
    """The names of all sessions that were ever stored and not deleted, whether or not their state still exists.

    The names distinguish a session whose state is lost from a new session. The 10,000 most recently used names are
    kept, in the folder of sessions as empty files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / ".known"
        self._names: OrderedDict[str, None] = OrderedDict()
        if self._folder is not None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            files = sorted(self._folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
            for path in files[:-_MOST_NAMES]:
                path.unlink(missing_ok=True)
            self._names.update((path.name, None) for path in files[-_MOST_NAMES:])

    def __contains__(self, name: str) -> bool:
        return name in self._names if self._folder is None else (self._folder / name).exists()

    def add(self, name: str) -> None:
        if self._folder is not None and name not in self:
            os.close(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._names[name] = None
        self._names.move_to_end(name)
        while len(self._names) > _MOST_NAMES:
            self.remove(next(iter(self._names)))

    def remove(self, name: str) -> None:
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)
        self._names.pop(name, None)


@contextlib.contextmanager
def problems(subject: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{subject} cannot be used: {error.strerror or error}", "free disk space, or another folder for sessions"
        ) from error


def _read_session(name: str, path: Path, manifest: Manifest) -> Snapshot:
    try:
        with problems(f"the session {name}"):
            return Snapshot.from_bytes(_read(path), manifest)
    except SnapshotError as error:
        raise SnapshotError(f"the session {name} cannot be used: {error.problem}", "delete it") from error


def _read_mark(name: str, path: Path) -> bytes | None:
    """Return the first 48 bytes of a session's file, which differ between any two states; None without a file."""
    with problems(f"the session {name}"), contextlib.suppress(FileNotFoundError):
        return _read(path, MARK)
    return None


def _read(path: Path, size: int = -1) -> bytes:
    # A symbolic link is not followed, and a pipe is not waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is no file")
        return file.read(size)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _claimed(folder: Path, shared: bool) -> int:
    """Lock the session folder for this process, or (`shared`) for all processes that share it; return the lock file."""
    number = _open_lock(folder / ".servers")
    try:
        fcntl.flock(number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return number
        os.close(number)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise EnvironmentProblem(
            f"another server uses the folder of sessions {folder}",
            "--session-shared for every server of the folder, or another --session-folder",
        ) from error
    return number


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder of sessions, so that no other process changes it between a check and a rename."""
    with problems("the folder of sessions"):
        number = _open_lock(folder / ".lock")
    try:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    break
                if time.monotonic() > end:
                    problem = f"another process holds the lock of the sessions for {_LOCK_SECONDS:g} seconds"
                    raise EnvironmentProblem(problem, f"end the process that holds {folder / '.lock'}") from error
            time.sleep(0.005)
        yield
    finally:
        os.close(number)


def _lock_turn(number: int, name: str, kind: int) -> bool:
    """Lock or unlock one byte of a file for a session (conversation), and return whether that was possible.

    All sessions share one lock file, with a byte for each name. A file for each name could never be deleted, because
    another process may be opening it.
    """
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    try:
        fcntl.lockf(number, kind, 1, place)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True
