"""Tests of forty random schedules. `benchmarks/correctness/schedules.py` runs a thousand."""

from collections import Counter
from pathlib import Path

from kvexport.engine.load import load
from tests.support.on_device import onto_device
from tests.support.schedules import Alone, Schedule
from tests.support.tensorrt_artifacts import engines as tensorrt_engines

SCHEDULES, STEPS = 40, 20


def test_answers_of_random_schedules_equal_solo_answers(tiny_artifact: Path, tmp_path: Path) -> None:
    # The second engine has so few lanes that requests wait, and displace one another.
    *engines, other = (load(tiny_artifact, lanes=lanes) for lanes in (None, 2, None))
    alone, happened = Alone(other), Counter[str]()
    for seed in range(SCHEDULES):
        happened += Schedule(engines, alone, tmp_path / str(seed), seed).run(STEPS)
    kinds = ("answered", "fork", "cancel", "stop", "resume", "turn", "expire", "stream")
    assert min(happened[kind] for kind in kinds) > 10


def test_the_same_on_a_device_with_graphs(tiny_artifact: Path, tmp_path: Path) -> None:
    *engines, other = (load(tiny_artifact) for _ in range(3))
    for engine in engines:
        onto_device(engine, graphs=True, late=True)
    for seed in range(4):
        Schedule(engines, Alone(other), tmp_path / str(seed), 100 + seed).run(STEPS)


def test_the_same_on_engines_of_tensorrt(tiny_artifact: Path, tmp_path: Path, plugins: Path) -> None:
    engine, other = load(tensorrt_engines(tiny_artifact, tmp_path / "engines")), load(tiny_artifact)
    Schedule([engine, other], Alone(other), tmp_path / "sessions", 200).run(STEPS)
