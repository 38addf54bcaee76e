"""The channels of gpt-oss (OpenAI's harmony format): reasoning, calls of tools and the answer, each with a header.

An answer is a sequence of messages, `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant`. The channel analysis is
reasoning, a header with to=functions.NAME begins a tool call, and everything else is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from kvexport.language.chat import ChatTemplate
from kvexport.language.text_stream import overlap
from kvexport.language.tool_calls import Piece

FINAL = "<|channel|>final<|message|>"  # what a prompt ends with whose answer has to keep to a grammar
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.:/-]+)")


def has_channels(template: ChatTemplate | None) -> bool:
    return template is not None and any(
        "<|channel|>" in source and "<|message|>" in source for source in template.sources.values()
    )


class ChannelReader:
    def __init__(self, names: Collection[str], final: bool = False) -> None:
        self._names = frozenset(names)
        self._waiting, self._header = "", ""
        self._piece: Piece | None = Piece("text") if final else None  # what comes next; None within a header
        self._lacks_arguments = False

    def read(self, text: str, last: bool) -> list[Piece]:
        self._waiting += text
        pieces: list[Piece] = []
        while found := [(at, marker) for marker in MARKERS if (at := self._waiting.find(marker)) >= 0]:
            at, marker = min(found)
            self._take(self._waiting[:at], pieces)
            self._waiting = self._waiting[at + len(marker) :]
            if marker == "<|message|>":
                self._begin(pieces)
            elif marker in ("<|channel|>", "<|constrain|>"):
                if self._piece is not None:
                    self._end(pieces)
                self._header += marker
            else:
                self._end(pieces)
        kept = 0 if last else max(overlap(self._waiting, marker) for marker in MARKERS)
        end = len(self._waiting) - kept
        self._take(self._waiting[:end], pieces)
        self._waiting = self._waiting[end:]
        if last:
            if self._piece is None and "<|channel|>" not in self._header and self._header.strip():
                pieces.append(Piece("text", self._header))  # an answer without channels
            self._end(pieces)
        return pieces

    def _take(self, text: str, pieces: list[Piece]) -> None:
        if self._piece is None:
            self._header += text
        elif text:
            self._lacks_arguments = False
            pieces.append(self._piece._replace(text=text))

    def _begin(self, pieces: list[Piece]) -> None:
        recipient = _RECIPIENT.search(self._header)
        if recipient is not None and recipient[1] in self._names:
            pieces.append(Piece("call", name=recipient[1]))
            self._piece, self._lacks_arguments = Piece("arguments"), True
        else:
            self._piece = Piece("reasoning" if "<|channel|>analysis" in self._header else "text")
        self._header = ""

    def _end(self, pieces: list[Piece]) -> None:
        if self._lacks_arguments:
            pieces.append(Piece("arguments", "{}"))
        self._piece, self._header, self._lacks_arguments = None, "", False
