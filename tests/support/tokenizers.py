"""Small tokenizers of every family of language models, trained on this file's text."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvexport.language.tokenizer import Tokenizer

REPLACED = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIPPED = decoders.Sequence([*REPLACED, decoders.Strip(" ", 1, 0)])
FAMILIES: dict[str, tuple[Any, Any, Any]] = {  # normalizer, pre-tokenizer, decoder
    "Llama 2": (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), None, STRIPPED,
    ),
    "Mistral": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), STRIPPED),
    "a space before every text": (
        None,
        pre_tokenizers.Metaspace(prepend_scheme="always"),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]),
    ),
    "Gemma": (normalizers.Replace(" ", "\u2581"), None, decoders.Sequence(REPLACED)),
    "GPT-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "GPT-2, space first": (None, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
}  # fmt: skip


def tokenizer_of(name: str) -> Tokenizer:
    """Return a tokenizer of the family, whose special tokens are <unk>, <s> and </s>."""
    normalizer, pre_tokenizer, decoder = FAMILIES[name]
    byte_level = name.startswith("GPT-2")
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        inner.normalizer = normalizer
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoder
    fallback = [] if byte_level else [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<unk>", "<s>", "</s>", *fallback],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [],
        max_token_length=8,
        show_progress=False,
    )
    inner.train_from_iterator(['{"team": "red", "count": 12}\n' * 50, Path(__file__).read_text()], trainer)
    definition = json.loads(inner.to_str())
    definition["added_tokens"] = [x for x in definition["added_tokens"] if not x["content"].startswith("<0x")]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(definition)))
