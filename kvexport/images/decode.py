"""Decoding of image files to RGB pixels, with bounds on bytes and pixels that are checked before decoding."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvexport.errors import EnvironmentProblem, UsageError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

# A file, the bytes of a file, an image of Pillow, or a function that returns the result of `read_image`.
ImageInput: TypeAlias = "str | Path | bytes | Image | Callable[[], Image]"

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 32 << 20
MOST_PIXELS = 1 << 26  # 0.4 GB while they are scaled
_SERVED_WEBP = 1 << 23  # pixels that take 0.1 s to decode
_SERVED_SCANS = 64  # of a progressive JPEG, which has ten; every scan takes as long as an image of its own
_BAND = 1 << 20  # pixels that are put on white at once, during which no other thread runs


def read_image(source: ImageInput, *, formats: tuple[str, ...] = FORMATS, served: bool = False) -> Image:
    """Return the first image of a file in RGB, rotated as its EXIF data says, with white in place of transparency.

    If a client `served` by a server sent the image, files are refused that take long to decode: animated files, JPEGs
    of very many scans, BMPs with run lengths, and large files in WebP, during whose decoding no other thread runs.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise EnvironmentProblem(
            "Pillow, which reads images, is not installed", "pip install 'kvexport[images]'"
        ) from error
    if callable(source):
        return source()
    if isinstance(source, Image.Image):
        name, image, data = "the image", source, b""
    else:
        name, data = bytes_of(source)
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
        except Exception as error:  # decoders raise whatever they meet
            raise _unreadable(name, error, formats) from error
    width, height = image.size
    most = _SERVED_WEBP if served and image.format == "WEBP" else MOST_PIXELS
    if not 0 < width * height <= most:
        raise UsageError(f"{name} has {width} x {height} pixels, at most {most} are read", "a smaller image")
    if served and image.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > _SERVED_SCANS:
        raise UsageError(f"{name} has more than {_SERVED_SCANS} scans", "a JPEG that is not progressive")
    if served and image.format == "BMP" and "rle" in str(getattr(image, "tile", "")):
        raise UsageError(f"{name} is a BMP with run lengths", "a PNG, or a BMP that is not compressed")
    # A photograph in JPEG may hold further images, such as a preview (MPO), and is not animated.
    if served and getattr(image, "is_animated", False) and image.format != "MPO":
        raise UsageError(f"{name} is animated", "one picture of it")
    try:
        return _on_white(ImageOps.exif_transpose(image))
    except Exception as error:
        raise _unreadable(name, error, formats) from error


def bytes_of(source: str | Path | bytes) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        name, data = "the image", source
    else:
        name = f"the image {source}"
        try:
            with Path(source).open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{name} cannot be read: {reason}", "the path of an image file") from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"{name} has more than {MOST_BYTES >> 20} MiB", "a smaller file")
    return name, data


def _on_white(image: Any) -> Image:
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        opaque: Image.Image = image.convert("RGB")
        return opaque
    image.load()
    whole, rows = Image.new("RGB", image.size), max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        whole.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return whole


def _unreadable(name: str, error: Exception, formats: tuple[str, ...]) -> UsageError:
    from PIL import UnidentifiedImageError

    reason = first_line(error)
    if isinstance(error, UnidentifiedImageError):
        reason = f"it is no image in one of the formats {', '.join(formats)}"
    return UsageError(f"{name} cannot be decoded: {reason[:200]}", f"a whole file in {', '.join(formats)}")
