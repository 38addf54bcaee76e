"""Export of an artifact as a model repository for NVIDIA's Triton Inference Server, in one of two kinds.

`state`: Triton runs one ONNX graph, and stores the KV cache of every sequence (implicit state of the sequence batcher).
`python`: Triton's python backend runs kvexport's engine, and sends one response for every token.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.artifact.manifest import Manifest
from kvexport.artifact.reading import load_manifest
from kvexport.deploy.folder import replaced
from kvexport.errors import UsageError

if TYPE_CHECKING:
    import onnx

KINDS = ("state", "python")
MARK = "# kvexport deploy triton\n"
MODEL_PY = '''"""kvexport's engine behind Triton's python backend."""

from kvexport.deploy.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
TYPES = {"float32": "FP32", "float16": "FP16", "int8": "INT8", "uint8": "UINT8", "int32": "INT32", "int64": "INT64"}
IDLE_MICROSECONDS = 600_000_000  # of a sequence that its client has left


class Word(str):
    """A value of a protobuf enumeration, written without quotes."""


def write_repository(artifact: Path, out: Path, kind: str, name: str | None = None) -> str:
    """Write a Triton model repository for an artifact. It may replace one that this function wrote before.

    Args:
        artifact: The artifact.
        out: Folder of the repository.
        kind: "state": Triton runs the ONNX graphs and keeps the KV cache itself; "python": a Python model runs
            kvexport's engine.
        name: Name of the model; None is the name of the artifact's folder.

    Returns:
        The name of the model.

    Raises:
        UsageError: The kind cannot run the artifact, the name is invalid, or `out` is another kind of folder.
        ArtifactError: The artifact is damaged.
    """
    if kind not in KINDS:
        raise UsageError(f"--kind is {kind!r}", f"--kind {' or --kind '.join(KINDS)}")
    name = Path(artifact).resolve().name if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise UsageError(f"{name!r} is no name of a model", "--name with letters, digits, _, - and . alone")
    if Path(out).resolve().is_relative_to(Path(artifact).resolve()):
        raise UsageError(f"{out} lies in the artifact, which holds nothing but its own files", "choose another --out")
    manifest = load_manifest(artifact)
    if kind == "state":
        _refuse_state(manifest)
    with replaced(out, "Triton model repository", is_repository) as work:
        folder = work / name / "1"
        folder.mkdir(parents=True)
        config = _write_state if kind == "state" else _write_python
        text = MARK + protobuf_text({"name": name, **config(Path(artifact), manifest, folder)})
        (work / name / "config.pbtxt").write_text(text, encoding="ascii")
    return name


def _refuse_state(manifest: Manifest) -> None:
    """Raise UsageError if Triton cannot run the artifact's ONNX graphs and keep its state."""
    if manifest.graphs.merge is not None and manifest.recipe.cache.merge_prompts == "end":
        raise UsageError(
            "the artifact merges where a prompt ends (cache.merge_prompts), and Triton calls one ONNX graph, which "
            "does not know where that is: its tokens would not be the engine's",
            "kvexport build --recipe NAME --set cache.merge_prompts=chunks, or --kind python",
        )
    if manifest.graphs.merge is not None and manifest.limits.merge_every != 1:
        raise UsageError(
            f"the artifact merges every {manifest.limits.merge_every} tokens, and Triton calls one ONNX graph, which "
            "can merge after every call alone: its tokens would not be the engine's",
            "kvexport build --recipe NAME --set cache.merge_every=1, or --kind python",
        )
    if manifest.recipe.cache.periodic.slots is not None:
        raise UsageError(
            "the artifact decodes over selected entries of its cache (cache.periodic.slots), and Triton calls one ONNX "
            "graph, which reads all of it: its tokens would not be the engine's",
            "--kind python",
        )
    if manifest.adapters:
        raise UsageError(
            "the artifact takes LoRA adapters, whose matrices are inputs of the ONNX graph, and Triton's requests do "
            "not bring them",
            "kvexport build --recipe NAME --set adapters.count=0, or --kind python",
        )
    if any(layer.value_in_key for layer in manifest.cache.caches):
        raise UsageError(
            "the artifact reads values from the keys (latent attention), so the state tensors of values have size 0, "
            "and Triton's states have sizes above 0",
            "--kind python",
        )


def is_repository(path: Path) -> bool:
    """Return whether a folder is a Triton model repository that `write_repository` wrote, with nothing else in it."""
    configs = [entry / "config.pbtxt" for entry in path.iterdir()]
    return all(config.is_file() and config.read_bytes().startswith(MARK.encode()) for config in configs)


def protobuf_text(message: Mapping[str, Any], indent: str = "") -> str:
    """Return a protobuf message in text format. Lists become repeated fields."""
    text = ""
    for name, value in message.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                text += f"{indent}{name} {{\n{protobuf_text(item, indent + '  ')}{indent}}}\n"
            else:
                text += f"{indent}{name}: {item if isinstance(item, Word) else json.dumps(item)}\n"
    return text


def _data_type(name: str) -> Word:
    return Word(f"TYPE_{TYPES[name]}")


def _tensor(name: str, dtype: Word, dims: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": dtype, "dims": dims, **more}


# One ONNX graph with its state.


def _write_state(artifact: Path, manifest: Manifest, folder: Path) -> dict[str, Any]:
    import onnx

    from kvexport.deploy.one_graph import with_limits, with_merge

    decoder = onnx.load(artifact / manifest.graphs.decoder, load_external_data=False)
    merge = onnx.load(artifact / manifest.graphs.merge) if manifest.graphs.merge is not None else None
    base = (artifact / manifest.graphs.decoder).parent
    for location in sorted(_external(decoder)):
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / location, folder / location)
    whole = with_limits(with_merge(decoder, merge, manifest.cache), manifest.limits)
    onnx.save(whole, folder / "model.onnx")
    logits = next(value for value in decoder.graph.output if value.name == "logits")
    rows = logits.type.tensor_type.shape.dim[1].dim_value or -1  # the last token's, or every token's
    lanes = manifest.limits.max_batch
    return {
        "backend": "onnxruntime",
        "max_batch_size": lanes,
        "input": [
            _tensor("input_ids", Word("TYPE_INT64"), [-1]),
            _tensor("query_length", Word("TYPE_INT64"), [1]),
        ],
        "output": [_tensor("logits", Word("TYPE_FP32"), [rows, manifest.model.vocabulary])],
        "sequence_batching": {
            "max_sequence_idle_microseconds": IDLE_MICROSECONDS,
            # Not `direct`, which fills the places of sequences that wait with calls that nobody made.
            "oldest": {"max_candidate_sequences": lanes},
            "state": _states(manifest),
        },
        "instance_group": [{"count": 1}],
    }


def _external(model: onnx.ModelProto) -> set[str]:
    """Return the names of the files that hold the weights of an ONNX graph."""
    tensors = model.graph.initializer
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def _states(manifest: Manifest) -> list[dict[str, Any]]:
    """Return Triton's configuration of every state tensor (KV cache), which begins as zeros.

    Triton pairs inputs and outputs by their places in two lists sorted by name, so this list has that order.
    """
    states = [("past_length", "present_length", _data_type("int64"), [1])]
    for past, present, layer, kind in manifest.cache.state_names():
        states.append((past, present, _data_type(layer.dtypes()[kind].name), list(layer.shapes(1)[kind][1:])))
    assert sorted(past for past, *_ in states) == [past for past, *_ in sorted(states, key=lambda state: state[1])]
    return [
        {
            "input_name": past,
            "output_name": present,
            "data_type": dtype,
            "dims": dims,
            "initial_state": {"name": "empty", "data_type": dtype, "dims": dims, "zero_data": True},
        }
        for past, present, dtype, dims in sorted(states)
    ]


# The engine behind the python backend.


def _write_python(artifact: Path, manifest: Manifest, folder: Path) -> dict[str, Any]:
    shutil.copytree(artifact, folder / "artifact")
    load_manifest(folder / "artifact")  # another build may have replaced files while they were copied
    (folder / "model.py").write_text(MODEL_PY, encoding="ascii")
    text, ids = Word("TYPE_STRING"), Word("TYPE_INT64")
    return {
        "backend": "python",
        "model_transaction_policy": {"decoupled": True},
        "input": [
            _tensor("text_input", text, [1], optional=True),
            _tensor("input_ids", ids, [-1], optional=True),
            _tensor("settings", text, [1], optional=True),
        ],
        "output": [
            _tensor("token_id", ids, [1]),
            _tensor("text_output", text, [1]),
            _tensor("finish_reason", text, [1]),
        ],
        "instance_group": [{"count": 1, "kind": Word("KIND_CPU")}],
    }
