"""Images in the messages of HTTP requests: data: URIs, and files below a folder. Nothing is fetched from addresses."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from kvexport.errors import UsageError
from kvexport.images.decode import FORMATS, MOST_BYTES, MOST_PIXELS, read_image
from kvexport.serve.errors import ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

    from kvexport.artifact.manifest import Manifest
    from kvexport.serve.settings import ServeSettings

KINDS = ("image_url", "input_image", "image")  # types of parts, of OpenAI's two APIs and Anthropic's
_DATA = re.compile(r"data:image/([a-z]{1,8});base64,", re.IGNORECASE)
_PIECE = 1 << 20  # characters, a multiple of 4
_SENT = 'send the image itself, as "data:image/png;base64,..."'


class Picture(NamedTuple):
    where: str  # place in the request, for errors
    url: str

    def refused(self, problem: str) -> ApiError:
        return ApiError(400, f"{self.where}: {problem}", param=self.where, code="invalid_image")

    def open(self, folder: str | None) -> Image:
        """Return the image, decoded within bounds. Raise ApiError if it cannot be used."""
        formats: tuple[str, ...] = FORMATS
        if (found := _DATA.match(self.url)) is not None:
            kind = {"JPG": "JPEG"}.get(found[1].upper(), found[1].upper())
            if kind not in FORMATS:
                raise self.refused(f"an image of type {kind}, and {', '.join(FORMATS)} are read")
            formats = (kind,)
            if len(self.url) - found.end() > MOST_BYTES * 4 // 3 + 4:
                raise self.refused(f"the image has more than {MOST_BYTES >> 20} MiB")
            data = self._decoded(self.url[found.end() :])
        elif self.url[:5].lower() == "file:":
            data = self._read(folder)
        elif self.url[:5].lower() == "data:":
            raise self.refused(f"the data: URI is no image in base64: {_SENT}")
        else:
            raise self.refused(f"images are not fetched from addresses: {_SENT}")
        try:
            return read_image(data, formats=formats, served=True)
        except UsageError as error:
            raise self.refused(f"{error.problem} ({error.fix})") from None

    def _decoded(self, text: str) -> bytes:
        try:
            if "=" in text[:-2]:
                raise ValueError
            # In pieces, because no other thread runs while one is decoded.
            return b"".join(base64.b64decode(text[i : i + _PIECE], validate=True) for i in range(0, len(text), _PIECE))
        except (binascii.Error, ValueError):
            raise self.refused("the image's data is no base64") from None

    def _read(self, folder: str | None) -> bytes:
        """Return the bytes of a file below the folder of images. No part of the path may be a symbolic link."""
        if folder is None:
            raise self.refused(f"this server reads no files (--image-folder lets it): {_SENT}")
        path = PurePosixPath(unquote(self.url[5:]).removeprefix("//"))
        if path.is_absolute() and path.is_relative_to(folder):
            path = path.relative_to(folder)
        *folders, name = path.parts or ("",)
        try:
            if path.is_absolute() or ".." in path.parts:
                raise OSError
            current = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for part in [*folders, name]:
                kind = os.O_NONBLOCK if part is name else os.O_DIRECTORY
                try:
                    inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=current)
                finally:
                    os.close(current)
                current = inner
            regular = stat.S_ISREG(os.fstat(current).st_mode)
            if not regular:  # `os.fdopen` of a folder fails, and leaves it open
                os.close(current)
                raise OSError
            with os.fdopen(current, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except (OSError, ValueError):
            raise self.refused(f"there is no file {str(path)[:200]!r} in the folder of images") from None
        return data


def picture_of(part: Mapping[str, Any], where: str) -> Picture:
    """Return the image of a message's part: OpenAI's image_url or input_image, or Anthropic's image."""
    source = part.get("source" if part["type"] == "image" else "image_url")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        url: Any = f"data:{source.get('media_type')};base64,{source.get('data')}"
    else:
        url = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(url, str):
        raise ApiError(400, f"{where}: an image has an image_url, or a source, with its data", param=where)
    return Picture(where, url)


def with_pictures(
    messages: Sequence[Mapping[str, Any]], manifest: Manifest, settings: ServeSettings
) -> tuple[list[Mapping[str, Any]], int]:
    """Replace the images in messages by functions that open them, for `Engine.chat_text`; also count the images."""
    count, left = 0, MOST_PIXELS

    def read(picture: Picture) -> Image:
        nonlocal left
        image = picture.open(settings.image_folder)
        left -= image.width * image.height
        if left < 0:
            raise picture.refused(f"the images of the conversation have more than {MOST_PIXELS} pixels in all")
        return image

    def opened(part: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal count
        picture = part.get("image")
        if not isinstance(picture, Picture):
            return part
        count += 1
        if manifest.images is None:
            reason = f" ({manifest.no_images})" if manifest.no_images else ""
            message = f"{picture.where}: an image, but this model reads only text{reason}"
            raise ApiError(400, message, param=picture.where, code="unsupported_value")
        if count > settings.images:
            raise picture.refused(f"the conversation has more than {settings.images} images")
        return {"type": "image", "image": partial(read, picture)}

    bound = [
        {**message, "content": list(map(opened, message["content"]))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return bound, count
