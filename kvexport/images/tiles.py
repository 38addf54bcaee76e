"""The tiles that an image encoder takes, cut from an image as the processors of transformers cut them.

A checkpoint's image encoder takes tiles that are cut in one of six ways:

    whole    scale to a size or by the shorter side, crop the middle: one tile
    canvas   scale to the grid of tiles whose aspect ratio is nearest, then the whole image as one more tile
    rows     scale by the longer side to multiples of a tile, then the whole image as one more tile
    anyres   the whole image as one tile, then fit it on a black canvas of one of several sizes
    patches  scale to multiples of a group of patches: one tile of all patches (`kvexport/images/patches.py`)
    lines    like patches, but only large images are scaled; the image's text has a token at the end of every row

A build compares these tiles with those of the checkpoint's own processor, and refuses a checkpoint if they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvexport.errors import UsageError
from kvexport.images.decode import MOST_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image

Side = Annotated[int, Field(ge=1, le=1 << 14)]
Rows = Annotated[int, Field(ge=1, le=1 << 16)]
Pinpoint = Annotated[int, Field(ge=1, le=1 << 13)]
Color = tuple[float, float, float]
_LONGEST = 4096  # the longer side of an image before it is scaled to multiples of a tile


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """How an artifact reads images: how they are cut, and the tokens that stand for their tiles in a prompt."""

    cut: Literal["whole", "canvas", "rows", "anyres", "patches", "lines"]
    height: Side  # pixels of a tile; of a patch if images are cut into patches or lines
    width: Side
    rows: Rows  # rows that the encoder returns for a tile, each in the place of one token; 1 for a group of patches
    hidden: Rows  # numbers of a row
    marker: Annotated[str, Field(min_length=1)]  # text that stands for an image in a prompt
    token: Annotated[int, Field(ge=0)]  # token in whose places rows are put
    # Text of an image in place of the marker, by its grid of tiles. A number stands for that many tokens `token`.
    texts: Mapping[str, tuple[str | Annotated[int, Field(ge=1)], ...]]
    token_text: str  # text of `token`
    resample: Annotated[int, Field(ge=0, le=5)]  # Pillow's filter
    scale: float  # of pixels from 0 to 255
    mean: Color
    std: Color
    # whole: height and width that the image is scaled to, or 0 and its shorter side; whether it is made square before
    size: tuple[Annotated[int, Field(ge=0, le=1 << 14)], Side] = (0, 1)
    square: bool = False
    # canvas: least and largest number of tiles; rows: longer side of the scaled image; lines: the longest side
    tiles: tuple[Annotated[int, Field(ge=1, le=1024)], Annotated[int, Field(ge=1, le=1024)]] = (1, 1)
    longest: Side = 1
    split: bool = True  # rows: whether the image is cut at all
    # anyres: heights and widths of canvases. The last row of every tile is the end of a line, once for each tile row of
    # the image; rows of the black border are left out. The name of a grid is the number of rows that remain.
    pinpoints: tuple[tuple[Pinpoint, Pinpoint], ...] = ()
    # anyres: the tiles beside the whole image whose rows are kept. The rows of more tiles are interpolated to as many.
    most: Annotated[int, Field(ge=0, le=1024)] = 0  # 0 keeps all rows
    # patches: least and largest number of pixels of the scaled image; frames that a patch repeats; whether pixels are
    # counted for each frame, and images of less than a group are scaled to one; side in patches of a group, which
    # gets one row; side in groups of a window of the encoder's attention, and side of its table of position embeddings,
    # 0 for none
    pixels: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1, le=MOST_PIXELS)]] = (1, 1)
    frames: Annotated[int, Field(ge=1, le=16)] = 1
    grown: bool = False
    group: Annotated[int, Field(ge=1, le=16)] = 1
    window: Annotated[int, Field(ge=0, le=1 << 10)] = 0
    table: Annotated[int, Field(ge=0, le=1 << 10)] = 0
    bidirectional: bool = False  # whether each token of an image sees all others, so that one call has to read them all
    # lines: texts that end a row of groups, and the last one
    ends: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        grids = all(height % self.height == width % self.width == 0 for height, width in self.pinpoints)
        if self.cut == "anyres" and not (self.pinpoints and grids):
            raise ValueError("has canvases that are no grids of tiles")

    def parts(self, grid: str) -> tuple[str | int, ...] | None:
        if self.cut == "lines":
            rows, columns = map(int, grid.split("x"))
            line: tuple[str | int, ...] = (columns, self.ends[0])
            return line * (rows - 1) + (columns, self.ends[1])
        return (int(grid),) if self.cut in ("anyres", "patches") else self.texts.get(grid)

    def text(self, grid: str) -> str:
        return "".join(part if isinstance(part, str) else self.token_text * part for part in self.parts(grid) or ())


def tiles_of(image: Image, spec: ImageSpec) -> tuple[NDArray[np.float32], str]:
    """Cut an RGB image into tiles [tiles, 3, height, width]; also return the name of the grid of tiles.

    `spec.texts` has the text that stands for an image with a given grid in a prompt. If images are cut into patches,
    the scaled image is one tile, and the grid's name is the number of vectors.
    """
    cuts = {"whole": _whole, "canvas": _canvas, "rows": _rows, "anyres": _anyres, "patches": _patches, "lines": _lines}
    tiles, grid = cuts[spec.cut](image, spec)
    pixels = np.stack(tiles).transpose(0, 3, 1, 2)
    scaled = (pixels.astype(np.float64) * spec.scale).astype(np.float32)
    mean, std = (np.array(color, np.float32)[:, None, None] for color in (spec.mean, spec.std))
    return (scaled - mean) / std, grid


def _resized(image: Image, height: int, width: int, spec: ImageSpec) -> Image:
    if height * width > MOST_PIXELS:
        raise UsageError(
            f"an image of {image.width} x {image.height} pixels would be scaled to {width} x {height} for this model",
            "an image whose sides differ less",
        )
    return image.resize((width, height), resample=spec.resample)


def _pieces(image: Image, spec: ImageSpec) -> list[NDArray[np.uint8]]:
    pixels = np.asarray(image)
    return [
        pixels[top : top + spec.height, left : left + spec.width]
        for top in range(0, image.height, spec.height)
        for left in range(0, image.width, spec.width)
    ]


def _whole(image: Image, spec: ImageSpec) -> tuple[list[NDArray[np.uint8]], str]:
    if spec.square and image.width != image.height:
        image = _squared(image, spec)
    height, width = spec.size
    if not height:
        short, long = sorted(image.size)
        longer = int(width * long / short)
        height, width = (longer, width) if image.width <= image.height else (width, longer)
    return [_cropped(np.asarray(_resized(image, height, width, spec)), spec)], "1"


def _squared(image: Image, spec: ImageSpec) -> Image:
    from PIL import Image

    side = max(image.size)
    if side * side > MOST_PIXELS:
        raise UsageError(
            f"an image of {image.width} x {image.height} pixels is made square for this model", "a smaller one"
        )
    red, green, blue = (int(x * 255) for x in spec.mean)
    canvas = Image.new("RGB", (side, side), (red, green, blue))
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas


def _cropped(pixels: NDArray[np.uint8], spec: ImageSpec) -> NDArray[np.uint8]:
    """Return the middle of an image, as large as a tile; an image that is smaller than a tile gets a black frame."""
    sides = pixels.shape[:2]
    tile = np.zeros((spec.height, spec.width, 3), np.uint8)
    places = []
    for side, wanted in zip(sides, (spec.height, spec.width), strict=True):
        # A larger image is cut from (side - wanted) // 2 on, a smaller one is put at the ceiling of half the rest.
        begin = (side - wanted) // 2 if side >= wanted else -math.ceil((wanted - side) / 2)
        places.append((slice(max(begin, 0), max(begin, 0) + min(side, wanted)), max(-begin, 0), min(side, wanted)))
    (rows, top, height), (columns, left, width) = places
    tile[top : top + height, left : left + width] = pixels[rows, columns]
    return tile


def _canvas(image: Image, spec: ImageSpec) -> tuple[list[NDArray[np.uint8]], str]:
    columns, rows = _nearest_grid(image, spec)
    tiles = _pieces(_resized(image, rows * spec.height, columns * spec.width, spec), spec)
    if len(tiles) > 1:
        tiles.append(np.asarray(_resized(image, spec.height, spec.width, spec)))
    return tiles, str(len(tiles))


def _nearest_grid(image: Image, spec: ImageSpec) -> tuple[int, int]:
    """Return the columns and rows of the grid of tiles whose aspect ratio is nearest to the image's.

    Of grids with equal ratios, the larger one is taken if its tiles have less than twice the image's pixels.
    """
    least, most = spec.tiles
    grids = sorted(
        ((c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most),
        key=lambda grid: grid[0] * grid[1],
    )
    ratio, area = image.width / image.height, image.width * image.height
    best, nearest = (1, 1), math.inf
    for columns, rows in grids:
        difference = abs(ratio - columns / rows)
        larger = area > 0.5 * spec.height * spec.width * columns * rows
        if difference < nearest or (difference == nearest and larger):
            best, nearest = (columns, rows), difference
    return best


def _rows(image: Image, spec: ImageSpec) -> tuple[list[NDArray[np.uint8]], str]:
    height, width = _longest_side(image.height, image.width, spec.longest)
    image = _resized(image, height, width, spec)
    if not spec.split:
        return [np.asarray(_resized(image, spec.height, spec.width, spec))], "0x0"
    height, width = _multiples(height, width, spec.height)
    image = _resized(image, height, width, spec)
    if max(height, width) <= spec.height:
        return [np.asarray(image)], "0x0"
    tiles = [*_pieces(image, spec), np.asarray(_resized(image, spec.height, spec.width, spec))]
    return tiles, f"{height // spec.height}x{width // spec.width}"


def _longest_side(height: int, width: int, longest: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
        height, width = _LONGEST, int(_LONGEST * ratio)
    return max(height, 1), max(width, 1)


def _multiples(height: int, width: int, side: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side


def _anyres(image: Image, spec: ImageSpec) -> tuple[list[NDArray[np.uint8]], str]:
    from PIL import Image

    height, width = _canvas_size(image, spec)
    if (scale := width / image.width) < height / image.height:
        fitted = _resized(image, min(math.ceil(image.height * scale), height), width, spec)
    else:
        fitted = _resized(image, height, min(math.ceil(image.width * (height / image.height)), width), spec)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(fitted, ((width - fitted.width) // 2, (height - fitted.height) // 2))
    tiles = [np.asarray(_resized(image, spec.height, spec.width, spec)), *_pieces(canvas, spec)]
    return tiles, str(len(order_of(image, spec, len(tiles))[0]))


def _patches(image: Image, spec: ImageSpec) -> tuple[list[NDArray[np.uint8]], str]:
    height, width = _within_pixels(image.height, image.width, spec)
    side = spec.height * spec.group
    return [np.asarray(_resized(image, height, width, spec))], str(height // side * (width // side))


def _lines(image: Image, spec: ImageSpec) -> tuple[list[NDArray[np.uint8]], str]:
    ratio, side = max(1.0, max(image.size) / spec.longest), spec.height * spec.group
    columns, rows = (max(1, -(-int(pixels / ratio) // side)) for pixels in image.size)
    return [np.asarray(_resized(image, rows * side, columns * side, spec))], f"{rows}x{columns}"


def _within_pixels(height: int, width: int, spec: ImageSpec) -> tuple[int, int]:
    """Round an image's height and width to multiples of a patch group's side, within the bounds of its pixels."""
    side = spec.height * spec.group
    least, most = (float(count) for count in spec.pixels)
    if spec.grown:
        least, most = least / spec.frames, most / spec.frames
        scale = max(side / height, side / width, 1)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > 200 * min(height, width):
        raise UsageError(
            f"an image of {width} x {height} pixels has sides of which one is over 200 times the other",
            "an image whose sides differ less",
        )
    high, wide = round(height / side) * side, round(width / side) * side
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        high = max(side, math.floor(height / scale / side) * side)
        wide = max(side, math.floor(width / scale / side) * side)
    elif high * wide < least:
        scale = math.sqrt(least / (height * width))
        high, wide = math.ceil(height * scale / side) * side, math.ceil(width * scale / side) * side
    return high, wide


def _canvas_size(image: Image, spec: ImageSpec) -> tuple[int, int]:
    """Return the height and width of the canvas that keeps most pixels of an image, and is filled most among equals."""

    def remaining(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / image.width, size[0] / image.height)
        pixels = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        return pixels, pixels - size[0] * size[1]

    return max(spec.pinpoints, key=remaining)


def order_of(image: Image, spec: ImageSpec, tiles: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return, for each of an image's n tokens, which k vectors of the tiles it gets, and weights; both [n, k].

    A token's embedding is the weighted sum of the k vectors.
    """
    if spec.cut != "anyres":
        return np.arange(tiles * spec.rows)[:, None], np.ones((tiles * spec.rows, 1), np.float32)
    height, width = _canvas_size(image, spec)
    side = math.isqrt(spec.rows - 1)
    lines, columns = height // spec.height * side, width // spec.width * side
    y, x = np.mgrid[:lines, :columns]
    rows = (1 + y // side * (columns // side) + x // side) * spec.rows + y % side * side + x % side
    if image.width / image.height > columns / lines:
        border = (lines - int(round(image.height * (columns / image.width), 7))) // 2
        rows = rows[border : lines - border]
    else:
        border = (columns - int(round(image.width * (lines / image.height), 7))) // 2
        rows = rows[:, border : columns - border]
    rows, weights = _shrunk(rows, spec.most * side**2)
    rows = np.pad(rows, ((0, 0), (0, 1), (0, 0)), constant_values=spec.rows - 1)  # the ends of lines
    weights = np.pad(weights, ((0, 0), (0, 1), (0, 0)), constant_values=1 / weights.shape[2])
    count = rows.shape[2]
    first = np.repeat(np.arange(spec.rows - 1)[:, None], count, 1), np.full((spec.rows - 1, count), 1 / count)
    order = np.concatenate([first[0], rows.reshape(-1, count)])
    return order, np.concatenate([first[1], weights.reshape(-1, count)]).astype(np.float32)


def _shrunk(rows: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Shrink a grid [Y, X] of image vectors to about `most` vectors, if it has over 1.2 times as many.

    Return the indices [y, x, k] of the k vectors of which each vector of the new grid is a mean, and their weights in
    that mean: those of bilinear interpolation, as in PyTorch without aligned corners. k is 1 if the grid is not shrunk.
    """
    ratio = math.sqrt(rows.size / most) if most else 0.0
    if ratio <= 1.1:
        return rows[..., None], np.ones((*rows.shape, 1))
    (top, bottom, y), (left, right, x) = (_neighbours(size, int(size // ratio)) for size in rows.shape)
    y, x = y[:, None], x[None]
    corners = [rows[np.ix_(i, j)] for i in (top, bottom) for j in (left, right)]
    return np.stack(corners, -1), np.stack([(1 - y) * (1 - x), (1 - y) * x, y * (1 - x), y * x], -1)


def _neighbours(size: int, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    at = np.maximum((np.arange(wanted) + 0.5) * size / wanted - 0.5, 0.0)
    first = at.astype(np.int64)
    return first, np.minimum(first + 1, size - 1), at - first
