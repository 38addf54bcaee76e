"""The text of a sequence that grows token by token and ends before a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvexport.errors import KvexportError, UsageError
from kvexport.language.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so this many tokens without a whole character include bytes that are no UTF-8.
_LONGEST_WAIT = 8
_LONGEST_CONTEXT = 8
CONTEXT = 4 * _LONGEST_CONTEXT  # tokens before a text that a TextStream looks at


class TextStream:
    """A streaming detokenizer: the text of one sequence while its tokens arrive.

    `push` returns only text that no later token changes. It keeps back the bytes of an incomplete character and any
    text that may begin a stop string. All returned pieces joined equal `decode` of all tokens, up to the stop string.
    The two texts differ only if a byte-fallback tokenizer's bytes are no UTF-8: `decode` then also drops valid
    characters next to such bytes.

    If several stop strings appear, the one that ends first counts, and among those that end together the longest. The
    result therefore does not depend on how the text is cut into tokens. Neither the stop string nor the text after it
    is returned, as users of a server expect; transformers' `stop_strings` keeps the stop string and the rest of its
    token. A stop string that spells a special token is never found, because special tokens are skipped: use
    eos_token_ids.

    The time for a token does not depend on the number of earlier tokens: a window of the last few tokens is decoded
    with and without the new one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        context_ids: Sequence[int] = (),
        shown_ids: Sequence[int] = (),
    ) -> None:
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise UsageError(f"stop strings are {stop_strings!r}", "give a list of strings, none of them empty")
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._shown = frozenset(shown_ids) & tokenizer.special_ids
        last = [i for i in context_ids[-CONTEXT:] if tokenizer.has_text(i)]
        # The tokens whose text was returned, kept because the next token's text depends on them; then the tokens that
        # wait, and how many of their characters were returned.
        self._context = last[-_LONGEST_CONTEXT:]
        self._waiting: list[int] = []
        self._decoded = 0
        self._bytes = b""
        self._kept_back = ""
        self._stop_string: str | None = None
        self._flushed = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared in the text. From then on `push` and `flush` return no text."""
        return self._stop_string is not None

    @property
    def stop_string(self) -> str | None:
        return self._stop_string

    def state(self) -> dict[str, Any] | None:
        """Return the streaming detokenizer's state for `restore`, in JSON's types; None if the text has ended."""
        if self._flushed or self.stopped:
            return None
        return {
            "context": list(self._context),
            "waiting": list(self._waiting),
            "decoded": self._decoded,
            "bytes": list(self._bytes),
            "held": self._kept_back,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        try:
            context, waiting = ([_whole(i) for i in state[name]] for name in ("context", "waiting"))
            decoded, kept_back = _whole(state["decoded"]), str(state["held"])
            data = bytes(_whole(i) for i in state["bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is no state of a text: {error!r}", "pass the value of TextStream.state") from error
        if max(len(context), len(waiting), len(data)) > CONTEXT:
            raise UsageError("the state of a text holds more than any text keeps", "pass the value of TextStream.state")
        self._context, self._waiting, self._decoded, self._bytes, self._kept_back = (
            context,
            waiting,
            decoded,
            data,
            kept_back,
        )

    def push(self, token_id: int) -> str:
        if self._flushed:
            raise KvexportError("a token came after the end of its text", "begin a new TextStream for a new sequence")
        if token_id in self._shown and not self.stopped:
            broken, self._bytes = _REPLACEMENT * len(self._bytes), b""
            return self._emit(self._end_waiting() + broken + self._tokenizer.decode([token_id], False))
        if self.stopped or not self._tokenizer.has_text(token_id):
            return ""
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is not None:
            return self._emit(self._take_byte(byte, token_id))
        broken, self._bytes = _REPLACEMENT * len(self._bytes), b""
        self._waiting.append(token_id)
        return self._emit(broken + self._decode_new())

    def flush(self) -> str:
        """End the sequence's text, and return the text that was kept back until later tokens would decide it.

        Incomplete bytes become U+FFFD. A second call returns "".
        """
        if self._flushed or self.stopped:
            return ""
        self._flushed = True
        out = self._emit(self._end_waiting() + _REPLACEMENT * len(self._bytes))
        return out if self.stopped else out + self._kept_back

    def _text(self, context: list[int], ids: list[int]) -> str:
        before, whole = self._tokenizer.decode(context), self._tokenizer.decode(context + ids)
        if whole.startswith(before):
            return whole[len(before) :]
        # The prompt ends inside a character that these tokens complete: the new text begins where the two texts differ.
        return whole[
            next((i for i, (old, new) in enumerate(zip(before, whole, strict=False)) if old != new), len(whole)) :
        ]

    def _take_byte(self, byte: int, token_id: int) -> str:
        # A byte-fallback decoder drops a whole run of bytes if one is missing or wrong, so runs are decoded here.
        before = self._end_waiting()
        text, self._bytes = _decode_utf8(self._bytes + bytes([byte]))
        self._context = [token_id]
        return before + text

    def _end_waiting(self) -> str:
        if not self._waiting:
            return ""
        out = self._text(self._context, self._waiting)[self._decoded :]
        self._waiting, self._decoded = [], 0
        return out

    def _decode_new(self) -> str:
        text = self._text(self._context, self._waiting)
        final = text.rstrip(_REPLACEMENT)
        out = final[self._decoded :]
        self._decoded = max(self._decoded, len(final))
        if text and len(final) == len(text):
            self._context, self._waiting, self._decoded = self._waiting[-_LONGEST_CONTEXT:], [], 0
        elif len(self._waiting) >= _LONGEST_WAIT:
            out += self._give_up_bytes()
        return out

    def _give_up_bytes(self) -> str:
        for cut in range(len(self._waiting) - 1, len(self._waiting) - 5, -1):
            left, right = self._waiting[:cut], self._waiting[cut:]
            first, second = self._text(self._context, left), self._text(left, right)
            # Bytes on both sides of the cut that belong together are fewer characters joined than apart.
            if first and second.endswith(self._tokenizer.decode(right)):
                out = first[self._decoded :]
                self._context, self._waiting, self._decoded = (
                    left[-_LONGEST_CONTEXT:],
                    right,
                    max(0, self._decoded - len(first)),
                )
                return out
        return ""

    def _emit(self, text: str) -> str:
        if not text:
            return ""
        text = self._kept_back + text
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop_strings if stop in text]
        if ends:
            end, negative_length, self._stop_string = min(ends)
            self._kept_back = ""
            return text[: end + negative_length]
        kept = max((overlap(text, stop) for stop in self._stop_strings), default=0)
        self._kept_back = text[len(text) - kept :]
        return text[: len(text) - kept]


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise ValueError(f"{value!r} is no number of this kind")
    return value


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Decode UTF-8 bytes; return the text (U+FFFD for invalid bytes), and the bytes of an incomplete last character."""
    text = ""
    while data:
        try:
            return text + data.decode(), b""
        except UnicodeDecodeError as error:
            text += data[: error.start].decode()
            if error.reason == "unexpected end of data":
                return text, data[error.start :]
            text += _REPLACEMENT * (error.end - error.start)
            data = data[error.end :]
    return text, b""
