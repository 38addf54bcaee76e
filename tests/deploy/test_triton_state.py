"""Tests of Triton's implicit state: its configuration, and the tokens of sequences that come and go at random."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import kvexport
from kvexport.artifact.reading import load_manifest
from kvexport.export.build import build
from tests.support import command_line, models
from tests.support.hybrids import CONFIGS as HYBRIDS
from tests.support.tiny_model import RECIPE
from tests.support.triton import SequenceBatcher, parsed


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path) -> Path:
    """An artifact of the tiny recipe that merges after every token."""
    folder = tiny_checkpoint.parent
    (folder / "triton.yaml").write_text(yaml.safe_dump(RECIPE))
    return kvexport.build(folder / "triton.yaml", folder / "triton", ["cache.merge_every=1"])


@pytest.fixture(scope="module")
def model(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("state") / "models"
    assert command_line.ok("deploy", "triton", artifact, "--out", out, "--name", "tiny") == f"{out / 'tiny'}\n"
    return out / "tiny"


def test_the_configuration_has_every_state_as_the_graph_has_it(model: Path, artifact: Path) -> None:
    import onnx

    config = parsed((model / "config.pbtxt").read_text())
    assert (config["name"], config["backend"], config["max_batch_size"]) == (["tiny"], ["onnxruntime"], [4])
    states = config["sequence_batching"][0]["state"]
    plan = load_manifest(artifact).cache
    pairs = {past: present for past, present, _, _ in plan.state_names()} | {"past_length": "present_length"}
    assert {s["input_name"][0]: s["output_name"][0] for s in states} == pairs
    graph = onnx.load(model / "1" / "model.onnx", load_external_data=False).graph
    types = {"TYPE_FP32": onnx.TensorProto.FLOAT, "TYPE_INT32": onnx.TensorProto.INT32, "TYPE_INT64": 7}
    values = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
    tensors = [(s[key][0], s) for s in states for key in ("input_name", "output_name")]
    tensors += [(s["name"][0], s) for s in (*config["input"], *config["output"])]
    assert {name for name, _ in tensors} == set(values)
    for name, tensor in tensors:
        assert types[tensor["data_type"][0]] == values[name].elem_type, name
        sizes = [dim.dim_value or -1 for dim in values[name].shape.dim]
        assert sizes[0] == -1 and (sizes[1:] == tensor["dims"] or name.startswith("present")), name
    # Triton pairs the states by their places in two sorted lists
    assert [pairs[past] for past in sorted(pairs)] == sorted(pairs.values())


def test_the_official_protobuf_reads_the_configuration(model: Path) -> None:
    """The official protobuf reads the configuration, and finds the same as the parser of these tests."""
    config = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="not reached: tritonclient[grpc]")
    from google.protobuf import json_format, text_format

    text = (model / "config.pbtxt").read_text()
    message = text_format.Parse(text, config.ModelConfig())
    assert _plain(json_format.MessageToDict(message, preserving_proto_field_name=True)) == _plain(parsed(text))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item if isinstance(item, list) else [item]) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else str(value)


def check_random_sequences(model: Path, artifact: Path, count: int) -> set[tuple[bool, int]]:
    """Check that sequences which come and go at random get the engine's tokens.

    Returns:
        For each batch whether it read prompts, and its size.
    """
    engine, batcher, rng = kvexport.load(artifact), SequenceBatcher(model), np.random.default_rng(0)
    prompts = [rng.integers(64, size=int(n)).tolist() for n in rng.integers(1, 80, size=count)]
    answers = [int(n) for n in rng.integers(1, 60, size=count)]
    expected = [engine.generate([p], max_new_tokens=n)[0].token_ids for p, n in zip(prompts, answers, strict=True)]
    assert max(len(p) + n for p, n in zip(prompts, answers, strict=True)) > 3 * 32  # far beyond the budget
    generated: list[list[int]] = [[] for _ in prompts]
    unread, waiting, running, batches = [list(p) for p in prompts], list(range(count)), [], set()
    while waiting or running:
        while waiting and len(running) < batcher.sequences and (not running or rng.random() < 0.3):
            running.append(waiting.pop(0))
        reading = rng.random() < 0.5  # a batch has one shape: chunks of prompts, or single tokens
        ready = [s for s in running if bool(unread[s]) == reading and rng.random() < 0.8][: batcher.most]
        calls = {s: unread[s][:16] if reading else generated[s][-1:] for s in ready}
        if not calls:
            continue
        batches.add((reading, len(calls)))
        for sequence, logits in batcher.call(calls, 16 if reading else 1).items():
            unread[sequence] = unread[sequence][16:]
            if not unread[sequence]:
                generated[sequence].append(int(logits.argmax()))
            if len(generated[sequence]) == answers[sequence]:
                running.remove(sequence)
    assert generated == expected
    return batches


def test_sequences_that_come_at_random_get_the_engine_s_tokens(model: Path, artifact: Path) -> None:
    assert {(True, 2), (False, 1), (False, 3)} <= check_random_sequences(model, artifact, 12)


def test_triton_keeps_recurrent_states(tmp_path: Path) -> None:
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", HYBRIDS["qwen3_5_text"]())
    cache = {"method": "keepkv", "budget": 32, "sinks": 2, "recent": 4, "merge_every": 1}
    limits = {"max_length": 160, "max_batch": 4}
    recipe = models.make_recipe(checkpoint, cache=cache, export={"prefill_chunk": 16}, limits=limits)
    artifact = build(recipe, tmp_path / "artifact")
    command_line.ok("deploy", "triton", artifact, "--out", tmp_path / "models", "--name", "hybrid")
    states = parsed((tmp_path / "models" / "hybrid" / "config.pbtxt").read_text())["sequence_batching"][0]["state"]
    assert {"past_key_values.layer.0.conv_state", "past_key_values.layer.0.recurrent_state"} <= {
        state["input_name"][0] for state in states
    }
    check_random_sequences(tmp_path / "models" / "hybrid", artifact, 6)


def test_the_graph_merges_in_the_call_that_fills_it_and_takes_no_more_than_a_chunk(model: Path) -> None:
    batcher = SequenceBatcher(model)
    used = []
    for tokens in (16, 16, 16, 1):
        batcher.call({0: list(range(tokens))}, tokens)
        used.append((batcher.kept[0]["past_key_values.0.votes"] > 0).sum(-1).tolist())
    assert used == [[16, 16], [32, 32], [32, 32], [32, 32]]
    before = batcher.kept[0]
    with pytest.raises(Exception, match="Reshape"):
        batcher.call({0: list(range(17))}, 17)
    assert batcher.kept[0] is before


def test_a_sequence_that_is_too_long_fails_beside_one_that_is_not(model: Path) -> None:
    batcher = SequenceBatcher(model)
    for _ in range(512 // 16):
        assert np.isfinite(batcher.call({0: list(range(16))}, 16)[0]).all()
    logits = batcher.call({0: [1], 1: [1]}, 1)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert np.array_equal(logits[1], SequenceBatcher(model).call({0: [1]}, 1)[0])


def test_a_repository_is_replaced_and_nothing_else_is(
    model: Path, artifact: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "models"
    for name in ("first", "second"):
        command_line.ok("deploy", "triton", artifact, "--out", out, "--name", name)
        assert [path.name for path in tmp_path.rglob("*") if path.parent in (tmp_path, out)] == ["models", name]
    (out / "mine").mkdir()
    for there in (out, artifact, model / "config.pbtxt"):
        message = command_line.failure(2, "deploy", "triton", artifact, "--out", there)
        assert "left alone" in message or "lies in the artifact" in message
    assert "merges every 4 tokens" in command_line.failure(
        2, "deploy", "triton", tiny_artifact, "--out", tmp_path / "x"
    )
    assert "name of a model" in command_line.failure(
        2, "deploy", "triton", artifact, "--out", tmp_path / "x", "--name", "../x"
    )
    assert "--kind is" in command_line.failure(
        2, "deploy", "triton", artifact, "--out", tmp_path / "x", "--kind", "both"
    )
    monkeypatch.chdir(out)
    assert "current directory" in command_line.failure(2, "deploy", "triton", artifact, "--out", ".")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.copyfile", _full)
    assert "No space left" in command_line.failure(3, "deploy", "triton", artifact, "--out", tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]
    assert sorted(path.name for path in out.iterdir()) == ["mine", "second"]


def _full(*paths: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(paths[-1]))
