"""Models in two GGUF files, the text decoder and llama.cpp's mmproj: logits with images are those of transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from numpy.typing import NDArray

from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.export.model.gguf import read_gguf
from kvexport.export.model.gguf_vision import _PROJECTORS, _deep_layers, _Facts
from kvexport.recipe.fields import Recipe
from tests.export.test_vision import logits_with_images
from tests.support import models, vision
from tests.support.command_line import run
from tests.support.gguf_files import NAMES, SIZES
from tests.support.vision import picture

gguf = pytest.importorskip("gguf", reason="not reached: pip install gguf")
KEYS, VISION = gguf.Keys, gguf.Keys.ClipVision
Weights = dict[str, NDArray[np.float32]]
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
QUANTIZED = ("idefics3", "qwen2_5_vl")  # written with matrices in blocks of Q8_0
ROTARY = {"qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl"}
# Of each model: llama.cpp's projector and its names of tensors, by patterns of transformers' names
PROJECTORS: dict[str, tuple[str, dict[str, str]]] = {
    "llava": (
        "mlp",
        {
            r"multi_modal_projector.linear_1": "mm.0",
            r"multi_modal_projector.linear_2": "mm.2",
            r".*pre_layrnorm": "v.pre_ln",
            r".*class_embedding": "v.class_embd",
        },
    ),
    "idefics3": ("idefics3", {r".*modality_projection.proj": "mm.model.fc", r".*post_layernorm": "v.post_ln"}),
    "internvl": (
        "internvl",
        {
            r"multi_modal_projector.layer_norm": "mm.model.mlp.0",
            r"multi_modal_projector.linear_1": "mm.model.mlp.1",
            r"multi_modal_projector.linear_2": "mm.model.mlp.3",
            r".*cls_token": "v.class_embd",
            r".*projection_layer": "attn_out",
            r".*patch_embeddings.projection": "v.patch_embd",
            r".*lambda_(\d)": r"ls\1.weight",
            r".*layernorm_before": "ln1",
            r".*layernorm_after": "ln2",
        },
    ),
    "qwen2_vl": ("qwen2vl_merger", {r".*ln_q": "v.post_ln", r".*merger.mlp.(\d)": r"mm.\1"}),
    "qwen2_5_vl": ("qwen2.5vl_merger", {r".*ln_q": "v.post_ln", r".*merger.mlp.(\d)": r"mm.\1"}),
    "qwen3_vl": (
        "qwen3vl_merger",
        {
            r".*visual.merger.norm": "v.post_ln",
            r".*visual.merger.linear_fc1": "mm.0",
            r".*visual.merger.linear_fc2": "mm.2",
            r".*deepstack_merger_list.*norm": "norm",
            r".*deepstack_merger_list.*linear_(fc\d)": r"\1",
        },
    ),
}
SHARED = {
    r".*patch_embedding|.*patch_embed.proj": "v.patch_embd", r".*position_embeddings?|.*pos_embed": "v.position_embd",
    r".*(?:layer_)?norm(\d)": r"ln\1", r".*\.(q|k|v)_proj": r"attn_\1", r".*\.qkv": "attn_qkv",
    r".*out_proj|.*attn.proj": "attn_out", r".*gate_proj": "ffn_gate", r".*(?:fc1|up_proj)": "ffn_up",
    r".*(?:fc2|down_proj)": "ffn_down",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _add(writer: Any, name: str, weight: NDArray[np.float32], *, quantized: bool = False) -> None:
    """Add a tensor in float32, or a matrix in blocks of Q8_0, whose values `weight` then has."""
    if quantized and weight.ndim == 2 and weight.shape[1] % 32 == 0 and "position" not in name:
        blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        weight[:] = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, np.ascontiguousarray(weight))


def _write_text(kind: str, checkpoint: Path, weights: Weights, file: Path) -> None:
    whole = json.loads((checkpoint / "config.json").read_text())
    config = whole["text_config"]
    arch = ROTARY.get(kind) or {"llama": "llama", "qwen2": "qwen2"}[config["model_type"]]
    writer = gguf.GGUFWriter(file, arch)
    for key, name in SIZES.items():
        value = config.get(name)
        if value:
            (writer.add_float32 if type(value) is float else writer.add_uint32)(f"{arch}.{key}", value)
    if kind in ROTARY:
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = list(vocabulary["model"]["vocab"]) + [token["content"] for token in vocabulary["added_tokens"]]
    special = len(vocabulary["added_tokens"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["! !"])
    writer.add_token_types([1] * (len(tokens) - special) + [3] * special)
    for name, weight in weights.items():
        match = re.fullmatch(r"model\.(?:language|text)_model\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if match is None and name != "lm_head.weight":
            continue
        layer, own, part = match.groups() if match else (None, "lm_head", "weight")
        stored = NAMES.get(own) or NAMES[f"model.{own}"]
        if arch == "llama" and stored in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if stored == "attn_q" else "num_key_value_heads"]
            halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        _add(writer, f"blk.{layer}.{stored}.{part}" if layer else f"{stored}.{part}", weight)
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_mmproj(kind: str, checkpoint: Path, weights: Weights, file: Path, **changes: str) -> None:
    whole = json.loads((checkpoint / "config.json").read_text())
    images = json.loads((checkpoint / "preprocessor_config.json").read_text())
    config = whole["vision_config"]
    projector, own = PROJECTORS[kind]
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_string(KEYS.Clip.PROJECTOR_TYPE, changes.get("projector", projector))
    layers = config.get("num_hidden_layers", config.get("depth"))
    if kind == "llava":  # which reads the output of the last layer but one, and a file has no more
        layers -= 1
        weights = {name: x for name, x in weights.items() if f"encoder.layers.{layers}." not in name}
    one = lambda x: x[0] if isinstance(x, list) else x  # noqa: E731
    sizes = {
        VISION.IMAGE_SIZE: one(config.get("image_size", 560)),
        VISION.PATCH_SIZE: one(config["patch_size"]),
        VISION.EMBEDDING_LENGTH: config.get("embed_dim", config["hidden_size"]),
        VISION.FEED_FORWARD_LENGTH: config.get("intermediate_size", 0),
        VISION.BLOCK_COUNT: layers,
        VISION.Attention.HEAD_COUNT: config.get("num_attention_heads", config.get("num_heads")),
        VISION.PROJECTION_DIM: whole["text_config"]["hidden_size"],
    }
    for key, value in sizes.items():
        writer.add_uint32(key, value)
    writer.add_float32(VISION.Attention.LAYERNORM_EPS, config.get("layer_norm_eps", 1e-6))
    writer.add_vision_image_mean(images["image_mean"])
    writer.add_vision_image_std(images["image_std"])
    writer.add_bool(KEYS.ClipVision.USE_GELU, kind not in ("llava", "qwen2_vl"))
    if kind == "idefics3":
        writer.add_uint32(VISION.Projector.SCALE_FACTOR, whole["scale_factor"])
        writer.add_uint32(VISION.PREPROC_IMAGE_SIZE, images["size"]["longest_edge"])
    if kind == "internvl":
        writer.add_uint32(VISION.Projector.SCALE_FACTOR, int(1 / whole["downsample_ratio"]))
        writer.add_uint32(VISION.PREPROC_MAX_TILES, images["max_patches"])
    if kind in ROTARY:
        writer.add_uint32(VISION.IMAGE_MIN_PIXELS, images["size"]["shortest_edge"])
        writer.add_uint32(VISION.IMAGE_MAX_PIXELS, images["size"]["longest_edge"])
    if kind == "qwen2_5_vl":
        writer.add_uint32(VISION.N_WA_PATTERN, 2)
        writer.add_uint32(VISION.WINDOW_SIZE, config["window_size"])
    deep = config.get("deepstack_visual_indexes", [])
    if deep:
        writer.add_array(VISION.IS_DEEPSTACK_LAYERS, [i in deep for i in range(config["depth"])])
    for name, weight in weights.items():
        stored = (
            None
            if name.startswith("lm_head") or "language_model" in name or "text_model" in name
            else _stored(name, own, deep)
        )
        if stored is None:
            continue
        if kind == "llava":  # its files have the names of two matrices the other way around
            stored = re.sub("ffn_up|ffn_down", lambda match: SWAPPED[match[0]], stored)
        if weight.ndim == 5:
            parts = {stored: weight[:, :, 0], f"{stored}.1": weight[:, :, 1]}
        elif "attn_qkv" in stored and kind != "qwen3_vl":
            rows = zip("qkv", np.split(weight, 3), strict=True)
            parts = {stored.replace("attn_qkv", f"attn_{part}"): own for part, own in rows}
        else:
            parts = {stored: weight[0] if name.endswith("position_embeddings") else weight}
        for part, values in parts.items():
            _add(writer, part, values, quantized=kind in QUANTIZED)
    _finish(writer)


def _stored(name: str, own: dict[str, str], deep: list[int]) -> str | None:
    base, ending = re.fullmatch(r"(.+?)(\.weight|\.bias)?", name).groups("")  # type: ignore[union-attr]
    base = base.removeprefix("model.")
    for pattern, short in {**own, **SHARED}.items():
        if (match := re.fullmatch(pattern, base)) is None:
            continue
        short = match.expand(short)
        number = re.search(r"(?:layers?|blocks|list)\.(\d+)\.", base)
        if short.startswith(("v.", "mm.")) or number is None:
            ending = ending or ".weight" * short.startswith("v.position")
            return f"{short}{ending}"
        if "deepstack" in base:
            return f"v.deepstack.{deep[int(number[1])]}.{short}{ending}"
        return f"v.blk.{number[1]}.{short}{ending}"
    assert base.endswith("post_layernorm"), name  # of CLIP, which LLaVA does not read
    return None


def _files(kind: str, folder: Path, **changes: str) -> tuple[Path, Path, Path]:
    """Return a random checkpoint, its text decoder as a GGUF file, and its image encoder as an mmproj file."""
    checkpoint = vision.save_checkpoint(kind, folder / "checkpoint")
    model = hf.AutoModelForImageTextToText.from_pretrained(checkpoint)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    text, mmproj = folder / "text.gguf", folder / "mmproj-text.gguf"
    _write_text(kind, checkpoint, weights, text)
    _write_mmproj(kind, checkpoint, weights, mmproj, **changes)
    model.save_pretrained(checkpoint)  # with the values of blocks
    return checkpoint, text, mmproj


def _recipe(text: Path, mmproj: Path) -> Recipe:
    recipe = models.make_recipe(text, export={"logits": "all", "prefill_chunk": 16}, limits={"max_length": 400})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"mmproj": str(mmproj)})})


def test_every_projector_is_tested() -> None:
    assert {projector for projector, _ in PROJECTORS.values()} == set(_PROJECTORS)


@pytest.mark.parametrize("kind", PROJECTORS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    checkpoint, text, mmproj = _files(kind, tmp_path)
    engine, right = load(build(_recipe(text, mmproj), tmp_path / "artifact")), vision.Transformers(checkpoint)
    assert not engine.manifest.no_images
    marker, pictures = engine.manifest.images.marker, [picture(37, 61), picture(90, 33)]
    prompt = f"a{marker}bc{marker} d"
    ids, images = engine.encode_with_images(prompt, pictures)
    expected, pixels = right.inputs(prompt, pictures)
    assert np.array_equal(ids, expected)
    (actual,) = logits_with_images(engine, [(ids, images)])
    logits = right.logits(expected, pixels)
    assert np.abs(actual - logits).max() <= 1e-4 * np.abs(logits).max()


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    checkpoint, text, mmproj = _files("idefics3", tmp_path)
    other = tmp_path / "other.gguf"
    weights = {name: np.zeros((1, 1), np.float32) for name in ("model.connector.modality_projection.proj.weight",)}
    cases = [(text, text, "for a decoder 'llama'"), (checkpoint, mmproj, "is no GGUF file")]
    for changes, problem in (
        ({"projector": "gemma3"}, "has the projector 'gemma3', .* expected .* mlp, idefics3"),
        ({"projector": "qwen2vl_merger"}, "'qwen2vl_merger', for a decoder 'llama'"),
        ({"projector": "mlp"}, "'mm.model.fc.weight', F32 .* no llava"),
    ):
        file = other.with_stem(changes["projector"])
        _write_mmproj("idefics3", checkpoint, weights, file, **changes)
        cases.append((text, file, problem))
    for model, file, problem in cases:
        with pytest.raises(UsageError, match=problem):
            build(_recipe(model, file), tmp_path / "artifact")
    refused = run("build", str(mmproj), "--out", str(tmp_path / "artifact"))
    assert refused.exit_code and "--mmproj" in refused.stderr


def test_metadata_that_no_encoder_has_is_named(tmp_path: Path) -> None:
    _, text, mmproj = _files("qwen3_vl", tmp_path)
    encoder = read_gguf(mmproj)
    encoder.metadata["clip.vision.is_deepstack_layers"] = 5
    assert _deep_layers(encoder) == []
    encoder.metadata["clip.vision.block_count"] = 1 << 31
    with pytest.raises(ValueError, match="block_count should be from 1 to 1024"):
        _Facts(encoder, read_gguf(text))


def test_the_command_takes_both_files(tmp_path: Path) -> None:
    _, text, mmproj = _files("internvl", tmp_path)
    out = tmp_path / "artifact"
    built = run("build", str(text), "--mmproj", str(mmproj), "--budget", "64", "--no-calibrate", "--out", str(out))
    assert built.exit_code == 0, built.stderr
    assert load(out).generate("a", images=[picture(30, 40)], max_new_tokens=2)[0].token_ids
