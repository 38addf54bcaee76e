"""The calls of tools in an answer, found while its text arrives.

A call is a JSON object with a name and arguments, behind the marker of the model's form (`kvexport.language.tools`).
Nothing of a marker is shown as text, nothing of a call before its name is known to be a tool's; its arguments come out
as they are made. What looks like a call and is none is text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal, NamedTuple

from kvexport.language.text import overlap

_SPACE = " \t\r\n"
_BETWEEN = _SPACE + "[],;"  # what may stand around the objects of several calls


class Piece(NamedTuple):
    """What is new of an answer: text; a call of the tool `name`; text of the JSON of that call's arguments; text of its
    reasoning."""

    kind: Literal["text", "call", "arguments", "reasoning"]
    text: str = ""
    name: str = ""


class CallReader:
    """Of one answer.

    names: of the tools. opening: what goes before calls, "" where none do. closing: what may stand behind each.
    first: calls may also begin the answer without anything before them. keys: the names of their arguments.
    """

    def __init__(self, names: Collection[str], opening: str, closing: str, first: bool, keys: Collection[str]) -> None:
        self._names, self._opening, self._closing, self._keys = frozenset(names), opening, closing, keys
        self._may_call = first  # whether an object that comes next is a call
        self._waiting = ""  # text that may become a marker, or the white space before one
        self._raw = ""  # since the marker: text, should it be no call
        self._object: _Object | None = None
        self._announced = False
        self._after_call = False  # no text has come since

    def read(self, text: str, last: bool) -> list[Piece]:
        """The pieces that are final with more text. last: there is no more."""
        pieces: list[Piece] = []
        self._waiting += text
        while self._waiting:
            before = len(self._waiting), self._may_call, self._object
            if self._object is not None:
                self._read_call(self._object, pieces)
            elif self._may_call:
                self._read_between(pieces)
            else:
                self._read_text(pieces, last)
            if (len(self._waiting), self._may_call, self._object) == before:
                break
        if last:
            self._show(pieces, self._unread(self._waiting) if self._may_call else self._raw + self._waiting)
            self._object, self._raw, self._waiting = None, "", ""
        return pieces

    def _unread(self, skipped: str) -> str:
        """What is text now that no call follows. Behind a call, brackets and commas are none."""
        return skipped.lstrip(_BETWEEN) if self._after_call and not self._raw else self._raw + skipped

    def _show(self, pieces: list[Piece], text: str) -> None:
        if self._after_call:
            text = text.lstrip(_SPACE)
        if text:
            self._after_call = False
            pieces.append(Piece("text", text))

    def _read_text(self, pieces: list[Piece], last: bool) -> None:
        """Show text up to the opening."""
        waiting, opening = self._waiting, self._opening
        at = waiting.find(opening) if opening else -1
        if at >= 0:
            final = waiting[:at].rstrip(_SPACE)
            self._show(pieces, final)
            end = at + len(opening)
            self._raw, self._waiting, self._may_call = waiting[len(final) : end], waiting[end:], True
            return
        final = waiting[: len(waiting) - overlap(waiting, opening)]
        if not last and opening:
            final = final.rstrip(_SPACE)
        self._show(pieces, final)
        self._waiting = waiting[len(final) :]

    def _read_between(self, pieces: list[Piece]) -> None:
        """Look for the next object behind an opening, or behind another call."""
        bare = self._waiting.lstrip(_BETWEEN)
        skipped = self._waiting[: len(self._waiting) - len(bare)]
        for marker in (self._opening, self._closing):
            if marker and bare.startswith(marker):
                self._may_call = marker == self._opening
                self._raw = self._raw + skipped + marker if self._may_call else ""
                self._waiting = bare[len(marker) :]
                return
        if bare.startswith("{"):
            self._object, self._announced = _Object(self._keys), False
            self._raw, self._waiting = self._raw + skipped, bare
        elif bare and overlap(bare, self._opening) < len(bare) and overlap(bare, self._closing) < len(bare):
            self._may_call = False
            self._show(pieces, self._unread(skipped))
            self._raw, self._waiting = "", bare

    def _read_call(self, found: _Object, pieces: list[Piece]) -> None:
        used = found.feed(self._waiting)
        if not self._announced:
            self._raw += self._waiting[:used]
        self._waiting = self._waiting[used:]
        # Behind a marker a call may do without arguments.
        ready = found.has_arguments or (found.complete and self._opening != "" and self._opening in self._raw)
        if not self._announced and found.name in self._names and ready:
            pieces.append(Piece("call", name=found.name or ""))
            self._announced, self._raw, self._after_call = True, "", True
        if self._announced and (text := found.take()):
            pieces.append(Piece("arguments", text))
        strange = found.name is not None and found.name not in self._names
        if not self._announced and (strange or found.broken or found.complete):
            self._show(pieces, self._raw)
            self._object, self._raw, self._may_call = None, "", False
        elif found.complete or found.broken:
            if not found.has_arguments:
                pieces.append(Piece("arguments", "{}"))
            self._object, self._announced = None, False


class _Object:
    """A JSON object that is read character by character: its `name`, and the JSON of its arguments as it comes. What is
    inside other values is passed over by its quotes and brackets alone."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = keys
        self.name: str | None = None
        self.has_arguments = False
        self.complete = self.broken = False
        self._depth = 0
        self._string: list[str] | None = None  # the string that is being read, its first quote included
        self._escaped = False
        self._key: str | None = None
        self._in_value = False
        self._arguments: list[str] = []

    def take(self) -> str:
        """More of the arguments."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        """Read on; how many characters it took. All, but where the object ends or is none."""
        for i, character in enumerate(text):
            if self._string is not None:
                self._read_string(character)
            else:
                self._read_structure(character)
            if self.complete or self.broken:
                return i + 1
        return len(text)

    def _read_string(self, character: str) -> None:
        assert self._string is not None
        self._string.append(character)
        if self._depth > 1:
            self._pass(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            whole, self._string = "".join(self._string), None
            if self._depth == 1:
                self._take_string(whole)

    def _take_string(self, literal: str) -> None:
        """A string of the object itself: a key, or the value of one."""
        try:
            value = json.loads(literal, strict=False)
        except ValueError:
            self.broken = True
            return
        if not self._in_value:
            self.broken = self._key is not None
            self._key = value
        elif self._key == "name":
            self.name = value
        else:
            self._pass(value)  # arguments as a text of JSON

    def _read_structure(self, character: str) -> None:
        if character == '"':
            self._string = [character]
            if self._depth > 1:
                self._pass(character)
        elif character in "{[":
            self._depth += 1
            self.broken = self._depth > 1 and not self._in_value
            if self._depth > 1:
                self._pass(character)
        elif character in "}]":
            if self._depth > 1:
                self._pass(character)
            self._depth -= 1
            self.complete = self._depth == 0 and character == "}"
            self.broken = self._depth == 0 and character == "]"
        elif self._depth == 1 and character == ",":
            self._key, self._in_value = None, False
        elif self._depth == 1 and character == ":" and not self._in_value:
            self.broken = self._key is None
            self._in_value = True
            self.has_arguments = self.has_arguments or self._key in self._keys
        elif self._in_value and (self._depth > 1 or character not in _SPACE):
            self._pass(character)
        elif character not in _SPACE:
            self.broken = True

    def _pass(self, text: str) -> None:
        """Something of a value."""
        if self._in_value and self._key in self._keys:
            self._arguments.append(text)
