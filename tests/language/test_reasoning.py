"""Reasoning is separated from the rest of an answer, wherever its text is cut."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvexport.language.answer import PlainReader
from kvexport.language.chat import ChatTemplate
from kvexport.language.reasoning import ReasoningReader, reasoning_tokens, thinks
from kvexport.language.token import Token
from kvexport.language.tool_calls import Piece
from kvexport.language.tools import HERMES

TEMPLATES = Path(__file__).parent / "chat_templates"
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def read(text: str, cuts: list[int], opened: bool = False, tools: bool = False) -> tuple[str, str, list[str]]:
    inner: Any = HERMES.reader([TOOL]) if tools else PlainReader()
    reader = ReasoningReader(opened, inner)
    ends = [0, *cuts, len(text)]
    pieces: list[Piece] = []
    for start, end in itertools.pairwise(ends):
        pieces += reader.read(text[start:end], False)
    pieces += reader.read("", True)
    parts = ["".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "text")]
    assert all(piece.text for piece in pieces if piece.kind in ("reasoning", "text"))
    return parts[0], parts[1], [piece.name for piece in pieces if piece.kind == "call"]


@pytest.mark.parametrize(("text", "opened", "expected"), [
    ("<think>\nit is 4\n</think>\n\nFour.", False, ("it is 4", "Four.")),
    ("\nit is 4\n</think>\n\nFour.\n", True, ("it is 4", "Four.\n")),
    ("  <think>a < b </thin and\n\n</think>x", False, ("a < b </thin and", "x")),
    ("<think>\n\n</think>\n\nFour.", False, ("", "Four.")), ("<think>cut short </th", False, ("cut short </th", "")),
    ("<think>ends here</think>", False, ("ends here", "")), ("<thin air", False, ("", "<thin air")),
    ("Four. <think>no</think>", False, ("", "Four. <think>no</think>")), (" \n", False, ("", " \n")),
    ("", True, ("", "")), ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
])  # fmt: skip
def test_every_cut_of_an_answer_gives_the_same_parts(text: str, opened: bool, expected: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    assert read(text, [], opened)[:2] == expected
    assert read(text, list(range(1, len(text))), opened)[:2] == expected
    for _ in range(50):
        cuts = sorted(rng.integers(0, len(text) + 1, rng.integers(0, 6)).tolist())
        assert read(text, cuts, opened)[:2] == expected


def test_tool_calls_are_parsed_only_after_the_reasoning() -> None:
    text = f"<think>shall i {CALL}?</think>\n{CALL}"
    for cuts in ([], list(range(1, len(text)))):
        reasoning, answer, calls = read(text, cuts, tools=True)
        assert (reasoning, answer, calls) == (f"shall i {CALL}?", "", ["look"])


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_reasoning_are_counted_up_to_its_end(opened: bool, size: int) -> None:
    def count(text: str) -> int:
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        return reasoning_tokens([Token(0, 1, piece) for piece in pieces], opened)

    head = "" if opened else "<think>"
    thought = head + "\nsome thoughts</think>"
    assert count(thought + "yes") == -(-len(thought) // size)
    assert count(head + "cut short") == -(-len(head + "cut short") // size)
    assert count("") == 0
    assert opened or count("plain <think>") == 0


def test_templates_that_know_of_reasoning_are_known() -> None:
    known = {
        path.stem for path in TEMPLATES.glob("*.jinja") if thinks(ChatTemplate({"default": path.read_text()}, {}, ""))
    }
    assert known == {"qwen3", "deepseek-r1", "smollm3-generation"} and not thinks(None)
