"""Tests of tokens and settings beside tokenizer.json: an artifact's tokenizer gives transformers' ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from benchmarks.speed.grammars import SMALL
from kvexport.errors import UsageError
from kvexport.export.added_tokens import complete_tokenizer
from kvexport.language.chat import read_json
from kvexport.language.tokenizer import Tokenizer

TEXT = "<|tool|>hello <|x|> world <sep> </s>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copyfile(SMALL / "tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path


def token(text: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": text, **plain, **flags}


NUMBERED = {"4096": token("<|tool|>"), "4097": token("<|x|>", special=False)}
TOKENIZER_CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "numbered tokens": {"added_tokens_decoder": NUMBERED},
    "a token that is in the vocabulary": {"added_tokens_decoder": {"300": token("NAME OF 300")}},
    "a token that takes the space beside it": {"added_tokens_decoder": {"4096": token("<|x|>", lstrip=True)}},
    "named tokens": {"eos_token": "</s>", "additional_special_tokens": ["<|tool|>", "<sep>"]},
    "a named token with flags": {"sep_token": {"__type": "AddedToken", **token("<|x|>", rstrip=True)}},
    "named tokens by name": {"extra_special_tokens": {"image_token": "<|tool|>"}},
    "a BOS": {"add_bos_token": True, "bos_token": "<|tool|>"},
    "no BOS": {"add_bos_token": False, "bos_token": "<|tool|>"},
}


def ids_that_agree(folder: Path, older: dict[str, Any] | None = None) -> list[int]:
    """Return transformers' ids of TEXT, which are those of the completed tokenizer."""
    expected = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    complete_tokenizer(folder, older or {})
    assert Tokenizer.from_folder(folder).encode(TEXT) == expected
    return list(expected)


@pytest.mark.parametrize("name", TOKENIZER_CONFIGS)
def test_ids_are_those_of_transformers(folder: Path, name: str) -> None:
    plain = Tokenizer.from_folder(folder).encode(TEXT)
    config = json.dumps(TOKENIZER_CONFIGS[name]).replace("NAME OF 300", name_of(folder, 300))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **json.loads(config)})
    )
    assert (ids_that_agree(folder) != plain) is ("tool" in config or "<|x|>" in config)


def name_of(folder: Path, token_id: int) -> str:
    return str(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(token_id))


def test_older_files_are_read(folder: Path) -> None:
    older = {"<|tool|>": 4096, "<|x|>": 4097}
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "sep_token": "<|x|>"}))
    (folder / "added_tokens.json").write_text(json.dumps(older))
    assert {4096, 4097} < {*ids_that_agree(folder, older)}
    assert 4097 in Tokenizer.from_folder(folder).special_ids
    assert 4096 not in Tokenizer.from_folder(folder).special_ids


def test_a_tokenizer_that_lacks_nothing_stays_as_it_is(folder: Path) -> None:
    added = read_json(folder / "tokenizer.json")["added_tokens"]
    numbered = {str(x["id"]): {key: value for key, value in x.items() if key != "id"} for x in added}
    config = {"added_tokens_decoder": numbered, "eos_token": added[-1]["content"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    before = (folder / "tokenizer.json").read_bytes()
    complete_tokenizer(folder, {})
    assert (folder / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(("numbered", "problem"), [
    ({"5000": token("<|x|>")}, "'<|x|>' cannot get the id 5000"), ({"one": token("<|x|>")}, "invalid literal"),
    ({"4096": "text"}, "malformed"), ({"4096": {"content": 3}}, "malformed"),
])  # fmt: skip
def test_added_tokens_that_do_not_fit_are_refused(folder: Path, numbered: dict[str, Any], problem: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": numbered}))
    with pytest.raises(UsageError, match=r"added tokens of .* do not fit") as caught:
        complete_tokenizer(folder, {})
    assert problem in caught.value.problem
