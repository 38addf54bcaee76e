"""Tests of reading JSON from clients and models: what it refuses, and that it refuses early."""

import json
import time
from typing import Any

import pytest

from kvexport.bounded_json import MOST_VALUES, TooManyValues, read_json


@pytest.mark.parametrize("value", [None, True, "a", 1.5, 2**70, [], {}, {"a": [1, {"b": ["\u00e9\n"]}]}, "[,{:" * 99])
def test_a_value_is_read_as_json_reads_it(value: Any) -> None:
    text = json.dumps(value)
    assert read_json(text) == json.loads(text) == read_json(text.encode())


@pytest.mark.parametrize(
    "text", ["", "{", "[1]]", "NaN", "[Infinity]", "1e999", "[-1e999]", "1" * 5000, "[" * 5000, '"\ud800"', b'"\xff"']
)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        read_json(text)


@pytest.mark.parametrize("element", ["[]", "{}", "0", '""', '{"":0}', "[[[]]]"])
def test_many_values_are_refused_before_they_are_made(element: str) -> None:
    text = ("[" + ",".join([element] * (16_000_000 // (len(element) + 1))) + "]").encode()
    begun = time.thread_time()
    with pytest.raises(TooManyValues, match="more than 250000 JSON values"):
        read_json(text)
    assert time.thread_time() - begun < 2  # json.loads takes longer, and holds the interpreter's lock meanwhile


def test_values_up_to_the_bound_are_read() -> None:
    assert len(read_json(json.dumps([0] * (MOST_VALUES - 2)))) == MOST_VALUES - 2
    with pytest.raises(TooManyValues):
        read_json(json.dumps([0] * 100), most=99)
    assert read_json(json.dumps([",[{:"] * 30), most=40)
