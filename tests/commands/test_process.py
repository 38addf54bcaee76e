"""The program ends cleanly when a signal asks it to, and works with closed standard streams."""

import gc
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from kvexport.commands.app import skip_last_collection
from tests.support.command_line import ENVIRONMENT, ROOT, process
from tests.support.http_server import wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_takes_its_child_with_it(number: signal.Signals) -> None:
    code = (
        "import os, time\n"
        "os.cpu_count = lambda: 2\n"
        "from kvexport.commands.process import end_cleanly\n"
        "from kvexport.export.forked import forked\n"
        "end_cleanly()\n"
        "with forked(lambda: (print(os.getpid(), flush=True), time.sleep(600))):\n"
        "    time.sleep(600)\n"
    )
    child = process(code=code)
    assert child.stdout
    forked = int(child.stdout.readline())
    child.send_signal(number)
    child.communicate(timeout=120)
    wait_until(
        lambda: not any(x.pid == forked and x.info["status"] != "zombie" for x in psutil.process_iter(["status"]))
    )


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from kvexport.commands.process import end_cleanly; end_cleanly()\n"
        "print('inside', flush=True); time.sleep(0.2); print(1)"
    )
    child = process(code=code)
    assert child.stdout
    assert child.stdout.readline() == "inside\n"
    child.send_signal(signal.SIGHUP)
    assert child.communicate(timeout=120)[0] == "1\n"


@pytest.mark.parametrize(("arguments", "closed", "code", "message"), [
    (["generate", "ARTIFACT", "-"], "<&-", 2, "stdin, which is closed"),
    (["generate", "ARTIFACT", "abc", "--max-new-tokens", "3"], "2>&-", 0, ""),
    (["generate", "ARTIFACT", "abc", "--max-new-tokens", "3"], "<&- 2>&-", 0, ""),
    (["recipes", "show", "no-such-recipe"], "2>&-", 2, ""),
    (["plan", "--recipe", "tiny-keepkv"], "<&- >&- 2>&-", 0, ""),
])  # fmt: skip
def test_standard_streams_may_be_closed(
    tiny_artifact: Path, arguments: list[str], closed: str, code: int, message: str
) -> None:
    words = [str(tiny_artifact) if word == "ARTIFACT" else word for word in arguments]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "kvexport", *words],
        capture_output=True, text=True, check=False, cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "from kvexport.commands.process import open_standard_streams; open_standard_streams()\n"
        f"import sys; file = open({str(tmp_path / 'file')!r}, 'w'); print(file.fileno(), file=file); file.flush()\n"
        "print('noise', file=sys.stderr, flush=True)"
    )
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, check=False, cwd=ROOT, env=ENVIRONMENT).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


@pytest.mark.parametrize("arguments", [
    ["inspect", "LONG"], ["generate", "LONG", "abc"], ["build", "--recipe", "./LONG.yaml"],
    ["plan", "--recipe", "tiny-keepkv", "--set", "model.path=./LONG"], ["recipes", "show", "LONG"],
    ["validate", "LONG"],
])  # fmt: skip
def test_a_path_that_no_file_can_have_is_exit_code_2(arguments: list[str]) -> None:
    from tests.support.command_line import failure

    message = failure(2, *(word.replace("LONG", "a" * 5000) for word in arguments))
    assert "too long" in message
    assert "fix: " in message


@pytest.mark.parametrize("loaded", [False, True])
def test_the_last_collection_is_skipped_unless_triton_needs_it(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    if loaded:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    skip_last_collection()
    assert frozen == ([] if loaded else [True])
