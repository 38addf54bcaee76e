"""The image part of a model: its encoder as an ONNX graph, and how its processor cuts images into tiles.

Every model of transformers that reads images has a method `get_image_features`, which returns embeddings of the
decoder's hidden size; the model puts them in place of placeholder tokens. The graph vision.onnx computes them for one
tile of an image. A model that does more with images is refused with a reason before anything is traced, and its decoder
is built to read only text.
"""

import inspect
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional
from transformers import AttentionInterface, AutoImageProcessor, PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from kvexport import backends
from kvexport.errors import KvexportError
from kvexport.export.graph.tracer import initializer_names, onnx_operator
from kvexport.export.model.config import first_line_of
from kvexport.export.model.hf_model import build_fake, is_composite
from kvexport.export.model.tensors import ModelShape
from kvexport.export.passes.library import MICROSOFT
from kvexport.export.weights.specs import packings, weight_specs
from kvexport.export.weights.write import Spec
from kvexport.images.decode import MOST_PIXELS
from kvexport.images.patches import encoder_inputs
from kvexport.images.tiles import ImageSpec, tiles_of
from kvexport.methods.slots import Rotary
from kvexport.ops.to_onnx import optimize, to_onnx
from kvexport.quiet import quiet_exporter
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.shards import refuse_link

# Model types for which tests compare logits with images to those of transformers (tests/export/test_vision.py)
COMPARED = {"aya_vision", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "qianfan_ocr", "smolvlm"}
COMPARED |= {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"}
COMPARED |= {"vipllava", "gemma3", "mistral3"}
_AREAS = ("shortest_edge", "longest_edge", "min_pixels", "max_pixels")  # numbers of pixels if images become patches
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_MOST_NUMBER = 1 << 14  # the largest number in a processor's settings: sides of images, tiles, tokens of a tile
_MOST_SIDE = 16  # the most tiles in a row or a column of an image
# Heights and widths of sample images, for which kvexport's tiles are compared with those of the checkpoint's processor
_SAMPLES = ((37, 61), (61, 37), (64, 64), (7, 300), (900, 20), (500, 700))


class Vision(NamedTuple):
    """The image part of a model: how images are cut, the encoder's graph, and the sources of its weights' bytes."""

    spec: ImageSpec
    graph: ir.Model  # the encoder without weights
    weights: list[Spec]


class _Refused(Exception):
    """The error that says why a model is built without its image encoder."""


def read_vision(shape: ModelShape, recipe: Recipe) -> Vision | str:
    """Return a model's image encoder, or the reason why it is not built; "" for a model that reads only text."""
    if not is_composite(shape.model.config):
        return ""
    try:
        _check_model(shape, recipe)
        with quiet_exporter():
            spec, dimensions = _read_spec(shape.checkpoint.path, shape.model.config)
            bidirectional = "token_type_ids" in inspect.signature(shape.model.forward).parameters
            if bidirectional and spec.rows > (chunk := recipe.export.prefill_chunk):
                raise _Refused(
                    f"one call has to read the {spec.rows} tokens of an image, which see each other, and "
                    f"export.prefill_chunk is {chunk}; --set export.prefill_chunk={spec.rows} reads images"
                )
            spec = replace(spec, bidirectional=bidirectional)
            model, mode = build_fake(shape.model.config, shape.model.dtype, recipe.rotary_length)
            graph = _trace(model, mode, spec, five=dimensions == 5)
        _keep_read(model, graph)
        floats = recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"bits": None})})
        weights = weight_specs(shape.checkpoint, model, floats)
        if packings(weights):
            raise _Refused("the weights of its image encoder are packed")
    except _Refused as refused:
        return str(refused)
    except KvexportError as error:
        return error.problem
    return Vision(spec, graph, weights)


def planned_encoder_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Return at most how many bytes the image encoder's weights take; 0 if only text would be built."""
    try:
        _check_model(shape, recipe)
    except _Refused:
        return 0
    if not any((shape.checkpoint.path / name).exists() for name in PROCESSOR_FILES):
        return 0
    model, _ = build_fake(shape.model.config, shape.model.dtype, recipe.rotary_length)
    decoder = {name for name, _ in shape.model.named_parameters(remove_duplicate=False)}
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if name not in decoder)


def _check_model(shape: ModelShape, recipe: Recipe) -> None:
    """Raise _Refused if the model does more with images than kvexport knows."""
    model, config, backend = shape.model, shape.model.config, backends.get(recipe.backend.name)
    rotates = f"cache.positions: {recipe.cache.positions} or cache.method: {recipe.cache.method}"
    turns = hasattr(model.base_model, "get_rope_index") and any(x.rotary != Rotary() for x in shape.plan.caches)
    arguments = inspect.signature(model.forward).parameters
    encoder = inspect.signature(getattr(model.base_model, "get_image_features", lambda: None)).parameters
    needed = [name for name, x in encoder.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    reasons = {
        "the recipe says export.images: false": not recipe.export.images,
        f"{backend.name} runs no image encoder": not backend.runs_images,
        "cache.periodic decodes without the rows of images": recipe.cache.periodic.slots is not None,
        f"its images have positions of rows and columns (M-RoPE), and {rotates} rotates keys by their index": turns,
        "tokens of an image attend to those after them, which is not tested on GPUs": "token_type_ids" in arguments
        and backend.needs_gpu(recipe),
        "it has no encoder that transformers calls get_image_features": "pixel_values" not in encoder,
        f"its encoder takes {', '.join(needed[1:])} beside pixels": len(needed) > 1
        and config.model_type not in COMPARED,
        "its images have not been compared with transformers": config.model_type not in COMPARED,
    }
    for reason, applies in reasons.items():
        if applies:
            raise _Refused(reason)


def _read_spec(folder: Path, config: Any) -> tuple[ImageSpec, int]:
    """Return how the checkpoint's image processor cuts images, and how many dimensions its array of tiles has."""
    try:
        processor = read_processor(folder, config)
        spec = image_spec(processor, config)
        return spec, _compare(processor, spec)
    except (_Refused, KvexportError):
        raise
    except Exception as error:  # settings of wrong types may raise any exception
        raise _Refused(f"transformers cannot read its image processor: {first_line_of(error)}") from error


def read_processor(folder: Path, config: Any) -> Any:
    """Return the checkpoint's image processor of transformers, in numpy and Pillow, without its part for videos."""
    kind = _processor_class(config)
    reader: Any = AutoImageProcessor
    if not hasattr(kind, "replace_image_token"):
        raise _Refused(f"transformers {transformers.__version__} does not say which text stands for an image")
    for name in PROCESSOR_FILES:
        refuse_link(folder / name)
    settings, _ = kind.get_processor_dict(str(folder))
    images = reader.from_pretrained(str(folder), backend="pil", local_files_only=True, trust_remote_code=False)
    _check_numbers([settings, images.to_dict()], _AREAS if hasattr(images, "merge_size") else ())
    # The class that the checkpoint names might read a pickle.
    parts = {"image_processor": images, "tokenizer": PreTrainedTokenizerFast.from_pretrained(str(folder))}
    names = inspect.signature(kind).parameters
    given = {name: value for name, value in settings.items() if name in names and name not in parts}
    absent = {"video_processor": None} if "video_processor" in names else {}
    with _without_video(kind):
        return kind(**{**given, **parts, **absent})


def _processor_class(config: Any) -> Any:
    kind: Any = PROCESSOR_MAPPING[type(config)]
    if "torchvision" not in getattr(kind, "_backends", ()):
        return kind
    # transformers has this processor beside torchvision alone, although its image processor has a twin in Pillow.
    package = kind.__module__.rpartition(".")[0]
    name = package.rpartition(".")[2]
    sys.modules[imported := f"{package}.image_processing_{name}"] = import_module(
        f"{package}.image_processing_pil_{name}"
    )
    try:
        return getattr(import_module(kind.__module__), kind.__name__)
    finally:
        del sys.modules[imported]


def _check_numbers(settings: Any, areas: Collection[str]) -> None:
    """Raise _Refused if an image processor's settings have values so large that tiles or texts would be huge."""
    for name, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        if isinstance(value, dict | list | tuple):
            _check_numbers(value, areas)
        elif isinstance(value, int | float) and not abs(value) <= (MOST_PIXELS if name in areas else _MOST_NUMBER):
            raise _Refused(f"the settings of its processor hold the number {value:.6g}")


@contextmanager
def _without_video(kind: type) -> Iterator[None]:
    """Within this context, make an image processor without the packages for videos and the checks of its parts."""

    def keep(self: Any, *parts: Any, **named: Any) -> None:
        attributes = dict(zip(("image_processor", "tokenizer"), parts, strict=False))
        self.__dict__.update(attributes | named)

    module = sys.modules[kind.__module__]
    absent = {name: object() for name, value in vars(module).items() if value is None and not name.startswith("__")}
    with mock.patch.object(ProcessorMixin, "__init__", keep), mock.patch.dict(vars(module), absent):
        yield


def image_spec(processor: Any, config: Any) -> ImageSpec:
    """Return how a processor of transformers cuts images, with the placeholder text of every grid of tiles."""
    images, kwargs = processor.image_processor, _image_settings(processor)

    def setting(name: str) -> Any:
        return kwargs.get(name, getattr(images, name, None))

    size, crop = _sides(setting("size")), _sides(setting("crop_size"))
    largest = _sides(setting("max_image_size"))
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge", 0)
    tile = crop if setting("do_center_crop") else size
    cut: dict[str, Any] = {"cut": "whole", "square": bool(setting("do_pad"))}
    grids: dict[str, dict[str, Any]] = {"1": {"num_crops": [0]}}
    hidden, encoder = config.get_text_config().hidden_size, getattr(config, "vision_config", None)
    if group := setting("merge_size"):
        side, grids = setting("patch_size"), {}
        tile = {"height": side, "width": side}
        cut = {"cut": "patches", "pixels": (shortest, longest), "frames": setting("temporal_patch_size")}
        cut |= {"grown": "num_frames" in inspect.signature(_resize_of(images)).parameters}
        cut |= {"group": group, "window": getattr(encoder, "window_size", 0) // (side * group)}
        cut |= {"table": math.isqrt(getattr(encoder, "num_position_embeddings", 0))}
        hidden *= 1 + len(getattr(encoder, "deepstack_visual_indexes", ()))
    elif hasattr(processor, "image_break_token"):
        side, grids = processor.patch_size, {}
        tile = {"height": side, "width": side}
        cut = {"cut": "lines", "longest": longest, "group": processor.spatial_merge_size}
        cut |= {"ends": (processor.image_break_token, processor.image_end_token)}
    elif largest:
        side = largest["longest_edge"]
        cut = {"cut": "rows", "longest": longest, "split": bool(setting("do_image_splitting"))}
        tile, most = {"height": side, "width": side}, -(-(min(longest, 4096) + 1) // side)
        grids = {"0x0": {"rows": [[0]], "cols": [[0]]}}
        if cut["split"] and most <= _MOST_SIDE:
            sizes = ((r, c) for r in range(1, most + 1) for c in range(1, most + 1))
            grids |= {f"{r}x{c}": {"rows": [[r]], "cols": [[c]]} for r, c in sizes}
    elif setting("max_patches"):
        most = min(setting("max_patches"), _MOST_SIDE**2) if setting("crop_to_patches") else 1
        least = min(setting("min_patches"), most)
        cut, counts = {"cut": "canvas", "tiles": (least, most)}, {1, *range(max(least, 2) + 1, most + 2)}
        grids = {str(n): {"num_patches": [n]} for n in sorted(counts)}
    elif pinpoints := setting("image_grid_pinpoints"):
        cut, grids = {"cut": "anyres", "pinpoints": tuple((height, width) for height, width in pinpoints)}, {}
        if most := getattr(config, "vision_aspect_ratio", None):
            cut["most"] = int(most.removeprefix("anyres_max_"))
    elif shortest:
        cut["size"] = (0, shortest)
    else:
        cut["size"] = (size.get("height"), size.get("width"))
    if not tile.get("height") or not all(map(setting, ("do_rescale", "do_normalize"))):
        raise _Refused(f"its processor ({type(images).__name__}) prepares images in a way that kvexport does not know")
    token = next(x for x in (getattr(config, "image_token_id", None), getattr(config, "image_token_index", None)) if x)
    token_text = processor.tokenizer.convert_ids_to_tokens(token)
    pixels = {"pixel_values": [np.zeros((3, tile["height"], tile["width"]), np.float32)]}
    texts = {
        name: _runs(processor.replace_image_token({**pixels, **grid}, 0), token_text) for name, grid in grids.items()
    }
    rows = _rows_of_tiles(texts) if texts else 1
    if cut["cut"] == "anyres":
        rows = (tile["height"] // config.vision_config.patch_size) ** 2 + 1
    return ImageSpec(
        **cut,
        height=tile["height"],
        width=tile["width"],
        rows=rows,
        hidden=hidden,
        marker=getattr(processor, "image_placeholder_token", processor.image_token),
        token=token,
        token_text=token_text,
        texts=texts,
        resample=int(setting("resample")),
        scale=float(setting("rescale_factor")),
        mean=_color(setting("image_mean")),
        std=_color(setting("image_std")),
    )


def _resize_of(images: Any) -> Any:
    return getattr(sys.modules[type(images).__module__], "smart_resize", lambda: None)


def _image_settings(processor: Any) -> dict[str, Any]:
    settings = {**(getattr(processor, "images_kwargs", None) or {}), "return_tensors": "np"}
    if hasattr(processor, "image_break_token"):
        settings["patch_size"] = processor.patch_size * processor.spatial_merge_size
    return settings


def prepare(processor: Any, image: Any) -> Any:
    return processor.image_processor(image, **_image_settings(processor))


def _color(numbers: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, [numbers] * 3 if isinstance(numbers, float) else numbers)
    return red, green, blue


def _sides(size: Any) -> dict[str, Any]:
    sides = dict(size) if isinstance(size, dict) else vars(size) if size is not None else {}
    return {name: side for name, side in sides.items() if side is not None}


def _runs(text: str, token: str) -> tuple[str | int, ...]:
    """Return a text in which each run of repeated placeholder tokens is replaced by the number of tokens in the run."""
    parts = re.split(f"((?:{re.escape(token)})+)", text)
    return tuple(len(x) // len(token) if i % 2 else x for i, x in enumerate(parts) if x)


def _compare(processor: Any, spec: ImageSpec) -> int:
    """Refuse tiles or texts of `spec` that differ from the processor's; return the dimensions of its tile array."""
    from PIL import Image

    random, dimensions = np.random.default_rng(0), 0
    for height, width in _SAMPLES:
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        tiles, grid = tiles_of(image, spec)
        prepared = prepare(processor, image)
        pixels, dimensions = prepared["pixel_values"], prepared["pixel_values"].ndim
        theirs = pixels if spec.cut == "patches" else pixels.reshape(-1, *pixels.shape[-3:])
        tiles = encoder_inputs(tiles, spec)["pixel_values"] if spec.cut == "patches" else tiles
        text = _runs(processor.replace_image_token(prepared, 0), spec.token_text)
        if theirs.shape != tiles.shape or np.abs(theirs - tiles).max() > 1e-5 or text != spec.parts(grid):
            name = type(processor.image_processor).__name__
            raise _Refused(f"its processor ({name}) prepares images in a way that kvexport does not know")
    return dimensions


def _rows_of_tiles(texts: Mapping[str, tuple[str | int, ...]]) -> int:
    """Return the number of placeholder tokens that stand for an image's tile; raise _Refused if tiles differ."""
    found = set()
    for grid, text in texts.items():
        rows, _, columns = grid.partition("x")
        tiles = int(rows) * int(columns) + 1 if columns else int(rows)
        found.add(sum(part for part in text if isinstance(part, int)) / tiles)
    if len(found) != 1 or not (rows_of_one := found.pop()).is_integer() or not rows_of_one:
        raise _Refused("its processor writes texts whose tokens are not those of equal tiles")
    return int(rows_of_one)


def _keep_read(model: Any, graph: ir.Model) -> None:
    names = initializer_names(model)
    for prefix, module in model.named_modules():
        for name in module._parameters:
            if names.get(f"{prefix}.{name}".lstrip(".")) not in graph.graph.initializers:
                module._parameters[name] = None


# The name says "flash" so that transformers passes all patches, with the borders of windows, in one call.
WINDOWS = "kvexport_flash_windows"
torch.library.define(
    "kvexport::whole_attention", "(Tensor query, Tensor key, Tensor value, *, int num_heads, float scale) -> Tensor"
)
torch.library.register_fake("kvexport::whole_attention", lambda query, key, value, **_: torch.empty_like(query))
_WHOLE: Any = torch.ops.kvexport.whole_attention.default


def _attend_in_windows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Let each patch attend to the patches of its window (without windows, to all); [1, patches, heads, size].

    Queries, keys and values are [1, heads, patches, size].
    """
    patches = [x[0].transpose(0, 1) for x in (query, key, value)]
    if not (most := options["max_length_q"]):
        whole = _WHOLE(*(x[None].flatten(2) for x in patches), num_heads=query.shape[1], scale=options["scaling"])
        return whole.unflatten(2, query.shape[1::2]), None
    borders, number = options["cu_seq_lens_q"], torch.arange(query.shape[2])
    places = borders[:-1, None] + torch.arange(most)
    real = places < borders[1:, None]
    q, k, v = (x[torch.where(real, places, 0)].transpose(1, 2) for x in patches)  # [windows, heads, most, size]
    scores = (q @ k.transpose(2, 3) * options["scaling"]).float().masked_fill(~real[:, None, None], -math.inf)
    window = (number[:, None] >= borders[1:]).sum(1)
    return (scores.softmax(-1).to(v.dtype) @ v)[window, :, number - borders[window]][None], None


AttentionInterface.register(WINDOWS, _attend_in_windows)


class _PatchEncoder(nn.Module):
    """The module that is traced as vision.onnx if images are cut into patches; `encoder_inputs` makes its inputs."""

    def __init__(self, model: Any, spec: ImageSpec, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.most = (spec.window * spec.group) ** 2
        encoder = model.base_model.visual if spec.cut == "patches" else model.base_model.vision_tower
        encoder.config._attn_implementation = WINDOWS
        patches_as_products(encoder)

    def forward(self, pixel_values: Tensor, *inputs: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(self.names, inputs, strict=True))
        if self.most:
            given["max_window_seqlen"] = self.most
        borders = torch.tensor([0, 1 << 30])  # of all patches, however many
        grid = functional.pad(given["position_ids"].amax(0) + 1, (1, 0), value=1)[None]
        features = self.model.base_model.visual(pixel_values, grid, cu_seqlens=borders, max_seqlen=0, **given)
        return torch.cat([features.pooler_output, *getattr(features, "deepstack_features", ())], -1).float()


class _LineEncoder(_PatchEncoder):
    """Like `_PatchEncoder`, for Pixtral's encoder and Mistral's projector, whose modules take no groups of patches."""

    def forward(self, pixel_values: Tensor, *inputs: Tensor) -> Tensor:
        tower, projector = self.model.base_model.vision_tower, self.model.base_model.multi_modal_projector
        states = [tower.ln_pre(tower.patch_conv(pixel_values.to(self.model.dtype))[None])]
        places = tower.patch_positional_embedding(states[0], inputs[0])
        whole = {"max_length_q": 0}
        for layer in tower.transformer.layers:
            states.append(layer(states[-1], None, position_embeddings=places, **whole))
        merger = projector.patch_merger
        x = projector.norm(states[self.model.config.vision_feature_layer][0])
        groups = x.unflatten(0, (-1, merger.spatial_merge_size**2)).transpose(1, 2).flatten(1)
        x = projector.linear_1(merger.merging_layer(groups))
        rows: Tensor = projector.linear_2(projector.act(x)).float()
        return rows


def patches_as_products(encoder: nn.Module) -> None:
    """Let an encoder compute each convolution that covers its whole input, as of patches, by a matrix product."""
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.forward = partial(_product, module)  # type: ignore[method-assign]


def _product(convolution: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    return functional.linear(x.flatten(1), convolution.weight.flatten(1), convolution.bias)


class _Encoder(nn.Module):
    """The module that is traced as vision.onnx: from pixels [1, 3, H, W] of a tile to embeddings [rows, hidden]."""

    def __init__(self, model: Any, spec: ImageSpec, five: bool) -> None:
        super().__init__()
        self.model, self.shape, self.five = model, (spec.rows, spec.hidden), five
        self.sizes = {"image_sizes": [(1, 1)]} if spec.cut == "anyres" else {}

    def forward(self, pixel_values: Tensor) -> Tensor:
        pixels = pixel_values[None] if self.five else pixel_values
        return features_of(self.model, pixels, **self.sizes).reshape(self.shape)


def features_of(model: Any, pixel_values: Tensor, **sizes: Any) -> Tensor:
    """Return the vectors [n, hidden] that a model of transformers puts in the places of an image's tokens."""
    features = model.base_model.get_image_features(pixel_values.to(model.dtype), **sizes, return_dict=True)
    parts = (features.pooler_output, *(getattr(features, "deepstack_features", None) or ()))
    whole = [torch.cat(list(x)) if isinstance(x, Sequence) else x for x in parts]  # some have a tensor for each image
    return torch.cat([x.flatten(0, -2) for x in whole], -1).float()


def _sample(spec: ImageSpec) -> tuple[dict[str, Tensor], list[dict[int, Any]]]:
    """Return sample inputs for an image encoder that takes patches, and which input dimensions vary with the image."""
    side = spec.height * spec.group
    shape = [side * count * (spec.window or 1) for count in (3, 2)]
    given = encoder_inputs(np.zeros((1, 3, *shape), np.float32), spec)
    groups = Dim("groups")
    sizes = {"window_index": groups, "cu_window_seqlens": Dim("windows", min=3)}  # the graph takes 2 too
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    return tensors, [{0: sizes.get(name, spec.group**2 * groups)} for name in tensors]


def _trace(model: Any, mode: Any, spec: ImageSpec, *, five: bool) -> ir.Model:
    # Without canvases an image is its first tile, to which the model appends the end of a line.
    none = mock.patch.multiple(model.config, image_grid_pinpoints=[[0, 0]]) if spec.cut == "anyres" else nullcontext()
    try:
        with mode, none:
            shapes: list[Any]
            inputs, shapes = {"pixel_values": torch.zeros(1, 3, spec.height, spec.width)}, [None]
            encoder: nn.Module = _Encoder(model, spec, five)
            if spec.cut in ("patches", "lines"):
                inputs, shapes = _sample(spec)
                encoder = (_PatchEncoder if spec.cut == "patches" else _LineEncoder)(model, spec, list(inputs)[1:])
            sizes = {"num_heads": "int", "scale": "float"}
            whole = onnx_operator("MultiHeadAttention", ["query", "key", "value"], ["output"], sizes, (), MICROSOFT)
            names = {"input_names": [*inputs], "output_names": ["image_rows"]}
            first, *rest = shapes
            graph = to_onnx(
                encoder.eval(), [*inputs.values()], [first, tuple(rest)] if rest else [first], {_WHOLE: whole}, **names
            )
    except Exception as error:
        raise _Refused(f"its image encoder cannot be traced: {first_line_of(error)}") from error
    for name in initializer_names(model).values():
        if name in graph.graph.initializers:
            graph.graph.initializers[name].const_value = None
    optimize(graph)
    return graph
