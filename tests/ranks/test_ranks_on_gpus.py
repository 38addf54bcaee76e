"""Engines whose ranks have one GPU each, on a fake driver and CUDA kernels compiled for the host.

They give the tokens of one process. The tests also cover the ends of ranks, and the messages about missing GPUs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import threading
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.backends.onnxruntime import devices, mailboxes
from kvexport.backends.onnxruntime import operators as native
from kvexport.backends.onnxruntime.backend import BACKEND
from kvexport.errors import EnvironmentProblem, KvexportError
from kvexport.ranks import processes
from plugins.building import headers, make
from tests.support import fake_gpus
from tests.support.fake_gpus import Driver
from tests.support.tiny_model import PROMPTS, generated

needs_binding = pytest.mark.skipif(
    not make.is_current("onnxruntime-cuda-host"),
    reason="not reached: the binding is not compiled for the host (make cuda-host)",
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver of two fake GPUs, in this process and in the workers that it starts."""
    monkeypatch.setenv(native.VARIABLE, str(fake_gpus.ON_HOST))
    monkeypatch.setattr(processes, "PROGRAM", fake_gpus.PROGRAM)
    return fake_gpus.install(monkeypatch.setattr, Driver())


@needs_binding
def test_ranks_on_gpus_equal_one_process_and_free_their_memory(
    artifact: Path, tiny_artifact: Path, gpus: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, others = set(gpus.held), set(threading.enumerate())
    engine = kvexport.load(artifact, device="cuda")
    tokens = generated(engine)
    state: Any = engine.new_state(2)
    assert state.top_logits, "rows stay on the device"
    assert {"cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"} <= set(gpus.log)
    del engine, state
    gc.collect()
    for thread in set(threading.enumerate()) - others:
        if "_read" in thread.name:  # the channel to the ended worker holds the mailboxes until its thread ends
            thread.join(30)
    assert set(gpus.held) <= held
    assert gpus.log[-3:] == ["cuIpcCloseMemHandle", "cuMemFree_v2", "cuMemHostUnregister"]
    monkeypatch.undo()
    assert tokens == generated(kvexport.load(tiny_artifact))


@needs_binding
def test_a_killed_rank_is_named_while_kernels_wait_for_it(artifact: Path, gpus: Driver) -> None:
    engine = kvexport.load(artifact, device="cuda")
    ranks: Any = engine.model
    process = ranks.ranks._processes[0]
    stream = engine.stream(PROMPTS[0], max_new_tokens=400)
    next(stream)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(KvexportError, match=rf"rank 1, the process {process.pid}, was ended by SIGKILL"):
        list(stream)
    with pytest.raises(KvexportError, match="was ended by SIGKILL"):
        engine.generate([1, 2], max_new_tokens=2)


@needs_binding
def test_a_rank_that_hangs_is_named(artifact: Path, gpus: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "SECONDS_TO_WAIT", 0.5)
    engine = kvexport.load(artifact, device="cuda")
    ranks: Any = engine.model
    process = ranks.ranks._processes[0]
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(KvexportError, match=r"^rank 0 waited 0.5 s for the summand of rank 1"):
            engine.generate([1, 2], max_new_tokens=2)
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_rank_that_cannot_join_gives_a_reason_and_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: Driver
) -> None:
    undo: list[tuple[str, Any]] = []
    memory = mmap(-1, mailboxes.shared_bytes(2))

    def join() -> None:
        mailboxes.exchanged(memory, 0, 2, 1000, undo)

    gpus.answers["cuMemAlloc_v2"] = 2
    with pytest.raises(EnvironmentProblem, match="cannot be used for cuMemAlloc: CUDA_ERROR_2"):
        join()
    assert [name for name, _ in undo] == ["cuMemHostUnregister"]
    gpus.answers.clear()
    monkeypatch.setattr(mailboxes, "SECONDS_TO_JOIN", 0.0)
    with pytest.raises(KvexportError, match="rank 1 has created no mailbox in 0 s"):
        join()
    memory[:4] = mailboxes.FAILED.to_bytes(4, "little")
    with pytest.raises(RuntimeError, match="a rank has failed"):
        join()
    mailboxes._give_back(undo, memory)
    assert gpus.log.count("cuMemFree_v2") == 2


def test_gpus_that_are_missing_or_apart_are_named(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, gpus: Driver
) -> None:
    gpus.apart = {(1, 0)}
    with pytest.raises(EnvironmentProblem, match="GPU 1 does not reach the memory of GPU 0") as apart:
        kvexport.load(artifact, device="cuda")
    assert "CUDA_VISIBLE_DEVICES" in apart.value.fix
    gpus.gpus = 1
    with pytest.raises(EnvironmentProblem, match="2 ranks need 2 GPUs, but the driver shows 1") as few:
        kvexport.load(artifact, device="cuda")
    assert few.value.fix.startswith("--set backend.tensor_parallel=1")


def test_the_doctor_shows_how_many_gpus_can_be_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(4)
    monkeypatch.setattr(ctypes, "CDLL", fake_gpus.load_driver(driver))
    assert devices.most_ranks(16) == (4, "") and devices.most_ranks(3) == (3, "")
    driver.apart = {(3, 1)}
    assert devices.most_ranks(16) == (3, "")
    diagnosis = BACKEND.diagnose()
    assert diagnosis.rows["ranks on GPUs"] == "up to 3" and diagnosis.data["cuda_ranks"] == 3
    driver.apart = {(1, 0)}
    assert devices.most_ranks(16) == (1, "GPU 1 does not reach the memory of GPU 0, neither by NVLink nor over PCIe")
    driver.gpus = 1
    assert BACKEND.diagnose().rows["ranks on GPUs"] == "no: 2 ranks need 2 GPUs, but the driver shows 1"
    driver.answers["cuInit"] = 100
    assert devices.most_ranks(16) == (1, "the NVIDIA driver cannot be used: CUDA_ERROR_100")


def test_every_rank_has_another_gpu_first(gpus: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.gpus = 3
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    assert [devices.visible_from(rank) for rank in range(3)] == ["0,1,2", "1,0,2", "2,0,1"]
    monkeypatch.setenv(devices.VISIBLE, "GPU-a, GPU-b,GPU-c,GPU-not-there")
    assert devices.visible_from(2) == "GPU-c,GPU-a,GPU-b"


def test_the_driver_of_the_tests_has_names_of_the_real_one() -> None:
    try:
        header = headers.find("cuda") / "cuda.h"
    except Exception as error:
        pytest.skip(f"not reached: {error}")
    names = {name for name in vars(Driver) if re.match("cu[A-Z]", name)}
    assert len(names) > 15 and names <= fake_gpus.names_of_cuda_h(header)


def test_problem_words_are_decoded() -> None:
    one = object.__new__(mailboxes.Mailboxes)
    problems = {word: one.problem(word.to_bytes(4, "little")) for word in (0, 1, 2 | 3 << 8 | 1 << 16, 3 | 1 << 8)}  # type: ignore[arg-type]
    assert list(problems.values()) == [
        "",
        "a rank has failed",
        "rank 3 waited 30 s for the summand of rank 1",
        "the ranks are out of step: rank 1 and rank 0 add up different tensors",
    ]
    assert one.bytes(16) and not one.bytes(17) and not one.bytes(0)
    assert os.sysconf("SC_PAGESIZE") <= mailboxes.HANDLES
