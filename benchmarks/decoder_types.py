"""Which decoder types of transformers can be exported: `python benchmarks/decoder_types.py [TYPE...] [--table FILE]`.

Every type that AutoModelForCausalLM or AutoModelForImageTextToText knows gets a tiny random config. Its artifact, with
a budget that holds the whole sequence, reads two sequences in chunks and then token by token; the logits are compared
with those of transformers' own model. A type is

    equal      logits within 1e-4 of the largest, and the most likely next tokens are the same
    refused    kvexport says why, by a UsageError
    not tried  transformers itself cannot make or run the tiny model
    different  neither: a silent fault
    leaked     an exception of torch or transformers reached the caller

Results are appended to a file of JSON lines, one for each type, so that a run can be split and resumed.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from kvexport.engine.load import load  # noqa: E402
from kvexport.errors import UsageError  # noqa: E402
from kvexport.export.build import build  # noqa: E402
from kvexport.export.model.hf_model import auto_class, decoder_class  # noqa: E402
from tests.support import models  # noqa: E402

TOLERANCE = 1e-4
SECONDS = 150  # of one type
WINDOW = 24
SIZES: dict[str, Any] = {
    "vocab_size": 100, "vocab_size_per_layer_input": 100, "hidden_size": 64, "n_embd": 64, "d_model": 64,
    "embed_dim": 64, "word_embed_proj_dim": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96,
    "ffn_hidden_size": 96, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "multi_query_group_num": 2, "head_dim": 16, "global_head_dim": 16, "kv_channels": 16,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "sliding_window": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "top_k_experts": 2, "moe_topk": 2, "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48, "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    "n_group": 1, "topk_group": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "first_k_dense_replace": 1, "depth": 2,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "query_pre_attn_scalar": 16, "rotary_dim": 8,
    "attn_logit_softcapping": 5.0, "altup_num_inputs": 2, "laurel_rank": 8, "mlp_only_layers": [],
    "image_token_id": 99, "video_token_id": 98, "image_token_index": 99, "vision_start_token_id": 97,
    "vision_end_token_id": 96, "projection_dim": 64, "out_hidden_size": 64, "mamba_n_heads": 4,
}  # fmt: skip


def tiny(config_class: Any, depth: int = 0) -> dict[str, Any]:
    """Return the fields of a tiny config of a class: sizes that the class knows, of nested configs too."""
    default = config_class().to_dict()
    # The default may differ from the type of the field: lists of layers follow the number of layers by themselves.
    fields = {name: value for name, value in SIZES.items() if name in default and not isinstance(default[name], list)}
    for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        if default.get(name) is not None:
            fields[name] = token
    if "kv_lora_rank" in fields:  # every head has a key of its own, whose sizes are those of its parts
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    if isinstance(default.get("layer_types"), list):
        kinds = list(dict.fromkeys(default["layer_types"]))[:2]
        fields["layer_types"] = (kinds * 2)[:2]
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        if isinstance(default.get(name), dict) and depth < 2:
            kind = default[name].get("model_type")
            fields[name] = tiny(CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else nested, depth + 1)  # noqa: SIM401
            if kind:
                fields[name]["model_type"] = kind
    sections = (default.get("rope_parameters") or default.get("rope_scaling") or {}).get("mrope_section")
    if sections:
        rope = dict(default.get("rope_parameters") or default["rope_scaling"])
        fields["rope_parameters"] = {**rope, "mrope_section": [4, 2, 2]}
    return fields


def save(config: Any, folder: Path) -> None:
    """Save a checkpoint of random weights, biases and norms included."""
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return the result of one type: its `result`, and the `reason` or the `error` of the logits."""
    config_class = CONFIG_MAPPING[name]
    try:
        config = config_class(**tiny(config_class))
        config.architectures = [decoder_class(config).__name__]
        save(config, folder / "checkpoint")
        ids = models.random_ids(0, 90, 60, vocabulary=90)
        reference = auto_class(config).from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
        with torch.no_grad():
            right = [reference(input_ids=torch.from_numpy(x)[None]).logits[0].numpy() for x in ids]
        assert all(np.isfinite(x).all() for x in right), "logits that are not finite"
    except Exception as error:
        return {"result": "not tried", "reason": f"{type(error).__name__}: {error}"[:300]}
    export = {"logits": "all", "prefill_chunk": 32}
    recipe = models.make_recipe(folder / "checkpoint", export=export, limits={"max_length": 160})
    try:
        engine = load(build(recipe, folder / "artifact"))
    except UsageError as error:
        return {"result": "refused", "reason": str(error)[:400]}
    except Exception as error:
        return {"result": "leaked", "reason": f"{type(error).__name__}: {error}"[:400]}
    own_logits = models.given_tokens_logits(engine, ids, (50, 20))
    pairs = list(zip(own_logits, right, strict=True))
    error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    same = all((a.argmax(-1) == b.argmax(-1)).all() or np.abs(a - b).max() < 1e-6 * np.abs(b).max() for a, b in pairs)
    return {"result": "equal" if error < TOLERANCE and same else "different", "error": error}


class _Late(Exception):
    """A type took longer than `SECONDS`."""


def _stop(*_: Any) -> None:
    raise _Late


def all_types() -> list[str]:
    """Return every decoder type, those of text first."""
    names = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for config in mapping:
            names[config.model_type] = None
    return [name for name in names if name in CONFIG_MAPPING]


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown, with the counts before it."""
    counts = Counter(x["result"] for x in results)
    lines = [", ".join(f"{n} {kind}" for kind, n in counts.most_common()) + ".", "", "| type | result | reason |",
             "| --- | --- | --- |"]  # fmt: skip
    for x in sorted(results, key=lambda x: (x["result"], x["type"])):
        reason = " ".join(x.get("reason", "").split()).replace("|", "\\|")[:180]
        lines.append(f"| `{x['type']}` | {x['result']} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the types that have no result yet, and write the table where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="all types where none is named")
    parser.add_argument("--results", type=Path, default=Path("decoder_types.jsonl"), help="file of JSON lines")
    parser.add_argument("--table", type=Path, help="write a table of all results so far")
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts of the types")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _stop)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    known = {x["type"]: x for x in map(json.loads, lines)}
    i, n = map(int, options.part.split("/"))
    for name in options.types or [x for x in all_types()[i - 1 :: n] if x not in known]:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(SECONDS)
            try:
                result = measure(name, Path(folder))
            except _Late:
                result = {"result": "not tried", "reason": f"longer than {SECONDS} s"}
            except Exception as error:
                result = {"result": "leaked", "reason": f"{type(error).__name__}: {error}"[:400]}
            finally:
                signal.alarm(0)
        known[name] = {"type": name, **result, "seconds": round(time.perf_counter() - begin, 1)}
        print(json.dumps(known[name]), flush=True)
        with options.results.open("a") as stream:
            stream.write(json.dumps(known[name]) + "\n")
    if options.table:
        options.table.write_text(table(list(known.values())))


if __name__ == "__main__":
    main()
