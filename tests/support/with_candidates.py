"""Artifacts that find fewer candidates than their vocabulary holds, or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.export.graph import top_logits as candidates


def with_candidates(artifact: Path, out: Path, count: int, *, engines: bool = False) -> Path:
    """A copy that finds so many; 0: one as it was built before there were any. engines: it has those of TensorRT."""
    shutil.copytree(artifact, out)
    manifest = load_manifest(out)
    content = manifest.to_json()
    if count:
        with mock.patch.object(candidates, "COUNT", count):
            model = candidates.candidates_model(manifest.model.vocabulary)
        (out / "candidates.onnx").write_bytes(model.SerializeToString())
        content["candidates"] = count
    else:
        (out / "candidates.onnx").unlink()
        del content["candidates"], content["graphs"]["candidates"]
        if engines:
            (out / "candidates.plan").unlink()
            del content["engines"]["tensorrt"]["candidates"]
    write_manifest(out, content)
    return out
