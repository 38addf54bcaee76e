"""Artifacts that find fewer candidates than their vocabulary holds, or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

from kvexport.artifact.publish import load_manifest, write_manifest
from kvexport.export.graph import top_logits as candidates


def with_candidates(artifact: Path, out: Path, count: int, *, engines: bool = False) -> Path:
    """A copy that finds so many; 0: one as it was built before there were any. engines: it has those of TensorRT."""
    shutil.copytree(artifact, out)
    manifest = load_manifest(out)
    content = {k: v for k, v in manifest.items() if k not in ("files", "manifest_sha256")}
    if count:
        with mock.patch.object(candidates, "COUNT", count):
            model = candidates.candidates_model(manifest["model"]["vocabulary"])
        (out / "candidates.onnx").write_bytes(model.SerializeToString())
        content["candidates"] = count
    else:
        (out / "candidates.onnx").unlink()
        del content["candidates"], content["graphs"]["candidates"]
        if engines:
            (out / "candidates.plan").unlink()
            del content["engines"]["candidates"]
    write_manifest(out, content)
    return out
