"""A rank that is a process, over kernels on the host: prints a digest of what it sums.

    python -m tests.support.rank_on_host LIBRARY RANK RANKS MEMORY      MEMORY: the number of an open file

The memory holds the word of `KvCudaRanks`, and from 4096 on the mailboxes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from mmap import mmap
from pathlib import Path

import numpy as np

from tests.support.cuda_ranks import View, in_order, mailbox_bytes, random_part, sum_of
from tests.support.paths import ROOT

SIZES = (3, 4096, 5000, 5000, 4, 16_000)
MOST_SECONDS = 120


def sums_of_processes(library: Path, count: int) -> list[str]:
    """What ranks of this library print, or the last line of their error."""
    file = os.memfd_create("ranks")
    os.ftruncate(file, 4096 + count * mailbox_bytes(ctypes.CDLL(str(library))))
    command = [sys.executable, "-m", "tests.support.rank_on_host", str(library)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(file,),
            cwd=ROOT,
        )
        for rank in range(count)
    ]
    os.close(file)
    said = [process.communicate(timeout=MOST_SECONDS) for process in started]
    return [output.strip() or errors.strip().splitlines()[-1] for output, errors in said]


def parts(count: int) -> list[list[np.ndarray]]:
    """Of every sum the parts of all ranks."""
    rng = np.random.default_rng(count)
    return [[random_part(rng, size, "float32") for _ in range(count)] for size in SIZES]


def digest(count: int) -> str:
    """What a rank prints that is right."""
    return hashlib.sha256(b"".join(in_order(of_all).tobytes() for of_all in parts(count))).hexdigest()


def main() -> None:
    """One rank."""
    library, rank, count = ctypes.CDLL(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    memory = mmap(int(sys.argv[4]), 0)
    begin, size, call = ctypes.addressof(ctypes.c_char.from_buffer(memory)), mailbox_bytes(library), sum_of(library)
    view = View(rank, count, MOST_SECONDS * 1_000_000_000 // 4, begin)
    view.mailbox[:count] = [begin + 4096 + i * size for i in range(count)]
    if reports := getattr(library, "kv_ptx_reports", None):
        reports.restype = ctypes.c_char_p
        # Threads and blocks in random turns, the same ones in every process: blocks of one number run at a time.
        library.kv_host_set(2, 1, 4, ctypes.c_size_t(101376))
    found = hashlib.sha256()
    for of_all in parts(count):
        total = np.full_like(of_all[0], 77)
        said = call(view, "float32", of_all[rank].ctypes.data, total.ctypes.data, total.size)
        if said:
            sys.exit((reports and reports().decode()) or said)
        found.update(total.tobytes())
    word = int.from_bytes(memory[:4], "little")
    print(f"no sum: {word:#x}" if word else found.hexdigest())


if __name__ == "__main__":
    main()
