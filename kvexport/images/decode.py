"""Decoding of image files to RGB pixels, with bounds on bytes and pixels that are checked before decoding."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvexport.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

# A file, the bytes of a file, or an image of Pillow.
ImageInput: TypeAlias = "str | Path | bytes | Image"

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 32 << 20
MOST_PIXELS = 1 << 26  # 0.4 GB while they are scaled


def read_image(source: ImageInput) -> Image:
    """Return the first image of a file in RGB, rotated as its EXIF data says, with white in place of transparency.

    Raises:
        UsageError: The file is no image, or too large.
        EnvironmentProblem: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise EnvironmentProblem(
            "Pillow, which reads images, is not installed", "pip install 'kvexport[images]'"
        ) from error
    if isinstance(source, Image.Image):
        name, image = "the image", source
    else:
        name, data = _bytes_of(source)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Exception as error:  # decoders raise whatever they meet
            raise _unreadable(name, error) from error
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        raise UsageError(f"{name} has {width} x {height} pixels, at most {MOST_PIXELS} are read", "a smaller image")
    try:
        return _on_white(ImageOps.exif_transpose(image))
    except Exception as error:
        raise _unreadable(name, error) from error


def _bytes_of(source: str | Path | bytes) -> tuple[str, bytes]:
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

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    converted: Image.Image = image.convert("RGB")
    return converted


def _unreadable(name: str, error: Exception) -> UsageError:
    from PIL import UnidentifiedImageError

    reason = (str(error) or type(error).__name__).splitlines()[0]
    if isinstance(error, UnidentifiedImageError):
        reason = f"it is no image in one of the formats {', '.join(FORMATS)}"
    return UsageError(f"{name} cannot be decoded: {reason[:200]}", f"a whole file in {', '.join(FORMATS)}")
