"""The image encoder of a GGUF model, which llama.cpp keeps in a file of its own (mmproj), beside the text decoder.

`with_encoder` makes one checkpoint of both files: transformers' names of the tensors, the config of the whole model,
and the settings of an image processor. Source of the names: llama.cpp's gguf-py/gguf/constants.py and
tensor_mapping.py. `_PROJECTORS` lists the models that are read, by the file's clip.projector_type.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvexport.errors import UsageError
from kvexport.export.model.cached import cache_folder, write_once
from kvexport.export.model.ggml_blocks import LAYOUTS
from kvexport.export.model.gguf import FLOATS, Gguf, GgufWeight, read_gguf
from kvexport.export.model.gguf_architectures import shortest
from kvexport.export.model.gguf_model import TEXTS_VERSION, check_layers, tensors_of, write_texts
from kvexport.export.model.gguf_tokenizer import write_json
from kvexport.export.model.tensors import Array, Dense, Source, Weight, dense_values, float_weight
from kvexport.tensor_files.casting import load_tensor
from kvexport.tensor_files.shards import TensorEntry

_TENSOR = re.compile(r"([\w.]+?)(\.weight|\.bias)?(\.1)?")
# llama.cpp's names of the tensors of a layer, and transformers' in the encoders of CLIP and SigLIP, InternVL, and Qwen
_CLIP = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_INTERN = {
    "ln1": "layernorm_before", "ln2": "layernorm_after", "ls1": "lambda_1", "ls2": "lambda_2",
    "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
    "attn_out": "attention.projection_layer", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_QWEN = {
    "ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj",
    **dict.fromkeys(("attn_qkv", "attn_q", "attn_k", "attn_v"), "attn.qkv"),
}  # fmt: skip
_QWEN_MERGER = {
    "v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2",
}  # fmt: skip
_BARE = ("class_embedding", "lambda_1", "lambda_2")  # parameters whose names end neither in .weight nor in .bias
_BATCHED = ("cls_token", "position_embeddings")  # the same, of shape [1, n, hidden]
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_EMBEDDINGS = {
    "v.patch_embd": "embeddings.patch_embedding", "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm", "v.class_embd": "embeddings.class_embedding", "v.pre_ln": "pre_layrnorm",
}  # fmt: skip
_INTERN_EMBEDDINGS = {
    "v.class_embd": "embeddings.cls_token", "v.patch_embd": "embeddings.patch_embeddings.projection",
    "v.position_embd": "embeddings.position_embeddings",
}  # fmt: skip
_INTERN_PROJECTION = {"mm.model.mlp.0": "layer_norm", "mm.model.mlp.1": "linear_1", "mm.model.mlp.3": "linear_2"}
_INTERN_TOKENS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<IMG_CONTEXT>",
}  # fmt: skip
_QWEN3 = {
    "v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed", "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2",
    "v.deepstack.{}.norm": "deepstack_merger_list.{}.norm", "v.deepstack.{}.fc1": "deepstack_merger_list.{}.linear_fc1",
    "v.deepstack.{}.fc2": "deepstack_merger_list.{}.linear_fc2",
}  # fmt: skip
_TOWER, _VISUAL, _PROJECTION = "model.vision_tower", "model.visual", "model.multi_modal_projector"

Settings = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Entries of config.json, of preprocessor_config.json and of processor_config.json."""


class _Facts(dict[str, Any]):
    """The metadata below clip.vision of an mmproj file, and facts from its tensors and from the model's tokenizer."""

    def __init__(self, gguf: Gguf, text: Gguf) -> None:
        prefix = "clip.vision."
        super().__init__({key.removeprefix(prefix): x for key, x in gguf.metadata.items() if key.startswith(prefix)})
        check_layers(self["block_count"])
        self.gguf, self.tokens = gguf, text.metadata["tokenizer.ggml.tokens"]
        self.inner = max(self.rows(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
        self.deep = _deep_layers(gguf)

    def token(self, text: str) -> int:
        if text not in self.tokens:
            raise KeyError(f"token {text} in the tokenizer of its model")
        index: int = self.tokens.index(text)
        return index

    def rows(self, tensor: str) -> int:
        return self.gguf.tensors[tensor].shape[0]

    def encoder(self, gelu: str, other: str = "") -> dict[str, Any]:
        return {
            "hidden_size": self["embedding_length"],
            "intermediate_size": self.inner,
            "num_hidden_layers": self["block_count"],
            "num_attention_heads": self["attention.head_count"],
            "image_size": self["image_size"],
            "patch_size": self["patch_size"],
            "layer_norm_eps": shortest(self["attention.layer_norm_epsilon"]),
            "hidden_act": gelu if not other or self.gguf.metadata.get("clip.use_gelu") else other,
        }

    def processor(self, name: str, resample: int, **more: Any) -> dict[str, Any]:
        colors = {name: [shortest(x) for x in self[name]] for name in ("image_mean", "image_std")}
        return {"image_processor_type": name, "resample": resample, **colors, **more}

    def rows_of_tile(self) -> int:
        return int((self["image_size"] // self["patch_size"] // self["projector.scale_factor"]) ** 2)


def _llava(facts: _Facts) -> Settings:
    side = facts["image_size"]
    if len(facts.get("feature_layer", [0])) > 1:
        raise ValueError("the model reads the outputs of several layers")
    # The file has the encoder's layers up to the one whose output the model reads.
    encoder = {**facts.encoder("gelu", "quick_gelu"), "model_type": "clip_vision_model"}
    config = {"vision_feature_layer": -1, "image_token_index": facts.token("<image>"), "vision_config": encoder}
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    processor = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, facts.processor("LlavaImageProcessor", 3, **sizes), {"patch_size": facts["patch_size"], **processor}


def _idefics3(facts: _Facts) -> Settings:
    side = facts["image_size"]
    config = {"image_token_id": facts.token("<image>"), "scale_factor": facts["projector.scale_factor"]}
    longest = {"size": {"longest_edge": facts.get("preproc_image_size", 4 * side)}}
    images = facts.processor("Idefics3ImageProcessor", 1, **longest, max_image_size={"longest_edge": side})
    encoder = {"vision_config": facts.encoder("gelu_pytorch_tanh")}
    return {**config, **encoder}, images, {"image_seq_len": facts.rows_of_tile()}


def _internvl(facts: _Facts) -> Settings:
    side, patch = facts["image_size"], facts["patch_size"]
    encoder = {**facts.encoder("gelu", "silu"), "image_size": [side, side], "patch_size": [patch, patch]}
    encoder["attention_bias"] = "v.blk.0.attn_q.bias" in facts.gguf.tensors
    config = {"image_token_id": facts.token("<IMG_CONTEXT>"), "downsample_ratio": 1 / facts["projector.scale_factor"]}
    tiles = {"min_patches": facts.get("preproc_min_tiles", 1), "max_patches": facts.get("preproc_max_tiles", 12)}
    images = facts.processor("GotOcr2ImageProcessor", 3, size={"height": side, "width": side}, **tiles)
    return {**config, "vision_config": encoder}, images, {"image_seq_length": facts.rows_of_tile()}


def _qwen(facts: _Facts, **own: Any) -> Settings:
    group, side = facts.get("spatial_merge_size", 2), facts["patch_size"]
    encoder = {
        "hidden_size": facts["embedding_length"], "intermediate_size": facts.inner,
        "out_hidden_size": facts["projection_dim"], "depth": facts["block_count"],
        "num_heads": facts["attention.head_count"], "spatial_merge_size": group, "patch_size": side,
    }  # fmt: skip
    names = {"image_token": "image_pad", "video_token": "video_pad", "vision_start_token": "vision_start"}
    config = {f"{name}_id": facts.token(f"<|{text}|>") for name, text in names.items()}
    bounds = {"shortest_edge": ("image_min_pixels", 4), "longest_edge": ("image_max_pixels", 16384)}
    size = {name: facts.get(key, groups * (side * group) ** 2) for name, (key, groups) in bounds.items()}
    images = facts.processor("Qwen2VLImageProcessor", 3, size=size, patch_size=side, merge_size=group)
    return {**config, "vision_config": {**encoder, **own}}, images, {}


def _qwen2_vl(facts: _Facts) -> Settings:
    hidden = facts["embedding_length"]
    return _qwen(facts, embed_dim=hidden, mlp_ratio=facts.inner // hidden, hidden_size=facts["projection_dim"])


def _qwen2_5_vl(facts: _Facts) -> Settings:
    every = facts.get("n_wa_pattern") or 1
    whole = [*range(every - 1, facts["block_count"], every)]
    return _qwen(facts, window_size=facts.get("window_size", 112), fullatt_block_indexes=whole)


def _qwen3_vl(facts: _Facts) -> Settings:
    positions = facts.rows("v.position_embd.weight")
    return _qwen(facts, deepstack_visual_indexes=facts.deep, num_position_embeddings=positions)


def _deep_layers(gguf: Gguf) -> list[int]:
    deep = gguf.metadata.get("clip.vision.is_deepstack_layers", [])
    return [i for i, is_deep in enumerate(deep) if is_deep] if isinstance(deep, list) else []


@dataclass(frozen=True)
class _Projector:
    model_type: str  # transformers' name
    settings: Callable[[_Facts], Settings]
    # Prefixes of transformers' names, and below each llama.cpp's names and transformers'. {} is the number of a layer.
    tables: Mapping[str, Mapping[str, str]]
    decoder: str = ""  # llama.cpp's architecture of the text decoder; empty for any
    text: str = "model.language_model"  # the text decoder's prefix
    tokens: Mapping[str, str] | None = None  # names of special tokens that the processor asks the tokenizer for

    def names(self) -> dict[str, str]:
        """Map llama.cpp's tensor names to transformers' names, both without the ending .weight or .bias."""
        tables = self.tables.items()
        return {
            f"v.blk.{{}}.{name}" if "{}" in root else name: f"{root}.{mine}"
            for root, table in tables
            for name, mine in table.items()
        }


_MLP, _MLP3 = ({"ffn_up": f"mlp.{name}1", "ffn_down": f"mlp.{name}2"} for name in ("fc", "linear_fc"))
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_IDEFICS3 = {
    "model.vision_model.encoder.layers.{}": _CLIP,
    "model.vision_model": _EMBEDDINGS,
    "model.connector": {"mm.model.fc": "modality_projection.proj"},
}
_LLAVA = {f"{_TOWER}.encoder.layers.{{}}": _CLIP, _TOWER: _EMBEDDINGS}
_LLAVA[_PROJECTION] = {"mm.0": "linear_1", "mm.2": "linear_2"}
_INTERNVL = {f"{_TOWER}.encoder.layer.{{}}": _INTERN, _TOWER: _INTERN_EMBEDDINGS, _PROJECTION: _INTERN_PROJECTION}
_BLOCKS = f"{_VISUAL}.blocks.{{}}"
_PROJECTORS = {
    "mlp": _Projector("llava", _llava, _LLAVA),
    "idefics3": _Projector("idefics3", _idefics3, _IDEFICS3, text="model.text_model"),
    "internvl": _Projector("internvl", _internvl, _INTERNVL, tokens=_INTERN_TOKENS),
    "qwen2vl_merger": _Projector("qwen2_vl", _qwen2_vl, {_BLOCKS: _QWEN | _MLP, _VISUAL: _QWEN_MERGER}, "qwen2vl"),
    "qwen2.5vl_merger": _Projector(
        "qwen2_5_vl", _qwen2_5_vl, {_BLOCKS: _QWEN | _GATED, _VISUAL: _QWEN_MERGER}, "qwen2vl"
    ),
    "qwen3vl_merger": _Projector("qwen3_vl", _qwen3_vl, {_BLOCKS: _QWEN | _MLP3, _VISUAL: _QWEN3}, "qwen3vl"),
}
"""The projectors, by llama.cpp's name."""


def _joined(name: str, parts: Sequence[TensorEntry | Source], shape: tuple[int, ...], *, stacked: bool) -> Weight:
    """Join weights by rows, or with `stacked` along a third axis, the frames of a patch."""

    def values() -> Array:
        floats = [load_tensor(x, "float32") if isinstance(x, TensorEntry) else dense_values(x) for x in parts]
        return np.stack(floats, 2) if stacked else np.concatenate(floats)

    return float_weight(name, shape, values)


def with_encoder(text: Gguf, file: Path) -> tuple[Path, dict[str, TensorEntry], dict[str, Source], str]:
    """Combine a text decoder and an mmproj file: return a folder with the config, tensors, sources, and a hash."""
    gguf = read_gguf(file)
    projector = _projector_of(gguf, text)
    stored: dict[str, TensorEntry | Source] = {}
    for tensors in tensors_of(text):
        stored |= {re.sub(r"^model\b", projector.text, name): tensor for name, tensor in tensors.items()}
    stored |= _encoder_tensors(gguf, projector)
    digest = hashlib.sha256(f"{text.digest}{gguf.digest}".encode()).hexdigest()
    folder = cache_folder("gguf") / f"{digest[:32]}-{TEXTS_VERSION}"
    write_once(folder, f"the config of {file}", lambda new, _: _write(text, gguf, projector, new), "some megabytes")
    plain = {name: x for name, x in stored.items() if isinstance(x, TensorEntry)}
    return folder, plain, {name: x for name, x in stored.items() if not isinstance(x, TensorEntry)}, digest


def _projector_of(gguf: Gguf, text: Gguf) -> _Projector:
    meta, decoder = gguf.metadata, str(text.metadata.get("general.architecture"))[:40]
    kind = str(meta.get("clip.projector_type", meta.get("clip.vision.projector_type")))[:40]
    projector = _PROJECTORS.get(kind) if meta.get("general.architecture") == "clip" else None
    if projector is None or projector.decoder not in ("", decoder):
        raise UsageError(
            f"{gguf.file} has the projector {kind!r}, for a decoder {decoder!r}; expected an image encoder (mmproj) "
            f"with one of {', '.join(_PROJECTORS)}, and its own model",
            "set model.path to the checkpoint that the files were made of, or build the text decoder alone",
        )
    return projector


def _encoder_tensors(gguf: Gguf, projector: _Projector) -> dict[str, TensorEntry | Source]:
    parts: dict[str, dict[str, TensorEntry | Source]] = {}
    names, deep, down = projector.names(), _deep_layers(gguf), gguf.tensors.get("v.blk.0.ffn_down.weight")
    # Older files have the names of the two matrices the other way around.
    swapped = down is not None and down.shape[-1] == gguf.metadata.get("clip.vision.embedding_length") != down.shape[0]
    for stored, entry in gguf.tensors.items():
        match = _TENSOR.fullmatch(stored)
        base, ending, frame = match.groups("") if match else ("", "", "")
        number = re.search(r"\.(\d+)\.", base)
        head, _, last = re.sub(r"\.\d+\.", ".{}.", base, count=1).rpartition(".")
        index = int(number[1]) if number else 0
        name = names.get(f"{head}.{_SWAPPED.get(last, last) if swapped else last}")
        known = entry.dtype in FLOATS or (entry.dtype in LAYOUTS and len(entry.shape) == 2)
        if name is None or not known or (head == "v.deepstack.{}" and index not in deep):
            raise UsageError(
                f"{gguf.file} has a tensor {stored[:80]!r}, {entry.dtype} of shape {list(entry.shape)}, which no "
                f"{projector.model_type} that is read here has",
                "take the mmproj file of type F16, or set model.path to the checkpoint that the files were made of",
            )
        name = name.format(deep.index(index) if head == "v.deepstack.{}" else index)
        if name.endswith(_BATCHED):
            entry = replace(entry, shape=(1, math.prod(entry.shape[:-1]), entry.shape[-1]))
        elif not name.endswith(_BARE):
            name += ending
        parts.setdefault(name, {})[frame or last] = entry if entry.dtype in FLOATS else Dense(GgufWeight(entry))
    whole: dict[str, TensorEntry | Source] = {}
    for name, own in parts.items():
        ordered = tuple(own[key] for key in sorted(own, key=lambda key: "qkvd1".find(key[-1])))
        rows, *rest = ordered[0].shape
        if len({part.shape if ".1" in own else part.shape[1:] for part in ordered}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in ordered)
            raise UsageError(
                f"{gguf.file} has parts of {name} with shapes that do not fit each other: {shapes}",
                f"download {gguf.file.name} again",
            )
        shape = (rows, *rest[:1], 2, *rest[1:]) if ".1" in own else (sum(part.shape[0] for part in ordered), *rest)
        whole[name] = ordered[0] if len(ordered) == 1 else _joined(name, ordered, shape, stacked=".1" in own)
    return whole


def _write(text: Gguf, gguf: Gguf, projector: _Projector, folder: Path) -> None:
    write_texts(text, folder)
    decoder = json.loads((folder / "config.json").read_text())
    try:
        config, images, processor = projector.settings(_Facts(gguf, text))
        if projector.decoder:  # it rotates queries and keys by rows and columns of images
            sections = text.metadata[f"{projector.decoder}.rope.dimension_sections"]
            decoder["rope_parameters"]["mrope_section"] = [size for size in sections if size]
            del decoder["model_type"]  # that of the same decoder without images
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else f"unusable metadata: {error}"
        raise UsageError(f"{gguf.file} has {what}", f"download {gguf.file.name} and {text.file.name} again") from error
    if projector.tokens:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        write_json(folder / "tokenizer_config.json", {**settings, "extra_special_tokens": dict(projector.tokens)})
    write_json(folder / "preprocessor_config.json", images)
    write_json(folder / "processor_config.json", processor)
    shared = {key: decoder[key] for key in ("tie_word_embeddings", "dtype")}
    write_json(folder / "config.json", {"model_type": projector.model_type, "text_config": decoder, **shared, **config})
