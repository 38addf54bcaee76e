"""Sessions: conversations whose KV cache and other state are stored between turns.

A session is a snapshot with a name. Its next turn is a request that starts from the snapshot, reads only the new
tokens, and produces the next snapshot.

The most recently used sessions are in memory, all others in a folder, one file each. Both have a limit in bytes: the
least recently used sessions move from memory to the folder, and are later deleted there. An error of one session does
not affect other sessions.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvexport.artifact.manifest import Manifest
from kvexport.errors import EnvironmentProblem
from kvexport.language.chat import Message
from kvexport.state.session_files import (
    NAME,
    SUFFIX,
    KnownNames,
    SessionLost,
    check_name,
    problems,
    read_session,
    temporary,
)
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport.engine.engine import Engine

ANY = b""  # No state has this mark. `put` with ANY replaces any state.


class SessionStore:
    """The stored conversations (sessions) of one artifact in one process, in memory and in files.

    Args:
        manifest: The manifest of the artifact.
        memory: Bytes that sessions in memory may take. The most recently used session stays in memory even if it is
            larger.
        folder: The folder of files, created if it is missing. None keeps sessions only in memory.
        disk: Bytes that all files may take.

    Raises:
        EnvironmentProblem: The folder cannot be used.
    """

    def __init__(self, manifest: Manifest, *, memory: int, folder: Path | None = None, disk: int = 0) -> None:
        self._manifest, self._memory, self._folder, self._disk = manifest, memory, folder, disk
        self._loaded: OrderedDict[str, Snapshot] = OrderedDict()  # in memory, the session used last at the end
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes of each file; equal to the state in memory, if any
        with problems(f"the folder of sessions {folder}"):
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for path in folder.glob(f".*{SUFFIX}.*"):  # half-written files of a process that was killed
                    path.unlink()
                entries = [(p.lstat(), p) for p in folder.glob(f"*{SUFFIX}") if NAME.fullmatch(p.stem)]
                for status, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
                    self._files[path.stem] = status.st_size
            self._known = KnownNames(folder)

    def names(self) -> list[str]:
        """Return the names of all stored sessions, ordered by last use; the last is the most recent."""
        return [*(name for name in self._files if name not in self._loaded), *self._loaded]

    @property
    def memory_bytes(self) -> int:
        """The bytes that sessions stored in memory take."""
        return sum(snapshot.nbytes for snapshot in self._loaded.values())

    @property
    def disk_bytes(self) -> int:
        """The bytes that all session files take."""
        return sum(self._files.values())

    def get(self, name: str) -> Snapshot | None:
        """Return the stored state (snapshot) of a session; None if the name is new.

        Raises:
            UsageError: No session can have the name.
            SessionLost: The session was kept before, and its state is gone.
            SnapshotError: The file is damaged, or belongs to another artifact. The file stays.
            EnvironmentProblem: The file cannot be read. The file stays.
        """
        check_name(name)
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        if name not in self._files:
            if name in self._known:
                raise SessionLost(name)
            return None
        snapshot = read_session(name, self._path(name), self._manifest)
        self._load(name, snapshot)
        self._files.move_to_end(name)
        with contextlib.suppress(EnvironmentProblem):  # on an error more sessions stay in memory than the bound allows
            self._make_room(0, name)
        return snapshot

    def mark(self, name: str) -> bytes:
        """Return ANY, so that `put` replaces any stored state: no other process changes the sessions of this store."""
        return ANY

    def put(self, name: str, snapshot: Snapshot, expected: bytes | None = ANY) -> None:
        """Store the state of a session in place of an earlier one. If that fails, the earlier state stays.

        Args:
            name: The session.
            snapshot: Its new state.
            expected: Ignored here; see `SharedSessions.put`.

        Raises:
            UsageError: No session can have the name.
            EnvironmentProblem: Another session could not be written to make room, or the folder cannot be used.
        """
        check_name(name)
        earlier = self._loaded.get(name)
        self._make_room(snapshot.nbytes - (0 if earlier is None else earlier.nbytes), name)
        with problems(f"the session {name}"):
            self._known.add(name)
        self._delete_file(name)  # an older state
        self._load(name, snapshot)

    def delete(self, name: str) -> bool:
        """Delete a session, a stored conversation, from memory and from the folder.

        Returns:
            Whether the session was known.

        Raises:
            UsageError: No session can have the name.
            EnvironmentProblem: The file cannot be deleted.
        """
        check_name(name)
        known = name in self._loaded or name in self._files or name in self._known
        self._delete_file(name)
        self._loaded.pop(name, None)
        with problems(f"the session {name}"):
            self._known.remove(name)
        return known

    def flush(self) -> None:
        """Write all sessions in memory to their files, before the process ends.

        Raises:
            EnvironmentProblem: A session could not be written. The others were.
        """
        failed: EnvironmentProblem | None = None
        for name in list(self._loaded) if self._folder is not None else ():
            try:
                self._write(name)
            except EnvironmentProblem as error:
                failed = error
        if failed is not None:
            raise failed

    def _load(self, name: str, snapshot: Snapshot) -> None:
        self._loaded[name] = snapshot
        self._loaded.move_to_end(name)

    def _make_room(self, more: int, name: str) -> None:
        """Move sessions other than `name` from memory to files until `more` further bytes fit into the memory limit."""
        while self.memory_bytes + more > self._memory:
            oldest = next((other for other in self._loaded if other != name), None)
            if oldest is None:
                return
            if self._folder is None:
                del self._loaded[oldest]
            else:
                self._write(oldest)

    def _write(self, name: str) -> None:
        """Move a session from memory to a file, and delete the least recently used files if disk space is short."""
        if name not in self._files:
            data, path = self._loaded[name].to_bytes(), self._path(name)
            with problems(f"the session {name} stays in memory: its file"):
                if len(data) > self._disk:
                    raise OSError(f"it takes {len(data)} bytes, all files together may take {self._disk}")
                with temporary(path, data) as file:
                    file.replace(path)
            self._files[name] = len(data)
            while self.disk_bytes > self._disk:
                self._delete_file(next(iter(self._files)))
        del self._loaded[name]

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{SUFFIX}"

    def _delete_file(self, name: str) -> None:
        if name in self._files:
            with problems(f"the session {name}"):
                self._path(name).unlink(missing_ok=True)
            del self._files[name]


def next_turn(
    engine: Engine,
    snapshot: Snapshot,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> NDArray[np.int64] | None:
    """Return the token ids that a conversation adds to a snapshot of its beginning.

    The ids are the end of the last answer, and everything after it.

    Args:
        engine: The engine whose chat template and tokenizer write the conversation.
        snapshot: The state after the last answer.
        messages: The whole conversation.
        tools: The tools that the template lists, as JSON schemas.
        **variables: The template's own variables.

    Returns:
        Token ids [n] int64. None if the snapshot is not the beginning of the conversation, or the template writes
        earlier messages in another way than the model did.

    Raises:
        UsageError: The conversation cannot be encoded, see `Engine.encode_chat`.
    """
    if engine.chat_template is None or engine.tokenizer is None:
        return None
    text = engine.chat_template.render(messages, tools, **variables)
    known = engine.tokenizer.decode(snapshot.ids.tolist(), skip_special_tokens=False)
    if not text.startswith(known) or len(text) == len(known):
        return None
    return np.array(engine.tokenizer.encode(text[len(known) :], add_special_tokens=False), np.int64)
