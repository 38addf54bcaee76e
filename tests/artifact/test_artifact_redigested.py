"""Damaged files of an artifact whose digests match are refused, and the error says that the artifact is at fault."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from tests.support.command_line import failure, run


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def other_slots(data: bytes) -> bytes:
    """Return an ONNX graph for a cache with one slot more in both KV heads of layer 1."""
    model = onnx.ModelProto.FromString(data)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_key_values.1.", "present.1.")):
            slots = 2 if value.name.endswith(".score") else 1
            value.type.tensor_type.shape.dim[slots].dim_value += 2
    return model.SerializeToString()


def without_output(data: bytes) -> bytes:
    model = onnx.ModelProto.FromString(data)
    del model.graph.output[-1]
    return model.SerializeToString()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": cut,
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)) * (len(data) // 256),
    "a list": lambda data: b"[1]",
    "deep": lambda data: b"[" * 100_000,
}
CASES = [
    *(
        (name, kind)
        for name in ("decoder.onnx", "merge.onnx", "tokenizer.json")
        for kind in ("cut", "empty", "garbage")
    ),
    *(("decoder.weights", kind) for kind in ("cut", "empty")),
    *(("generation_config.json", kind) for kind in ("cut", "garbage", "a list", "deep")),
]


def refused(artifact: Path, folder: Path, name: str, data: bytes) -> str:
    copy = folder / "copy"
    shutil.copytree(artifact, copy)
    manifest = load_manifest(copy)
    (copy / name).write_bytes(data)
    write_manifest(copy, manifest.to_json())
    message = failure(5, "generate", copy, "abc", "--max-new-tokens", 3)
    if name.endswith(".onnx"):
        shown = run("inspect", copy)
        assert shown.exit_code in (0, 5) and (shown.exit_code == 0 or "is no ONNX graph" in shown.stderr)
    assert "build" in message.split("fix: ")[1]
    return message


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_damage_behind_valid_digests_is_an_error_of_the_artifact(
    tiny_artifact: Path, tmp_path: Path, name: str, kind: str
) -> None:
    message = refused(tiny_artifact, tmp_path, name, DAMAGE[kind]((tiny_artifact / name).read_bytes()))
    assert str(tmp_path / "copy") in message


@pytest.mark.parametrize(("name", "change", "message"), [
    ("decoder.onnx", other_slots, "input past_key_values.1.key is "),
    ("merge.onnx", other_slots, "input past_key_values.1.key is "),
    ("decoder.onnx", without_output, "has no output present.1."),
    ("merge.onnx", without_output, "has no output present.1."),
])  # fmt: skip
def test_graphs_of_another_cache_are_refused(
    tiny_artifact: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    assert message in refused(tiny_artifact, tmp_path, name, change((tiny_artifact / name).read_bytes()))


@pytest.mark.parametrize(("name", "source"), [("decoder.onnx", "merge.onnx"), ("merge.onnx", "decoder.onnx")])
def test_graphs_in_one_anothers_place_are_refused(tiny_artifact: Path, tmp_path: Path, name: str, source: str) -> None:
    message = refused(tiny_artifact, tmp_path, name, (tiny_artifact / source).read_bytes())
    assert "it has no input input_ids" in message or "its input input_ids is " in message


def test_a_graph_that_is_no_graph_is_named_by_inspect(tiny_artifact: Path, tmp_path: Path) -> None:
    refused(tiny_artifact, tmp_path, "merge.onnx", bytes(range(256)))
    message = failure(5, "inspect", tmp_path / "copy")
    assert "copy/merge.onnx is no ONNX graph" in message and "kvexport build" in message


def test_a_path_that_is_not_utf8_is_no_damaged_artifact(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xffart"))
    shutil.copytree(tiny_artifact, copy)
    message = failure(2, "generate", copy, "abc", "--max-new-tokens", 3)
    assert "is not UTF-8" in message and "mv the artifact" in message
