"""Trial run of a checkpoint's untrusted tokenizer and chat template, in a child process with limits.

A tokenizer and a chat template are programs from the checkpoint. A template that doubles a string again and again, or a
tokenizer whose normalizers multiply a text, can make the process run out of memory and die. A build therefore first
renders and encodes a few conversations in the child process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

from kvexport.errors import EnvironmentProblem, KvexportError, UsageError

_SECONDS = 10  # of processor time, which a busy machine does not use up
_MOST_WAITING_SECONDS = 240  # for a process that waits and does not compute
_BYTES = 2 << 30  # of address space
_TOO_MUCH = "they take too much memory"
_LONGEST = 100_000  # tokens; the conversations below have some hundred characters
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
_USER, _ANSWER = {"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}
CONVERSATIONS = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [_USER, _ANSWER, {"role": "user", "content": "And 2 + 2?\n\nA second line."}],
)
_TEXTS = ("", "Hello, world! 123", "ab " * 300, "\u00e9\u4e2d\U0001f600 \n\t")


def try_texts(folder: Path) -> None:
    command = [sys.executable, "-m", __name__, str(folder.resolve()), str(_SECONDS), str(os.getpid())]
    root = str(Path(__file__).resolve().parents[2])
    environment = {"PATH": "", "PYTHONPATH": ":".join([root, *sys.path]), "TOKENIZERS_PARALLELISM": "false"}
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=_MOST_WAITING_SECONDS, env=environment, cwd="/"
        )
    except subprocess.TimeoutExpired:
        reason = f"they do not end within {_MOST_WAITING_SECONDS} seconds"
    else:
        if child.returncode == 0:
            return
        words = json.loads(child.stdout) if child.returncode == 1 and child.stdout else ""
        if words in ("", _TOO_MUCH) and (limit := _address_space()) < _BYTES:
            raise EnvironmentProblem(
                f"not enough memory to try the tokenizer: the limit on address space is {limit} bytes",
                f"ulimit -v {_BYTES >> 10}, or more",
            )
        end = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        reason = words or f"the process that tried them ended by {end}"
        if child.returncode == -signal.SIGXCPU:
            reason = f"they take longer than {_SECONDS} seconds of processor time"
    raise UsageError(
        f"the tokenizer or the chat template of {folder} cannot be used for short texts: {reason}",
        "take these files from the model's original repository",
    )


def _address_space() -> int:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _try(folder: Path) -> str:
    """Run a tokenizer and chat template on sample texts, and return what is wrong with them; "" if nothing is."""
    from kvexport.language.chat import read_chat_template
    from kvexport.language.tokenizer import Tokenizer

    tokenizer, template = Tokenizer.from_folder(folder), read_chat_template(folder)
    texts = list(_TEXTS)
    if template is not None:
        for conversation, tools in product(CONVERSATIONS, (None, [_TOOL])):
            with suppress(UsageError):
                texts.append(template.render(conversation, tools))
    for text in texts:
        if len(ids := tokenizer.encode(text, add_special_tokens=False)) > _LONGEST:
            return f"a text of {len(text)} characters has {len(ids)} tokens"
        tokenizer.decode(ids)
    return ""


def _main() -> None:
    import resource

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with its parent
        if os.getppid() != int(sys.argv[3]):  # the parent ended before the call
            sys.exit(1)
    # Below the hard limit, at which it kills without a reason, the system sends SIGXCPU.
    seconds = int(sys.argv[2])
    limits = (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, _BYTES, _BYTES),
    )
    for kind, soft, most in limits:
        hard = resource.getrlimit(kind)[1]  # which this process cannot raise
        hard = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (min(soft, hard), hard))
    try:
        problem = _try(Path(sys.argv[1]))
    except KvexportError as error:
        problem = error.problem
    except MemoryError:
        problem = _TOO_MUCH
    if problem:
        print(json.dumps(problem[:500]))
        sys.exit(1)


if __name__ == "__main__":
    _main()
