"""A small model with latent attention: the small checkpoint of tests/, converted to DeepSeek V3's type and trained on.

`make_model` writes the checkpoint that latent.py reads. The conversion keeps embeddings, MLPs and output projections.
The planes of high frequency of both KV heads become one rotated key, which all heads share: planes of the second KV
head get frequencies between those of the first. The other planes lose their rotation. They are factorised together with
the values to latents of RANK numbers, by the eigenvectors of their covariance over a text. That breaks the model, so it
is trained on the batches of tests/checkpoints/small/train.py afterwards.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from common import SMALL_CHECKPOINT
from torch import Tensor

sys.path.append(str(SMALL_CHECKPOINT))
import train
from documents import MAX_LENGTH, Data, code_row, load_data

RANK = 64
SIZE = 64  # of a key and of a value of the small checkpoint
TURNED = SIZE // 4  # planes of each KV head that stay rotated, of SIZE / 2
ROWS = 2  # of each kind that measure the model
TOKENS = 2048  # of a batch
FIRST = 2400  # the small checkpoint's last step: the batches after it are new
PEAK, WARM_UP = 1e-3, 20


def make_model(folder: Path, steps: int, threads: int) -> dict[str, Any]:
    """Write the checkpoint to `folder`, and return the figures of the model before and after training."""
    torch.set_num_threads(threads)
    data = load_data()
    model = _converted(data)
    figures = {"steps": steps, "converted": train.measure(model, data, ROWS)}
    _train(model, data, steps)
    figures["trained"] = train.measure(model, data, ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMALL_CHECKPOINT / name, folder)
    model.save_pretrained(folder)
    return figures


def _converted(data: Data) -> Any:
    """Return the small checkpoint as a dense model of the type DeepSeek V3, with parameters in float32."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    small: Any = AutoModelForCausalLM.from_pretrained(str(SMALL_CHECKPOINT), dtype=torch.float32).eval()
    old = small.config
    config = DeepseekV3Config(
        vocab_size=old.vocab_size, hidden_size=old.hidden_size, intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers, first_k_dense_replace=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads, num_key_value_heads=old.num_attention_heads,
        q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=SIZE - 2 * TURNED, v_head_dim=SIZE,
        qk_rope_head_dim=4 * TURNED, rope_interleave=False,
        # Plane 2f of the shared key has the frequency of plane f of the small checkpoint, whose theta is 10,000.
        rope_parameters={"rope_type": "default", "rope_theta": math.sqrt(old.rope_parameters["rope_theta"])},
        max_position_embeddings=old.max_position_embeddings, rms_norm_eps=old.rms_norm_eps,
        tie_word_embeddings=True, num_mtp_layers=0,
        bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    kept = {name: x for name, x in small.state_dict().items() if not name.endswith(("q_proj.weight", "_proj.bias"))}
    model.load_state_dict(kept, strict=False)
    inputs = _attention_inputs(small, data)
    with torch.no_grad():
        for i, (layer, x) in enumerate(zip(model.model.layers, inputs, strict=True)):
            _convert(small.model.layers[i].self_attn, layer.self_attn, x)
    return model


def _attention_inputs(small: Any, data: Data) -> list[Tensor]:
    """Return what the attention of each layer reads in 16 rows of source, [tokens, hidden] each."""
    import numpy as np

    inputs: list[list[Tensor]] = [[] for _ in small.model.layers]
    for layer, rows in zip(small.model.layers, inputs, strict=True):
        layer.input_layernorm.register_forward_hook(lambda module, args, output, rows=rows: rows.append(output[0]))
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for _ in range(16):
            small(torch.tensor([code_row(data, rng, MAX_LENGTH, data.train)[0]]))
    return [torch.cat(rows) for rows in inputs]


def _convert(old: Any, new: Any, inputs: Tensor) -> None:
    """Set the weights of a layer's latent attention from those of a layer with two KV heads."""
    heads, groups = new.num_heads, 2
    half, nope = SIZE // 2, SIZE - 2 * TURNED
    turned = torch.cat([torch.arange(TURNED), half + torch.arange(TURNED)])
    plain = torch.cat([torch.arange(TURNED, half), half + torch.arange(TURNED, half)])
    # For each KV head, the numbers of the shared rotated key that hold its planes.
    shared = [torch.cat([2 * torch.arange(TURNED) + g, 2 * TURNED + 2 * torch.arange(TURNED) + g]) for g in range(2)]
    query = old.q_proj.weight.view(heads, SIZE, -1) * math.sqrt((nope + 4 * TURNED) / SIZE)
    key, value = (x.weight.view(groups, SIZE, -1) for x in (old.k_proj, old.v_proj))
    to = torch.zeros(heads, nope + 4 * TURNED, query.shape[2])
    rotated = torch.zeros(4 * TURNED, query.shape[2])
    for head in range(heads):
        group = head * groups // heads
        to[head, :nope] = query[head, plain]
        to[head, nope + shared[group]] = query[head, turned]
        rotated[shared[group]] = key[group, turned]
    new.q_proj.weight.copy_(to.flatten(0, 1))
    expanded = torch.cat([key[:, plain], value], 1).flatten(0, 1)  # [groups (n + v), hidden]
    covariance = expanded @ (inputs.T @ inputs / len(inputs)) @ expanded.T
    basis = torch.linalg.eigh(covariance).eigenvectors[:, -RANK:]  # of the largest eigenvalues
    down = basis.T @ expanded
    new.kv_a_proj_with_mqa.weight.copy_(torch.cat([down, rotated]))
    # The norm gives latents a length of their own; on the mean it is undone.
    new.kv_a_layernorm.weight.fill_(float((inputs @ down.T).pow(2).mean(-1).sqrt().mean()))
    up = basis.view(groups, nope + SIZE, RANK).repeat_interleave(heads // groups, 0)
    new.kv_b_proj.weight.copy_(up.flatten(0, 1))


def _train(model: Any, data: Data, steps: int) -> None:
    """Train all weights with the small checkpoint's optimizers; the learning rate falls linearly to zero."""
    steppers = train.optimizers(model)
    model.train()
    for step in range(steps):
        rate = PEAK * min(1.0, (step + 1) / WARM_UP) * (steps - step) / steps
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = rate
        kind, rows = train.batch_at(data, 0, FIRST + step, 0, TOKENS)
        parts = train.losses(model, rows)
        loss = sum(mean for mean, _ in parts.values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        if step % 10 == 0:
            print(step, kind, {name: round(float(mean.detach()), 3) for name, (mean, _) in parts.items()}, flush=True)
    model.eval()
