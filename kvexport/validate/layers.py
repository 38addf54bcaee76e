"""Builds of only the first layers of an artifact's model, for validation.

`kvexport validate --layers` compares only these layers if the whole model is too large for PyTorch, or would take too
long. Every layer has the same KV cache as in the artifact.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvexport.artifact.manifest import Manifest
from kvexport.artifact.reading import load_manifest
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.plan.cache import CachePlan
from kvexport.recipe.cache import AllocationSection
from kvexport.terminal import Progress, silent

# Ends of names of lists in config.json whose length is unrelated to the number of layers
NOT_PER_LAYER = ("architectures", "_token_id", "_token_ids")


@contextmanager
def first_layers(
    path: Path, count: int, checkpoint: str | None = None, progress: Callable[[str, int | None], Progress] = silent
) -> Iterator[Path]:
    """Build the first `count` layers of an artifact, graphs only; they are deleted when the block ends."""
    from kvexport.export.model.checkpoint import open_checkpoint
    from kvexport.tensor_files.shards import own_links

    manifest = load_manifest(path)
    total = manifest.model.layers
    if not 1 <= count <= total:
        raise UsageError(
            f"--layers {count}, but the model of {path} has {total} layers",
            f"--layers 1 to {total}; without it, all of them",
        )
    recipe = manifest.recipe
    source = open_checkpoint(checkpoint or recipe.model.path, recipe.model.revision, mmproj=recipe.model.mmproj)
    require_checkpoint(source, manifest, path)
    source.require_folder("--layers")
    with (
        tempfile.TemporaryDirectory(prefix="kvexport-layers-") as folder,
        own_links(small := Path(folder) / "checkpoint"),
    ):
        _shorten_checkpoint(source, small, total, count)
        model = recipe.model.model_copy(update={"path": str(small), "revision": None})
        # `plan` sets the budgets. The recipe's shares and whole layers are for the full number of layers.
        cache = recipe.cache.model_copy(update={"allocation": AllocationSection(kind="uniform")})
        if manifest.cache.attention_layers:
            raise UsageError(
                "--layers compares the first layers of a model whose every layer attends to a cache of its own; this "
                "model has layers with a recurrent state, or with another layer's cache",
                "no --layers, which compares all layers",
            )
        plan = CachePlan(manifest.cache.caches[:count])
        yield build(
            recipe.model_copy(update={"model": model, "cache": cache}),
            Path(folder) / "artifact",
            name=manifest.name,
            graphs_only=True,
            plan=plan,
            progress=progress,
        )


def require_checkpoint(checkpoint: Any, manifest: Manifest, path: Path) -> None:
    if checkpoint.fingerprint != manifest.model.fingerprint:
        raise UsageError(
            f"{checkpoint.path} is not the checkpoint of {path}", "--checkpoint DIR with the one it was built from"
        )


def _shorten_checkpoint(source: Any, folder: Path, total: int, count: int) -> None:
    from transformers import AutoConfig

    from kvexport.export.vision import PROCESSOR_FILES

    folder.mkdir()
    for file in source.path.iterdir():
        if ".safetensors" in file.suffixes:
            (folder / file.name).symlink_to(file.resolve())
    processor = (file for name in PROCESSOR_FILES if (file := source.path / name).exists())
    for file in (*source.texts, *processor):
        shutil.copyfile(file, folder / file.name)
    text = AutoConfig.from_pretrained(str(source.path)).get_text_config()
    key = type(text).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(shorten_config(source.config, key, total, count)))


def shorten_config(config: dict[str, Any], key: str, total: int, count: int) -> dict[str, Any]:
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": shorten_config(config["text_config"], key, total, count)}
    cut = {
        name: value[:count]
        if isinstance(value, list) and len(value) == total and not name.endswith(NOT_PER_LAYER)
        else value
        for name, value in config.items()
    }
    return {**cut, key: count}
