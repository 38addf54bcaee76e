"""Tokenizers and end tokens of GGUF files: the ids are llama.cpp's and sentencepiece's, where these packages are."""

import json
import urllib.request
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.speed.grammars import SMALL
from kvexport.errors import UsageError
from kvexport.export.model.gguf import read_gguf
from kvexport.export.model.gguf_model import write_texts
from kvexport.language.chat import read_chat_template, read_json
from kvexport.language.settings import GenerationSettings
from kvexport.language.tokenizer import Tokenizer
from tests.support.gguf_files import decoder

TEXTS = (
    "hello world", " hello", "  two  spaces", "", "say xyzzyq now", "xyzzyq", "the <|im_end|> end",
    "<tool>hello <tool> x", "year 20261129, $5.00!!  two  spaces\n\n\ttab",
    "e\u0301 na\u00efve \u4f60\u597d \U0001f600", "don't WE'LL x+=1;\n",
    "trailing ", "\n", "hello<|im_end|>\n<|im_start|>user\n hi", "a<unk>b", "\u2581x",
)  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 512,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def written(file: Path, tokens: list[str], **tokenizer: Any) -> Path:
    """Write a tiny random Llama with these tokens; values of None are left out of the metadata."""
    rng = np.random.default_rng(0)
    sizes = {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 64), "mlp.up_proj": (64, 64), "mlp.down_proj": (64, 64),
        "input_layernorm": (64,), "post_attention_layernorm": (64,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (len(tokens), 64), "model.norm": (64,), "lm_head": (len(tokens), 64)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in sizes.items()}
    weights = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    more = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    more = {"llama.rope.dimension_count": 16, "llama.vocab_size": len(tokens), **more}
    data, _ = decoder(CONFIG, weights, tokens, **more)
    file.write_bytes(data)
    return file


def texts_of(file: Path) -> Path:
    folder = file.with_suffix("")
    folder.mkdir()
    write_texts(read_gguf(file), folder)
    return folder


def byte_level(folder: Path, pre: str | None, **more: Any) -> Path:
    """Write a file with the small tokenizer of 4096 tokens, some of them special ones or a word without merges."""
    model = read_json(SMALL / "tokenizer.json")["model"]
    tokens = list(model["vocab"])
    renamed = {4095: "\u0120xyzzyq", 4094: "xyzzyq", 4093: "<|im_end|>", 4092: "<|im_start|>", 4091: "<tool>"}
    gone = {tokens[i] for i in renamed}
    merges = [merge for merge in model["merges"] if not {*merge, "".join(merge)} & gone]
    for i, token in renamed.items():
        tokens[i] = token
    types = [2, 3, 3, 3, *[1] * 4087, 4, 3, 3, 1, 1]
    return written(
        folder / "model.gguf",
        tokens,
        pre=pre,
        merges=[" ".join(merge) for merge in merges],
        token_type=types,
        bos_token_id=1,
        eos_token_id=2,
        **{"add_bos_token": None, **more},
    )


def sentencepiece_file(folder: Path, **more: Any) -> Path:
    tokens, scores, types = pieces(folder)
    return written(
        folder / "model.gguf",
        tokens,
        **{
            "model": "llama",
            "pre": None,
            "merges": None,
            "scores": scores,
            "token_type": types,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            "add_bos_token": None,
            **more,
        },
    )


def pieces(folder: Path) -> tuple[list[str], list[float], list[int]]:
    """Return tokens, scores and types of a sentencepiece model, as convert_hf_to_gguf.py writes them."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="not reached: pip install sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        input=__file__, model_prefix=str(folder / "spm"), model_type="bpe", vocab_size=700, byte_fallback=True,
        character_coverage=0.99, user_defined_symbols=["<tool>"], normalization_rule_name="identity",
        control_symbols=["<|im_start|>", "<|im_end|>", "<|endoftext|>"], remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(str(folder / "spm.model"))
    count = range(model.get_piece_size())
    user_defined = [model.id_to_piece(i) == "<tool>" for i in count]
    types = [
        2
        if model.is_unknown(i)
        else 3
        if model.is_control(i)
        else 6
        if model.is_byte(i)
        else 4
        if user_defined[i]
        else 1
        for i in count
    ]
    return [model.id_to_piece(i) for i in count], [model.get_score(i) for i in count], types


def llama_cpp(file: Path) -> Callable[[str], list[int]]:
    module = pytest.importorskip("xllamacpp", reason="not reached: pip install xllamacpp")
    parameters = module.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = parameters.n_parallel = 1
    parameters.port, parameters.warmup = 0, False
    server = module.Server(parameters)

    def tokenize(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.listening_address.rstrip('/')}/tokenize", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return list(json.loads(answer.read())["tokens"])

    return tokenize


@pytest.mark.parametrize(
    "pre",
    [
        *("llama-bpe", "tekken", "qwen2", "gpt-2", "smollm", "glm4", "stablelm2", "default", None),
        *("deepseek-llm", "deepseek-coder", "deepseek-v3"),
    ],
)
def test_ids_of_byte_level_files_are_those_of_llama_cpp(tmp_path: Path, pre: str | None) -> None:
    file = byte_level(tmp_path, pre)
    tokenizer, tokenize = Tokenizer.from_folder(texts_of(file)), llama_cpp(file)
    assert {text: tokenizer.encode(text) for text in TEXTS} == {text: tokenize(text) for text in TEXTS}


@pytest.mark.parametrize("more", [{}, {"add_space_prefix": True}, {"add_space_prefix": False}, {"add_eos_token": True},
                                  {"add_bos_token": False}, {"general.name": "Phi-3 mini"}], ids=str)  # fmt: skip
def test_ids_of_sentencepiece_files_are_those_of_llama_cpp(tmp_path: Path, more: dict[str, Any]) -> None:
    file = sentencepiece_file(tmp_path, **more)
    tokenizer, tokenize = Tokenizer.from_folder(texts_of(file)), llama_cpp(file)
    assert {text: tokenizer.encode(text) for text in TEXTS} == {text: tokenize(text) for text in TEXTS}


def test_ids_of_a_gemma_4_file_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Gemma 4's files have the merges of a sentencepiece model, and no scores that say their order."""
    from transformers.tokenization_utils_base import generate_merges

    tokens, scores, _ = pieces(tmp_path)
    merges = generate_merges({token: i for i, token in enumerate(tokens)}, dict(zip(tokens, scores, strict=True)))
    more = {"model": "gemma4", "merges": [" ".join(pair) for pair in merges], "add_space_prefix": False}
    file = sentencepiece_file(tmp_path, **more, add_bos_token=True)
    tokenizer, tokenize = Tokenizer.from_folder(texts_of(file)), llama_cpp(file)
    assert {text: tokenizer.encode(text) for text in TEXTS} == {text: tokenize(text) for text in TEXTS}


def test_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    file = sentencepiece_file(tmp_path)
    tokenizer = Tokenizer.from_folder(texts_of(file))
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "spm.model"))
    plain = [text for text in TEXTS if text and "<" not in text]
    assert len(plain) > 8
    for text in plain:
        ids = tokenizer.encode(text)
        assert ids == [1, *model.encode(text)]
        assert tokenizer.decode(ids) == model.decode(ids) == text.replace("\u2581", " ")


def test_a_first_token_and_whole_words_depend_on_the_splitting_rule(tmp_path: Path) -> None:
    for pre, add_bos, first, whole in (
        ("llama-bpe", None, [1], True),
        ("tekken", None, [1], True),
        ("llama-bpe", False, [], True),
        ("qwen2", None, [], False),
        ("qwen2", True, [1], False),
    ):
        folder = tmp_path / f"{pre}-{add_bos}"
        folder.mkdir()
        tokenizer = Tokenizer.from_folder(texts_of(byte_level(folder, pre, add_bos_token=add_bos)))
        assert (tokenizer.encode("xyzzyq") == [*first, 4094]) is whole
        assert tokenizer.encode("")[:1] == first
        assert tokenizer.encode("<|im_end|>") == [*first, 4093]


@pytest.mark.parametrize(
    ("tokens", "more", "ends"),
    [
        ({10: "<|im_end|>"}, {"eos_token_id": 9}, {9, 10}),
        ({9: "<|endoftext|>", 10: "<|im_end|>"}, {"eos_token_id": 9}, {9, 10}),
        ({10: "<end_of_turn>"}, {"eot_token_id": 12}, {2, 10, 12}),
        ({}, {"eot_token_id": 12, "eom_token_id": 13}, {2, 12, 13}),
        ({10: "<|end|>"}, {}, {2, 10}),
        ({10: "<|end|>", 11: "<|return|>", 12: "<|call|>"}, {}, {2, 11, 12}),
        ({10: "</s>", 11: "<|tool_response>"}, {}, {2, 11}),
    ],
    ids=str,
)
def test_an_answer_ends_where_llama_cpp_ends_it(
    tmp_path: Path, tokens: dict[int, str], more: dict[str, int], ends: set[int]
) -> None:
    names = [tokens.get(i, f"t{i}") for i in range(64)]
    ids = {"eos_token_id": 2, **more}
    file = written(tmp_path / "model.gguf", names, token_type=None, bos_token_id=None, add_bos_token=None, **ids)
    folder = texts_of(file)
    settings = GenerationSettings.from_generation_config(read_json(folder / "generation_config.json"))
    assert set(settings.eos_token_ids) == ends
    assert {*tokens} & ends <= Tokenizer.from_folder(folder).special_ids


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
    ],
    ids=str,
)
def test_rotary_positions_are_scaled_as_in_llama_cpp(
    tmp_path: Path, metadata: dict[str, Any], rope: dict[str, Any]
) -> None:
    file = byte_level(tmp_path, "qwen2", **{f"llama.{key}": value for key, value in metadata.items()})
    config = read_json(texts_of(file) / "config.json")
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **rope}


def test_a_template_for_tools_is_kept(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools | length }} tools"}
    template = read_chat_template(texts_of(byte_level(tmp_path, "qwen2", **templates)))
    message = [{"role": "user", "content": "x"}]
    assert [template.render(message, tools) for tools in (None, [{}])] == ["plain", "1 tools"]


@pytest.mark.parametrize(("model", "pre"), product(("gpt2", "bert"), ("unheard",)))
def test_an_unknown_kind_of_tokenizer_is_named(tmp_path: Path, model: str, pre: str) -> None:
    with pytest.raises(UsageError, match=f"tokenizer '{model}' that splits text as 'unheard' does"):
        texts_of(byte_level(tmp_path, pre, model=model))
