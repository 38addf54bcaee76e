"""A rank as a process of its own, with kernels on the host. It prints a digest of its sums.

    python -m tests.support.rank_on_host LIBRARY RANK RANKS MEMORY

MEMORY is the number of an open file. It holds the word of `KvCudaRanks`, and the mailboxes from byte 4096 on.
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
    """Run all ranks of this library as processes, and return what each prints, or the last line of its error."""
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
    outputs = [process.communicate(timeout=MOST_SECONDS) for process in started]
    return [output.strip() or errors.strip().splitlines()[-1] for output, errors in outputs]


def parts(count: int) -> list[list[np.ndarray]]:
    """Return the parts of all ranks, for every sum."""
    rng = np.random.default_rng(count)
    return [[random_part(rng, size, "float32") for _ in range(count)] for size in SIZES]


def digest(count: int) -> str:
    """Return the digest that a rank prints if all its sums are right."""
    return hashlib.sha256(b"".join(in_order(of_all).tobytes() for of_all in parts(count))).hexdigest()


def main() -> None:
    """Run one rank."""
    library, rank, count = ctypes.CDLL(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    memory = mmap(int(sys.argv[4]), 0)
    begin, size, call = ctypes.addressof(ctypes.c_char.from_buffer(memory)), mailbox_bytes(library), sum_of(library)
    view = View(rank, count, MOST_SECONDS * 1_000_000_000 // 4, begin)
    view.mailbox[:count] = [begin + 4096 + i * size for i in range(count)]
    if reports := getattr(library, "kv_ptx_reports", None):
        reports.restype = ctypes.c_char_p
        # Threads and blocks take turns in a random order, the same in every process: blocks of one number run at the
        # same time.
        library.kv_host_set(2, 1, 4, ctypes.c_size_t(101376))
    digest_of_sums = hashlib.sha256()
    for of_all in parts(count):
        total = np.full_like(of_all[0], 77)
        problem = call(view, "float32", of_all[rank].ctypes.data, total.ctypes.data, total.size)
        if problem:
            sys.exit((reports and reports().decode()) or problem)
        digest_of_sums.update(total.tobytes())
    word = int.from_bytes(memory[:4], "little")
    print(f"no sum: {word:#x}" if word else digest_of_sums.hexdigest())


if __name__ == "__main__":
    main()
