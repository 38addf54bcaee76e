"""Copies of artifacts that find fewer top logits of a row."""

import shutil
from pathlib import Path
from unittest import mock

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.export.graph import graphs


def with_top_logits(artifact: Path, out: Path, count: int) -> Path:
    """Copy an artifact, and change the number of top logits that it finds."""
    shutil.copytree(artifact, out)
    manifest = load_manifest(out)
    with mock.patch.object(graphs, "MOST_LOGITS", count):
        model = graphs.top_logits_model(manifest.model.vocabulary)
    (out / "top_logits.onnx").write_bytes(model.SerializeToString())
    write_manifest(out, {**manifest.to_json(), "top_logits": count})
    return out
