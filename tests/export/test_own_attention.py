"""Older decoders, which compute attention in their own code: the logits equal Hugging Face's, with ALiBi too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf

from kvexport.engine.engine import Engine
from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build, read_model
from kvexport.export.hooks.own_attention import OWN, POSITION_SIZE, POSITION_UNIT
from kvexport.plan.cache import stored_rows
from tests.support import models

WINDOW = 24
TOKENS = {"vocab_size": 100, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
SIZES = {**TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
CONFIGS: dict[str, Any] = {
    # Slopes of six heads are no powers of two alone.
    "bloom": lambda: hf.BloomConfig(**TOKENS, hidden_size=96, n_layer=2, n_head=6),
    "codegen": lambda: hf.CodeGenConfig(**GPT, rotary_dim=8),
    "falcon": lambda: hf.FalconConfig(**SIZES),
    "falcon with KV heads": lambda: hf.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon with ALiBi": lambda: hf.FalconConfig(
        **TOKENS, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, alibi=True, multi_query=False, bias=True,
        parallel_attn=False, max_position_embeddings=4096,
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        **TOKENS, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=WINDOW, max_position_embeddings=512,
    ),
    "gpt_neox_japanese": lambda: hf.GPTNeoXJapaneseConfig(**SIZES),
    "gptj": lambda: hf.GPTJConfig(**GPT, rotary_dim=8),
    "mpt": lambda: hf.MptConfig(**TOKENS, d_model=64, n_layers=2, n_heads=4, attn_config={"clip_qkv": 1.0}),
    "openai-gpt": lambda: hf.OpenAIGPTConfig(**GPT),
    "xglm": lambda: hf.XGLMConfig(
        **{**TOKENS, "pad_token_id": 1}, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4,
        max_position_embeddings=512,
    ),
}  # fmt: skip
LONG = 2500  # more positions than float16 and bfloat16 tell apart


def engine_of(folder: Path, name: str, length: int = 160, dtype: str = "float32", **cache: Any) -> Engine:
    checkpoint = models.save_checkpoint(folder / "checkpoint", CONFIGS[name]())
    cache = cache or {"method": "full", "budget": 1.0}
    export = {"logits": "all", "prefill_chunk": min(length // 4, 500)}
    recipe = models.make_recipe(checkpoint, dtype=dtype, cache=cache, export=export, limits={"max_length": length})
    return load(build(recipe, folder / "artifact"))


def test_every_type_is_tested() -> None:
    assert {name.partition(" ")[0] for name in CONFIGS} == OWN.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_transformers_in_ragged_batches(name: str, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, name)
    heads = {"falcon": 1, "falcon with KV heads": 2, "falcon with ALiBi": 6, "bloom": 6}.get(name, 4)
    assert {x.kv_heads for x in engine.plan.caches} == {heads}
    assert [x.sliding_window for x in engine.plan.caches] == ([0, WINDOW] if name == "gpt_neo" else [0, 0])
    more = POSITION_SIZE if name in ("bloom", "mpt", "falcon with ALiBi") else 0
    assert {x.key_size - x.value_size for x in engine.plan.caches} == {more}
    models.assert_logits_of_transformers(engine, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("name", "dtype", "allowed"), [("falcon with ALiBi", "float32", 5e-5), ("bloom", "float16", 4e-3)]
)
def test_positions_of_long_texts_are_exact(name: str, dtype: str, allowed: float, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, name, LONG + 4, dtype)
    ids = models.random_ids(0, LONG)
    (right,) = models.hugging_face_logits(tmp_path / "checkpoint", ids)
    (actual,) = models.given_tokens_logits(engine, ids, (LONG - 4,))
    assert np.abs(actual - right).max() <= allowed * np.abs(right).max()


def test_a_merged_key_has_the_mean_position_of_its_tokens(tmp_path: Path) -> None:
    # With `running_mean`, every key is the mean of the keys of its tokens, and a slot has a vote for each of them.
    engine = engine_of(tmp_path, "mpt", method="zeromerge", budget=16, sinks=2, recent=4, merge_every=4)
    lanes, (ids,) = engine.lanes(1), models.random_ids(1, 100)
    for first in range(0, 100, 20):
        lanes.append([ids[first : first + 20]], prefill=True)
    for i, cache in enumerate(engine.plan.caches):
        names = (f"past_key_values.{i}.{name}" for name in ("key", "votes"))
        key, votes = (lanes.state.state[name][0].reshape(cache.kv_heads, cache.capacity[0], -1) for name in names)
        places = stored_rows(key, None)[..., -POSITION_SIZE:].sum(-1) / POSITION_UNIT
        assert np.allclose((votes[..., 0] * places).sum(-1), sum(range(100)), rtol=1e-5)
        assert votes.max() > 3


def test_caches_that_cannot_keep_positions_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", CONFIGS["bloom"]())
    for cache, reason in (
        ({"dtype": "int8"}, "which would round the positions that the keys of layer 0 contain (ALiBi)"),
        ({"positions": "cache"}, "no layer rotates keys"),
    ):
        recipe = models.make_recipe(checkpoint, cache={"budget": 32, **cache}, limits={"max_length": 64})
        with pytest.raises(UsageError) as caught:
            read_model(recipe)
        assert reason in caught.value.problem and caught.value.fix
