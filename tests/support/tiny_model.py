"""The tiny random Llama of `conftest.py`: its alphabet with one token per character, its recipe, and prompts for it."""

import string
from pathlib import Path
from typing import Any

ALPHABET = string.ascii_letters + string.digits + " ."
RECIPE = {
    "description": "A random Llama",
    "model": {"path": "./checkpoint"},
    "cache": {"method": "keepkv", "budget": 32, "merge_every": 4},
    "export": {"prefill_chunk": 16},
    "limits": {"max_length": 512, "max_batch": 4},
}
PROMPTS = [list(range(1, 46)), list(range(5, 12)), [3]]


def generated(engine: Any, count: int = 40) -> list[list[int]]:
    """Return an engine's answers to PROMPTS, a ragged batch that goes far beyond the budget of 32 slots."""
    return [completion.token_ids for completion in engine.generate(PROMPTS, max_new_tokens=count)]


def make_checkpoint(folder: Path) -> Path:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(ALPHABET)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_artifact(folder: Path) -> Path:
    """Build an artifact of the tiny Llama, for programs that are not tests."""
    import kvexport
    from kvexport.recipe.fields import Recipe

    make_checkpoint(folder / "checkpoint")
    recipe = {**RECIPE, "model": {"path": str(folder / "checkpoint")}}
    return kvexport.build(Recipe.model_validate(recipe), folder / "artifact")
