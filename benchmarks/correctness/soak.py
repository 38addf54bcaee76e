"""A day of operation in minutes: two servers with one folder of sessions, killed, stopped, cut off and with full disks.

    python benchmarks/correctness/soak.py ARTIFACT --minutes 10 --kills 100 --out benchmarks/results/soak.json

Six clients have conversations. Meanwhile each server is killed (SIGKILL) a few seconds after it has started. The
folder's disk is full for a second at a time. A server is stopped (SIGSTOP) and continues. A proxy cuts connections
after a random number of bytes. The folder is a tmpfs in a mount namespace of its own. If processes may not mount, the
disk is never full, and the result states it. The run ends when both the minutes and the kills are reached, at the
latest after three times the minutes. At the end every conversation has one more turn. An acknowledged turn that is
missing, a wrong answer, or a lane that is not free again counts as a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT, save
from benchmarks.correctness.soak_client import Client, Reference, Session

CLIENTS, DISK = 6, 256 << 20  # room for the conversations of an hour
MOUNTED = "KVEXPORT_SOAK_MOUNTED"


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A server that can be killed and started again at the same address."""

    def __init__(self, artifact: Path, folder: Path, log: Path) -> None:
        self.port, self.log = free_port(), log
        options = ["--threads", "1", "--session-folder", str(folder), "--session-shared", "--drain", "5"]
        self._command = [sys.executable, "-m", "kvexport", "serve", str(artifact), "--port", str(self.port), *options]
        self.lock = threading.Lock()  # a stopped server is not killed, and a killed one not stopped
        self.largest = 0  # bytes of resident memory
        self.start()

    @property
    def url(self) -> str:
        """The address of the server, with its port."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process, and wait until it answers or has ended."""
        with self.log.open("ab") as errors:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=ROOT
            )
        while self.process.poll() is None and not self.healthy():
            time.sleep(0.05)

    def healthy(self) -> bool:
        """Return whether /health answers."""
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def note_memory(self) -> int:
        """Return the resident bytes and remember the largest."""
        with suppress(psutil.Error):
            now = int(psutil.Process(self.process.pid).memory_info().rss)
            self.largest = max(self.largest, now)
            return now
        return 0

    def kill(self) -> None:
        """End the process as a power failure would."""
        self.process.kill()
        self.process.wait()


class CuttingProxy(threading.Thread):
    """A proxy that closes half of its connections after a random number of bytes of the answer."""

    def __init__(self, servers: list[Server], cuts: Counter[str]) -> None:
        super().__init__(daemon=True)
        self._servers, self._cuts, self._random = servers, cuts, random.Random(1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        """Accept connections until the process ends."""
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        limit = self._random.randrange(1, 2500) if self._random.random() < 0.5 else sys.maxsize
        with client, suppress(OSError):
            port = self._random.choice(self._servers).port
            with socket.create_connection(("127.0.0.1", port), timeout=10) as server:
                client.settimeout(10)
                upward = threading.Thread(target=self._copy, args=(client, server, sys.maxsize), daemon=True)
                upward.start()
                if self._copy(server, client, limit):
                    self._cuts["connections cut"] += 1
                for one in (client, server):
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, limit: int) -> bool:
        """Copy at most `limit` bytes and return whether the limit was reached."""
        with suppress(OSError):
            while limit > 0 and (data := source.recv(min(4096, limit))):
                target.sendall(data)
                limit -= len(data)
        return limit <= 0


class Disturbances:
    """The threads that kill and stop servers and fill the disk.

    Args:
        servers: The servers.
        folder: The folder of sessions.
        every: Mean seconds until a running server is killed.
        mounted: Whether the folder has a small disk of its own.
    """

    def __init__(self, servers: list[Server], folder: Path, every: float, mounted: bool) -> None:
        self.servers, self.folder, self.every, self.mounted = servers, folder, every, mounted
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        works: list[tuple[Callable[[random.Random], None], float]] = [(self._freeze, 9.0)]
        works += [(partial(self._kill, server), every) for server in servers]
        works += [(self._fill, 4.0)] if mounted else []
        self.threads = [
            threading.Thread(target=self._repeat, args=(i, *work), daemon=True) for i, work in enumerate(works)
        ]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """End the threads. All servers run afterwards."""
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def _repeat(self, seed: int, work: Callable[[random.Random], None], every: float) -> None:
        order = random.Random(seed)
        while not self.stop.wait(order.uniform(0.5, 1.5) * every):
            work(order)

    def _kill(self, server: Server, _: random.Random) -> None:
        with server.lock:
            server.note_memory()
            server.kill()
            self.counts["kills"] += 1
            server.start()

    def _freeze(self, order: random.Random) -> None:
        server = order.choice(self.servers)
        with server.lock:
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(order.uniform(0.5, 7.0))
            server.process.send_signal(signal.SIGCONT)
            self.counts["freezes"] += 1

    def _fill(self, order: random.Random) -> None:
        filler = self.folder / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self.counts["full disks"] += 1
        time.sleep(order.uniform(0.3, 1.5))
        filler.unlink(missing_ok=True)


def in_own_namespace() -> bool:
    """Return whether this process has mounts of its own. It starts again with them if it can."""
    if MOUNTED in os.environ:
        return os.environ[MOUNTED] == "yes"
    prefix = ["unshare", "--map-root-user", "--mount"]
    works = False
    with suppress(OSError):
        works = subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    os.environ[MOUNTED] = "yes" if works else "no"
    if works:
        os.execvp("unshare", [*prefix, sys.executable, "-m", "benchmarks.correctness.soak", *sys.argv[1:]])
    return False


def last_turns(clients: list[Client], servers: list[Server]) -> int:
    """Give every conversation one more turn and return the number of right answers."""
    right = 0
    for client in clients:
        client._urls = [server.url for server in servers]
        sessions: list[Session] = [session for session in client.sessions if session.acknowledged]
        right += sum(client.turn(session) for session in sessions)
    return right


def busy_lanes(server: Server) -> int:
    """Return the number of lanes of a server that are in use."""
    with urllib.request.urlopen(f"{server.url}/stats", timeout=10) as answer:
        return sum(lane["state"] != "idle" for lane in json.load(answer)["lanes"])


def soak(arguments: argparse.Namespace, mounted: bool, folder: Path) -> dict[str, Any]:
    """Run servers, clients and disturbances, and return the figures."""
    import kvexport

    reference = Reference(kvexport.load(arguments.artifact, threads=1))
    log = Path(tempfile.gettempdir()) / "kvexport-soak.log"
    log.write_bytes(b"")
    servers = [Server(arguments.artifact, folder, log) for _ in range(2)]
    cuts, counts, lock, stop = Counter[str](), Counter[str](), threading.Lock(), threading.Event()
    proxy = CuttingProxy(servers, cuts)
    proxy.start()
    urls = [*(server.url for server in servers), proxy.url]
    clients = [Client(number, urls, reference, stop, counts, lock) for number in range(CLIENTS)]
    try:
        for client in clients:
            client.start()
        begun = time.monotonic()
        disturbances = Disturbances(servers, folder, arguments.every, mounted)
        while (minutes := (time.monotonic() - begun) / 60) < arguments.minutes * 3:
            time.sleep(1)
            if minutes >= arguments.minutes and disturbances.counts["kills"] >= arguments.kills:
                break
        disturbances.end()
        stop.set()
        for client in clients:
            client.join(60)
        minutes = (time.monotonic() - begun) / 60
        conversations = sum(1 for client in clients for session in client.sessions if session.acknowledged)
        right = last_turns(clients, servers)
        time.sleep(1)
        lanes = sum(busy_lanes(server) for server in servers)
        largest = max(max(server.note_memory(), server.largest) for server in servers)
    finally:
        for server in servers:
            server.kill()
    problems = [problem for client in clients for problem in client.problems]
    print(*problems, sep="\n", file=sys.stderr)
    text = log.read_text(errors="replace")
    return {
        "minutes": round(minutes, 1),
        **{name: disturbances.counts[name] for name in ("kills", "freezes", "full disks")},
        "disk": "a tmpfs" if mounted else "not reached: no process may mount here, so the disk was never full",
        **cuts,
        "outcomes": dict(sorted(counts.items())),
        "conversations": conversations,
        "conversations right at the end": right,
        "acknowledged turns lost": sum(n for name, n in counts.items() if name.startswith("acknowledged turns lost")),
        "wrong answers": counts["wrong answers"],
        "lanes in use at the end": lanes,
        "half-written files left": len(list(folder.glob(".*.session.*"))),
        "largest server MB": round(largest / 1e6),
        "tracebacks in the log": text.count("Traceback"),
        "bytes of log": len(text),
    }


def main() -> None:
    """Run, print the figures, and exit with 1 if a turn was lost or an answer was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=100, help="the least number of kills")
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds until a running server is killed")
    parser.add_argument("--out", type=Path, help="the file to write with the figures as JSON")
    arguments = parser.parse_args()
    mounted = in_own_namespace()
    with tempfile.TemporaryDirectory(prefix="kvexport-soak-") as name:
        folder = Path(name) / "sessions"
        folder.mkdir()
        if mounted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)], check=True)
        try:
            figures = soak(arguments, mounted, folder)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
    print(json.dumps(figures, indent=1))
    if arguments.out:
        save(arguments.out, figures)
    failed = figures["acknowledged turns lost"] + figures["wrong answers"] + figures["lanes in use at the end"]
    sys.exit(bool(failed or figures["conversations"] != figures["conversations right at the end"]))


if __name__ == "__main__":
    main()
