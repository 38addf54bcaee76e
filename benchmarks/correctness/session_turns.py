"""Turns of sessions beside kills, full disks and concurrent turns: how many acknowledged turns were lost.

    python benchmarks/correctness/session_turns.py ARTIFACT [--turns 10000] [--out FILE]

A server runs in a process of its own with `--session-folder`, first with the folder to itself, then as one of two
servers with `--session-shared`. Clients send turns of many sessions, several at once to each session. Meanwhile a
server is killed (SIGKILL) and started again, or its disk is full for a while: the largest size of its files is set
below that of a session, so that a write ends in the middle. Now and then a session is deleted. At the end every turn
that was answered with status 200 must be in the tokens of its session, once, unless the session was deleted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import save
from benchmarks.correctness.attacks import KEY, Target, target

TURNS_OF_A_SESSION = 8  # acknowledged, then another session begins: the model's texts are short
CLIENTS, OF_ONE_SESSION = 8, 4
SMALLEST_FILE = 1000  # bytes of a file while the disk counts as full


class Servers:
    """One or two servers of a folder of sessions, which are killed and started again."""

    def __init__(self, artifact: Path, folder: Path, count: int) -> None:
        self.artifact, self.folder, self.count = artifact, folder, count
        self.targets: list[Target | None] = [None] * count
        self._ends = [ExitStack() for _ in range(count)]
        self.starts = 0

    def start(self, i: int) -> None:
        self.starts += 1
        options = ["--session-folder", str(self.folder / "sessions"), "--session-memory", "100000"]
        options += ["--queue", "64", *(["--session-shared"] if self.count > 1 else [])]
        log = self.folder / f"log-{self.starts}"
        self.targets[i] = self._ends[i].enter_context(target(self.artifact, log, *options, descriptors=256))

    def kill(self, i: int) -> None:
        """Kill a server and start it again."""
        self.targets[i] = None
        self._ends[i].close()
        self.start(i)

    def fill_disk(self, i: int, full: bool) -> None:
        """Let a server's writes end in the middle, or no longer."""
        one = self.targets[i]
        if one is not None:
            size = SMALLEST_FILE if full else resource.RLIM_INFINITY
            resource.prlimit(one.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def close(self) -> None:
        for ends in self._ends:
            ends.close()


def ask(server: Target, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """Send a request and return the status and the body of the answer; 0 if the connection broke."""
    connection = http.client.HTTPConnection(*server.address(), timeout=60)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


class Run:
    """Turns against one or two servers, and what they acknowledged."""

    def __init__(self, servers: Servers, turns: int, every: int, seed: int) -> None:
        self.servers, self.turns, self.every, self.seed = servers, turns, every, seed
        self.sent = self.acknowledged = self.kills = self.full_disks = 0
        self.kept: dict[str, list[str]] = {}  # acknowledged turns since the last deletion
        self.answers: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._end = threading.Event()

    def clients(self) -> None:
        """Send turns from several threads until enough of them are acknowledged."""
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            trouble = pool.submit(self._trouble)
            done = [pool.submit(self._client, i) for i in range(CLIENTS)]
            try:
                for one in done:
                    one.result()
            finally:
                self._end.set()
            trouble.result()

    def _client(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        names = [f"g{number // OF_ONE_SESSION}s{i}" for i in range(self.turns)]
        place = 0
        while self.acknowledged < self.turns:
            name = names[place]
            with self._lock:
                self.sent += 1
                word = f" t{self.sent}x"
                known = self.kept.setdefault(name, [])
                full = len(known) >= TURNS_OF_A_SESSION
            if full:
                place += 1
                continue
            server = rng.choice(self.servers.targets)
            if server is None:
                time.sleep(0.05)
                continue
            if number % OF_ONE_SESSION == 0 and rng.random() < 0.02:
                self._delete(server, name)
                place += 1
                continue
            body = {"prompt": word, "session_id": name, "max_tokens": 1, "stream": rng.random() < 0.3}
            status, data = ask(server, "POST", "/v1/completions", body)
            if body["stream"] and status == 200:
                status = 200 if b"[DONE]" in data and b'"error"' not in data else 500 if data else 0
            with self._lock:
                self.answers[status] += 1
                if status == 200:
                    self.acknowledged += 1
                    known.append(word)
            if status != 200:
                time.sleep(0.01)

    def _delete(self, server: Target, name: str) -> None:
        """Delete a session for good: no client uses its name again, and its turns that run may end either way."""
        with self._lock:
            self.kept.setdefault(name, []).extend("" for _ in range(TURNS_OF_A_SESSION))
        ask(server, "DELETE", f"/v1/sessions/{name}")

    def _trouble(self) -> None:
        rng = random.Random(self.seed)
        nth = 1
        while not self._end.wait(0.02):
            if self.acknowledged < nth * self.every:
                continue
            i, nth = rng.randrange(self.servers.count), nth + 1
            if nth % 2:
                self.servers.kill(i)
                self.kills += 1
            else:
                self.servers.fill_disk(i, True)
                self._end.wait(0.3)
                self.servers.fill_disk(i, False)
                self.full_disks += 1

    def lost(self, artifact: Path) -> list[str]:
        """Return the acknowledged turns that the stored sessions do not have, or have twice."""
        from kvexport.artifact.reading import load_manifest
        from kvexport.language.tokenizer import Tokenizer
        from kvexport.state.sessions import SessionStore

        tokenizer = Tokenizer.from_folder(artifact)
        folder = self.servers.folder / "sessions"
        store = SessionStore(load_manifest(artifact), memory=0, folder=folder, disk=1 << 40)
        missing = []
        for name, words in self.kept.items():
            if not any(words) or "" in words:
                continue
            snapshot = store.get(name)
            text = "" if snapshot is None else tokenizer.decode(snapshot.ids.tolist())
            missing += [f"{name}:{word}" for word in words if text.count(word) != 1]
        store.close()
        return missing


def run(artifact: Path, turns: int, count: int, every: int, seed: int = 0) -> dict[str, Any]:
    """Send turns to `count` servers of one folder, with a trouble after each `every` turns. Return what happened."""
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(artifact, Path(folder), count)
        begun = time.monotonic()
        try:
            for i in range(count):
                servers.start(i)
            one = Run(servers, turns, every, seed)
            one.clients()
        finally:
            servers.close()
        lost = one.lost(artifact)
        return {
            "servers": count,
            "acknowledged": one.acknowledged,
            "lost": len(lost),
            "examples": lost[:5],
            "sessions": len(one.kept),
            "kills": one.kills,
            "full disks": one.full_disks,
            "answers": {str(status): number for status, number in sorted(one.answers.items())},
            "seconds": round(time.monotonic() - begun, 1),
        }


def main() -> None:
    """Run, print the table, and exit with 1 if a turn was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--turns", type=int, default=10_000, help="acknowledged turns in all, half of them shared")
    parser.add_argument("--out", type=Path, help="the file to write with the table as JSON")
    arguments = parser.parse_args()
    rows = [run(arguments.artifact, arguments.turns // 2, count, every=200) for count in (1, 2)]
    for row in rows:
        print(json.dumps(row))
    if arguments.out:
        save(arguments.out, {"rows": rows})
    sys.exit(any(row["lost"] for row in rows))


if __name__ == "__main__":
    main()
