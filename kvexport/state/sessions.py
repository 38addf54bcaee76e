"""Sessions: conversations that stay. A session is a snapshot under a name; its next turn is a request that starts from
it, reads the new tokens alone and leaves the next snapshot.

Those used last are in memory, others in a folder, one file each, written whole or not at all and readable for its owner
alone. Both are bounded: what has not been used for longest goes to the folder, and from there is deleted. An error of
one session loses no other, and one that cannot be written stays in memory.
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
from kvexport.state.session_files import NAME, SUFFIX, check_name, problems, read_session, write_file
from kvexport.state.snapshot import Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvexport.engine.engine import Engine


class SessionStore:
    """The sessions of one artifact. memory, disk: bytes, at most; the session used last is in memory whatever its size.
    folder: None keeps them in memory alone; it is made where it is missing. Not safe to use from several threads at
    once. Raises EnvironmentProblem for a folder that cannot be used."""

    def __init__(self, manifest: Manifest, *, memory: int, folder: Path | None = None, disk: int = 0) -> None:
        self._manifest, self._memory, self._folder, self._disk = manifest, memory, folder, disk
        self._held: OrderedDict[str, Snapshot] = OrderedDict()  # in memory, the one used last at the end
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes; what is in memory too is the same there
        if folder is not None:
            with problems(f"the folder of sessions {folder}"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for path in folder.glob(f".*{SUFFIX}.*"):  # of a process that was killed
                    path.unlink()
                found = [(p.lstat(), p) for p in folder.glob(f"*{SUFFIX}") if NAME.fullmatch(p.stem)]
            for status, path in sorted(found, key=lambda entry: entry[0].st_mtime_ns):
                self._files[path.stem] = status.st_size

    def names(self) -> list[str]:
        """Of all sessions, the one used last at the end."""
        return [*(name for name in self._files if name not in self._held), *self._held]

    @property
    def memory_bytes(self) -> int:
        """Of the sessions in memory."""
        return sum(snapshot.nbytes for snapshot in self._held.values())

    @property
    def disk_bytes(self) -> int:
        """Of the files."""
        return sum(self._files.values())

    def get(self, name: str) -> Snapshot | None:
        """A session; None where there is none, or no longer. Raises UsageError for a name that cannot be one,
        SnapshotError for a file that is damaged or of another artifact, EnvironmentProblem for one that cannot be read;
        the session then stays where it is."""
        check_name(name)
        if name in self._held:
            self._held.move_to_end(name)
            return self._held[name]
        if name not in self._files:
            return None
        snapshot = read_session(name, self._path(name), self._manifest)
        self._hold(name, snapshot)
        self._files.move_to_end(name)
        with contextlib.suppress(EnvironmentProblem):  # all of them are still there
            self._make_room()
        return snapshot

    def put(self, name: str, snapshot: Snapshot) -> None:
        """Keep a session, in the place of an earlier state of it. Raises UsageError for a name that cannot be one;
        EnvironmentProblem where another cannot be written to make room: this one is then kept where it was known
        before, and not where it is new."""
        check_name(name)
        known = name in self._held or name in self._files
        if not known:
            self._make_room(snapshot.nbytes)
        self._hold(name, snapshot)
        self._delete_file(name)  # it is behind now
        self._make_room()

    def delete(self, name: str) -> bool:
        """Forget a session; whether there was one. Errors as `get`."""
        check_name(name)
        known = self._held.pop(name, None) is not None or name in self._files
        self._delete_file(name)
        return known

    def flush(self) -> None:
        """Write all that are in memory to the folder: before the process ends. Raises EnvironmentProblem where one
        cannot be written, after the others were."""
        failed: EnvironmentProblem | None = None
        for name in list(self._held) if self._folder is not None else ():
            try:
                self._write(name)
            except EnvironmentProblem as error:
                failed = error
        if failed is not None:
            raise failed

    def _hold(self, name: str, snapshot: Snapshot) -> None:
        self._held[name] = snapshot
        self._held.move_to_end(name)

    def _make_room(self, more: int = 0) -> None:
        """Keep the memory within its bound: all but the session used last may go."""
        while self.memory_bytes + more > self._memory and len(self._held) > (0 if more else 1):
            name = next(iter(self._held))
            if self._folder is None:
                del self._held[name]
            else:
                self._write(name)

    def _write(self, name: str) -> None:
        """From memory to the folder; files that were not used for longest are deleted when it is there."""
        if name not in self._files:
            data, path = self._held[name].to_bytes(), self._path(name)
            with problems(f"the session {name} stays in memory: its file"):
                if len(data) > self._disk:
                    raise OSError(f"it takes {len(data)} bytes, all files together may take {self._disk}")
                write_file(path, data)
            self._files[name] = len(data)
            while self.disk_bytes > self._disk:
                self._delete_file(next(iter(self._files)))
        del self._held[name]

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{SUFFIX}"

    def _delete_file(self, name: str) -> None:
        if self._files.pop(name, None) is not None:
            with problems(f"the session {name}"):
                self._path(name).unlink(missing_ok=True)


def next_turn(
    engine: Engine,
    snapshot: Snapshot,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> NDArray[np.int64] | None:
    """The token ids that a conversation adds to a snapshot of its beginning [n] int64: the last answer's end, and what
    came after it. messages: all of the conversation. None where the snapshot is not its beginning, or the template
    writes earlier messages in another way than the model did. Errors as `Engine.encode_chat`."""
    if engine.chat_template is None or engine.tokenizer is None:
        return None
    text = engine.chat_template.render(messages, tools, **variables)
    known = engine.tokenizer.decode(snapshot.ids.tolist(), skip_special_tokens=False)
    if not text.startswith(known) or len(text) == len(known):
        return None
    return np.array(engine.tokenizer.encode(text[len(known) :], add_special_tokens=False), np.int64)
