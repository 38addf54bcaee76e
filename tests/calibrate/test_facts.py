"""Tests of the passages with facts that calibration asks about."""

from functools import partial

import numpy as np

from kvexport.calibrate.facts import asked_and_answered, passage_ids, question_and_answer
from kvexport.language.tokenizer import Tokenizer
from kvexport.recipe.load import load_recipe

FACTS = ["anna lamp .", "boris guitar .", "carla piano ."]
LENGTH = 160


def test_a_passage_has_each_fact_once_and_the_requested_length() -> None:
    tokenizer = Tokenizer.from_folder(load_recipe("tiny-full", []).recipe.model.path)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    ids = passage_ids(encode, ["then many came ."] * 60, FACTS, LENGTH, np.random.default_rng(3))
    words = tokenizer.decode(ids)
    assert all(words.count(fact.removesuffix(" .")) == 1 for fact in FACTS)
    assert LENGTH - 6 < len(ids) <= LENGTH
    question, answer = question_and_answer(encode, "? anna", "lamp")
    assert (tokenizer.decode(question), tokenizer.decode(answer)) == ("? anna", "lamp")


def test_an_answer_is_judged_where_the_token_before_it_stands() -> None:
    sample = asked_and_answered([1, 2, 3], [([4, 5], [6, 7]), ([8], [9])])
    assert [sample.ids[p + 1] for p in sample.counted] == [6, 7, 9] and sample.ids[: sample.prompt] == [1, 2, 3]
