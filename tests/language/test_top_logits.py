"""Tests of tokens chosen from the largest logits alone: each equals the token of the whole row, with the same draws."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexport.backends.onnxruntime.device_array import DeviceArray
from kvexport.backends.rows import MASS_ERROR, TopLogits
from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import KvexportError
from kvexport.export.graph.graphs import MOST_LOGITS, top_logits_model
from kvexport.language.sampling import Sampler, may_settle
from kvexport.language.settings import GenerationSettings
from tests.language.test_sampling import cases, openai_settings, sampler_after
from tests.support.tiny_model import PROMPTS
from tests.support.with_top_logits import with_top_logits


def top_of(logits: np.ndarray, count: int, error: float = 0.0) -> TopLogits:
    """Return the largest logits as a device finds them.

    Equal logits come with the higher ids first, because no code may rely on their order. `error` is a relative error of
    the mass.
    """
    order = np.lexsort((-np.arange(logits.size), -logits))[: min(count, logits.size)]
    mass = float(np.exp(logits.astype(np.float64) - logits.max()).sum()) * (1 + error)
    return TopLogits(order.astype(np.int32), logits[order], mass, logits.size)


@settings(max_examples=600, deadline=None)
@given(cases(), st.sampled_from([1, 2, 8, 64, 256]), st.sampled_from([-0.9, 0.0, 0.9]), st.booleans(), st.data())
def test_tokens_from_the_largest_logits_equal_those_from_the_row(
    case: Any, count: int, error: float, more: bool, data: st.DataObject
) -> None:
    generation, prompt, generated, logits = case
    if more:
        generation = replace(generation, **data.draw(openai_settings(logits.size)))
    generated = [token for token in generated if token not in generation.eos_token_ids]
    row, narrow = (sampler_after(generation, prompt, generated, logits.size) for _ in range(2))
    top = top_of(logits, count, error * MASS_ERROR)
    before = top.values.copy()
    try:
        expected = row.next(logits)
    except KvexportError:
        if top.ids.size < logits.size:
            assert narrow.next_of(top) is None
        return
    settled = narrow.next_of(top)
    np.testing.assert_array_equal(top.values, before)
    if settled is None:
        assert narrow.generated == generated[: len(narrow.generated)]
        settled = narrow.next(logits)
    else:
        assert may_settle(generation, count, logits.size)
    assert settled == expected
    # Both generators are at the same draw.
    assert narrow.next(logits) == row.next(logits)


SETTLED = {
    "greedy": (GenerationSettings(), 1.0),
    "greedy, penalty": (GenerationSettings(repetition_penalty=1.3), 1.0),
    "greedy, OpenAI's penalties": (
        GenerationSettings(presence_penalty=0.5, frequency_penalty=1.5, logit_bias={7: -100.0}), 1.0
    ),
    "greedy, no end yet": (GenerationSettings(min_new_tokens=50, max_new_tokens=60, eos_token_ids=(3, 17)), 1.0),
    "top_k": (GenerationSettings(do_sample=True, temperature=0.7, seed=1), 1.0),
    "top_k, top_p, min_p, penalty": (
        GenerationSettings(do_sample=True, temperature=1.3, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=1), 1.0,
    ),
    "top_p": (GenerationSettings(do_sample=True, top_k=0, top_p=0.9, seed=1), 0.9),
    "top_p, colder": (GenerationSettings(do_sample=True, temperature=0.6, top_k=0, top_p=0.95, seed=1), 0.9),
    "top_p, warmer": (GenerationSettings(do_sample=True, temperature=1.1, top_k=0, top_p=0.8, seed=1), 0.6),
    "min_p": (GenerationSettings(do_sample=True, top_k=0, min_p=0.05, seed=1), 0.95),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTLED)
def test_the_largest_logits_are_nearly_always_enough(name: str) -> None:
    generation, least = SETTLED[name]
    random = np.random.default_rng(0)
    settled = 0
    row, narrow = (Sampler(generation, [1, 2, 3], 32000) for _ in range(2))
    for _ in range(50):
        logits = (random.standard_normal(32000) * 1.5).astype(np.float32)
        logits[random.integers(0, 32000, 20)] += np.linspace(
            5, 15, 20, dtype=np.float32
        )  # all others together have about 2 %
        actual = narrow.next_of(top_of(logits, MOST_LOGITS))
        expected = row.next(logits)
        settled += actual is not None
        assert (narrow.next(logits) if actual is None else actual) == expected
    assert settled / 50 >= least
    assert may_settle(generation, MOST_LOGITS, 32000)


def test_settings_that_need_the_whole_row_are_known_in_advance() -> None:
    assert not may_settle(GenerationSettings(do_sample=True, top_k=0), MOST_LOGITS, 32000)
    assert not may_settle(GenerationSettings(do_sample=True, top_k=MOST_LOGITS), MOST_LOGITS, 32000)
    for raising in ({"repetition_penalty": 0.9}, {"presence_penalty": -0.1}, {"logit_bias": {1: 0.1}}, {"logprobs": 0}):
        assert not may_settle(GenerationSettings(**raising), MOST_LOGITS, 32000)
    lowering: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 2.0, "logit_bias": {1: -1.0}}
    assert may_settle(GenerationSettings(**lowering), MOST_LOGITS, 32000)
    assert may_settle(GenerationSettings(do_sample=True, top_k=0), 64, 64)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_invalid_row_determines_no_token(bad: float) -> None:
    logits = np.linspace(-1, 1, 1000, dtype=np.float32)
    session = finder(1000)
    logits[5] = bad
    values, ids, mass, _ = session.run(None, {"logits": logits[None, None]})
    sampler = Sampler(GenerationSettings(), [1], 1000)
    assert sampler.next_of(TopLogits(ids[0, 0], values[0, 0], float(mass[0, 0, 0]), 1000)) is None
    with pytest.raises(KvexportError, match="logit 5 of new token 0"):
        sampler.next(logits)


def finder(vocabulary: int) -> Any:
    return ort.InferenceSession(top_logits_model(vocabulary).SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("vocabulary", [40, 256, 32003])
def test_the_graph_returns_the_largest_logits(vocabulary: int) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 1, vocabulary)).astype(np.float32) * 4
    logits[1, 0, 7] = logits[1, 0, 30] = 100.0  # equal
    values, ids, mass, token = finder(vocabulary).run(None, {"logits": logits})
    n = min(MOST_LOGITS, vocabulary)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(token, logits.argmax(-1))
    assert ids.shape == values.shape == (3, 1, n)
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=-1)[..., :n])
    np.testing.assert_array_equal(np.take_along_axis(logits, ids.astype(np.int64), -1), values)
    exact = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
    np.testing.assert_allclose(mass, exact, rtol=MASS_ERROR / 2)


# Engines.

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 3}
MODES = {
    "greedy": GREEDY,
    "top_k": {**SAMPLED, "top_k": 5, "temperature": 1.5},
    "top_p": {**SAMPLED, "top_k": 0, "top_p": 0.6},
    "everything": {**SAMPLED, "top_k": 0},
    "raising penalty": {**GREEDY, "repetition_penalty": 0.8},
    "logprobs": {**GREEDY, "logprobs": 2},
}


@pytest.fixture(scope="module")
def few(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_top_logits(tiny_artifact, tmp_path_factory.mktemp("few") / "artifact", 8)


def on_device(path: Path) -> Engine:
    engine = load(path)
    engine.model.zeros = partial(DeviceArray, "cpu")  # type: ignore[attr-defined]
    return engine


def tokens(engine: Engine, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=40, **options)]


@pytest.mark.parametrize("name", MODES)
def test_an_engine_whose_logits_stay_on_the_device_gives_the_same_tokens(
    few: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read: list[int] = []
    whole = DeviceArray.read

    def watched(array: DeviceArray) -> Any:
        read.append(array.shape[-1])
        return whole(array)

    monkeypatch.setattr(DeviceArray, "read", watched)
    host, device = load(few), on_device(few)
    assert tokens(device, **MODES[name]) == tokens(host, **MODES[name])
    assert host.timing.whole_rows is None
    rows, steps = device.timing.whole_rows, 39 * len(PROMPTS)
    assert rows is not None
    prompts = 3  # chunks
    if name in ("greedy", "top_k"):
        assert rows == 0
        assert read.count(64) == prompts
    elif name == "top_p":
        assert 0 < rows < steps
        assert prompts < read.count(64) <= prompts + rows
    else:
        assert rows == steps
