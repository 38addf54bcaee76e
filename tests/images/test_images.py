"""Images are decoded and cut into tiles as the processors of transformers do, and hostile files are refused."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from kvexport.errors import UsageError
from kvexport.export import vision as exporter
from kvexport.images import decode
from kvexport.images.patches import encoder_inputs
from kvexport.images.rows import RowCache, encode_images
from kvexport.images.tiles import ImageSpec, tiles_of
from tests.support import vision
from tests.support.vision import picture, png


def _animated() -> bytes:
    frames = [picture(40, 60, seed).quantize(16) for seed in range(3)]
    return png(frames[0], format="GIF", save_all=True, append_images=frames[1:])


def _turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return png(picture(30, 50), format="JPEG", exif=exif)


def _with_alpha(mode: str) -> bytes:
    image = picture(45, 33).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return png(image.convert(mode))


FILES: dict[str, Callable[[], bytes]] = {
    "odd": lambda: png(picture(37, 61)),
    "one row": lambda: png(picture(1, 4000)),
    "one column": lambda: png(picture(4000, 1)),
    "one pixel": lambda: png(picture(1, 1)),
    "large": lambda: png(picture(900, 700)),
    "palette": lambda: png(picture(50, 40).quantize(64)),
    "transparent palette": lambda: png(picture(50, 40).quantize(64), transparency=3),
    "gray": lambda: png(picture(50, 40).convert("L")),
    "bits": lambda: png(picture(50, 40).convert("1")),
    "gray and alpha": lambda: _with_alpha("LA"),
    "alpha": lambda: _with_alpha("RGBA"),
    "cmyk": lambda: png(picture(50, 40).convert("CMYK"), format="JPEG"),
    "16 bits": lambda: png(Image.fromarray(np.arange(50 * 40, dtype=np.uint16).reshape(50, 40) * 30)),
    "webp": lambda: png(picture(50, 40), format="WEBP", lossless=True),
    "animated": _animated,
    **{f"EXIF {n}": lambda n=n: _turned(n) for n in range(2, 9)},  # type: ignore[misc]
}


@pytest.fixture(
    scope="module",
    params=["llava", "llava_next", "llava_onevision", "internvl", "smolvlm", "square", "qwen2_vl", "glm4v", "mistral3"],
)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ImageSpec]:
    folder, square = tmp_path_factory.mktemp("processor"), request.param == "square"
    config = vision.save_processor("llava" if square else request.param, folder)
    processor = exporter.read_processor(folder, config)
    if square:
        processor.image_processor.do_pad = True
    return processor, exporter.image_spec(processor, config)


@pytest.mark.parametrize("name", FILES)
def test_tiles_are_those_of_transformers(name: str, cut: tuple[Any, ImageSpec]) -> None:
    data, (processor, spec) = FILES[name](), cut
    if name in ("one row", "one column") and spec.cut == "patches":
        with pytest.raises(UsageError, match="over 200 times the other"):
            tiles_of(decode.read_image(data), spec)
        return
    tiles, grid = tiles_of(decode.read_image(data), spec)
    if name in ("one row", "one column") and spec.cut == "lines":  # transformers scales the image to no pixels
        assert sorted(tiles.shape[2:]) == [14, spec.longest]
        return
    right = exporter.prepare(processor, ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    inputs = tiles if spec.cut == "lines" else encoder_inputs(tiles, spec)["pixel_values"]
    pixels = right["pixel_values"].reshape(inputs.shape)
    assert np.abs(inputs - pixels).max() <= 1e-5
    text = processor.replace_image_token(right, 0)
    assert spec.text(grid) == text


@pytest.mark.parametrize(
    ("cut", "sizes"), [("llava_next", [(56, 14), (56, 21)]), ("mistral3", [(56, 28), (28, 56)])], indirect=["cut"]
)
def test_images_of_equal_pixels_and_other_texts_have_other_digests(
    sizes: list[tuple[int, int]], cut: tuple[Any, ImageSpec]
) -> None:
    black, spec = [Image.new("RGB", size) for size in sizes], cut[1]
    first, second = (tiles_of(image, spec)[0] for image in black)
    assert first.tobytes() == second.tobytes()
    images, texts = encode_images(black, spec, None, RowCache())
    assert len(set(images.digests)) == len(set(texts)) == 2


def test_images_are_put_on_white_band_by_band(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _with_alpha("RGBA")
    whole = np.asarray(decode.read_image(data))
    for band in (1, 33, 400):
        monkeypatch.setattr(decode, "_BAND", band)
        assert np.array_equal(np.asarray(decode.read_image(data)), whole)


@pytest.mark.parametrize(("data", "problem"), [
    (b"", "no image in one of the formats"), (b"no image at all", "no image in one of the formats"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in one of the formats"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image in one of the formats"),
    (png(picture(64, 64))[:3000], "cannot be decoded"),
    (png(picture(64, 64), format="JPEG")[:900], "cannot be decoded"),
    (png(picture(9, 9), format="TIFF"), "no image in one of the formats"),
    (png(Image.new("1", (9000, 9000))), "pixels"), (png(Image.new("1", (20_000, 20_000))), "pixels"),
    (bytes(decode.MOST_BYTES + 1), "MiB"),
])  # fmt: skip
def test_files_that_are_no_whole_small_images_are_refused(data: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    for source in (data, file, str(file)):
        with pytest.raises(UsageError, match=problem):
            decode.read_image(source)


@pytest.mark.parametrize("path", ["missing.png", ".", "a\0b"])
def test_paths_that_are_no_files_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        decode.read_image(path)


@pytest.mark.parametrize("cut", ["llava", "square"], indirect=True)
def test_an_image_that_would_be_scaled_to_too_many_pixels_is_refused(cut: tuple[Any, ImageSpec]) -> None:
    """The shorter side of 1 x 100,000 pixels becomes a tile's: 28 x 2,800,000."""
    with pytest.raises(UsageError, match=r"scaled|square"):
        tiles_of(decode.read_image(png(picture(1, 100_000))), cut[1])
