"""Tests of answers in channels (gpt-oss): reasoning, calls and text are told apart wherever the text is cut."""

import pytest

from kvexport.language.chat import ChatTemplate
from kvexport.language.harmony import ChannelReader, has_channels
from kvexport.language.tool_calls import Piece

ANALYSIS = "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": "<|b"}'
THOUGHT, LOOK = Piece("reasoning", "The user asks."), Piece("call", name="look")
READ = {
    "an answer": (f"{ANALYSIS}<|channel|>final<|message|>Hi <|there", [THOUGHT, Piece("text", "Hi <|there")]),
    "its end": ("<|channel|>final<|message|>Hi<|return|>", [Piece("text", "Hi")]),
    "a call": (f"{ANALYSIS}{CALL}<|call|>", [THOUGHT, LOOK, Piece("arguments", '{"a": "<|b"}')]),
    "a recipient first": (
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>',
        [LOOK, Piece("arguments", "{}")],
    ),
    "no arguments": ("<|channel|>commentary to=functions.look<|message|><|call|>", [LOOK, Piece("arguments", "{}")]),
    "a preamble": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
        [Piece("text", "I look."), LOOK, Piece("arguments", '{"a": "<|b"}')],
    ),
    "another tool": ("<|channel|>commentary to=functions.rm<|message|>{}", [Piece("text", "{}")]),
    "cut in the reasoning": ("<|channel|>analysis<|message|>The", [Piece("reasoning", "The")]),
    "cut in a header": ("<|channel|>anal", []),
    "no channels": ("Hello", [Piece("text", "Hello")]),
}  # fmt: skip


def pieces(text: str, size: int, final: bool = False) -> list[Piece]:
    reader = ChannelReader(["look"], final)
    joined: list[Piece] = []
    for start in range(0, len(text) + size, size):
        for piece in reader.read(text[start : start + size], start + size >= len(text) + size):
            if joined and piece.kind == joined[-1].kind != "call":
                joined[-1] = joined[-1]._replace(text=joined[-1].text + piece.text)
            else:
                joined.append(piece)
    return joined


@pytest.mark.parametrize("name", READ)
def test_channels_are_told_apart(name: str) -> None:
    text, expected = READ[name]
    for size in (1, 2, 3, 7, 1000):
        assert pieces(text, size) == expected


def test_an_answer_behind_the_final_header_is_text() -> None:
    assert pieces('{"a": 1}', 3, final=True) == [Piece("text", '{"a": 1}')]


def test_a_template_has_channels_or_not() -> None:
    assert has_channels(ChatTemplate({"default": "<|start|>assistant<|channel|>final<|message|>"}, {}, "x"))
    assert not has_channels(ChatTemplate({"default": "<|im_start|>"}, {}, "x"))
    assert not has_channels(None)
