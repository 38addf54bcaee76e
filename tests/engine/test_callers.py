"""Tests of one engine with many callers, and of what callers give it."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvexport
from kvexport.engine.turns import Turns
from kvexport.errors import UsageError

PROMPTS = ["abcdefgh", "hgfedcba" * 4, "a", "xyz" * 9]


@pytest.fixture(scope="module")
def alone(tiny_artifact: Path) -> list[list[int]]:
    """The answer to each prompt when it runs without the others."""
    engine = kvexport.load(tiny_artifact)
    return [engine.generate(prompt, max_tokens=30)[0].token_ids for prompt in PROMPTS]


def test_threads_share_an_engine(tiny_artifact: Path, alone: list[list[int]]) -> None:
    engine = kvexport.load(tiny_artifact)
    answers: dict[int, list[int]] = {}

    def answer(i: int) -> None:
        answers[i] = engine.generate(PROMPTS[i], max_tokens=30)[0].token_ids

    threads = [threading.Thread(target=answer, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(PROMPTS))] == alone and not engine.busy


def test_turns_are_taken_in_order_and_may_nest() -> None:
    turns, threads = Turns(), []
    order: list[int] = []

    def take(i: int) -> None:
        with turns:
            order.append(i)

    with turns, turns:
        for i in range(5):
            thread = threading.Thread(target=take, args=(i,))
            thread.start()
            while len(turns._waiting) <= i:
                pass
            threads.append(thread)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4] and turns._owner is None


def test_a_closed_engine_refuses_requests(tiny_artifact: Path) -> None:
    with kvexport.load(tiny_artifact) as engine:
        stream = engine.stream("abc", max_tokens=40)
        next(stream)
    assert not engine.busy
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate("abc")


def test_the_names_that_others_use(tiny_artifact: Path) -> None:
    engine = kvexport.LLM(tiny_artifact)
    whole = engine.generate("abc", max_tokens=12)[0]
    assert len(whole.token_ids) == 12
    stop = whole.text[4:6]
    assert engine.generate("abc", max_tokens=12, stop=stop)[0].text == whole.text[: whole.text.index(stop)]
    with pytest.raises(UsageError, match="two names of one setting"):
        engine.settings(max_tokens=3, max_new_tokens=4)
    assert engine.settings(temperature=0.5).do_sample and not engine.settings(temperature=0).do_sample


def test_a_logits_processor_sees_prompt_and_answer_and_decides(tiny_artifact: Path) -> None:
    engine = kvexport.load(tiny_artifact)
    seen: list[list[int]] = []

    def only_seven(ids: Any, logits: Any) -> Any:
        seen.append(ids.tolist())
        changed = np.full_like(logits, -np.inf)
        changed[7] = 0
        return changed

    answer = engine.generate([1, 2, 3], max_tokens=3, logits_processor=only_seven)[0]
    assert answer.token_ids == [7, 7, 7]
    assert seen == [[1, 2, 3], [1, 2, 3, 7], [1, 2, 3, 7, 7]]
    with pytest.raises(UsageError, match="no function"):
        engine.generate([1], logits_processor=[3])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="shape"):
        engine.generate([1], logits_processor=lambda ids, logits: logits[:3])
