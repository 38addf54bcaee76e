"""Train the tiny recall checkpoint in this folder: a two-layer Llama that looks up facts anywhere in its prompt.

The language is made of words. A *fact* reads ``anna lamp .`` (a name, a thing, a full stop), a *filler* sentence is a
few common words and a full stop, and a prompt is::

    <bos> facts and filler sentences in random order ? anna

Its answer is the one token ``lamp``, followed by ``<eos>``. Names are distinct within a prompt, and so are things, so
that exactly one answer is right. The answer stands only in the prompt, so the checkpoint shows directly which entries a
KV cache still holds.

Training has two kinds of batch. *Copy* batches have rows of distinct names and things that repeat with a random period
per row. Predicting every repeated word forms induction heads. (Filler words are not among them, since no question asks
for one.) *Recall* batches have prompts of the language above, with one or many questions. At first there are only short
copy batches, until the model copies. Then both kinds alternate while rows grow to 1152 tokens, and the share of recall
batches grows. (Training recall from the first step fails: the model learns to name any thing of the prompt, and learns
nothing more.)

Importing this module needs numpy alone; torch, transformers and tokenizers are imported by the functions that use them.
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

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

SPECIALS = ("<unk>", "<bos>", "<eos>", "<pad>")
MARKS = (".", "?")
NAMES = tuple(
    """
    adam agnes alan alice amir anders anna anton arthur astrid aziz barbara basil beatrice ben bertha bob boris bruno
    carla carlos cecil chloe clara colin conrad cyrus daisy daniel david delia dennis diana dora doris edgar edith elena
    elias emil emma eric ernest esther eva felix fiona flora frank fred freya gavin george gina gloria greta gustav
    hanna harold hector helen henry hilda hugo ida igor ines ingrid irene isaac ivan jacob jane jasper joan jonas judith
    julia karim karl kate kevin kira lars laura leo leila lena linus louis lucy luke mabel magnus maria martin maya
    miles mina mona nadia nathan nina noah nora olga oliver omar oscar otto paula pedro peter petra philip quentin
    rachel ralph rita robert rosa ruth samuel sara simon theo tom wanda
    """.split()
)
THINGS = tuple(
    """
    anchor apple arrow axe bag ball banjo barrel basket bell belt bench bicycle blanket boat book boot bottle bowl box
    bracelet bread brick broom brush bucket button cabinet camera candle candy carpet cart chain chair cheese clock coat
    coin comb compass cup curtain desk dice dish doll door dress drum easel egg engine fan feather fence flag flute fork
    garlic glove guitar hammer harp hat helmet hook horn hose jacket jar jug kettle key kite knife ladder lamp lantern
    lemon letter lock magnet map mask medal mirror mitten mug nail necklace needle net oar onion orange oven paddle
    paint pan paper pear pearl pen pencil pepper piano pillow pipe plate plum pocket potato pump purse puzzle quilt
    radio rake ribbon ring rope ruler saddle scarf spoon stool table
    """.split()
)
FILLER = tuple(
    """
    the a and but then when while there here this that these those some many few every other same old new long short
    small large quiet slow early late again often always never soon once now today later under over near far along
    across behind before after around between with without from into it they was were went came seemed stayed
    """.split()
)
WORDS = SPECIALS + MARKS + NAMES + THINGS + FILLER
"""The vocabulary; the id of a word is its index."""

IDS = {word: index for index, word in enumerate(WORDS)}
UNK, BOS, EOS, PAD, STOP, ASK = (IDS[word] for word in SPECIALS + MARKS)
NAME_IDS = np.array([IDS[word] for word in NAMES])
THING_IDS = np.array([IDS[word] for word in THINGS])
FILLER_IDS = np.array([IDS[word] for word in FILLER])
FACT_IDS = np.concatenate([NAME_IDS, THING_IDS])

MAX_FACTS = min(len(NAMES), len(THINGS))
MAX_LENGTH = 2048
IGNORE = -100
"""Label of a position without a loss."""


def filler_sentences(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Return filler sentences of exactly ``count`` tokens in all.

    Each sentence has two to eight words and a full stop; it has fewer words if no more fit.
    """
    words = rng.choice(FILLER_IDS, size=count).tolist()
    sentences, start = [], 0
    for size in rng.integers(3, 10, size=count // 3 + 1).tolist():
        end = min(start + size, count)
        if count - end < 3:
            end = min(count, start + 9) if count - start <= 9 else count - 3
        if start == end:
            break
        sentences.append([*words[start : end - 1], STOP])
        start = end
    return sentences


def make_story(
    rng: np.random.Generator, length: int, facts: int, depth: float | None = None
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ``length`` tokens of facts among filler sentences, and the facts as (name, thing) pairs in random order.

    With ``depth`` the first pair stands at that fraction of the story's sentences (0 first, 1 last), else anywhere.
    """
    if not 1 <= facts <= MAX_FACTS or 3 * facts > length:
        raise ValueError(f"{facts} facts do not fit {length} tokens (at most {min(MAX_FACTS, length // 3)})")
    names = rng.choice(NAME_IDS, size=facts, replace=False).tolist()
    things = rng.choice(THING_IDS, size=facts, replace=False).tolist()
    pairs = list(zip(names, things, strict=True))
    sentences = [[name, thing, STOP] for name, thing in pairs[1:]] + filler_sentences(rng, length - 3 * facts)
    rng.shuffle(sentences)
    place = int(rng.integers(len(sentences) + 1)) if depth is None else round(depth * len(sentences))
    sentences.insert(place, [*pairs[0], STOP])
    return [token for sentence in sentences for token in sentence], pairs


def make_prompt(rng: np.random.Generator, length: int, facts: int, depth: float | None = None) -> tuple[list[int], int]:
    """Return a prompt of exactly ``length`` token ids, ``<bos> ... ? NAME``, and the id of its answer.

    Args:
        rng: The source of randomness.
        length: The number of token ids.
        facts: The number of facts, at most ``min(MAX_FACTS, (length - 3) // 3)``; the rest is filler.
        depth: The place of the fact that the question asks for: 0 puts it first, 1 right before the question, None
            anywhere.
    """
    story, pairs = make_story(rng, length - 3, facts, depth)
    name, thing = pairs[0]
    return [BOS, *story, ASK, name], thing


def decode(ids: list[int]) -> str:
    """Return the words of ``ids``, separated by spaces."""
    return " ".join(WORDS[index] for index in ids)


def recall_row(rng: np.random.Generator, length: int) -> tuple[list[int], list[int]]:
    """Return a training row of ``length`` ids and its labels, aligned with the ids.

    The row is ``<bos> story ? NAME THING ? NAME THING ... <eos>``. Only the answers and the final ``<eos>`` have a
    loss. The question marks between two questions have none, so that the model generates one answer and then ``<eos>``.
    """
    most = min(MAX_FACTS, (length - 5) // 3)
    facts = max(1, round(math.exp(rng.uniform(0, math.log(most)))))
    room = (length - 2 - 3 * facts) // 3
    questions = max(1, min(facts, room, int(rng.integers(1 + length // 8))))
    story, pairs = make_story(rng, length - 2 - 3 * questions, facts)
    ids, labels = [BOS, *story], [IGNORE] * (1 + len(story))
    for name, thing in pairs[:questions]:
        ids += [ASK, name, thing]
        labels += [IGNORE, IGNORE, thing]
    return [*ids, EOS], [*labels, EOS]


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
