"""A streaming parser that finds tool calls in a model's answer while the text arrives.

A tool call stands behind a marker of the model's form (`kvexport.language.tools`). The call is a JSON object with a
name and arguments, or a name with the JSON of its arguments, or a name with a pair of tags for each argument. The
parser never shows a piece of a marker as text. The parser shows no piece of a call before the call's name is known to
be the name of a tool. Arguments in JSON are shown as they are generated, and arguments in tags one by one. Text that
resembles a call but is none is shown as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvexport.bounded_json import read_json
from kvexport.language.text_stream import overlap

_SPACE = " \t\r\n"
_LONGEST_HEAD = 256  # characters of a call before its arguments
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as Python's templates print them
_BETWEEN = _SPACE + "[],;"  # the characters that may stand around the objects of several calls


class Piece(NamedTuple):
    # "text" and "reasoning" bring more text; "call" begins a call of the tool `name`; "arguments" brings more of the
    # JSON of its arguments
    kind: Literal["text", "call", "arguments", "reasoning"]
    text: str = ""
    name: str = ""


class CallReader:
    def __init__(
        self,
        names: Collection[str],
        openings: Sequence[str],
        closings: Sequence[str],
        first: bool,
        parser: Callable[[], CallParser],
        inside: Collection[str] = (),
        begins: str = "{",
    ) -> None:
        self._names, self._openings, self._closings = frozenset(names), openings, closings
        self._parser, self._inside, self._begins = parser, inside, begins
        self._may_call = first  # whether an object that comes next is a call
        self._waiting = ""  # text that may become a marker, or the white space before one
        self._raw = ""  # everything since the marker, which is text if no call follows
        self._object: CallParser | None = None
        self._announced = False
        self._after_call = False  # whether no text has come since the last call
        self._closed = False  # whether a closing marker has come since, so that an opening one has to come first

    def read(self, text: str, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        self._waiting += text
        while self._waiting:
            before = len(self._waiting), self._may_call, self._closed, self._object
            if self._object is not None:
                self._read_call(self._object, pieces)
            elif self._may_call:
                self._read_between(pieces, last)
            else:
                self._read_text(pieces, last)
            if (len(self._waiting), self._may_call, self._closed, self._object) == before:
                break
        if last:
            self._show(pieces, self._unread(self._waiting) if self._may_call else self._raw + self._waiting)
            self._object, self._raw, self._waiting = None, "", ""
        return pieces

    def _unread(self, skipped: str) -> str:
        """Return text that was kept back for a tool call that did not come, without the marks that separate calls."""
        return skipped.lstrip(_BETWEEN) if self._after_call and not self._raw else self._raw + skipped

    def _show(self, pieces: list[Piece], text: str) -> None:
        if self._after_call:
            text = text.lstrip(_SPACE)
        if text:
            self._after_call = False
            pieces.append(Piece("text", text))

    def _read_text(self, pieces: list[Piece], last: bool) -> None:
        waiting = self._waiting
        at, opening = min(((at, x) for x in self._openings if (at := waiting.find(x)) >= 0), default=(-1, ""))
        if at >= 0:
            final = waiting[:at].rstrip(_SPACE)
            self._show(pieces, final)
            end = at + (0 if opening in self._inside else len(opening))
            self._raw, self._waiting, self._may_call = waiting[len(final) : end], waiting[end:], True
            self._closed = False
            return
        kept = max((overlap(waiting, opening) for opening in self._openings), default=0)
        final = waiting[: len(waiting) - kept]
        if not last and self._openings:
            final = final.rstrip(_SPACE)
        self._show(pieces, final)
        self._waiting = waiting[len(final) :]

    def _read_between(self, pieces: list[Piece], last: bool) -> None:
        bare = self._waiting.lstrip(_BETWEEN if self._begins == "{" and not self._closed else _SPACE)
        skipped = self._waiting[: len(self._waiting) - len(bare)]
        markers = [*self._openings, *(self._closings if self._after_call else ())]
        if not last and any(bare != marker and marker.startswith(bare) for marker in markers):
            return  # what came may become a marker, or a longer one
        if found := [x for x in markers if bare.startswith(x) and x not in self._inside]:
            marker = max(found, key=len)
            self._closed = marker not in self._openings
            self._raw = "" if self._closed else self._raw + skipped + marker
            self._waiting = bare[len(marker) :]
        elif bare and not self._closed and (not self._begins or bare[0] in self._begins):
            self._object, self._announced = self._parser(), False
            self._raw, self._waiting = self._raw + skipped, bare
        elif bare:
            self._may_call = self._closed = False
            self._show(pieces, self._unread(skipped))
            self._raw, self._waiting = "", bare

    def _read_call(self, call: CallParser, pieces: list[Piece]) -> None:
        used = call.feed(self._waiting)
        if not self._announced:
            self._raw += self._waiting[:used]
        self._waiting = self._waiting[used:]
        # After a marker, a call may lack arguments.
        ready = call.has_arguments or (call.complete and any(x in self._raw for x in self._openings[:1]))
        if not self._announced and call.name in self._names and ready:
            pieces.append(Piece("call", name=call.name or ""))
            self._announced, self._raw, self._after_call = True, "", True
        if self._announced and (text := call.take()):
            pieces.append(Piece("arguments", text))
        strange = call.name is not None and call.name not in self._names
        if not self._announced and (strange or call.broken or call.complete):
            self._show(pieces, self._raw)
            self._object, self._raw, self._may_call = None, "", False
        elif call.complete or call.broken:
            if not call.has_arguments:
                pieces.append(Piece("arguments", "{}"))
            self._object, self._announced = None, False


class CallParser:
    """A streaming parser of the JSON object of a tool call.

    The parser keeps the tool's `name` and passes on the JSON of its arguments. The parser skips the values of other
    keys, and follows only their quotes and brackets.
    """

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
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        """Parse text of a tool call; return how many characters were read, which is less than all if the call ends."""
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
        if self._in_value and self._key in self._keys:
            self._arguments.append(text)


class NamedParser(CallParser):
    def __init__(self, head: str) -> None:
        super().__init__(("arguments",))
        self._head, self._pattern = "", head

    def feed(self, text: str) -> int:
        for i, character in enumerate(text):
            if self.name is None and character != "{":
                self._head += character
                self.broken = len(self._head) > _LONGEST_HEAD
            elif self.name is None and not self._begin():
                self.broken = True
            else:
                super().feed(character)
                self.complete = self._depth == 1 and self._string is None
            if self.complete or self.broken:
                return i + 1
        return len(text)

    def _begin(self) -> bool:
        if (match := re.fullmatch(self._pattern, self._head)) is None:
            return False
        super().feed(f'{{"name": "{match["name"]}", "arguments": ')
        return True


class TaggedParser(CallParser):
    def __init__(self, head: str, argument: str, end: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(())
        self._patterns, self._schemas = (head, argument, end), schemas
        self._text, self._count = "", 0

    def feed(self, text: str) -> int:
        self._text += text
        if ">" not in text and "<" not in text:
            self.broken = self.name is None and len(self._text) > _LONGEST_HEAD
            return len(text)
        head, argument, end = self._patterns
        if self.name is None:
            if (match := re.match(head, self._text)) is None:
                self.broken = len(self._text) > _LONGEST_HEAD
                return len(text)
            self.name, self.has_arguments = match["name"], True
            self._text = self._text[match.end() :]
        while (match := re.match(argument, self._text, re.DOTALL)) is not None:
            self._text = self._text[match.end() :]
            value = json.dumps(self._value(match["key"], match["value"]), ensure_ascii=False)
            self._arguments.append(f"{', ' if self._count else '{'}{json.dumps(match['key'])}: {value}")
            self._count += 1
        if (match := re.match(end, self._text)) is not None:
            self.complete = True
            self._arguments.append("}" if self._count else "{}")
            return len(text) - (len(self._text) - match.end())
        return len(text)

    def _value(self, key: str, text: str) -> Any:
        schema = self._schemas.get(self.name or "", {}).get(key)
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        if kinds == "string":
            return text
        try:
            return read_json(_CONSTANTS.get(text.strip(), text))
        except ValueError:
            return text
