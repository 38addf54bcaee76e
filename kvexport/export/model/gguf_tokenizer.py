"""The tokenizer, the chat templates and the end tokens of a GGUF file, as llama.cpp reads them (llama-vocab.cpp).

Two kinds of tokenizers are read: byte-level BPE with a known splitting rule, and SentencePiece's BPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.export.model.gguf import Gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # GGUF's token types; user-defined tokens are never split, not special
# Tokens that end an answer in every vocabulary that has them: they end a turn, a text, a tool call or a file of code.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
)
# Exceptions: in vocabularies with all tokens of the set, the second token ends only a part of an answer, or belongs to
# another model.
_NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|flush|>", "<|calls|>"}, "<|end|>"), ({"<|tool_response>"}, "</s>"),
)  # fmt: skip
# How byte-level BPE splits a text, beyond the rules that transformers knows: regular expressions that are applied one
# after the other. GPT-2's expression follows unless it is among them, or an empty one is.
_PUNCTUATION, _THREE_DIGITS = r"[\p{P}\$\+<=>\^~\|]+", r"[0-9][0-9][0-9]"
_HAN, _LINE_END = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"[\r\n]"
_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_SPLITS: dict[str | None, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "mpt", "olmo", "jais", "trillion", "mellum"), ()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}",)),
    **dict.fromkeys(("default", None), (_PUNCTUATION, "GPT-2", r"\p{N}+", _THREE_DIGITS)),
    "deepseek-llm": (_LINE_END, r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", rf"\s?[{_SIGNS}]+", r"\s+$", _HAN, r"\p{N}+", ""),
    "deepseek-coder": (_LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}", ""),
    "deepseek-v3": (
        *(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "",
    ),
}
_SAME_AS = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe", "stablelm2": "qwen2", "hunyuan": "qwen2"}
_ADD_BOS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "tekken",
)
_WHOLE = (*_ADD_BOS, "glm4", "chatglm-bpe")  # a piece of text that is a token stays whole, without any merges


def write_tokenizer(gguf: Gguf, folder: Path, length: int) -> None:
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    meta = gguf.metadata
    tokens, kind, split = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise _unknown(gguf)
    tokenizer = _byte_level(gguf) if kind == "gpt2" else _sentencepiece(gguf)
    ends = {tokens[i] for i in end_ids(meta)}
    types = meta.get("tokenizer.ggml.token_type") or [_CONTROL if token in ends else 1 for token in tokens]
    found = {
        i: kind for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or tokens[i] in ends
    }
    takes_space = any(name in str(meta.get("general.name")).lower() for name in ("phi-3", "phi3"))
    tokenizer.add_tokens(
        [
            AddedToken(
                tokens[i],
                normalized=False,
                special=kind != _USER_DEFINED,
                rstrip=takes_space and tokens[i] not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for i, kind in found.items()
        ]
    )
    adds = {"bos": kind == "llama" or split in _ADD_BOS, "eos": False}
    ids = {name: meta.get(f"tokenizer.ggml.{name}_token_id", default) for name, default in (("bos", 1), ("eos", 2))}
    marks = {
        name: tokens[ids[name]]
        for name in adds
        if meta.get(f"tokenizer.ggml.add_{name}_token", adds[name])
        and (kind == "llama" or f"tokenizer.ggml.{name}_token_id" in meta)
    }
    if marks:
        parts = [x for x in (marks.get("bos"), "$A", marks.get("eos")) if x]
        tokenizer.post_processor = TemplateProcessing(parts, None, [(marks[name], ids[name]) for name in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in SPECIAL_IDS.items()
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    rest = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", {**special, **_templates(meta), **rest})


def end_ids(meta: Mapping[str, Any]) -> list[int]:
    tokens = meta["tokenizer.ggml.tokens"]
    named = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    texts = set(_END_TEXTS)
    by_text = {token: i for i, token in enumerate(tokens) if token in texts}
    ends = dict.fromkeys([*(i for i in named if i is not None), *by_text.values()])
    for with_all, without in _NO_ENDS:
        if with_all <= by_text.keys():
            ends.pop(by_text.get(without, -1), None)
    return list(ends)


def _templates(meta: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): x for key, x in meta.items() if key.startswith(f"{prefix}.")}
    default = meta.get(prefix)
    if not named:
        return {"chat_template": default} if default else {}
    templates = {**({"default": default} if default else {}), **named}
    return {"chat_template": [{"name": name, "template": template} for name, template in templates.items()]}


def _byte_level(gguf: Gguf) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    meta = gguf.metadata
    tokens, split = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.pre")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocabulary, _merges(meta, vocabulary), ignore_merges=split in _WHOLE)
    tokenizer = Tokenizer(model)
    known = _known_splits()
    steps: list[Any]
    if (own := known.get(_SAME_AS.get(str(split), split))) is not None:
        steps = [pre_tokenizers.Split(Regex(own), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    elif split in _SPLITS:
        expressions = _SPLITS[split]
        gpt2 = known["GPT-2"]
        steps = [pre_tokenizers.Split(Regex(gpt2 if x == "GPT-2" else x), "isolated") for x in expressions if x]
        steps.append(pre_tokenizers.ByteLevel(False, use_regex=not {"GPT-2", ""} & {*expressions}))
    else:
        raise _unknown(gguf)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(meta: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the BPE merges of a GGUF file, without those whose result is no token."""
    pairs = (merge[:1] + merge[1:].replace(" ", "\0", 1) for merge in meta["tokenizer.ggml.merges"])
    split = (pair.partition("\0")[::2] for pair in pairs)
    return [(a, b) for a, b in split if a in vocabulary and b in vocabulary and a + b in vocabulary]


def _known_splits() -> dict[str | None, str]:
    """Return the splitting rules of byte-level BPE that transformers knows, by llama.cpp's names, and GPT-2's rule."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise EnvironmentProblem(
            f"transformers cannot read tokenizers of GGUF files: {error}", "pip install --upgrade transformers"
        ) from error
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    splits: dict[str | None, str] = {"GPT-2": gpt2}
    splits.update(GGUF_PRE_TOKENIZER_SPLITS)
    return splits


def _sentencepiece(gguf: Gguf) -> Tokenizer:
    """Return a tokenizer of SentencePiece's BPE, which merges the pair whose token has the highest score."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    meta = gguf.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in meta:
        merges = _merges(meta, vocabulary)
    else:
        gemma = str(meta.get("general.architecture")).startswith("gemma")  # Gemma's scores are not in merge order
        scores = range(0, -len(tokens), -1) if gemma else meta["tokenizer.ggml.scores"]
        merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown])
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "\u2581")
    ends: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    # A space is put before a text and before the text after a special token, even if the text begins with a space.
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        ends.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _unknown(gguf: Gguf) -> UsageError:
    kind, split = (gguf.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    return UsageError(
        f"{gguf.file} has a tokenizer {kind!r} that splits text as {split!r} does, which is not known here",
        "set model.path to the checkpoint that the file was made of",
    )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
