"""Tokenization: text to token ids and back.

A tokenizer is the artifact's tokenizer.json, run by the `tokenizers` package. The setting clean_up_tokenization_spaces
of older checkpoints is not supported; transformers 5 ignores it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvexport.errors import ArtifactError, EnvironmentProblem, UsageError

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"

_SHORT_TEXT = 4096  # characters, which are encoded within a few milliseconds


class Tokenizer:
    """A wrapper of `tokenizers.Tokenizer` that never truncates or pads. Several sequences can share one tokenizer."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special_ids = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        falls_back = inner.decoder is not None and inner.decoder.decode(["<0x41>"]) == "A"
        bytes_by_id = {inner.token_to_id(f"<0x{value:02X}>"): value for value in range(256)} if falls_back else {}
        self._fallback_bytes = {i: value for i, value in bytes_by_id.items() if i is not None}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
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
        """The number of tokens, including added tokens. A row of logits may be longer, because of padding."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each token id below `vocab_size` adds to a text, if the token is not the text's first.

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
        """Return the id of the token with a given name in the vocabulary ("<|im_end|>"); None if there is none."""
        return self._inner.token_to_id(token)

    def special(self, markers: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of those markers that are special tokens, which decoding hides unless told to show them."""
        ids = (self.token_id(marker) for marker in dict.fromkeys(markers))
        return tuple(token for token in ids if token is not None and token in self._special_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
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

    def ranges(self, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges (first, end) of `ids` whose tokens share a character with the text's spans (first, end)."""
        encoding = self._inner.encode_batch([text], add_special_tokens=False)[0]
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if len(offsets) != len(ids) or encoding.ids != list(ids):
            raise UsageError("the tokenizer gives a text other tokens when it counts characters", "pin no message")
        ranges = []
        for first, end in spans:
            of_span = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > first))
            if of_span.size:
                ranges.append((int(of_span[0]), int(of_span[-1]) + 1))
        return ranges

    def encode_within(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another text: no special tokens, no space in front."""
        return self._within.encode(text, add_special_tokens=False)

    @property
    def adds_spaces(self) -> bool:
        """Whether the tokenizer puts a space before a text, as those of Llama 2 and Mistral do."""
        return self._within is not self

    @cached_property
    def _within(self) -> Tokenizer:
        import tokenizers

        definition = json.loads(self._inner.to_str())
        changed = _without_prefix(definition)
        return self if changed == definition else Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(changed)))

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1) or 1

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens: its characters divided by the longest token's.

        The bound fails for a tokenizer that drops characters, for example repeated spaces.
        """
        return -(-len(text) // self._longest_token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Ids without a token have no text. Bytes that are no UTF-8 become U+FFFD.
        """
        try:
            return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _library_error("decode these ids", error) from None

    def has_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._inner.id_to_token(token_id) is not None

    def fallback_byte(self, token_id: int) -> int | None:
        """Return the byte 0..255 that a byte-fallback token ("<0xE5>") stands for; None for all other tokens."""
        return self._fallback_bytes.get(token_id)


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of a Rust library, which Python gets as PanicException."""
    return type(error).__name__ == "PanicException"


def _library_error(action: str, error: BaseException) -> BaseException:
    """Return the error to raise in place of an error of the library `tokenizers`.

    The library raises plain Exception, which becomes a UsageError. A panic of the library's Rust code arrives as
    PanicException, which is not an Exception and would end a thread; it becomes a UsageError too. Other errors stay as
    they are.
    """
    if type(error) is not Exception and not is_panic(error):
        return error
    problem = f"the tokenizer failed to {action}: {str(error)[:200]}"
    return UsageError(problem, "try another text; if all fail, the checkpoint's tokenizer.json is wrong")


_NO_PREFIX = {"add_prefix_space": False, "prepend_scheme": "never"}


def _without_prefix(node: Any) -> Any:
    """Return a part of tokenizer.json without the steps that put a space before a text (Llama 2, Mistral, GPT-2)."""
    if isinstance(node, list):
        return [
            _without_prefix(item) for item in node if not (isinstance(item, dict) and item.get("type") == "Prepend")
        ]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "Prepend":
        return None
    kept = {key: value if key in ("model", "added_tokens") else _without_prefix(value) for key, value in node.items()}
    return {**kept, **{key: value for key, value in _NO_PREFIX.items() if key in kept}}


def _unmap(name: str) -> bytes:
    """Return the bytes of a byte-level BPE token's name, in which one visible character stands for each byte."""
    return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in name)


def _visible_bytes() -> dict[str, int]:
    """Return GPT-2's byte alphabet: visible Latin-1 characters stand for themselves, other bytes for U+0100 and up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in visible]
    return {chr(v): v for v in visible} | {chr(256 + i): v for i, v in enumerate(others)}


_BYTES = _visible_bytes()
