"""Encoded images on their way into the decoder: vectors that replace the embeddings of placeholder tokens.

The image encoder gives each tile of an image several vectors of the decoder's hidden size. The prompt has one
placeholder token for each of these vectors.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.images.decode import ImageInput, read_image
from kvexport.images.patches import row_offsets
from kvexport.images.tiles import ImageSpec, order_of, tiles_of

Rows = NDArray[np.float32]
KEPT_ROWS = 128 << 20  # bytes of the rows of earlier images that an engine keeps


class CallImages(NamedTuple):
    """The image vectors that one call of the decoder reads, by the names of the decoder's inputs."""

    image_rows: NDArray[np.float32]  # [n, hidden]; row 0 is zeros, and stands in no place
    image_places: NDArray[np.int64]  # [B, T], the row in the place of each token, 0 for none
    # [B, 4, T], how far each token's rotary positions on three axes are from its index, and those of later tokens from
    # theirs, beside what earlier calls added; None if images have no rotary positions of their own
    image_offsets: NDArray[np.int64] | None = None
    # [1 + L], after a 0 the lanes in which tokens of images see later ones of their image; None if none ever does
    image_lanes: NDArray[np.int64] | None = None

    @classmethod
    def none(cls, spec: ImageSpec, batch: int, tokens: int) -> CallImages:
        offsets = np.zeros((batch, 4, tokens), np.int64) if spec.cut == "patches" else None
        lanes = np.zeros(1, np.int64) if spec.bidirectional else None
        return cls(np.zeros((1, spec.hidden), np.float32), np.zeros((batch, tokens), np.int64), offsets, lanes)

    def inputs(self) -> dict[str, NDArray[Any]]:
        return {name: array for name, array in self._asdict().items() if array is not None}


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The encoded images of a prompt, a vector (row) for each of the prompt's placeholder tokens.

    Attributes:
        rows: The vectors [n, hidden], in the order of the placeholder tokens.
        keys: A negative number for each vector [n], by which equal images are recognized.
        digests: The SHA-256 of each image's tiles, in hexadecimal digits.
        offsets: The result of `row_offsets` for all vectors, [n, 4].
        bidirectional: `ImageSpec.bidirectional`.
    """

    rows: NDArray[np.float32]
    keys: NDArray[np.int64]
    digests: tuple[str, ...]
    offsets: NDArray[np.int64] | None = None
    bidirectional: bool = False


class RowCache:
    """A cache of image vectors by the image's hash, because a client sends an image again in every turn."""

    def __init__(self) -> None:
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, digest: bytes, encode: Callable[[], Rows]) -> Rows:
        with self._lock:
            rows = self._rows.pop(digest, None)
        if rows is None:
            rows = encode()
        with self._lock:
            self._rows[digest] = rows
            while sum(kept.nbytes for kept in self._rows.values()) > KEPT_ROWS:
                self._rows.popitem(last=False)
        return rows


def encode_images(
    images: Sequence[ImageInput],
    spec: ImageSpec,
    encode: Callable[[Rows], Rows] | None,
    cache: RowCache,
    *,
    read: Sequence[str] = (),
    check: Callable[[int], None] | None = None,
) -> tuple[PromptImages, list[str]]:
    """Encode images; also return, for each image, the text with the placeholder tokens that stand for the image.

    `encode` maps a tile's pixels [1, 3, height, width] to vectors [rows, hidden]; with None the result has no vectors.
    Leading images whose digests are in `read` get no vectors either. `check` is called before each image is encoded,
    with the number of vectors up to the image's end; it raises an error if there are too many.
    """
    rows, keys = [np.zeros((0, spec.hidden), np.float32)], [np.zeros(0, np.int64)]
    moved = [] if spec.cut != "patches" else [np.zeros((0, 4), np.int64)]
    digests, texts, count = list[str](), list[str](), 0
    for image in images:
        pixels = read_image(image)
        tiles, grid = tiles_of(pixels, spec)
        groups = math.prod(map(int, grid.split("x"))) if spec.cut in ("patches", "lines") else len(tiles)
        order, weights = order_of(pixels, spec, groups)
        offsets = row_offsets(tiles, spec)
        if spec.parts(grid) is None:
            raise UsageError(f"an image is cut into {grid} tiles, for which the model has no text", "a smaller image")
        # Tiles of the same bytes may have other shapes.
        digest = hashlib.sha256(tiles.tobytes() + order.tobytes() + str(tiles.shape).encode()).digest()
        digests.append(digest.hex())
        texts.append(spec.text(grid))
        count += len(order)
        if check is not None:
            check(count)
        if encode is None or [*read[: len(digests)]] == digests:
            continue
        rows.append(cache.rows(digest, partial(_encoded, tiles, order, weights, encode)))
        keys.append(np.resize(np.frombuffer(digest, np.int64) | np.iinfo(np.int64).min, len(order)))
        if offsets is not None:
            moved.append(offsets)
    # One image's vectors are those of the cache: requests that wait with the same image have no copies of them.
    whole = rows[1] if len(rows) == 2 else np.concatenate(rows)
    offsets = np.concatenate(moved) if moved else None
    return PromptImages(whole, np.concatenate(keys), tuple(digests), offsets, spec.bidirectional), texts


def _encoded(tiles: Rows, order: NDArray[np.int64], weights: Rows, encode: Callable[[Rows], Rows]) -> Rows:
    """Encode the tiles of an image; return one vector for each of the image's tokens, as `order` and `weights` say."""
    rows = np.concatenate([encode(tile[None]) for tile in tiles])
    if order.shape[1] == 1:
        return rows[order[:, 0]]
    summed = np.zeros((len(order), rows.shape[1]), np.float32)
    for i, weight in zip(order.T, weights.T, strict=True):
        summed += rows[i] * weight[:, None]
    return summed


def with_images(prompt: str, texts: Sequence[str], spec: ImageSpec) -> str:
    """Return a prompt in which each image marker became its image's text; without markers the texts come first."""
    parts = prompt.split(spec.marker)
    if len(parts) == 1:
        parts = [""] * len(texts) + parts
    if len(parts) != len(texts) + 1:
        raise UsageError(
            f"the prompt has {len(parts) - 1} places for images ({spec.marker}), and there are {len(texts)} images",
            "one image for each place, or a prompt without places, which the images then precede",
        )
    return "".join(text for pair in zip(parts, [*texts, ""], strict=True) for text in pair)


def places_of(ids: NDArray[np.int64], images: PromptImages | None, spec: ImageSpec | None) -> NDArray[np.int64]:
    """Return for each token of a prompt [n] the index, from 1, of the image vector that replaces it; 0 for none."""
    places = np.zeros(len(ids), np.int64)
    if images is not None:
        if spec is None or images.rows.shape[1] != spec.hidden:
            raise UsageError("the images were encoded for another artifact", "Engine.encode_with_images of this engine")
        found = ids == spec.token
        if (count := int(found.sum())) != len(images.rows):
            raise UsageError(
                f"the prompt has {count} tokens for images, whose images have {len(images.rows)} rows",
                f"a prompt whose text does not hold {spec.token_text} itself",
            )
        places[found] = np.arange(1, count + 1)
    return places


def chunk_end(places: NDArray[np.int64], images: PromptImages | None, start: int, chunk: int) -> int:
    """Return the end of the prompt chunk that begins at token `start`; a chunk may not end within certain images.

    One call has to read the whole of an image whose tokens see each other. The result may be beyond the prompt's end;
    it is `start` if such an image is longer than a chunk.
    """
    end = start + chunk
    if images is not None and images.bidirectional and end < len(places) and places[end]:
        while end > start and places[end - 1]:
            end -= 1
    return end


def chunk_borders(places: NDArray[np.int64], images: PromptImages | None, start: int, chunk: int) -> list[int]:
    """Return where to cut the rest of a prompt, from token `start` on, into chunks of at most `chunk` tokens.

    An image whose tokens attend to each other is not cut. `places` has the index of each token's image vector, 0 for
    tokens of text.

    Raises:
        UsageError: Images that follow each other have more than `chunk` tokens.
    """
    borders = list[int]()
    while (end := chunk_end(places, images, start, chunk)) < len(places):
        if end == start:
            raise UsageError(
                f"more than {chunk} tokens of images follow each other, and one call has to read them",
                "text between the images",
            )
        borders.append(start := end)
    return borders


def call_images(chunks: Sequence[tuple[NDArray[np.int64], PromptImages | None]]) -> CallImages | None:
    """Return the image vectors of a decoder call that reads a chunk of each prompt; None if no token is of an image.

    A chunk is given as the indices of the image vectors of its tokens (`places_of`) and the prompt's encoded images.
    """
    if not any(images is not None and places.any() for places, images in chunks):
        return None
    rows: list[NDArray[np.float32]] = []
    placed = np.zeros((len(chunks), max(len(places) for places, _ in chunks)), np.int64)
    offsets = np.zeros((len(chunks), 4, placed.shape[1]), np.int64)
    moves, count, lanes = False, 1, [0]
    for lane, (places, images) in enumerate(chunks):
        used = places > 0
        if images is not None and used.any():
            rows.append(images.rows[places[used] - 1])
            placed[lane, : len(places)][used] = np.arange(count, count + len(rows[-1]))
            count += len(rows[-1])
            lanes += [lane] * images.bidirectional
            if images.offsets is not None:
                moves, own = True, offsets[lane, :, : len(places)]
                own[:, used] = images.offsets[places[used] - 1].T
                later = np.cumsum(own[3])
                own[:3] += later - own[3]
                own[3] = later
    whole = np.concatenate([np.zeros_like(rows[0][:1]), *rows])
    seeing = np.array(lanes) if len(lanes) > 1 else None
    return CallImages(whole, placed, offsets if moves else None, seeing)
