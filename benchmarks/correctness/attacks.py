"""Attacks on a server; the result has one row for each attack, with the number of its failures.

    python benchmarks/correctness/attacks.py ARTIFACT --out benchmarks/results/attacks.json
    python benchmarks/correctness/attacks.py ARTIFACT --minutes 30

The server is a process of its own with 64 file descriptors. During every attack a client reads streams without a pause.
An attack fails the server if a request is answered otherwise than expected, if that client waits longer than 0.25 s for
a token, if /health does not answer, or if the server's memory stays more than 10 % above its largest size after a first
round of all attacks, in which libraries take their memory. With --minutes the attacks repeat, each at another moment,
until the time is over.
"""

from __future__ import annotations

import argparse
import http.client
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.common import ROOT, save

KEY = "key-of-the-attacks"
DESCRIPTORS = 64
LONGEST_GAP = 0.25  # seconds between two pieces of a running stream
MIB = 1 << 20


@dataclass
class Target:
    """A server that is attacked."""

    url: str
    process: subprocess.Popen[bytes]

    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def connect(self, timeout: float = 30) -> socket.socket:
        return socket.create_connection(self.address(), timeout=timeout)

    def post(self, path: str, body: bytes, timeout: float = 60) -> int:
        """Send a body and return the status of the answer, 0 if the connection was closed."""
        connection = http.client.HTTPConnection(*self.address(), timeout=timeout)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
            connection.request("POST", path, body, headers)
            return connection.getresponse().status
        except (ConnectionError, http.client.HTTPException, TimeoutError):
            return 0
        finally:
            connection.close()

    def raw(self, data: bytes) -> bytes:
        """Send bytes unchanged and return all bytes that arrive until the connection closes."""
        with self.connect() as connection:
            connection.sendall(data)
            answer = b""
            with suppress(TimeoutError, ConnectionError):
                while chunk := connection.recv(65536):
                    answer += chunk
            return answer

    def healthy(self) -> bool:
        """Return whether /health answers within 2 seconds."""
        connection = http.client.HTTPConnection(*self.address(), timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def memory(self) -> int:
        """Return the resident bytes of the server."""
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextmanager
def target(artifact: Path, log: Path, *options: str, descriptors: int = DESCRIPTORS) -> Iterator[Target]:
    """Run a server in a process of its own; `log` is the file for its stderr."""
    command = [sys.executable, "-m", "kvexport", "serve", str(artifact), "--port", "0", "--threads", "1"]
    limited = ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", *command, "--api-key", KEY, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as errors:
        process = subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=ROOT)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().decode().strip()
        if not url:
            raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
        yield Target(url, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


class Reader(threading.Thread):
    """A client that reads one stream after another and records the longest time between two pieces."""

    def __init__(self, server: Target) -> None:
        super().__init__(daemon=True)
        self.server, self.longest, self.failed, self.pieces = server, 0.0, "", 0
        self._end = threading.Event()

    def run(self) -> None:
        """Read until `stop`, all streams on one connection."""
        body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection = http.client.HTTPConnection(*self.server.address(), timeout=30)
        last = time.perf_counter()
        try:
            while not self._end.is_set():
                connection.request("POST", "/v1/completions", body, headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    self.failed = f"a stream was answered {answer.status}"
                    return
                while line := answer.readline():
                    if line.strip():
                        now = time.perf_counter()
                        self.longest, last, self.pieces = max(self.longest, now - last), now, self.pieces + 1
        except (OSError, http.client.HTTPException) as error:
            self.failed = f"a stream broke: {error!r}"
        finally:
            connection.close()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._end.set()
        self.join(60)


Attack = Callable[[Target], str]  # returns the failure, or ""


def half_headers(server: Target) -> str:
    """Open 80 connections, more than the process has descriptors, and send half a header on each."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(80):
            with suppress(OSError):
                sockets.append(server.connect(0.05))
                sockets[-1].sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        end = time.monotonic() + 1
        while time.monotonic() < end:
            if not server.healthy():
                return "/health does not answer beside half-sent headers"
            time.sleep(0.1)
    finally:
        for one in sockets:
            one.close()
    return ""


def half_bodies(server: Target) -> str:
    """Open 80 connections and send the head of a request and the first byte of its body on each."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n"
    sockets: list[socket.socket] = []
    try:
        for _ in range(80):
            with suppress(OSError):
                sockets.append(server.connect(0.05))
                sockets[-1].sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        return "" if server.healthy() else "/health does not answer beside half-sent bodies"
    finally:
        for one in sockets:
            one.close()


def _status(path: str, body: Callable[[], bytes], expected: tuple[int, ...]) -> Callable[[], Attack]:
    def prepared() -> Attack:
        data = body()

        def attack(server: Target) -> str:
            status = server.post(path, data)
            return "" if status in expected else f"{path} was answered {status}, expected one of {expected}"

        return attack

    return prepared


def both_lengths(server: Target) -> str:
    """Send Content-Length with chunked encoding: two servers could disagree on where the request ends."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    more = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    answer = server.raw((head + more).encode())
    smuggled = answer.count(b"HTTP/1.1") != 1
    return "" if answer.startswith(b"HTTP/1.1 400") and not smuggled else f"answered {answer[:60]!r}"


def bad_headers(server: Target) -> str:
    """Send headers that are not addresses, not ASCII, or not HTTP."""
    lines = {
        "Origin: http://[": (b"403",),
        "Authorization: Bearer \xff\xfe": (b"401",),
        "x-api-key: \u20ac": (b"401",),
        "Host: [": (b"401", b"400"),
        "a" * 70_000: (b"400", b"431"),
        "Content-Length: -1": (b"400",),
    }
    for line, expected in lines.items():
        with_host = "" if line.startswith("Host") else "Host: x\r\n"
        answer = server.raw(f"GET /v1/models HTTP/1.1\r\n{with_host}Connection: close\r\n{line}\r\n\r\n".encode())
        if answer[9:12] not in expected:
            return f"{line[:40]!r} was answered {answer[:60]!r}"
    return ""


def _json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def _text() -> str:
    return "ab " * (5 * MIB)


HELLO = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def _called(arguments: str) -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
# Functions that prepare an attack. All bodies together are 100 MB, so each is made when its attack runs, and before the
# reader begins, whose thread would wait for it.
ATTACKS: dict[str, Callable[[], Attack]] = {
    "80 connections with half a header": lambda: half_headers,
    "80 connections with half a body": lambda: half_bodies,
    "a prompt of 15 MB": _status(COMPLETE, lambda: _json(prompt=_text()), (400,)),
    "a text of 15 MB to tokenize": _status("/tokenize", lambda: _json(prompt=_text()), (400,)),
    "a message of 15 MB": _status(CHAT, lambda: _json(messages=[{"role": "user", "content": _text()}]), (400,)),
    "3 million token ids": _status(COMPLETE, lambda: _json(prompt=[1] * 3_000_000), (400, 413)),
    "a million stop strings": _status(COMPLETE, lambda: _json(prompt="a", stop=["a"] * 1_000_000), (400, 413)),
    "a stop string of 10 MB": _status(COMPLETE, lambda: _json(prompt="a", stop="a" * 10 * MIB), (400,)),
    "200,000 biases": _status(
        COMPLETE, lambda: _json(prompt="a", logit_bias={str(i): 1 for i in range(200_000)}), (400, 413)
    ),
    "2.5 million lists in an unknown field": _status(
        COMPLETE, lambda: b'{"prompt":"a","x":[' + b",".join([b"[]"] * 2_500_000) + b"]}", (413,)
    ),
    "a million keys in an unknown field": _status(
        COMPLETE, lambda: b'{"prompt":"a","x":{' + b",".join(b'"%d":0' % i for i in range(1_000_000)) + b"}}", (413,)
    ),
    "100,000 nested lists": _status(
        COMPLETE, lambda: b'{"prompt":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", (400,)
    ),
    "120,000 messages": _status(CHAT, lambda: _json(messages=[{"role": "user", "content": "a"}] * 120_000), (400, 413)),
    "a schema as a text of 2.5 million lists": _status(
        CHAT, lambda: _json(**HELLO, structured_outputs={"json": "[" + ",".join(["[]"] * 2_500_000) + "]"}), (400,)
    ),
    "arguments as a text of 2.5 million lists": _status(
        CHAT, lambda: _json(messages=[_called("[" + ",".join(["[]"] * 2_500_000) + "]")]), (400, 413)
    ),
    "30 texts of arguments with 100,000 lists": _status(
        CHAT, lambda: _json(messages=[_called("[" + ",".join(["[]"] * 100_000) + "]")] * 30), (400, 413)
    ),
    "120,000 texts and numbers as a prompt": _status(COMPLETE, lambda: _json(prompt=["a", 5] * 60_000), (400,)),
    "100,000 wrong biases": _status(
        COMPLETE, lambda: _json(prompt="a", logit_bias={str(i): "x" for i in range(100_000)}), (400,)
    ),
    "a body of 20 MB": _status(COMPLETE, lambda: _json(prompt="a" * 20 * MIB), (413, 0)),
    "Content-Length beside chunked": lambda: both_lengths,
    "headers that are no addresses and no ASCII": lambda: bad_headers,
}


def slow_grammars(server: Target) -> str:
    """Send 20 grammars whose compilation ends at its limit of time, and requests without one beside them."""
    forms = [{"json": {"type": "integer", "multipleOf": 16_777_213 + 2 * i}} for i in range(20)]
    with ThreadPoolExecutor(len(forms)) as pool:
        slow = [pool.submit(server.post, CHAT, _json(**HELLO, structured_outputs=form), 600) for form in forms]
        longest, ended = 0.0, False
        while not ended:
            ended, begun = all(one.done() for one in slow), time.monotonic()
            if (status := server.post(COMPLETE, _json(prompt="a", max_tokens=2))) != 200:
                return f"a request without a grammar was answered {status}"
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.05)
        if longest > 1:
            return f"a request without a grammar took {longest:.1f} s"
        statuses = {one.result() for one in slow}
    return "" if statuses == {400} else f"slow grammars were answered {statuses}"


# Attacks that take too long for the tests.
LONG: dict[str, Callable[[], Attack]] = {"20 slow grammars": lambda: slow_grammars}


def run_attack(server: Target, name: str, base: int) -> tuple[str, float]:
    """Run one attack beside a reader.

    Returns:
        The failure or "", and the reader's longest gap in seconds.
    """
    attack, reader = (ATTACKS | LONG)[name](), Reader(server)
    reader.start()
    while reader.pieces < 50 and reader.is_alive():
        time.sleep(0.005)
    reader.longest = 0.0
    problem = attack(server)
    time.sleep(0.3)
    reader.stop()
    problem = problem or reader.failed
    if reader.longest > LONGEST_GAP:
        problem = problem or f"a stream stood still for {reader.longest:.2f} s"
    if not server.healthy():
        problem = problem or "/health does not answer after it"
    if (now := server.memory()) > 1.1 * base:
        problem = problem or f"memory {now / MIB:.0f} MB, before {base / MIB:.0f} MB"
    return problem, reader.longest


def drains(server: Target) -> str:
    """Return the failure when a signal ends the server beside a half-sent body, or ""."""
    with server.connect() as half:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n"
        half.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        time.sleep(0.2)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        try:
            code = server.process.wait(20)
        except subprocess.TimeoutExpired:
            return "the server waits for a half-sent body instead of ending"
    seconds = time.monotonic() - start
    return "" if code == 0 and seconds < 10 else f"exit code {code} after {seconds:.0f} s"


def main() -> None:
    """Attack, print the table, and exit with 1 if a row has a failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat the attacks for this time")
    parser.add_argument("--out", type=Path, help="the file to write with the table as JSON")
    arguments = parser.parse_args()
    log = Path(tempfile.gettempdir()) / "kvexport-attacks.log"
    order = random.Random(0)
    rows: dict[str, dict[str, object]] = {name: {"tries": 0, "longest gap s": 0.0, "failures": 0} for name in ATTACKS}
    with target(arguments.artifact, log) as server:
        base = 0
        for name in ATTACKS:  # in the first round libraries take memory
            run_attack(server, name, 1 << 40)
            base = max(base, server.memory())
        end = time.monotonic() + 60 * arguments.minutes
        while True:
            for name in order.sample(list(ATTACKS), len(ATTACKS)):
                problem, gap = run_attack(server, name, base)
                row = rows[name]
                row["tries"] = int(str(row["tries"])) + 1
                row["longest gap s"] = max(float(str(row["longest gap s"])), round(gap, 3))
                if problem:
                    row["failures"] = int(str(row["failures"])) + 1
                    print(f"{name}: {problem}", file=sys.stderr)
            if time.monotonic() > end:
                break
        for name in LONG:
            problem, gap = run_attack(server, name, base)
            if problem:
                print(f"{name}: {problem}", file=sys.stderr)
            rows[name] = {"tries": 1, "longest gap s": round(gap, 3), "failures": int(bool(problem))}
        problem = drains(server)
    rows["a signal beside a half-sent body"] = {"tries": 1, "longest gap s": 0.0, "failures": int(bool(problem))}
    size = log.stat().st_size
    rows["bytes of log above 1 MB"] = {"tries": 1, "longest gap s": 0.0, "failures": int(size > MIB)}
    for name, row in rows.items():
        print(f"{name:45} tries {row['tries']:>4}  longest gap {row['longest gap s']:>6} s  failures {row['failures']}")
    if arguments.out:
        save(arguments.out, {"rows": rows})
    sys.exit(any(row["failures"] for row in rows.values()))


if __name__ == "__main__":
    main()
