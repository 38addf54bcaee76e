"""Added tokens that a checkpoint stores outside tokenizer.json, written into tokenizer.json as transformers reads them.

These tokens are in tokenizer_config.json (`added_tokens_decoder` and named special tokens such as `eos_token`) or in
the older files added_tokens.json and special_tokens_map.json. The setting `add_bos_token` has no effect for a
checkpoint that has a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.errors import UsageError
from kvexport.language.chat import CONFIG, SPECIAL, read_json
from kvexport.language.tokenizer import FILE_NAME

if TYPE_CHECKING:
    import tokenizers

OLDER = "added_tokens.json"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def complete_tokenizer(folder: Path, older: Mapping[str, Any]) -> None:
    """Add the added tokens that `folder`/tokenizer.json lacks; leave the file unchanged if it lacks none."""
    import tokenizers

    config = read_json(folder / CONFIG)
    inner = tokenizers.Tokenizer.from_file(str(folder / FILE_NAME))
    if not isinstance(numbered := config.get("added_tokens_decoder"), Mapping):
        config = {**read_json(folder / SPECIAL), **config}
        names = {token["content"] for token in _special(config)}
        numbered = {
            str(i): {"content": text, "special": text in names, "normalized": text not in names}
            for text, i in older.items()
        }
    try:
        tokens = {int(i): token for i, token in numbered.items()}
        changed = _add(inner, [tokens[i] for i in sorted(tokens)])
        for i, token in tokens.items():
            if inner.token_to_id(token["content"]) != i:
                raise ValueError(f"the token {token['content'][:40]!r} cannot get the id {i}")
        known = {token.content for token in inner.get_added_tokens_decoder().values()}
        changed |= _add(inner, [token for token in _special(config) if token["content"] not in known])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = error if isinstance(error, ValueError) else f"an entry is malformed: {error!r}"
        raise UsageError(f"the added tokens of {folder} do not fit {FILE_NAME}: {problem}") from error
    if changed:
        inner.save(str(folder / FILE_NAME))


def _special(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    tokens = [config.get(name) for name in _NAMED]
    for name in _LISTED:
        listed = config.get(name) or []
        tokens += listed.values() if isinstance(listed, Mapping) else listed
    for token in tokens:
        if token:
            yield {
                "normalized": False,
                **(token if isinstance(token, Mapping) else {"content": token}),
                "special": True,
            }


def _add(inner: tokenizers.Tokenizer, tokens: list[dict[str, Any]]) -> bool:
    from tokenizers import AddedToken

    before = {repr(token) for token in inner.get_added_tokens_decoder().values()}
    added = [AddedToken(x["content"], **{flag: x[flag] for flag in _FLAGS if flag in x}) for x in tokens]
    lacking = [token for token in added if repr(token) not in before]
    inner.add_tokens(lacking)
    return bool(lacking)
