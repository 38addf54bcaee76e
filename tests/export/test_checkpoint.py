"""Tests of checkpoints: which files are read, and the message for every kind of damage."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_numpy
from safetensors.torch import save_file

from kvexport.errors import UsageError
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.tensor_files.shards import DTYPE_BITS

CONFIG = {"model_type": "llama", "hidden_size": 8}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_file(header: object, data: bytes = b"", pad: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw + pad).to_bytes(8, "little") + raw + pad + data


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def make_single(directory: Path, weights: bytes | None = None, config: object = CONFIG) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    (directory / "model.safetensors").write_bytes(write_file(one(), bytes(8)) if weights is None else weights)
    return directory


def make_sharded(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    shards = {
        "model-00001-of-00002.safetensors": {"embed": torch.randn(4, 2).to(torch.bfloat16), "norm": torch.ones(2)},
        "model-00002-of-00002.safetensors": {"head": torch.randn(4, 2).half(), "ids": torch.arange(3)},
    }
    for name, tensors in shards.items():
        save_file(tensors, directory / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 64}, "weight_map": weight_map})
    )
    return directory


def edit_index(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(json.dumps(index))


def refusal(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_checkpoint(directory)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    assert "\n" not in caught.value.problem
    return str(caught.value)


def test_entries_point_at_the_bytes_that_safetensors_reads(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(make_sharded(tmp_path))
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {}
    seen = set()
    for file in tmp_path.glob("*.safetensors"):
        for name, info in safetensors.deserialize(file.read_bytes()):
            entry = checkpoint.tensors[name]
            assert (entry.name, entry.file, entry.dtype, list(entry.shape)) == (
                name,
                file.resolve(),
                info["dtype"],
                info["shape"],
            )
            assert file.read_bytes()[entry.offset : entry.offset + entry.nbytes] == bytes(info["data"])
            seen.add(name)
    assert seen == set(checkpoint.tensors) == {"embed", "norm", "head", "ids"}


def test_a_hub_cache_of_symlinks_gives_real_files(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs").mkdir()
    directory = make_single(tmp_path / "snapshots" / COMMIT)
    blob = tmp_path / "blobs" / "0123"
    (directory / "model.safetensors").rename(blob)
    (directory / "model.safetensors").symlink_to("../../blobs/0123")
    assert read_checkpoint(directory).tensors["w"].file == blob.resolve()
    blob.unlink()
    assert "model.safetensors is missing" in refusal(directory)


def test_generation_config_is_read_and_checked(tmp_path: Path) -> None:
    make_single(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_checkpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("{")
    assert "generation_config.json is not valid JSON" in refusal(tmp_path)


def test_the_fingerprint_follows_config_and_headers_and_not_the_place(tmp_path: Path) -> None:
    def fingerprint(name: str, **change: Any) -> str:
        return read_checkpoint(make_single(tmp_path / name, **change)).fingerprint

    base = fingerprint("a")
    assert fingerprint("b") == base
    others = {
        fingerprint("c", config={**CONFIG, "hidden_size": 9}),
        fingerprint("d", weights=write_file(one(shape=[1, 2]), bytes(8))),
        fingerprint("e", weights=write_file(one(shape=[3], offsets=[0, 12]), bytes(12))),
        fingerprint("f", weights=write_file(one(), bytes(8), pad=b" ")),
        fingerprint("h", weights=write_file(one("I32"), bytes(8))),
    }
    assert base not in others
    assert len(others) == 5
    assert fingerprint("g", weights=write_file(one(), b"\x01" * 8)) == base
    assert len(base) == 64


def test_a_single_file_is_preferred_to_an_index(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(write_file(one(), bytes(8)))
    assert set(read_checkpoint(tmp_path).tensors) == {"w"}


def test_a_tensor_that_the_index_does_not_name_is_ignored(tmp_path: Path) -> None:
    edit_index(make_sharded(tmp_path), lambda index: index["weight_map"].pop("ids"))
    assert set(read_checkpoint(tmp_path).tensors) == {"embed", "norm", "head"}


SIZE = len(write_file(one(), bytes(8)))
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: expected at least 8 bytes, found 0"),
    "short prefix": (b"\x10\0\0", "truncated: expected at least"),
    "header cut": (write_file(one(), bytes(8))[:30], "found 30"),
    "data cut": (write_file(one(), bytes(7)), f"is truncated: expected {SIZE} bytes, found {SIZE - 1}"),
    "data added": (write_file(one(), bytes(9)), f"after its last tensor: expected {SIZE} bytes, found {SIZE + 1}"),
    "huge header": ((100_000_001).to_bytes(8, "little") + bytes(100), "header of 100000001 bytes, expected at most"),
    "web page": (b"<!DOCTYPE html><html></html>", "is not a safetensors file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    "not utf-8": (write_file(b'{"\xff":1}'), "not UTF-8 JSON: byte 0xff at 2"),
    "not json": (write_file(b"{'w': 1}"), "not valid JSON"),
    "nul padded": (write_file(b"{}\0\0"), "not valid JSON"),
    "deep": (write_file(b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not valid JSON"),
    "long number": (write_file(b'{"w":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "list": (write_file(b"[]"), "holds a JSON list, expected an object"),
    "key twice": (write_file(b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{}}'), "'w' comes twice"),
    "metadata": (write_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "no object": (write_file({"w": 1}), "'w' in"),
    "no dtype": (write_file({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "dtype 'None'"),
    "dtype": (write_file(one("F31"), bytes(8)), "dtype 'F31', expected one of BOOL"),
    "dtype list": (write_file(one(["F32"]), bytes(8)), "expected one of BOOL"),
    "shape": (write_file(one(shape=2), bytes(8)), "shape 2, expected a list"),
    "shape negative": (write_file(one(shape=[-2]), bytes(8)), "shape [-2]"),
    "shape bool": (write_file(one(shape=[True], offsets=[0, 4]), bytes(4)), "shape [True]"),
    "shape float": (write_file(one(shape=[2.0]), bytes(8)), "shape [2.0]"),
    "shape overflow": (write_file(one(shape=[2**32, 2**32, 0], offsets=[0, 0])), "more elements than any file holds"),
    "offsets": (write_file(one(offsets=[0]), bytes(8)), "data_offsets [0]"),
    "offsets reversed": (write_file(one(offsets=[8, 0]), bytes(8)), "begin <= end"),
    "offsets negative": (write_file(one(offsets=[-8, 0]), bytes(8)), "data_offsets"),
    "size": (write_file(one(shape=[3]), bytes(8)), "F32 of shape [3], needs 12 bytes, found 8"),
    "half a byte": (write_file(one("F4", [3], [0, 2]), bytes(2)), "needs 1.5 bytes, found 2"),
    "hole": (write_file(one(offsets=[4, 12]), bytes(12)), "leaves a hole before it: expected offset 0, found 4"),
    "overlap": (
        write_file({**one(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [6, 10]}}, bytes(10)),
        "'v' in * overlaps the one before it: expected offset 8, found 6",
    ),
    "beyond": (write_file(one(shape=[2**40], offsets=[0, 2**42]), bytes(8)), "is truncated"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    data, words = BAD_FILES[case]
    message = refusal(make_single(tmp_path, data))
    position = 0
    for part in words.split("*"):
        position = message.index(part, position)
    assert "model.safetensors" in message
    assert ("git lfs pull" if case == "lfs" else "download model.safetensors again") in message
    if case not in ("key twice",):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_raise_nothing_else_and_accept_no_more_than_safetensors(
    tmp_path: Path, data: st.DataObject
) -> None:
    good = save_numpy(
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 2), np.int8), "c": np.ones(5, np.float16)}
    )
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(len(raw) - 2, len(raw)))]
    make_single(tmp_path, bytes(raw))
    try:
        mine = read_checkpoint(tmp_path).tensors
    except UsageError:
        return
    reference = dict(safetensors.deserialize(bytes(raw)))
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in mine.items()} == {
        name: (info["dtype"], info["shape"]) for name, info in reference.items()
    }


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_width_safetensors_gives_it(tmp_path: Path, dtype: str) -> None:
    nbytes = DTYPE_BITS[dtype]
    raw = write_file(one(dtype, [8], [0, nbytes]), bytes(nbytes))
    assert safetensors.deserialize(raw)[0][1]["dtype"] == dtype
    assert read_checkpoint(make_single(tmp_path, raw)).tensors["w"].nbytes == nbytes


def test_a_scalar_an_empty_tensor_and_a_padded_header_are_fine(tmp_path: Path) -> None:
    header = {**one(shape=[], offsets=[0, 4]), "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [4, 4]}}
    tensors = read_checkpoint(make_single(tmp_path, write_file(header, bytes(4), pad=b"  \n"))).tensors
    assert tensors["w"].shape == ()
    assert tensors["none"].nbytes == 0


BAD_INDEXES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no map": (lambda index: index.pop("weight_map"), "has no weight_map"),
    "empty map": (lambda index: index["weight_map"].clear(), "has no weight_map"),
    "list map": (lambda index: index.update(weight_map=["embed"]), "has no weight_map"),
    "missing shard": (
        lambda index: index["weight_map"].update(x="model-00003-of-00002.safetensors"),
        "model-00003-of-00002.safetensors is missing",
    ),
    "missing tensor": (
        lambda index: index["weight_map"].update(dict.fromkeys("xy", "model-00001-of-00002.safetensors")),
        "lacks 'x', 'y', which model.safetensors.index.json says it holds",
    ),
    "wrong shard": (lambda index: index["weight_map"].update(norm="model-00002-of-00002.safetensors"), "lacks 'norm'"),
    "number": (lambda index: index["weight_map"].update(x=3), "puts tensor 'x' into '3'"),
    "pickle": (lambda index: index["weight_map"].update(x="pytorch_model.bin"), "expected the name of a .safe"),
    **{
        f"traversal {name}": (
            lambda index, name=name: index["weight_map"].update(x=name),
            "expected the name of a .safetensors file",
        )
        for name in (
            "../model.safetensors", "/etc/model.safetensors", "a/../b.safetensors", "a/b.safetensors",
            "..\\m.safetensors", "..", "", "a\0.safetensors", "\x1b[2J.safetensors", "\ud800.safetensors",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_bad_indexes_are_refused(tmp_path: Path, case: str) -> None:
    edit, words = BAD_INDEXES[case]
    edit_index(make_sharded(tmp_path), edit)
    message = refusal(tmp_path)
    assert words in message
    assert message.isascii()
    assert "\x1b" not in message


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (make_sharded(tmp_path) / "model.safetensors.index.json").write_bytes(b"\xff")
    assert "model.safetensors.index.json is not UTF-8 JSON" in refusal(tmp_path)


def test_one_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file(
        {"head": torch.ones(4, 2), "embed": torch.ones(1)}, make_sharded(tmp_path) / "model-00002-of-00002.safetensors"
    )
    edit_index(tmp_path, lambda index: index["weight_map"].pop("ids"))
    message = refusal(tmp_path)
    assert "'embed' is in two shards" in message
    assert "model-00001-of-00002.safetensors and model-00002-of-00002.safetensors" in message


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt"]
)
def test_pickles_are_refused_with_the_line_that_converts(tmp_path: Path, name: str) -> None:
    (make_single(tmp_path) / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"\x80\x04.")
    message = refusal(tmp_path)
    assert name in message
    assert "pickle" in message
    assert "safe_serialization=True" in message
    # The fix in the message is a program that compiles.
    compile(message.split('python -c "')[1].rstrip('"'), "fix", "exec")


def test_the_error_for_a_directory_without_weights_lists_its_files(tmp_path: Path) -> None:
    (make_single(tmp_path) / "model.safetensors").unlink()
    assert "no weights ('config.json')" in refusal(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(write_file(one(), bytes(8)))
    assert "'consolidated.safetensors'" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapters.count=1" in refusal(tmp_path)


def test_a_cached_snapshot_without_safetensors_is_converted_by_its_hub_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--some-model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (make_single(snapshot) / "model.safetensors").unlink()
    assert "from_pretrained('org/some-model')" in refusal(snapshot)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"\xff\xfe", "config.json is not UTF-8 JSON"),
        (b"{", "config.json is not valid JSON"),
        (b"[1]", "config.json holds a JSON list"),
        ({"hidden_size": 8}, "has model_type None"),
        ({"model_type": 3}, "has model_type 3"),
        (
            {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "says that weights are quantized (gptq), and no tensor is",
        ),
        ({**CONFIG, "text_config": {"quantization_config": {"quant_method": "hqq"}}}, "quantized as hqq, which"),
        ({**CONFIG, "quantization_config": {"load_in_4bit": True}}, "quantized as unnamed, which"),
        ({"model_type": "my_own", "auto_map": {"AutoModel": "m.M"}}, "model_type 'my_own' is unknown to transformers"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, config: object, words: str) -> None:
    assert words in refusal(make_single(tmp_path, config=config))


@pytest.mark.parametrize("extra", [
    {"auto_map": {"AutoModelForCausalLM": "m.M"}}, {"auto_map": None}, {"quantization_config": None},
    {"limit": float("inf")},
])  # fmt: skip
def test_harmless_config_keys_are_accepted(tmp_path: Path, extra: dict[str, Any]) -> None:
    assert read_checkpoint(make_single(tmp_path, config={**CONFIG, **extra})).config == {**CONFIG, **extra}


def test_missing_config_and_missing_directory(tmp_path: Path) -> None:
    (make_single(tmp_path) / "config.json").unlink()
    assert "config.json is missing" in refusal(tmp_path)
    assert "is not a directory" in refusal(tmp_path / "none")


def test_reading_a_checkpoint_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "import kvexport.export.weights.write\n"
        "from kvexport.export.model.checkpoint import read_checkpoint, resolve_checkpoint\n"
        "read_checkpoint(resolve_checkpoint(sys.argv[1], None))\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, make_single(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
