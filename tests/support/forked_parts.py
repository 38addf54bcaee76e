"""`python -m tools.gpu_check` whose parts are forks of this process."""

import os
import sys
import tempfile
import traceback
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy  # noqa: F401 - imported once here, because every part imports it
import torch

from tools.gpu_check import __main__ as gpu_check


class Copy:
    def __init__(self, command: list[str], **_: Any) -> None:
        self.streams = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - closed after they are read
        self.pid = os.fork()
        if not self.pid:
            sys.argv = command[2:]  # without the interpreter and -m
            self._run()

    def _run(self) -> NoReturn:
        code = 0
        for number, stream in enumerate(self.streams, 1):
            os.dup2(stream.fileno(), number)
        try:
            gpu_check.main()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

    def communicate(self, timeout: float) -> list[str]:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        outputs = []
        for stream in self.streams:
            stream.seek(0)
            outputs.append(stream.read())
            stream.close()
        return outputs


if __name__ == "__main__":
    torch.set_num_threads(1)
    gpu_check.subprocess = SimpleNamespace(**{**vars(gpu_check.subprocess), "Popen": Copy})  # type: ignore[assignment]
    gpu_check.main()
