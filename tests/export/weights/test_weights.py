"""Tests of weights as ONNX external data: layout, casts against PyTorch, hard links, digests, memory, and refusals."""

import errno
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvexport.errors import UsageError
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.weights.write import Location, SharedWeights, TensorSpec, link_shared, total_bytes, write_weights
from kvexport.tensor_files.casting import load_tensor
from kvexport.tensor_files.shards import TensorEntry

TORCH = {"float32": torch.float32, "float16": torch.float16}
STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def ignore(_count: int) -> None:
    pass


def make_entries(
    directory: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors"
) -> dict[str, TensorEntry]:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, directory / name)
    if name != "model.safetensors":
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(tensors, name)})
        )
    return read_checkpoint(directory).tensors


def make_specs(entries: dict[str, TensorEntry], dtype: str) -> list[TensorSpec]:
    return [TensorSpec(f"model.{name}", entry, dtype, entry.shape) for name, entry in entries.items()]


def read_back(stage: Path, location: Location, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    data = (stage / location.file).read_bytes()[location.offset : location.offset + location.nbytes]
    return np.frombuffer(data, dtype).reshape(shape)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    short = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    if dtype.itemsize == 2:
        return finite(short.view(dtype))
    high = torch.arange(65536, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x8000, 0xFFFF])
    single = (high[:, None] | low).flatten().to(torch.int32).view(torch.float32)
    return finite(single if dtype == torch.float32 else torch.cat([single.double(), single.double() * (1 + 2.0**-40)]))


def finite(values: torch.Tensor) -> torch.Tensor:
    return values[values.isfinite()]


@pytest.mark.parametrize(("stored", "dtype"), list(itertools.product(STORED, TORCH)))
def test_casts_agree_with_pytorch_bit_for_bit(tmp_path: Path, stored: str, dtype: str) -> None:
    values = every_pattern(STORED[stored])
    values = values[values.to(TORCH[dtype]).isfinite()]
    entries = make_entries(tmp_path / "ckpt", {"x": values})
    expected = values.to(TORCH[dtype]).numpy()
    locations, _ = write_weights(make_specs(entries, dtype), tmp_path, ignore)
    for actual in (read_back(tmp_path, locations["model.x"], dtype, values.shape), load_tensor(entries["x"], dtype)):
        assert actual.dtype == dtype
        np.testing.assert_array_equal(bits(actual), bits(expected))
    assert (expected == 0).any()
    assert np.signbit(expected[expected == 0]).any()


@pytest.mark.parametrize("how", ["cast", "same type"])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, how: str, value: float) -> None:
    for stored in ("F32", "F16") if how != "cast" else STORED:
        values = torch.full((1_200_000,), torch.finfo(STORED[stored]).max / 2, dtype=STORED[stored])
        values[2::3] = -torch.finfo(STORED[stored]).max
        bad = values.clone()
        bad[1_100_000] = math.copysign(value, value)
        folder = tmp_path / stored
        entries = make_entries(folder, {"first": torch.ones(5, dtype=STORED[stored]), "w": bad, "z": values[:9]})
        dtype = {"F32": "float32", "F16": "float16"}.get(stored, "float32")
        if how == "cast":
            dtype = "float16" if stored == "F32" else "float32"
        specs = [s for s in make_specs(entries, dtype) if how != "cast" or s.name == "model.w"]
        with pytest.raises(
            UsageError, match=r"tensor 'w' in .*infinite or NaN, the first is number 1100000 of 1200000"
        ):
            write_weights(specs, folder, ignore)


def refuse_link(*_: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize("stored", ["BF16", "F32", "F64"])
def test_values_beyond_float16_are_counted_and_refused(tmp_path: Path, stored: str) -> None:
    # 65519 still rounds to the largest float16.
    values = torch.tensor([1.0, 65504.0, 65536.0, -1e5, 3e38, 65519.0], dtype=torch.float64)
    values = torch.cat([values, torch.ones(5_000_000), torch.full((2,), 7e4)]).to(STORED[stored])
    entries = make_entries(tmp_path / "ckpt", {"lm_head": values})
    lost = int(values.half().isinf().sum())
    with pytest.raises(UsageError, match=rf"{lost} of 5000008 values of tensor 'lm_head'.*65504") as caught:
        write_weights(make_specs(entries, "float16"), tmp_path, ignore)
    assert "model.dtype=float32" in caught.value.fix
    with pytest.raises(UsageError, match=f"{lost} of"):
        load_tensor(entries["lm_head"], "float16")


def test_float64_beyond_float32_is_refused(tmp_path: Path) -> None:
    entries = make_entries(tmp_path / "ckpt", {"x": torch.tensor([1e39, 1.0], dtype=torch.float64)})
    with pytest.raises(UsageError, match="1 of 2 values") as caught:
        load_tensor(entries["x"], "float32")
    assert "model.dtype" not in caught.value.fix


def test_copy_aligns_digests_and_reports_progress(tmp_path: Path) -> None:
    sizes = {"a": (3,), "big": (64, 256), "b": (5, 7), "bigger": (100_003,), "empty": (0, 4), "scalar": ()}
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in sizes.items()}
    specs = make_specs(make_entries(tmp_path / "ckpt", tensors), "float32")
    reported: list[int] = []
    locations, digests = write_weights(specs, tmp_path, reported.append)
    assert set(locations) == {f"model.{name}" for name in sizes}
    end = 0
    for spec in specs:
        place = locations[spec.name]
        assert place.file == "decoder.weights"
        assert place.nbytes == 4 * math.prod(spec.shape)
        assert place.offset % (4096 if place.nbytes >= 65536 else 64) == 0
        assert place.offset >= end
        end = place.offset + place.nbytes
        expected = tensors[spec.entry.name].float().numpy()
        np.testing.assert_array_equal(read_back(tmp_path, place, "float32", spec.shape), expected)
    data = (tmp_path / "decoder.weights").read_bytes()
    assert digests == {"decoder.weights": hashlib.sha256(data).hexdigest()}
    assert sum(reported) == total_bytes(specs) == sum(4 * math.prod(shape) for shape in sizes.values())


def test_the_page_alignment_begins_at_64_kib(tmp_path: Path) -> None:
    below, at = torch.ones(64 * 256 - 1), torch.ones(64 * 256)
    entries = make_entries(tmp_path / "ckpt", {"a": torch.ones(1), "b": below, "c": torch.ones(1), "d": at})
    specs = [TensorSpec(name, entries[name], "float32", entries[name].shape) for name in "abcd"]
    locations, _ = write_weights(specs, tmp_path, ignore)
    assert [locations[name].offset for name in "abcd"] == [0, 64, 64 + 65536, 65536 + 4096]


def test_tied_tensors_are_stored_once_per_dtype(tmp_path: Path) -> None:
    entry = make_entries(tmp_path / "ckpt", {"embed": torch.randn(50, 8)})["embed"]
    specs = [TensorSpec("embed", entry, "float32", (50, 8)), TensorSpec("lm_head", entry, "float32", (50, 8))]
    half = TensorSpec("half", entry, "float16", (50, 8))
    reported: list[int] = []
    locations, _ = write_weights([*specs, half], tmp_path, reported.append)
    assert locations["embed"] == locations["lm_head"]
    assert locations["half"] != locations["embed"]
    assert sum(reported) == total_bytes([*specs, half]) == 50 * 8 * 6
    np.testing.assert_array_equal(
        read_back(tmp_path, locations["half"], "float16", (50, 8)), load_tensor(entry, "float16")
    )


def test_a_failing_write_passes_through(tmp_path: Path) -> None:
    make_entries(tmp_path / "ckpt", {"w": torch.randn(2000)})
    script = (
        "import resource, sys, signal; from pathlib import Path\n"
        "from kvexport.export.model.checkpoint import read_checkpoint\n"
        "from kvexport.export.weights.write import TensorSpec, write_weights\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "entry = read_checkpoint(Path(sys.argv[1])).tensors['w']\n"
        "try: write_weights([TensorSpec('w', entry, 'float32', entry.shape)], Path(sys.argv[2]), lambda n: None)\n"
        "except OSError as error: print(error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "ckpt", tmp_path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == errno.EFBIG


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_source_that_shrank_is_named(tmp_path: Path, dtype: str) -> None:
    entries = make_entries(tmp_path / "ckpt", {"w": torch.randn(3_000_000)})
    source = tmp_path / "ckpt" / "model.safetensors"
    size = source.stat().st_size
    os.truncate(source, size - 1)
    with pytest.raises(
        UsageError, match=f"model.safetensors ends before tensor 'w'.*{size} bytes, found {size - 1}"
    ) as caught:
        write_weights(make_specs(entries, dtype), tmp_path, ignore)
    assert "download model.safetensors again" in caught.value.fix


def test_shape_dtype_and_name_faults_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    entries = make_entries(tmp_path / "ckpt", {"w": torch.randn(4, 3), "ids": torch.arange(3)})
    good = TensorSpec("w", entries["w"], "float32", (4, 3))
    with pytest.raises(UsageError, match=r"'w'.*shape \[4, 3\].*expects \[3, 4\]"):
        write_weights([good, TensorSpec("v", entries["w"], "float32", (3, 4))], tmp_path, ignore)
    with pytest.raises(UsageError, match=r"'ids'.*is I64, expected one of F64, F32, F16, BF16"):
        write_weights([good, TensorSpec("ids", entries["ids"], "float32", (3,))], tmp_path, ignore)
    with pytest.raises(ValueError, match="same initializer name"):
        write_weights([good, good], tmp_path, ignore)
    assert not (tmp_path / "decoder.weights").exists()


def test_load_tensor_agrees_with_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "s": torch.tensor(2.5), "none": torch.zeros(0, 7)}
    entries = make_entries(tmp_path, tensors, "model-00001-of-00001.safetensors")
    reference = load_file(tmp_path / "model-00001-of-00001.safetensors")
    for name, entry in entries.items():
        mine = load_tensor(entry, "float32")
        assert mine.flags.writeable
        np.testing.assert_array_equal(mine, reference[name].numpy())


STREAM = """
import json, resource, sys
from pathlib import Path
import numpy as np
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.weights.write import TensorSpec, write_weights
def peak():
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
entry = read_checkpoint(Path(sys.argv[1])).tensors["w"]
before = peak()
write_weights([TensorSpec("w", entry, sys.argv[3], entry.shape)], Path(sys.argv[2]), lambda n: None)
after = peak()
np.ones(16 << 20)
print(json.dumps([after - before, peak() - after]))
"""


@pytest.mark.parametrize(("dtype", "width", "target", "mib"), [("F32", 4, "float32", 128), ("BF16", 2, "float16", 300)])
def test_a_large_tensor_streams_in_little_memory(tmp_path: Path, dtype: str, width: int, target: str, mib: int) -> None:
    nbytes = mib << 20
    header = json.dumps({"w": {"dtype": dtype, "shape": [nbytes // width], "data_offsets": [0, nbytes]}}).encode()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + nbytes)
    # A shell starts the process: a forked child begins with its parent's peak memory, and that of pytest would hide the
    # child's growth.
    command = ["sh", "-c", '"$0" "$@"; exit $?', sys.executable, "-c", STREAM, tmp_path, tmp_path, target]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (tmp_path / "decoder.weights").unlink()
    growth, control = json.loads(done.stdout)
    assert growth < 64 << 20
    # The figure grows when 128 MiB are allocated.
    assert control > 64 << 20


@pytest.mark.parametrize("can_link", [True, False])
def test_shared_weights_are_linked_into_every_stage_and_copied_where_no_link_can_be(
    can_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = make_entries(tmp_path / "checkpoint", {"a": torch.randn(40, 50), "b": torch.randn(7).half()})
    specs = [TensorSpec(name, entry, "float32", entry.shape) for name, entry in entries.items()]
    folder = tmp_path / "shared"
    folder.mkdir()
    written = write_weights(specs, folder, ignore)
    if not can_link:

        def refuse(*_: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", refuse)
    for stage in (tmp_path / "one", tmp_path / "two"):
        stage.mkdir()
        done: list[int] = []
        assert link_shared(SharedWeights(folder, tuple(specs), written), stage, done.append) == written
        assert sum(done) == total_bytes(specs)
        assert len(written.digests) == 1
        for name, digest in written.digests.items():
            assert hashlib.sha256((stage / name).read_bytes()).hexdigest() == digest
            assert (stage / name).samefile(folder / name) == can_link
