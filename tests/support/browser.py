"""A headless Chromium, controlled through its debugging pipe. Tests are skipped on machines without Chromium."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--no-first-run", "--disable-component-update", "--disable-quic", "--disable-sync", "--window-size=1280,900",
    "--remote-debugging-pipe",
)  # fmt: skip

# The browser reads commands from descriptor 3 and writes answers to descriptor 4.
LAUNCH = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for pipe, number in zip(pipes, (3, 4)):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Tab:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb", 0)
        self._number, self._held, self._session = 0, b"", ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the debugging protocol and return its result."""
        self._number += 1
        number = self._number
        session = {"sessionId": self._session} if self._session else {}
        self._commands.write(
            json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0"
        )
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(str(message["params"]["entry"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            chunk = self._answers.read(1 << 16)
            assert chunk, "the browser has ended"
            self._held += chunk
        line, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def run(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """Wait until a JavaScript expression is true in the page, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < end, (expression, self.problems)
            time.sleep(0.02)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a browser for the duration of the `with` block, and yield a tab."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("not reached: there is no Chromium (apt-get install chromium)")
    to_browser, from_browser = os.pipe(), os.pipe()
    arguments = [sys.executable, "-c", LAUNCH, str(to_browser[0]), str(from_browser[1]), program, *FLAGS]
    arguments.append(f"--user-data-dir={folder / 'profile'}")
    with (folder / "browser.log").open("wb") as log:
        child = subprocess.Popen(
            arguments, pass_fds=(to_browser[0], from_browser[1]), stdout=log, stderr=log, cwd=folder
        )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Tab(to_browser[1], from_browser[0])
    finally:
        child.terminate()
        child.wait(30)
