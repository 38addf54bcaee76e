"""Tests of the command line's errors: a message on stderr, an exit code for every kind, and never a traceback."""

import signal
from pathlib import Path

import pytest

from kvexport.commands import errors as cli_errors
from kvexport.commands.process import Terminated
from kvexport.errors import KvexportError
from tests.support.command_line import failure, process, run


@pytest.mark.parametrize(
    "arguments", [["--nope"], ["nope"], ["build"], ["generate"], ["plan", "--recipe"], ["inspect", "x", "--steps"]]
)
def test_usage_errors_are_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error: " in result.stderr.lower()


@pytest.mark.parametrize("verb", ["inspect", "generate", "validate"])
def test_a_missing_artifact_is_exit_code_2(verb: str, tmp_path: Path) -> None:
    assert "there is no artifact" in failure(2, verb, tmp_path / "nothing", *(["abc"] if verb == "generate" else []))


def test_a_recipe_with_mistakes_is_exit_code_2(tmp_path: Path) -> None:
    message = failure(
        2, "build", "--recipe", "tiny-keepkv", "--set", "cache.budgett=3", "--set", "nope", "--out", tmp_path / "a"
    )
    assert "cache.budget" in message
    assert "--set nope" in message


@pytest.mark.parametrize(("error", "code", "message"), [
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 3, "pip install 'kvexport[export]'"),
    (MemoryError("Unable to allocate 3 GiB"), 3, "kvexport plan"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 3, "not enough memory"),
    (OSError(28, "No space left on device", "/x/y"), 3, "disk full while writing /x/y"),
    (OSError(36, "File name too long", "a" * 5000), 2, "(5000 characters): File name too long"),
    (OSError(27, "File too large", "/x/y"), 3, "/x/y grew past the limit"),
    (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), 3, "TMPDIR=DIRECTORY"),
    (KeyboardInterrupt(), 130, "interrupted"), (Terminated(signal.SIGTERM), 143, "ended by SIGTERM"),
    (BrokenPipeError(), 141, ""),
    (KvexportError("something\nin two lines", "the line that mends it"), 1, "fix: the line that mends it"),
])  # fmt: skip
def test_an_error_of_a_verb_becomes_a_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("kvexport.commands.doctor.diagnose", fail)
    result = run("doctor")
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_defect_is_one_line_and_its_traceback_is_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("something\nunexpected")

    monkeypatch.setattr("kvexport.commands.doctor.diagnose", fail)
    monkeypatch.setattr(cli_errors.tempfile, "tempdir", str(tmp_path))
    message = failure(1, "doctor")
    assert message.splitlines()[0] == "error: ZeroDivisionError: something"
    (log,) = tmp_path.iterdir()
    assert str(log) in message
    assert "in fail" in log.read_text()
    log.unlink()
    for shown in (run("--debug", "doctor"), run("doctor", env={"KVEXPORT_DEBUG": "1"})):
        assert shown.exit_code == 1
        assert "in fail" in shown.stderr
    monkeypatch.setattr(cli_errors.tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert "could not be kept" in failure(1, "doctor")
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_ends_the_program_quietly(tiny_artifact: Path) -> None:
    child = process("generate", tiny_artifact, "abc", "--max-new-tokens", 400)
    assert child.stdout
    assert child.stderr
    assert child.stdout.read(1)
    child.stdout.close()
    problems = child.stderr.read()
    assert child.wait(30) == 141
    assert "Traceback" not in problems
    assert "BrokenPipe" not in problems


def test_a_full_disk_behind_stdout_is_exit_code_3() -> None:
    with Path("/dev/full").open("w") as full:
        child = process("recipes", "show", "tiny-keepkv", stdout=full)
        assert "No space left" in child.communicate()[1]
    assert child.returncode == 3


def test_ctrl_c_ends_the_program_cleanly(tiny_artifact: Path) -> None:
    # Slow enough to be running when the signal comes, on any machine.
    code = (
        # A shell starts its background processes with interrupts ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import time; from kvexport.engine.lanes import Lanes; append = Lanes.append\n"
        "Lanes.append = lambda self, *given, **options: (time.sleep(0.05), append(self, *given, **options))[1]\n"
        "from kvexport.commands.app import main; main()"
    )
    child = process("generate", tiny_artifact, "abc", "--max-new-tokens", 400, code=code)
    assert child.stdout
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, problems = child.communicate(timeout=30)
    assert child.returncode == 130
    assert problems.splitlines()[-1] == "interrupted"
    assert "Traceback" not in problems


def test_output_that_is_not_a_terminal_has_no_colour(tiny_artifact: Path) -> None:
    for arguments in (["doctor"], ["recipes"], ["inspect", tiny_artifact], ["--help"], ["--nope"]):
        result = run(*arguments)
        assert "\x1b" not in result.output
