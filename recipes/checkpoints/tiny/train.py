"""Train the tiny recall checkpoint in this folder: a two-layer Llama that looks up facts anywhere in its prompt.

The module `kvexport.evaluate.tiny_language` describes its language.

Training has two kinds of batch. *Copy* batches have rows of distinct names and things that repeat with a random period
per row. Predicting every repeated word forms induction heads. (Filler words are not among them, since no question asks
for one.) *Recall* batches have prompts of the language above, with one or many questions. At first there are only short
copy batches, until the model copies. Then both kinds alternate while rows grow to 1152 tokens, and the share of recall
batches grows. (Training recall from the first step fails: the model learns to name any thing of the prompt, and learns
nothing more.)

Importing this module needs kvexport and numpy; torch, transformers and tokenizers are imported by the functions that
use them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvexport.evaluate.tiny_language import (
    ASK,
    BOS,
    EOS,
    IDS,
    IGNORE,
    MAX_FACTS,
    NAME_IDS,
    PAD,
    SPECIALS,
    THING_IDS,
    WORDS,
    make_story,
    recall_row,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

FACT_IDS = np.concatenate([NAME_IDS, THING_IDS])
MAX_LENGTH = 2048


def copy_row(
    rng: np.random.Generator, length: int, tokens: NDArray[np.int64] = FACT_IDS
) -> tuple[list[int], list[int]]:
    """Return a training row of ``length`` ids and its labels.

    The row is ``<bos>`` and distinct ``tokens`` (names and things) repeated with a random period. Every word from the
    first repetition's second word on has a loss.
    """
    period = int(rng.integers(4, min(len(tokens), length // 2) + 1))
    words = rng.choice(tokens, size=period, replace=False)
    ids = [BOS, *np.resize(words, length - 1).tolist()]
    return ids, [IGNORE] * (period + 2) + ids[period + 2 :]


def build_tokenizer() -> Tokenizer:
    """Return the word-level tokenizer.

    It splits at white space, looks words up and puts ``<bos>`` in front. Decoding joins the words with spaces.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def build_model(seed: int, layers: int) -> LlamaForCausalLM:
    """Return a new Llama of hidden size 128 with 4 query heads over 2 key-value heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def row_length(rng: np.random.Generator, progress: float) -> int:
    """Return the row length of a batch at ``progress`` in [0, 1].

    It is up to 64 at first and up to 1152 from 50 % on. One time in three it is the longest.
    """
    longest = 64 * 18 ** min(1.0, progress / 0.5)
    shortest = longest if rng.random() < 1 / 3 else max(24.0, longest / 8)
    return 8 * round(math.exp(rng.uniform(math.log(shortest), math.log(longest))) / 8)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Return the learning rate: a linear warm-up to ``peak``, then a cosine to a twentieth of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    turn = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * turn)))


def train(model: LlamaForCausalLM, seed: int, steps: int, tokens: int, peak: float, log: list[dict[str, Any]]) -> None:
    """Train in place on batches of about ``tokens`` tokens, and append a record per 20 steps and task to ``log``."""
    import torch

    rng = np.random.default_rng(seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98))
    model.train()
    start, recent = time.perf_counter(), {"copy": [], "recall": []}
    formed = None  # the step from which copying worked
    for step in range(steps):
        progress = 0.0 if formed is None else (step - formed) / (steps - formed)
        task = "copy" if formed is None or rng.random() < max(0.1, 0.5 - progress) else "recall"
        length = row_length(rng, progress)
        make = copy_row if task == "copy" else recall_row
        rows = [make(rng, length) for _ in range(max(1, tokens // length))]
        ids = torch.tensor([row[0] for row in rows])  # [batch, length]
        labels = torch.tensor([row[1] for row in rows])[:, 1:]  # [batch, length - 1]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak, warmup=50)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [batch, length - 1, hidden]
        kept = labels != IGNORE
        logits = model.lm_head(hidden[kept])  # [kept, vocabulary]
        wanted = labels[kept]
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        judged = wanted != EOS
        accuracy = (logits.argmax(-1) == wanted)[judged].float().mean().item()
        if formed is None and accuracy >= 0.95:
            formed = step
        recent[task].append((loss.item(), accuracy))
        if (step + 1) % 20 == 0 or step + 1 == steps:
            for name, values in recent.items():
                if values:
                    mean_loss, mean_accuracy = np.mean(values, axis=0).tolist()
                    seconds = round(time.perf_counter() - start, 1)
                    record = {
                        "step": step + 1,
                        "task": name,
                        "loss": round(mean_loss, 4),
                        "accuracy": round(mean_accuracy, 4),
                    }
                    log.append({**record, "seconds": seconds})
                    print(json.dumps(log[-1]), flush=True)
                    values.clear()
    model.eval()


def make_prompt(rng: np.random.Generator, length: int, facts: int, depth: float | None = None) -> tuple[list[int], int]:
    """Return a prompt of exactly ``length`` token ids, ``<bos> ... ? NAME``, and the token id of the right answer.

    ``depth`` is the place of the fact that is asked for: 0 at the beginning, 1 right before the question.
    """
    story, pairs = make_story(rng, length - 3, facts, depth)
    name, thing = pairs[0]
    return [BOS, *story, ASK, name], thing


def recall(
    model: LlamaForCausalLM, length: int, facts: int, count: int = 200, seed: int = 1234, depth: float | None = None
) -> tuple[float, float]:
    """Return the fraction of ``count`` prompts answered rightly, and the mean loss of the answer, with a full cache."""
    import torch

    rng = np.random.default_rng([seed, length, facts])
    prompts, answers = zip(*(make_prompt(rng, length, facts, depth) for _ in range(count)), strict=True)
    wanted = torch.tensor(answers)
    batch = max(1, 16384 // length)
    with torch.inference_mode():
        logits = torch.cat(
            [
                model(torch.tensor(prompts[i : i + batch]), logits_to_keep=1).logits[:, -1]
                for i in range(0, count, batch)
            ]
        )
    loss = torch.nn.functional.cross_entropy(logits, wanted).item()
    return (logits.argmax(-1) == wanted).float().mean().item(), loss


def evaluate(
    model: LlamaForCausalLM, step: int, log: list[dict[str, Any]], lengths: tuple[int, ...], facts: tuple[int, ...]
) -> str:
    """Return recall by prompt length and number of facts as a Markdown table; append every cell to ``log`` too."""
    start = time.perf_counter()
    lines = ["| length | " + " | ".join(f"{n} facts" for n in facts) + " |", "|---:" * (1 + len(facts)) + "|"]
    for length in lengths:
        cells = []
        for number in facts:
            if number > min(MAX_FACTS, (length - 3) // 3):
                cells.append("-")
                continue
            accuracy, loss = recall(model, length, number)
            cells.append(f"{accuracy:.3f}")
            record = {
                "step": step,
                "task": f"eval length={length} facts={number}",
                "loss": round(loss, 4),
                "accuracy": round(accuracy, 4),
            }
            log.append({**record, "seconds": round(time.perf_counter() - start, 1)})
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ends_with_eos(model: LlamaForCausalLM, count: int = 32) -> float:
    """Return the fraction of prompts whose greedy continuation is the answer and then ``<eos>``."""
    import torch

    rng = np.random.default_rng(99)
    right = 0
    for _ in range(count):
        prompt, answer = make_prompt(rng, 256, 16)
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=4, do_sample=False
        )
        right += out[0, len(prompt) :].tolist() == [answer, EOS]
    return right / count


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, positions: int, out: Path) -> None:
    """Write model, generation settings and tokenizer to ``out``; a sequence has at most ``positions`` tokens."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": positions,
        "padding_side": "left",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train, save and evaluate."""
    parser = argparse.ArgumentParser(description="Train the tiny recall checkpoint.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent, help="folder to write the checkpoint to"
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    log: list[dict[str, Any]] = []
    model = build_model(args.seed, args.layers)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(WORDS)} words")
    train(model, args.seed, args.steps, args.tokens, args.lr, log)
    save(model, build_tokenizer(), MAX_LENGTH, args.out)
    print(evaluate(model, args.steps, log, lengths=(64, 128, 256, 512, 1024, 1536), facts=(1, 4, 16, 64, 128)))
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        print(f"length 512, 16 facts, depth {depth}: {recall(model, 512, 16, depth=depth)[0]:.3f}")
    print(f"answer followed by <eos>: {ends_with_eos(model):.3f}")


if __name__ == "__main__":
    main()
