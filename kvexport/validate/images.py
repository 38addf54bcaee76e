"""The picture at the start of a validation's first sequence, and its embeddings by the engine and by PyTorch."""

from typing import Any, NamedTuple

import numpy as np
import torch

from kvexport.export.vision import prepare, read_processor
from kvexport.images.rows import CallImages, PromptImages, call_images, chunk_borders, places_of
from kvexport.validate.tokens import Ids


class Picture(NamedTuple):
    image: Any  # an image of Pillow
    ids: Ids  # tokens that stand for the picture
    places: Ids  # for each of these tokens, the number of its row from 1; 0 for none
    images: PromptImages  # rows that the engine's image encoder computed

    def borders(self, chunk: int) -> list[int]:
        return chunk_borders(self.places, self.images, 0, chunk)

    def call(self, tokens: list[Ids], begin: int) -> CallImages | None:
        places = [np.zeros(len(ids), np.int64) for ids in tokens]
        part = self.places[begin : begin + len(tokens[0])]
        places[0][: len(part)] = part
        return call_images([(own, None if lane else self.images) for lane, own in enumerate(places)])

    def arguments(self, checkpoint: Any, config: Any) -> dict[str, torch.Tensor]:
        prepared = prepare(read_processor(checkpoint.path, config), self.image)
        names = [name for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in prepared]
        return {name: torch.from_numpy(np.asarray(prepared[name])) for name in names}


def make_picture(engine: Any, seed: int) -> Picture | None:
    if (spec := engine.manifest.images) is None:
        return None
    from PIL import Image

    side = spec.height * (8 * spec.group if spec.cut == "lines" else 1)  # lines keep small images small
    pixels = np.random.default_rng(seed).integers(0, 256, (side, 2 * side, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    ids, images = engine.encode_with_images(spec.marker, [image], add_special_tokens=False)
    return Picture(image, ids, places_of(ids, images, spec), images)
