"""Train the small checkpoint in this folder: a six-layer Llama of Python source that also recalls facts of its context.

A *document* consists of lines of the standard library's own source. *Statements* stand among them at random places, and
*questions* with their answers at the end. Modules held out by `kvexport.evaluate.corpus` are never trained on::

    # anna lamp               anna has one value
    # ben anna                ben has whatever anna has
    ...
    # anna lamp               an answer repeats the stated value
    # ben anna lamp           and spells a chain out to its end
    # every carla harp, oven  all values of carla, in order
    # mostly david stool      the value that was stated most often
    # count david 4           the number of statements about david

Names and values are the tiny checkpoint's words; each is one token.  Only the document contains the answers.

Training has three kinds of batch.  *Copy* batches hold rows of distinct tokens repeated with a random period per row.
At first all batches are short copy batches of names and values, until the model copies: this forms induction heads.
Then *code* batches (source alone) and *recall* batches (documents, whose source counts towards the loss too) alternate
with copy batches, in rows of up to 1024 tokens.

EARLY, MIXED, AGAIN, PLAIN and DENSE are the steps at which a failing run was corrected; the README describes the
failures.

Every batch depends only on the seed, the step and the step at which copying worked. The learning rate depends on the
number of steps only in the last quarter. So a run can be stopped and resumed from its state file at any step.

Importing this module needs numpy alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from documents import (
    HERE,
    MAX_LENGTH,
    VOCABULARY,
    Data,
    code_row,
    copy_row,
    load_data,
    recall_row,
    tiny,
)

from kvexport.evaluate.tiny_language import BOS, EOS, IGNORE, PAD

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

COPY, CODE, RECALL = "copy", "code", "recall"
# From this step on names and values are copied again: 300 steps without copying had undone it, and recall did not
# progress beyond single facts
MIXED = 1018
AGAIN = 1124  # from this step on copying comes first again, until it works: it came back too slowly
# From this step on a value follows its name directly: behind a colon the model found some value of the document, but
# not the value of this name
PLAIN = 1380
DENSE = 1535  # from this step on most documents have no source: they teach first which value belongs to whom
# From this step on the learning rate is a third of the first one: at the first rate the loss of copying stagnated, and
# it fell at once
EARLY = 337


def build_model(seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised Llama of hidden size 256 with 4 query heads over 2 key-value heads of size 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def batch_at(
    data: Data, seed: int, step: int, formed: int | None, tokens: int
) -> tuple[str, list[tuple[list[int], list[int]]]]:
    """Return the kind of a step's batch, and its rows. `formed` is the step at which copying worked, or None."""
    rng = np.random.default_rng([seed, step])
    if formed is None:
        if step > AGAIN and rng.random() < 0.2:
            return CODE, [code_row(data, rng, 512, data.train) for _ in range(tokens // 512)]
        length = int(rng.choice([32, 48, 64]))
        return COPY, [copy_row(rng, length, data.words) for _ in range(tokens // length)]
    if step < MIXED:
        since = step - formed
        longest = 256 if since < 150 else 512 if since < 350 else MAX_LENGTH
        length = longest if rng.random() < 0.6 else longest // 2
        kind = str(rng.choice([COPY, CODE, RECALL], p=[0.06, 0.34, 0.6]))
        pool, dense = np.arange(4, VOCABULARY), 0.0
    else:
        kind = str(rng.choice([COPY, CODE, RECALL], p=[0.3, 0.2, 0.5]))
        lengths = {
            COPY: [48, 64, 128, 256] if step >= AGAIN else [64, 128, 256],
            CODE: [512, MAX_LENGTH],
            RECALL: [128, 256, 512, MAX_LENGTH],
        }
        length = int(rng.choice(lengths[kind]))
        pool, dense = data.words, 0.4 if step < DENSE else 0.8
    if kind == COPY:
        return kind, [copy_row(rng, length, pool) for _ in range(tokens // length)]
    if kind == CODE:
        return kind, [code_row(data, rng, length, data.train) for _ in range(tokens // length)]
    marks = ("", "") if step >= PLAIN else (":", " is")
    return kind, [recall_row(data, rng, length, data.train, dense, marks) for _ in range(tokens // length)]


def learning_rate(step: int, steps: int, peak: float, warmup: int = 60) -> float:
    """Return the learning rate of a step.

    It warms up linearly to three times `peak`, is `peak` from step EARLY on, and falls linearly to zero over the last
    quarter.
    """
    rate = 3 * peak * min(1.0, (step + 1) / warmup) if step < EARLY else peak
    return rate * min(1.0, max(0.02, (steps - step) / (steps / 4)))


def optimizers(model: LlamaForCausalLM) -> list[Any]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings and norms.

    Both take learning rates of AdamW's scale.
    """
    import torch

    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    outer = [p for p in model.parameters() if all(p is not q for q in inner)]
    return [
        torch.optim.Muon(inner, lr=1.0, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def losses(model: LlamaForCausalLM, rows: list[tuple[list[int], list[int]]]) -> dict[str, tuple[Any, Any]]:
    """Return (mean cross-entropy in nats, accuracy) of a batch, as tensors, for "source" and for "answer"."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = torch.tensor([row[0] for row in rows])  # [batch, length]
    labels = torch.tensor([row[1] for row in rows])[:, 1:]  # [batch, length - 1]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [batch, length - 1, hidden]
        kept = labels != IGNORE
        logits = model.lm_head(hidden[kept]).float()  # [kept, vocabulary]
    targets = labels[kept]
    each = cross_entropy(logits, targets % VOCABULARY, reduction="none")
    right = (logits.argmax(-1) == targets % VOCABULARY).float()
    parts = {"source": targets < VOCABULARY, "answer": targets >= VOCABULARY}
    return {name: (each[part].mean(), right[part].mean()) for name, part in parts.items() if part.any()}


def measure(model: LlamaForCausalLM, data: Data, rows: int) -> dict[str, Any]:
    """Measure the model at the training length with a full cache."""
    import torch

    rng = np.random.default_rng(1234)
    model.eval()
    with torch.inference_mode():
        code = [code_row(data, rng, MAX_LENGTH, data.held_out) for _ in range(rows)]
        nats = float(np.mean([losses(model, [row])["source"][0].item() for row in code]))
        size = sum(len(data.tokenizer.decode(ids).encode()) for ids, _ in code) / sum(len(ids) - 1 for ids, _ in code)
        counts: dict[str, list[bool]] = {}
        for _ in range(4 * rows):
            ids, labels = recall_row(data, rng, MAX_LENGTH, data.held_out, 0.0)
            best = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            start = 0
            for i in range(1, len(ids) + 1):
                if i == len(ids) or labels[i] < VOCABULARY:
                    if start:
                        line = data.tokenizer.decode(ids[max(0, start - 8) : start]).split("\n")[-1]
                        word = line.split()[1] if len(line.split()) > 1 else ""
                        kind = word if word in ("every", "mostly", "count") else "chain" if i - start > 2 else "one"
                        counts.setdefault(kind, []).append(
                            all(best[j - 1] + VOCABULARY == labels[j] for j in range(start, i))
                        )
                    start = 0
                elif not start:
                    start = i
    model.train()
    recall = {kind: [round(float(np.mean(hits)), 3), len(hits)] for kind, hits in sorted(counts.items())}
    return {
        "held_out_nats": round(nats, 4),
        "held_out_bits_per_byte": round(nats / math.log(2) / size, 4),
        "recall": recall,
    }


@dataclass
class Run:
    """A training run that can be stopped and resumed."""

    seed: int
    steps: int
    tokens: int
    peak: float
    state: Path
    step: int = 0
    formed: int | None = None
    # Processor time of all threads in the steps so far. Unlike the time by the clock it depends little on the machine's
    # other work.
    seconds: float = 0.0

    def train(self, model: LlamaForCausalLM, data: Data, log: list[dict[str, Any]]) -> None:
        """Train from the state file's step, or the start, to the last step, and append records to `log`."""
        steppers = optimizers(model)
        if self.state.exists():
            self._load(model, steppers, log)
        model.train()
        recent: dict[str, list[tuple[float, float]]] = {}
        saved_at = time.perf_counter()
        while self.step < self.steps:
            if self.step == AGAIN:
                self.formed = None
            start = time.process_time()
            self._advance(model, data, steppers, recent)
            self.seconds += time.process_time() - start
            if self.step % 20 == 0 or self.step == self.steps:
                for name, values in sorted(recent.items()):
                    loss, accuracy = np.mean(values, axis=0).tolist()
                    record = {"step": self.step, "task": name, "loss": round(loss, 4), "accuracy": round(accuracy, 4)}
                    log.append({**record, "seconds": round(self.seconds, 1)})
                    print(json.dumps(log[-1]), flush=True)
                recent.clear()
            if self.step % 200 == 0 and self.formed is not None:
                log.append({"step": self.step, "task": "held out", **measure(model, data, 8)})
                print(json.dumps(log[-1]), flush=True)
            if time.perf_counter() - saved_at > 150 or self.step == self.steps:
                self._save(model, steppers, log)
                saved_at = time.perf_counter()
        model.eval()

    def _advance(
        self, model: LlamaForCausalLM, data: Data, steppers: list[Any], recent: dict[str, list[tuple[float, float]]]
    ) -> None:
        import torch

        kind, rows = batch_at(data, self.seed, self.step, self.formed, self.tokens)
        for stepper in steppers:
            stepper.zero_grad(set_to_none=True)
            for group in stepper.param_groups:
                group["lr"] = learning_rate(self.step, self.steps, self.peak)
        parts = losses(model, rows)
        sum(loss for loss, _ in parts.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        self.step += 1
        for name, (loss, accuracy) in parts.items():
            recent.setdefault(f"{kind} {name}", []).append((loss.item(), accuracy.item()))
        if self.formed is None and kind == COPY and parts["answer"][1] >= 0.8:
            self.formed = self.step

    def _save(self, model: LlamaForCausalLM, steppers: list[Any], log: list[dict[str, Any]]) -> None:
        """Save the weights and the optimizers' tensors, with the progress and the log as the file's metadata."""
        from safetensors.torch import save_file

        tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
        for number, stepper in enumerate(steppers):
            for i, kept in stepper.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{i}.{name}": tensor for name, tensor in kept.items()}
        progress = {"step": self.step, "formed": self.formed, "seconds": self.seconds, "log": log}
        self.state.parent.mkdir(parents=True, exist_ok=True)
        new = self.state.with_suffix(".new")
        save_file(tensors, new, metadata={"progress": json.dumps(progress)})
        new.replace(self.state)

    def _load(self, model: LlamaForCausalLM, steppers: list[Any], log: list[dict[str, Any]]) -> None:
        import torch
        from safetensors import safe_open

        with safe_open(self.state, "pt") as file, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(f"model.{name}"))
            states: list[dict[int, dict[str, Any]]] = [{} for _ in steppers]
            for key in file.keys():  # noqa: SIM118
                kind, number, *rest = key.split(".")
                if kind == "optimizer":
                    states[int(number)].setdefault(int(rest[0]), {})[rest[1]] = file.get_tensor(key)
            progress = json.loads(file.metadata()["progress"])
        for stepper, state in zip(steppers, states, strict=True):
            stepper.load_state_dict({**stepper.state_dict(), "state": state})
        self.step, self.formed, self.seconds = progress["step"], progress["formed"], progress["seconds"]
        log[:] = progress["log"]


def main() -> None:
    """Train (or resume), measure and save."""
    parser = argparse.ArgumentParser(description="Train the small checkpoint of Python source and recall.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per batch")
    parser.add_argument("--lr", type=float, default=4e-3 / 3, help="learning rate after the first steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--state", type=Path, required=True, help="file to stop at and resume from")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    data = load_data()
    model = build_model(args.seed)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {sum(map(len, data.train))} tokens of source",
        flush=True,
    )
    log: list[dict[str, Any]] = []
    run = Run(args.seed, args.steps, args.tokens, args.lr, args.state)
    run.train(model, data, log)
    log.append(
        {
            "step": run.step,
            "task": "final",
            "formed": run.formed,
            "seconds": round(run.seconds),
            **measure(model, data, 64),
        }
    )
    print(json.dumps(log[-1]))
    tiny.save(model.to(torch.float16), data.tokenizer, 2 * MAX_LENGTH, HERE)


if __name__ == "__main__":
    main()
