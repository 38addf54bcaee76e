"""Sessions in a folder that several processes use: a conversation goes on in any of them.

Every state is written when it is put, so that a process that is killed loses no turn that has ended. What files held
when this process read or wrote them last is kept in memory; a file that another process has replaced is read anew. Of
two turns of one session at the same time the one that ends last stays.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from pathlib import Path

from kvexport.artifact.manifest import Manifest
from kvexport.errors import EnvironmentProblem
from kvexport.state.session_files import NAME, SUFFIX, check_name, problems, read_mark, read_session, write_file
from kvexport.state.snapshot import MARK, Snapshot

_LEFT_BEHIND = 3600  # seconds after which a file that is half written is one of a process that was killed


class SharedSessions:
    """The sessions of one artifact, in a folder that others use. memory, disk: bytes, at most; the session used last is
    in memory whatever its size, and the file written last stays. folder: is made where it is missing. Not safe to use
    from several threads at once. Raises EnvironmentProblem for a folder that cannot be used."""

    def __init__(self, manifest: Manifest, *, memory: int, folder: Path, disk: int) -> None:
        self._manifest, self._memory, self._folder, self._disk = manifest, memory, folder, disk
        self._held: OrderedDict[str, tuple[bytes | None, Snapshot]] = OrderedDict()  # with the file's mark
        self.disk_bytes = 0  # of all files, when one was written last
        with problems(f"the folder of sessions {folder}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.glob(f".*{SUFFIX}.*"):
                if path.stat().st_mtime < time.time() - _LEFT_BEHIND:
                    path.unlink(missing_ok=True)
        self._bound_disk("")

    @property
    def memory_bytes(self) -> int:
        """Of the sessions in memory."""
        return sum(snapshot.nbytes for _, snapshot in self._held.values())

    def get(self, name: str) -> Snapshot | None:
        """A session; None where there is none, or no longer. Errors as those of `SessionStore.get`."""
        check_name(name)
        mark = read_mark(name, self._path(name))
        there, snapshot = self._held.pop(name, (None, None))
        if snapshot is None or there != mark:
            if mark is None:
                return None
            snapshot = read_session(name, self._path(name), self._manifest)
        self._hold(name, mark, snapshot)
        return snapshot

    def put(self, name: str, snapshot: Snapshot) -> None:
        """Keep a session, in the place of an earlier state of it. Raises UsageError for a name that cannot be one,
        EnvironmentProblem where it cannot be written: this process then has it in memory alone."""
        check_name(name)
        data = snapshot.to_bytes()
        try:
            with problems(f"the session {name} stays in memory: its file"):
                if len(data) > self._disk:
                    raise OSError(f"it takes {len(data)} bytes, all files together may take {self._disk}")
                write_file(self._path(name), data)
        except EnvironmentProblem:
            self._hold(name, read_mark(name, self._path(name)), snapshot)
            raise
        self._hold(name, data[:MARK], snapshot)
        self._bound_disk(name)

    def delete(self, name: str) -> bool:
        """Forget a session; whether there was one. Errors as `get`."""
        check_name(name)
        mark, held = self._held.pop(name, (None, None))
        with problems(f"the session {name}"):
            try:
                self._path(name).unlink()
            except FileNotFoundError:
                return held is not None and mark is None
        return True

    def flush(self) -> None:
        """Every session is in the folder already."""

    def _hold(self, name: str, mark: bytes | None, snapshot: Snapshot) -> None:
        """In memory; those that were not used for longest make room."""
        self._held[name] = mark, snapshot
        self._held.move_to_end(name)
        while self.memory_bytes > self._memory and len(self._held) > 1:
            self._held.popitem(last=False)

    def _bound_disk(self, newest: str) -> None:
        """Delete the files that were not written for longest, until the others are within the bound."""
        with problems("the folder of sessions"):
            files = []
            for path in self._folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):
                    if NAME.fullmatch(path.stem):
                        files.append((path.lstat().st_mtime_ns, path.lstat().st_size, path))
            self.disk_bytes = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if self.disk_bytes <= self._disk:
                    break
                if path.stem != newest:
                    path.unlink(missing_ok=True)
                    self.disk_bytes -= size

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"
