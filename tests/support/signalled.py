"""A process that runs commands of kvexport in forked children, each of which gets a signal at a certain place.

    python -m tests.support.signalled TRACES RECIPE

Each line of stdin is a job in JSON: `arguments` of the command line; `place`, see below; `signal`; `reached`, a file
that the child creates when it is at the place; `stdout` and `stderr`, files; `folder` for temporary files. A place is
either "module:function", at whose call the child sends itself `signal`, or the end of a file's name: when that file is
opened for writing, the child waits for a signal from outside. For each job the process prints the child's number, and
then its exit code.

The process builds RECIPE before its first child, so that the children need not import PyTorch and trace a model anew.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn


def signal_at(place: str, number: int, reached: Path) -> None:
    """Replace a function by one that sends this process a signal before it does its work."""
    name, _, function = place.partition(":")
    module, process = importlib.import_module(name), os.getpid()
    real = getattr(module, function)

    def signalled(*arguments: Any, **named: Any) -> Any:
        if not reached.exists():
            reached.touch()
            os.kill(process, number)  # the main thread handles the signal, whichever thread sends it
        return real(*arguments, **named)

    setattr(module, function, signalled)


def wait_at(end: str, reached: Path) -> None:
    """Let this process wait for a signal when it opens a file for writing whose name ends with `end`."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(end) and str(arguments[1])[:1] in ("w", "x"):
            reached.touch()
            for _ in range(6000):  # a signal between two instructions does not end the sleep that follows it
                time.sleep(0.1)

    sys.addaudithook(hook)


def run(job: dict[str, Any]) -> None:
    from kvexport.commands.app import main

    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ["TMPDIR"] = tempfile.tempdir = job["folder"]
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ":" in job["place"]:
        signal_at(job["place"], job["signal"], Path(job["reached"]))
    else:
        wait_at(job["place"], Path(job["reached"]))
    sys.argv = ["kvexport", *job["arguments"]]
    main()


def run_and_end(job: dict[str, Any]) -> NoReturn:
    """Run a command, and end as the program does if the signal comes from outside."""
    code: Any = 0
    try:
        run(job)
    except SystemExit as end:
        code = end.code or 0
    if ":" in job["place"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def serve_jobs() -> None:
    """Import what all children need, and trace the recipe's model; then run jobs until stdin ends."""
    import kvexport.evaluate.runner
    from tests.support.shared_traces import shared_traces

    with shared_traces(Path(sys.argv[1])):
        with tempfile.TemporaryDirectory() as folder:
            kvexport.build(sys.argv[2], Path(folder) / "artifact")
        for line in sys.stdin:
            child = os.fork()
            if child == 0:
                run_and_end(json.loads(line))
            print(child, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve_jobs()
