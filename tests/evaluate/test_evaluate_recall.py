"""Tests of the passages with facts that calibration asks about."""

from functools import partial

import numpy as np

from kvexport.evaluate.recall import passage
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.load import load_recipe

FACTS = [
    ("anna lamp .", "? anna", "lamp"),
    ("boris guitar .", "? boris", "guitar"),
    ("carla piano .", "? carla", "piano"),
]
LENGTH = 160


def test_a_passage_has_each_fact_once_and_the_requested_length() -> None:
    tokenizer = Tokenizer.from_folder(load_recipe("tiny-full", []).recipe.model.path)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    text = passage(encode, ["then many came ."] * 60, FACTS, LENGTH, np.random.default_rng(3))
    words = tokenizer.decode(text.ids)
    assert all(words.count(fact.removesuffix(" .")) == 1 for fact, _, _ in FACTS)
    assert LENGTH - 6 < len(text.ids) <= LENGTH
    assert [tokenizer.decode(q.answer).strip() for q in text.questions] == [answer for _, _, answer in FACTS]
    assert all(q.digits == len(q.answer) for q in text.questions)
