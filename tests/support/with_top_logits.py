"""Copies of artifacts that find fewer top logits of a row, or none."""

import shutil
from pathlib import Path
from unittest import mock

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.export.graph import graphs


def with_top_logits(artifact: Path, out: Path, count: int, *, engines: bool = False) -> Path:
    """Copy an artifact, and change the number of top logits that it finds."""
    shutil.copytree(artifact, out)
    manifest = load_manifest(out)
    content = manifest.to_json()
    if count:
        with mock.patch.object(graphs, "MOST_LOGITS", count):
            model = graphs.top_logits_model(manifest.model.vocabulary)
        (out / "top_logits.onnx").write_bytes(model.SerializeToString())
        content["top_logits"] = count
    else:
        (out / "top_logits.onnx").unlink()
        del content["top_logits"], content["graphs"]["top_logits"]
        if engines:
            (out / "top_logits.plan").unlink()
            del content["engines"]["tensorrt"]["top_logits"]
    write_manifest(out, content)
    return out
