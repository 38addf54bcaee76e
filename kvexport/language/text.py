"""Tokenization: text to token ids and back, and the text of a sequence that grows token by token.

A tokenizer is the artifact's tokenizer.json, run by the `tokenizers` package. The setting clean_up_tokenization_spaces
of older checkpoints is not supported; transformers 5 ignores it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError, UsageError
from kvexport.language.panics import is_panic

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so this many tokens without a whole character include bytes that are no UTF-8.
_LONGEST_WAIT = 8
_LONGEST_CONTEXT = 8
_SHORT_TEXT = 4096  # characters, which are encoded within a few milliseconds
CONTEXT = 4 * _LONGEST_CONTEXT  # tokens before a text that a TextStream looks at


class Tokenizer:
    """A wrapper of `tokenizers.Tokenizer` that never truncates or pads, since these belong to training.

    Several sequences can share it.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Wrap a loaded tokenizer and switch its truncation and padding off."""
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special_ids = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        falls_back = inner.decoder is not None and inner.decoder.decode(["<0x41>"]) == "A"
        bytes_by_id = {inner.token_to_id(f"<0x{value:02X}>"): value for value in range(256)} if falls_back else {}
        self._fallback_bytes = {i: value for i, value in bytes_by_id.items() if i is not None}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer (tokenizer.json) of an artifact's folder.

        Raises:
            ArtifactError: tokenizer.json is missing or cannot be read.
            EnvironmentProblem: The `tokenizers` package cannot be imported.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise EnvironmentProblem(
                f"the package 'tokenizers' cannot be imported: {error}", "pip install tokenizers"
            ) from error
        path = Path(folder) / FILE_NAME
        try:
            text = path.read_text(encoding="utf-8")
            inner = tokenizers.Tokenizer.from_str(text)
        except FileNotFoundError as error:
            raise ArtifactError(f"{path} does not exist", "build the artifact again: kvexport build") from error
        except BaseException as error:
            # tokenizers raises plain Exception for a file it cannot parse, and panics for some.
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            problem = f"{path} is not a tokenizer that tokenizers {tokenizers.__version__} can read: {error}"
            raise ArtifactError(problem, "build the artifact again, or pip install --upgrade tokenizers") from error
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the tokenizer, added ones included. Logits may be longer (embedding padding)."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` skips."""
        return self._special_ids

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of text that each token id below `vocab_size` adds to a text in which it is not the first token.

        The space that begins many words is therefore included. A special token has the bytes of its name, an id without
        a token has none. Decoders that look at the next token (BPE with a suffix that ends words) are not supported.
        """
        added = {i: token.content for i, token in self._inner.get_added_tokens_decoder().items()}
        names = [self._inner.id_to_token(i) for i in range(self.vocab_size)]
        plain = [i for i, name in enumerate(names) if name is not None and i not in added]
        content = {i: bytes([value]) for i, value in self._fallback_bytes.items()}
        if '"ByteLevel"' in str(json.loads(self._inner.to_str())["decoder"]).replace("'", '"'):
            content |= {i: _unmap(names[i] or "") for i in plain}
        else:
            anchor = next((i for i in plain if i not in content and self.decode([i]).strip()), None)
            before = [] if anchor is None else [anchor]
            rest = [i for i in plain if i not in content]
            texts = self._inner.decode_batch([[*before, i] for i in rest], skip_special_tokens=False)
            start = len(self.decode(before))
            content |= {i: text[start:].encode() for i, text in zip(rest, texts, strict=True)}
        content |= {i: name.encode() for i, name in added.items()}
        return [content.get(i, b"") for i in range(self.vocab_size)]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary ("<|im_end|>"); None if there is none."""
        return self._inner.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            add_special_tokens: Whether the tokenizer's post-processor adds its special tokens. A chat template writes
                them itself.

        Raises:
            UsageError: The text is no Unicode (a lone surrogate), or the tokenizer fails on it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds a lone surrogate at character {error.start}", "pass valid Unicode text"
            ) from error
        # Unlike `encode`, `encode_batch` gives the interpreter's lock back. Without padding the ids are the same.
        try:
            if len(text) <= _SHORT_TEXT:
                return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
            return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise _library_error("encode this text", error) from None

    @cached_property
    def _longest_token(self) -> int:
        """The number of characters of the longest token."""
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1) or 1

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens: its characters divided by those of the longest token.

        A tokenizer that drops characters, for example spaces in a row, can give fewer.
        """
        return -(-len(text) // self._longest_token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids that are not in the vocabulary have no text.

        Ids without a token have no text. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            UsageError: The tokenizer fails on these ids.
        """
        try:
            return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _library_error("decode these ids", error) from None

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Return whether `decode` gives text for a token id: it has a token, which is not a skipped special one."""
        return (
            not (skip_special_tokens and token_id in self._special_ids)
            and self._inner.id_to_token(token_id) is not None
        )

    def fallback_byte(self, token_id: int) -> int | None:
        """Return the byte 0..255 that a byte-fallback token ("<0xE5>") stands for; None for all other tokens."""
        return self._fallback_bytes.get(token_id)


class TextStream:
    """A streaming detokenizer: the text of one sequence while its tokens arrive.

    `push` returns only text that no later token changes. It keeps back the bytes of an incomplete character and any
    text that may begin a stop string. All returned pieces joined equal `decode` of all tokens, up to the stop string.
    They differ only if a byte-fallback tokenizer's bytes are no UTF-8: `decode` then drops the valid characters next to
    them too.

    Of several stop strings the one that ends first counts, and of those that end together the longest, so the result
    does not depend on how the text is cut into tokens. Neither the stop string nor the text after it is returned, as
    users of a server expect; transformers' `stop_strings` keeps the stop string and the rest of its token. A stop
    string that spells a special token is never found while special tokens are skipped: use eos_token_ids.

    A token costs the same however many tokens came before: a window of the last few tokens is decoded with and without
    the new one.

    Args:
        tokenizer: The tokenizer.
        stop_strings: Texts that end the sequence, none of them empty.
        skip_special_tokens: Whether special tokens have no text.
        context_ids: The tokens before the first one (the prompt), so that the first token keeps the space before it.
            Without them the text begins as `decode` begins, which drops that space for most sentencepiece models.
        shown_ids: Special tokens whose names are part of the text while others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
        shown_ids: Sequence[int] = (),
    ) -> None:
        """Create the streaming detokenizer of a sequence.

        Raises:
            UsageError: A stop string is empty.
        """
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise UsageError(f"stop strings are {stop_strings!r}", "give a list of strings, none of them empty")
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._skips_special = skip_special_tokens
        self._shown = frozenset(shown_ids) & tokenizer.special_ids if skip_special_tokens else frozenset()
        last = [i for i in context_ids[-CONTEXT:] if tokenizer.has_text(i, skip_special_tokens)]
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
        """The stop string that ended the text; None if none has appeared."""
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
        """Restore the `state` of a streaming detokenizer that had the same tokenizer and stop strings.

        Raises:
            UsageError: The state is damaged.
        """
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
        """Append the next token to the text, and return the new text that no later token can change (often "").

        Raises:
            KvexportError: The text has ended by `flush`.
        """
        if self._flushed:
            raise KvexportError("a token came after the end of its text", "begin a new TextStream for a new sequence")
        if token_id in self._shown and not self.stopped:
            broken, self._bytes = _REPLACEMENT * len(self._bytes), b""
            return self._emit(self._end_waiting() + broken + self._tokenizer.decode([token_id], False))
        if self.stopped or not self._tokenizer.has_text(token_id, self._skips_special):
            return ""
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is not None:
            return self._emit(self._take_byte(byte, token_id))
        broken, self._bytes = _REPLACEMENT * len(self._bytes), b""
        self._waiting.append(token_id)
        return self._emit(broken + self._decode_new())

    def flush(self) -> str:
        """End the text, and return the rest that waited for later tokens.

        Incomplete bytes become U+FFFD. A second call returns "".
        """
        if self._flushed or self.stopped:
            return ""
        self._flushed = True
        out = self._emit(self._end_waiting() + _REPLACEMENT * len(self._bytes))
        return out if self.stopped else out + self._kept_back

    def _text(self, context: list[int], ids: list[int]) -> str:
        """Return the text that token ids add after the tokens of `context`."""
        before, whole = self._decode(context), self._decode(context + ids)
        if whole.startswith(before):
            return whole[len(before) :]
        # The prompt ends inside a character that these tokens complete: the new text begins where the two texts differ.
        return whole[
            next((i for i, (old, new) in enumerate(zip(before, whole, strict=False)) if old != new), len(whole)) :
        ]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skips_special)

    def _take_byte(self, byte: int, token_id: int) -> str:
        # A byte-fallback decoder drops a whole run of bytes if one is missing or wrong, so runs are decoded here.
        before = self._end_waiting()
        text, self._bytes = _decode_utf8(self._bytes + bytes([byte]))
        self._context = [token_id]
        return before + text

    def _end_waiting(self) -> str:
        """Return the rest of the undecoded tokens' text, even if a character is incomplete, and drop these tokens."""
        if not self._waiting:
            return ""
        out = self._text(self._context, self._waiting)[self._decoded :]
        self._waiting, self._decoded = [], 0
        return out

    def _decode_new(self) -> str:
        """Return the new text of the waiting tokens that no later token can change."""
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
        """Return the final text of byte tokens that can no longer become a character, and stop waiting for them."""
        for cut in range(len(self._waiting) - 1, len(self._waiting) - 5, -1):
            left, right = self._waiting[:cut], self._waiting[cut:]
            first, second = self._text(self._context, left), self._text(left, right)
            # Bytes on both sides of the cut that belong together are fewer characters joined than apart.
            if first and second.endswith(self._decode(right)):
                out = first[self._decoded :]
                self._context, self._waiting, self._decoded = (
                    left[-_LONGEST_CONTEXT:],
                    right,
                    max(0, self._decoded - len(first)),
                )
                return out
        return ""

    def _emit(self, text: str) -> str:
        """Append final text, and return what cannot belong to a stop string."""
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


def _library_error(action: str, error: BaseException) -> BaseException:
    """Return the error to raise in place of an error of the library `tokenizers`.

    The library raises plain Exception, which becomes a UsageError. A panic of its Rust code arrives as PanicException,
    which is not an Exception and would end a thread; it becomes a UsageError too. Other errors stay as they are.
    """
    if type(error) is not Exception and not is_panic(error):
        return error
    problem = f"the tokenizer failed to {action}: {str(error)[:200]}"
    return UsageError(problem, "try another text; if all fail, the checkpoint's tokenizer.json is wrong")


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise ValueError(f"{value!r} is no number of this kind")
    return value


def _unmap(name: str) -> bytes:
    """Return the bytes of a byte-level BPE token's name, in which one visible character stands for each byte."""
    return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in name)


def _visible_bytes() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: the byte that each visible character stands for.

    A byte that is a visible character of Latin-1 stands for itself. The other bytes, in order, have the characters from
    U+0100.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in visible]
    return {chr(v): v for v in visible} | {chr(256 + i): v for i, v in enumerate(others)}


_BYTES = _visible_bytes()


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Decode UTF-8: return the characters of `data`, and the bytes of an incomplete character at the end.

    A byte that can belong to no character becomes U+FFFD.
    """
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
