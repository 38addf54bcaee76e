"""Tiny random models that read images, with processors of transformers, and logits of transformers for prompts."""

import inspect
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvexport.export.vision import prepare, read_processor

SIDE = 28
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 7,
}
SIGLIP = {**VISION, "vision_use_head": False}
SMALL = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4}
SPLIT = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [3 * SIDE, SIDE], [SIDE, 3 * SIDE]]
PLACES = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
FAKE = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *PLACES]

# Encoders of images of any size, whose rows have rotary positions of rows and columns.
PADS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
PATCHES = {"patch_size": 7, "size": {"shortest_edge": 4 * 14 * 14, "longest_edge": 30 * 14 * 14}}
ENCODER = {"depth": 3, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "patch_size": 7}
TABLE = {"out_hidden_size": 32, "num_position_embeddings": 25}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
GLM = {"out_hidden_size": 32, "image_size": 35}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _in_patches(config: Any, encoder: dict[str, Any], images: Any = hf.Qwen2VLImageProcessorPil, **text: Any) -> Any:
    return (
        PADS,
        {"image_token": PADS[0]},
        images(**PATCHES),
        {},
        lambda: config(
            text_config={**TEXT, "rope_parameters": ROTARY, **text},
            vision_config={**ENCODER, **encoder},
            image_token_id=256,
            video_token_id=259,
        ),
    )


# Special tokens (the first is the placeholder, token 256), names of some of them, processor, its settings, and model.
KINDS: dict[str, tuple[list[str], dict[str, str], Any, dict[str, Any], Any]] = {
    "llava": (
        ["<image>"], {"image_token": "<image>"},
        hf.LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        lambda: hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**VISION),
         image_token_index=256),
    ),
    "llava_next": (
        ["<image>"], {"image_token": "<image>"},
        hf.LlavaNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE},
         image_grid_pinpoints=PINPOINTS),
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        lambda: hf.LlavaNextConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**VISION),
         image_token_index=256, image_grid_pinpoints=PINPOINTS),
    ),
    "llava_onevision": (
        ["<image>", "<video>"], {"image_token": "<image>", "video_token": "<video>"},
        hf.LlavaOnevisionImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS),
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
        lambda: hf.LlavaOnevisionConfig(text_config=hf.Qwen2Config(**TEXT),
         vision_config=hf.SiglipVisionConfig(**SIGLIP), image_token_id=256, video_token_id=257,
         image_grid_pinpoints=PINPOINTS, vision_aspect_ratio="anyres_max_2"),
    ),
    "internvl": (
        ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
         "video_token": "<video>"}, hf.GotOcr2ImageProcessorPil(**SMALL), {"image_seq_length": 4},
        lambda: hf.InternVLConfig(text_config=hf.Qwen2Config(**TEXT), vision_config=hf.InternVLVisionConfig(**{**VISION,
           "image_size": [SIDE, SIDE], "patch_size": [7, 7]}), image_token_id=256),
    ),
    "qianfan_ocr": (
        ["<IMG_CONTEXT>", "<img>", "</img>", "<image>"],
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
        hf.GotOcr2ImageProcessorPil(**SMALL), {"image_seq_length": 4},
        lambda: hf.QianfanOCRConfig(text_config=hf.Qwen3Config(**TEXT),
         vision_config=hf.QianfanOCRVisionConfig(**{**VISION, "image_size": [SIDE, SIDE], "patch_size": [7, 7]}),
         image_token_id=256),
    ),
    "vipllava": (
        ["<image>"], {"image_token": "<image>"},
        hf.LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        lambda: hf.VipLlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**VISION),
         image_token_index=256, vision_feature_layers=[-1, -2, 1]),
    ),
    "aya_vision": (
        ["<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"],
        {}, hf.GotOcr2ImageProcessorPil(**SMALL), {"patch_size": 7, "img_size": SIDE, "downsample_factor": 2},
        lambda: hf.AyaVisionConfig(text_config=hf.Cohere2Config(**TEXT), vision_config=hf.SiglipVisionConfig(**SIGLIP),
         image_token_index=256, alignment_intermediate_size=64),
    ),
    "idefics3": (
        FAKE, {"image_token": "<image>"}, hf.Idefics3ImageProcessorPil(**SPLIT), {"image_seq_len": 4},
        lambda: hf.Idefics3Config(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.Idefics3VisionConfig(**VISION),
         image_token_id=256, scale_factor=2),
    ),
    "smolvlm": (
        FAKE, {"image_token": "<image>"}, hf.SmolVLMImageProcessorPil(**SPLIT), {"image_seq_len": 4},
        lambda: hf.SmolVLMConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.SmolVLMVisionConfig(**VISION),
         image_token_id=256, scale_factor=2),
    ),
    "gemma3": (
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        hf.Gemma3ImageProcessorPil(size={"height": 2 * SIDE, "width": 2 * SIDE}),
        {"image_seq_length": 16},
        lambda: hf.Gemma3Config(
            # A window of fewer tokens than an image has
            text_config=hf.Gemma3TextConfig(
                **{**TEXT, "num_hidden_layers": 3, "query_pre_attn_scalar": 8, "sliding_window": 11},
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            vision_config=hf.SiglipVisionConfig(**{**SIGLIP, "image_size": 2 * SIDE}),
            mm_tokens_per_image=16,  # a mean of four patches each
            image_token_index=256,
            boi_token_index=257,
            eoi_token_index=258,
        ),
    ),
    "mistral3": (
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], {}, hf.PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=7),
        {"patch_size": 7, "spatial_merge_size": 2},
        lambda: hf.Mistral3Config(text_config=hf.MistralConfig(**TEXT), vision_config=hf.PixtralVisionConfig(**VISION),
         image_token_index=256, spatial_merge_size=2),
    ),
    "qwen2_vl": _in_patches(hf.Qwen2VLConfig, {"embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": _in_patches(
        hf.Qwen2_5_VLConfig, {"out_hidden_size": 32, "window_size": 28, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": _in_patches(hf.Qwen3VLConfig, {**TABLE, "deepstack_visual_indexes": [0, 2]}, num_hidden_layers=3),
    "qwen3_vl_moe": _in_patches(hf.Qwen3VLMoeConfig, {**TABLE, "deepstack_visual_indexes": [1]}, **EXPERTS),
    "qwen3_5": _in_patches(hf.Qwen3_5Config, TABLE, **LINEAR),
    "glm4v": _in_patches(hf.Glm4vConfig, GLM, hf.Glm4vImageProcessorPil),
    "glm4v_moe": _in_patches(hf.Glm4vMoeConfig, GLM, hf.Glm4vImageProcessorPil, **EXPERTS),
    "qwen3_5_moe": _in_patches(hf.Qwen3_5MoeConfig, TABLE, **LINEAR, **EXPERTS),
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}"
    "[{{ 'answer' if message['role'] == 'assistant' else message['role'] }}]{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARKER{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}[answer]"
)


def save_processor(kind: str, folder: Path) -> Any:
    """Save a tokenizer, a chat template and the settings of a processor. Return the config of its model."""
    special, names, images, settings, config = KINDS[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=names).save_pretrained(folder)
    marker = next((x for x in ("<image>", "<start_of_image>") if x in special), special[0])
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARKER", marker))
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return config()


def save_checkpoint(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(save_processor(kind, folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, **{"format": "PNG", **options})
    return stream.getvalue()


class Transformers:
    """A checkpoint in transformers, which reads text with markers of images."""

    def __init__(self, folder: Path) -> None:
        self.model = hf.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        self.processor = read_processor(folder, self.model.config)

    def inputs(self, text: str, images: Sequence[Image.Image]) -> tuple[NDArray[np.int64], Any]:
        """Return the token ids of a prompt and the arrays of its images, as transformers' processors make them."""
        processor = self.processor
        prepared = [prepare(processor, image) for image in images]
        parts = text.split(getattr(processor, "image_placeholder_token", processor.image_token))
        texts = [processor.replace_image_token(one, 0) for one in prepared]
        whole = "".join(part for pair in zip(parts, [*texts, ""], strict=True) for part in pair)
        ids = np.array(processor.tokenizer(whole)["input_ids"], np.int64)
        if not prepared:
            return ids, None
        if "image_sizes" in prepared[0]:
            return ids, dict(prepare(processor, list(images)))
        if "image_grid_thw" in prepared[0]:
            return ids, {
                **prepare(processor, list(images)),
                "mm_token_type_ids": (ids == processor.image_token_id)[None],
            }
        axis = 1 if prepared[0]["pixel_values"].ndim == 5 else 0
        pixels = {"pixel_values": np.concatenate([one["pixel_values"] for one in prepared], axis)}
        if "token_type_ids" in inspect.signature(self.model.forward).parameters:
            pixels["token_type_ids"] = (ids == self.model.config.image_token_id)[None]
        return ids, pixels

    def logits(self, ids: NDArray[np.int64], pixels: Any) -> NDArray[np.float32]:
        with torch.no_grad():
            given = {name: torch.from_numpy(np.asarray(array)) for name, array in (pixels or {}).items()}
            for name in given.keys() & {"mm_token_type_ids", "token_type_ids"}:  # a generated token is text
                kinds = given[name].int()
                given[name] = torch.nn.functional.pad(kinds, (0, len(ids) - kinds.shape[1]))
            logits = self.model(input_ids=torch.from_numpy(ids)[None], **given).logits[0]
        return logits.float().numpy()
