"""A process that runs commands of kvexport in forked children, and sends a child a signal at a certain function call.

    python -m tests.support.signalled TRACES

Each line of stdin is a job in JSON: `arguments` of the command line; `place`, "module:function", at whose call the
child gets `signal`; `reached`, a file that is created at that call; `stdout` and `stderr`, files; `folder` for
temporary files. The process prints the exit code of the child. Forked children need not import torch again.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any


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


def run(job: dict[str, Any]) -> None:
    """Run a command as `kvexport` does, until it exits."""
    from kvexport.commands.app import main

    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ["TMPDIR"] = tempfile.tempdir = job["folder"]
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal_at(job["place"], job["signal"], Path(job["reached"]))
    sys.argv = ["kvexport", *job["arguments"]]
    main()


def serve_jobs() -> None:
    """Import the modules that all children need, then run jobs until stdin ends."""
    models = "transformers.models.llama.modeling_llama"
    for name in ("kvexport.export.stages", "kvexport.export.model.hf_model", "kvexport.calibrate.layer_shares", models):
        importlib.import_module(name)
    from tests.support.shared_traces import shared_traces

    with shared_traces(Path(sys.argv[1])):
        for line in sys.stdin:
            child = os.fork()
            if child == 0:
                code = 70
                try:
                    run(json.loads(line))
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 0
                finally:
                    for stream in (sys.stdout, sys.stderr):
                        stream.flush()
                    os._exit(code)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve_jobs()
