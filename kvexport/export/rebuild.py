"""The preparation of an artifact for this machine, as `kvexport build --from` runs it.

The artifact's ONNX graphs may come from another machine. The backend builds its own files, such as TensorRT engines,
from them.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from kvexport import backends
from kvexport.artifact.digests import write_manifest
from kvexport.artifact.publish import staging
from kvexport.artifact.reading import load_manifest
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.recipe.fields import Recipe
from kvexport.recipe.inherit import inherit
from kvexport.recipe.load import checked
from kvexport.recipe.parse import Findings, Source, Tree, read_overrides
from kvexport.terminal import Progress, silent


def rebuild(
    source: Path,
    out: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    progress: Callable[[str, int | None], Progress] = silent,
) -> Path:
    """Let the recipe's backend prepare a copy of an artifact; this needs onnx, but neither torch nor the checkpoint."""
    manifest = load_manifest(source)
    recipe = _with_backend(manifest.recipe, overrides)
    backend = backends.get(recipe.backend.name)
    if not backend.prepared:
        others = [other.name for other in backends.all_backends() if other.prepared]
        raise UsageError(
            f"--from prepares an artifact for the machine that runs it, and {source} is for {backend.name}, which runs "
            "its graphs as they are",
            f"--from DIR --backend {' or '.join(others)}",
        )
    if manifest.images and not backend.runs_images:
        raise UsageError(
            f"{source} reads images, and {backend.name} runs no image encoder",
            f"{manifest.build_command('export.images=false')}, and --from with this artifact",
        )
    if importlib.util.find_spec("onnx") is None:
        raise EnvironmentProblem("build --from needs onnx, which is not installed", "pip install onnx")
    prepare = backend.preparation(recipe)
    assert prepare is not None
    target = source if out is None else out
    with staging(target) as folder:
        digests = {file: entry.sha256 for file, entry in manifest.files.items() if file not in backend.prepared}
        with progress("taking over the graphs", None):
            for file in digests:
                _take_over(source / file, folder / file)
        prepared = prepare(folder, replace(manifest, recipe=recipe), progress)
        write_manifest(folder, prepared.to_json(), known=digests)
    return target


def _with_backend(saved: Recipe, overrides: Sequence[str]) -> Recipe:
    if wrong := [x for x in overrides if not x.startswith("backend.")]:
        raise UsageError(
            f"--set {wrong[0]} would change the graphs, which --from keeps",
            "kvexport build MODEL, or --recipe NAME, without --from",
        )
    findings = Findings()
    tree = Source("the recipe", Path.cwd(), False, findings).read(yaml.safe_dump(saved.model_dump(mode="json")))
    assert isinstance(tree, Tree)
    return checked(inherit(tree, read_overrides(overrides, findings)), "the recipe", "", findings).recipe


def _take_over(source: Path, target: Path) -> None:
    """Hard-link a file of an artifact, which never changes, into the copy; copy it where links are not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
