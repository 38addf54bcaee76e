"""Speed of mixtures of experts and of hybrids on the CPU, beside llama.cpp and onnxruntime-genai.

    python benchmarks/speed/decoders.py --work DIR --llamacpp DIR [--genai DIR]
                                  [--models qwen3-30b-a3b,gpt-oss-20b,qwen3.5-4b] [--rounds 9]
                                  [--decode 512] [--prefill 512] [--kinds decode,prefill]
                                  [--file FILE.gguf --name NAME [--openvino DIR] [--node DIR]]

Results of models that are not measured again stay.

A file has the layers' sizes of a published model, but few layers and a small vocabulary, so that the layers take nearly
all of the time. Weights are random blocks: Q4_0, and for gpt-oss MXFP4 in experts and Q8_0 elsewhere. Embedding and
head are Q8_0. --work keeps files and artifacts. --llamacpp is the target of `pip install --no-deps --target DIR
xllamacpp`. llama.cpp and kvexport read the same GGUF file.

--genai is the target of `pip install --no-deps --target DIR onnxruntime-genai==0.18.0 accelerate` (transformers reads
MXFP4 with accelerate). Its builder reads a checkpoint of the same sizes with random MXFP4 experts, and rounds all
weights to int4 (groups of 32, accuracy level 4). It takes gpt-oss-20b, and refuses the type of Qwen3-30B-A3B.
qwen3.5-4b is measured without it, since it has no experts.

--file measures a GGUF file that people have in place of these, with a further side `slots`: kvexport with 512 slots.
--openvino is the target of `pip install --no-deps --target DIR openvino openvino-genai openvino-tokenizers`; OpenVINO
GenAI reads the same file, and converts its blocks. The wheel of llama.cpp has AVX2 alone. --node is a folder in which
`npm install --ignore-scripts node-llama-cpp` ran: its llama.cpp has a library for every instruction set (side `node`).

kvexport has a cache of the whole sequence, so nothing is evicted. Every side runs in a process of its own. A figure is
one block of 32 decoded tokens, or one prompt, the sides in turn. llama.cpp decodes greedily; kvexport gets tokens.
Writes benchmarks/results/decoders-ISA.json, or decoders-file-ISA.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.common import earlier, options_of, save, write_tokenizer
from benchmarks.speed.workers import (
    BLOCK,
    Run,
    Worker,
    engine_run,
    genai_model,
    genai_run,
    in_turn,
    llamacpp_run,
    openvino_run,
    serve,
)  # fmt: skip

THREADS = 2
VOCABULARY = 8192
ROOM = 4096  # tokens after the context
SLOTS = 512  # of the compressed cache beside a file that people have
KINDS = gguf.GGMLQuantizationType
GOALS = {"qwen3-30b-a3b": (1.0, 1.5), "gpt-oss-20b": (1.0, 1.5), "qwen3.5-4b": (1.0, None)}
"""Speed of decoding and of a prompt over that of the faster peer."""
GENAI = ("gpt-oss-20b",)  # the models that onnxruntime-genai's builder takes


@dataclass(frozen=True)
class Model:
    """The sizes of a model, and the number of layers that are written."""

    kind: str  # llama.cpp's architecture
    layers: int
    hidden: int  # size of a hidden state
    heads: tuple[int, int, int]  # numbers of query heads and KV heads, and the size of a key
    inner: int  # inner size of a dense layer or of an expert
    experts: tuple[int, int] = (0, 0)  # number of experts, and how many a token runs; zeros for dense layers
    more: dict[str, Any] = field(default_factory=dict)  # further metadata


MODELS = {
    "qwen3-30b-a3b": Model("qwen3moe", 4, 2048, (32, 4, 128), 768, (128, 8), {"rope.freq_base": 1e6}),
    "gpt-oss-20b": Model(
        "gpt-oss", 3, 2880, (64, 8, 64), 2880, (32, 4),
        {"rope.freq_base": 150000.0, "attention.sliding_window": 128},
    ),
    "qwen3.5-4b": Model(
        "qwen35", 8, 2560, (16, 4, 256), 9216, (0, 0),
        {"rope.freq_base": 1e7, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
         "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
         "ssm.time_step_rank": 32, "ssm.inner_size": 4096},
    ),
}  # fmt: skip


class File:
    """A GGUF file of random weights."""

    def __init__(self, path: Path, model: Model) -> None:
        self.model, self.rng = model, np.random.default_rng(0)
        self.writer = gguf.GGUFWriter(path, model.kind)
        self.kind = KINDS.Q8_0 if model.kind == "gpt-oss" else KINDS.Q4_0

    def matrix(self, name: str, shape: tuple[int, ...], kind: Any = None) -> None:
        """Add a matrix, or the matrices of experts, of random blocks with values of about 0.02."""
        kind = self.kind if kind is None else kind
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(shape) // numbers
        blocks = self.rng.integers(0, 256, (count, size), np.uint8)
        if kind == KINDS.MXFP4:
            blocks[:, 0] = 120
        else:
            step = 0.005 if kind == KINDS.Q4_0 else 0.0003
            blocks[:, :2] = np.array([step], np.float16).view(np.uint8)
        stored = blocks.reshape(*shape[:-1], shape[-1] // numbers * size)
        self.writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)

    def numbers(self, name: str, shape: tuple[int, ...], centre: float = 0.0) -> None:
        """Add a small float tensor with numbers near `centre`."""
        values = centre + 0.02 * self.rng.standard_normal(shape)
        self.writer.add_tensor(name, values.astype(np.float32))

    def describe(self) -> None:
        """Add the metadata and a tokenizer of meaningless words."""
        model, writer, kind = self.model, self.writer, self.model.kind
        query, kv, size = model.heads
        writer.add_block_count(model.layers)
        writer.add_context_length(32768)
        writer.add_embedding_length(model.hidden)
        writer.add_feed_forward_length(model.inner)
        writer.add_head_count(query)
        writer.add_head_count_kv(kv)
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_layer_norm_rms_eps(1e-6)
        if model.experts[0]:
            writer.add_expert_count(model.experts[0])
            writer.add_expert_used_count(model.experts[1])
            writer.add_expert_feed_forward_length(model.inner)
        for key, value in model.more.items():
            add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"{kind}.{key}", value)
        letters = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 324))]  # GPT-2's bytes
        tokens = ["<end>", *letters, "ab"]
        tokens += [f"w{i}" for i in range(len(tokens), VOCABULARY)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * (VOCABULARY - 1))
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(0)

    def attention(self, stem: str) -> None:
        """Add the attention of a layer."""
        model, (query, kv, size) = self.model, self.model.heads
        gates = 2 if model.kind == "qwen35" else 1
        shapes = {"q": (query * size * gates, model.hidden), "k": (kv * size, model.hidden),
                  "v": (kv * size, model.hidden), "output": (model.hidden, query * size)}  # fmt: skip
        for name, shape in shapes.items():
            self.matrix(f"{stem}attn_{name}", shape)
            if model.kind == "gpt-oss":
                self.numbers(f"{stem}attn_{name}.bias", shape[:1])
        if model.kind == "gpt-oss":
            self.numbers(f"{stem}attn_sinks.weight", (query,))
        else:
            self.numbers(f"{stem}attn_q_norm.weight", (size,), 1.0)
            self.numbers(f"{stem}attn_k_norm.weight", (size,), 1.0)

    def linear_attention(self, stem: str) -> None:
        """Add the linear attention of a layer of qwen35."""
        more, hidden = self.model.more, self.model.hidden
        heads, inner = more["ssm.time_step_rank"], more["ssm.inner_size"]
        channels = inner + 2 * more["ssm.group_count"] * more["ssm.state_size"]
        self.matrix(f"{stem}attn_qkv", (channels, hidden))
        self.matrix(f"{stem}attn_gate", (inner, hidden))
        self.matrix(f"{stem}ssm_beta", (heads, hidden), KINDS.Q8_0)
        self.matrix(f"{stem}ssm_alpha", (heads, hidden), KINDS.Q8_0)
        self.numbers(f"{stem}ssm_conv1d.weight", (channels, more["ssm.conv_kernel"]))
        self.numbers(f"{stem}ssm_a", (heads,), -1.0)
        self.numbers(f"{stem}ssm_dt.bias", (heads,))
        self.numbers(f"{stem}ssm_norm.weight", (inner // heads,), 1.0)
        self.matrix(f"{stem}ssm_out", (hidden, inner))

    def mlp(self, stem: str) -> None:
        """Add the experts or the dense MLP of a layer."""
        model, (count, _) = self.model, self.model.experts
        shapes = {"gate": (model.inner, model.hidden), "up": (model.inner, model.hidden),
                  "down": (model.hidden, model.inner)}  # fmt: skip
        if not count:
            for name, shape in shapes.items():
                self.matrix(f"{stem}ffn_{name}", shape)
            return
        self.numbers(f"{stem}ffn_gate_inp.weight", (count, model.hidden))
        kind = KINDS.MXFP4 if model.kind == "gpt-oss" else KINDS.Q4_0
        for name, shape in shapes.items():
            self.matrix(f"{stem}ffn_{name}_exps", (count, *shape), kind)
            if model.kind == "gpt-oss":
                self.numbers(f"{stem}ffn_{name}_exps.bias", (count, shape[0]))
        if model.kind == "gpt-oss":
            self.numbers(f"{stem}ffn_gate_inp.bias", (count,))

    def write(self) -> None:
        model = self.model
        self.describe()
        self.matrix("token_embd", (VOCABULARY, model.hidden), KINDS.Q8_0)
        self.matrix("output", (VOCABULARY, model.hidden), KINDS.Q8_0)
        self.numbers("output_norm.weight", (model.hidden,), 1.0)
        for i in range(model.layers):
            stem = f"blk.{i}."
            self.numbers(f"{stem}attn_norm.weight", (model.hidden,), 1.0)
            if model.kind == "qwen35" and (i + 1) % model.more["full_attention_interval"]:
                self.linear_attention(stem)
            else:
                self.attention(stem)
            after = "ffn_norm" if model.kind == "qwen3moe" else "post_attention_norm"
            self.numbers(f"{stem}{after}.weight", (model.hidden,), 1.0)
            self.mlp(stem)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def file_of(name: str, options: argparse.Namespace) -> Path:
    """Return the GGUF file of a model; a file of random weights is written if it is missing."""
    if name not in MODELS:
        return Path(options.file)
    path: Path = options.work / f"{name}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        File(part, MODELS[name]).write()
        part.rename(path)
    return path


def checkpoint_of(model: Model, folder: Path) -> Path:
    """Return a checkpoint of gpt-oss with the sizes of `model` and random weights; it is written if it is missing."""
    import torch
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    if (folder / "tokenizer_config.json").exists():
        return folder
    query, kv, size = model.heads
    config = GptOssConfig(
        num_hidden_layers=model.layers, hidden_size=model.hidden, intermediate_size=model.inner, head_dim=size,
        num_attention_heads=query, num_key_value_heads=kv, vocab_size=VOCABULARY, dtype="bfloat16",
        num_local_experts=model.experts[0], num_experts_per_tok=model.experts[1],
        quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in GptOssForCausalLM(config).named_parameters()}
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = shape
            blocks = (count, outputs, inputs // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
            tensors[f"{name}_scales"] = torch.full(blocks[:3], 120, dtype=torch.uint8)
        else:
            tensors[name] = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, VOCABULARY)
    return folder


def int4_model(name: str, options: argparse.Namespace) -> Path:
    """Return the model that onnxruntime-genai's own builder makes of the checkpoint."""
    checkpoint, out = checkpoint_of(MODELS[name], options.work / f"{name}-checkpoint"), options.work / f"{name}-genai"
    settings = ("int4_block_size=32", "int4_accuracy_level=4", "qmoe_block_size=32")
    return genai_model(checkpoint, out, options.genai, THREADS, "int4", *settings)


def artifact_of(name: str, context: int, options: argparse.Namespace, slots: int = 0) -> Path:
    """Return the artifact of a model with a full cache, or with `slots`; it is built if it is missing."""
    from kvexport.export.build import build
    from kvexport.recipe.fields import Recipe

    path: Path = options.work / f"{name}-{context}-{options.dtype}{f'-{slots}' if slots else ''}"
    if not path.exists():
        recipe = {
            "model": {"path": str(file_of(name, options)), "dtype": options.dtype},
            "cache": {"method": "ballot", "budget": slots} if slots else {"method": "full"},
            "export": {"prefill_chunk": 512},
            "limits": {"max_length": context + ROOM, "max_batch": 1},
            "backend": {"threads": THREADS},
        }
        build(Recipe.model_validate(recipe), path)
    return path


def prompt_of(context: int) -> Any:
    return np.random.default_rng(0).integers(300, VOCABULARY, context)


def runner(kind: str, side: str, name: str, context: int, options: argparse.Namespace) -> Run:
    """Return a function that returns the seconds of one decoded token, or of one prompt."""
    ids = prompt_of(context)
    if side == "llamacpp":
        return llamacpp_run(kind, file_of(name, options), ids, THREADS, options.llamacpp)
    if side == "genai":
        return genai_run(kind, int4_model(name, options), ids, context + ROOM)
    if side == "openvino":
        return openvino_run(kind, file_of(name, options), ids, THREADS, options.openvino)
    return engine_run(kind, artifact_of(name, context, options, SLOTS if side == "slots" else 0), ids)


def exec_node(kind: str, name: str, context: int, options: argparse.Namespace) -> None:
    """Go on as the process of node_llama.mjs, so that its memory is the side's."""
    ids = json.dumps(prompt_of(context).tolist())
    script = str(Path(__file__).with_name("node_llama.mjs"))
    os.execvp("node", ["node", script, options.node, kind, str(file_of(name, options)), ids, str(THREADS), str(BLOCK)])


def compare(kind: str, name: str, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turn."""
    file_of(name, options)
    artifact_of(name, context, options)
    peers = ["llamacpp"]
    if options.genai and name in GENAI:
        int4_model(name, options)
        peers.append("genai")
    if name not in MODELS:
        artifact_of(name, context, options, SLOTS)
        peers += ["slots", *(x for x in ("openvino", "node") if getattr(options, x))]
    workers = []
    for side in ("kvexport", *peers):
        command = [__file__, *sys.argv[1:], "--run", json.dumps([kind, side, name, context])]
        workers.append(Worker(side, command, THREADS, options.work, {"genai": options.genai}.get(side)))
    figures, bandwidth = in_turn(workers, 1, THREADS, options.rounds)
    tokens = 1 if kind == "decode" else context
    own = figures["kvexport"]
    ratios = {peer: [b / a for a, b in zip(own, figures[peer], strict=True)] for peer in peers}
    for peer in {"llamacpp", "node"} & figures.keys() if "slots" in figures else ():
        ratios[f"{peer}_with_slots"] = [b / a for a, b in zip(figures["slots"], figures[peer], strict=True)]
    goal = GOALS.get(name, (None, None))[kind == "prefill"]
    return {
        "tokens_per_second": {s: round(tokens / statistics.median(x), 1) for s, x in figures.items()},
        "all": {s: [round(tokens / x, 1) for x in each] for s, each in figures.items()},
        **{f"over_{peer}": round(statistics.median(x), 3) for peer, x in ratios.items()},
        **({"goal": goal} if goal else {}),
        "peak_MB": {worker.side: worker.peak_MB for worker in workers},
        "bandwidth_GBps": [round(x / 1e9, 1) for x in bandwidth],
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--llamacpp", required=True)
    parser.add_argument("--genai", default="")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--decode", type=int, default=512)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--kinds", default="decode,prefill")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--name", default="file", help="of the model in --file")
    parser.add_argument("--openvino", default="")
    parser.add_argument("--node", default="")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        kind, side, name, context = json.loads(options.run)
        if side == "node":
            exec_node(kind, name, context, options)
        serve(runner(kind, side, name, context, options))
        return
    from kvexport.backends.onnxruntime.operators import instruction_set, library

    options.work.mkdir(parents=True, exist_ok=True)
    path = library()
    isa = instruction_set(path) if path else "functions"
    results: dict[str, Any] = {"instruction_set": isa, "layers": {x: MODELS[x].layers for x in MODELS}}
    if options.file:
        own = earlier(f"decoders-file-{isa}").items()  # other contexts were measured in other runs
        results = {"instruction_set": isa, "slots": SLOTS} | {what: x for what, x in own if ", " in what}
    else:  # other models were measured in other runs
        results |= {what: x for what, x in earlier(f"decoders-{isa}").items() if what.split(",")[0] in MODELS}
    for name in [options.name] if options.file else options.models.split(","):
        for kind in options.kinds.split(","):
            context = getattr(options, kind)
            results[f"{name}, {kind} {context}"] = compare(kind, name, context, options)
            print(name, kind, context, json.dumps(results[f"{name}, {kind} {context}"]), flush=True)
    save(f"decoders{'-file' if options.file else ''}-{isa}", {**results, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
