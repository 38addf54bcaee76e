"""The first layers of an artifact's model, built as the artifact was: what `validate --layers` holds where the whole is
too large for PyTorch, or for the time there is. Every layer keeps the cache that it has in the artifact."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvexport.artifact.manifest import Manifest
from kvexport.artifact.reading import load_manifest
from kvexport.cache import CachePlan
from kvexport.errors import UsageError
from kvexport.export.build import build
from kvexport.recipe.cache import AllocationSection
from kvexport.terminal import Progress, silent

# Lists of a config that are as long as they are for reasons of their own.
NOT_PER_LAYER = ("architectures", "_token_id", "_token_ids")


@contextmanager
def first_layers(
    path: Path, count: int, checkpoint: str | None = None, progress: Callable[[str, int | None], Progress] = silent
) -> Iterator[Path]:
    """An artifact of the first `count` layers of the one at `path`, with embeddings and head, graphs alone; gone when
    the block ends.

    checkpoint: where the weights are, default the recipe's. Its recipe's model.path is a checkpoint of those layers,
    which lasts as long. Raises UsageError where the model has no such layers, or the weights are not the artifact's;
    else what `build` does.
    """
    from kvexport.export.model.checkpoint import read_checkpoint, resolve_checkpoint
    from kvexport.export.weights.importance import as_built

    manifest = load_manifest(path)
    total = manifest.model.layers
    if not 1 <= count <= total:
        raise UsageError(
            f"--layers {count}, but the model of {path} has {total} layers",
            f"--layers 1 to {total}; without it, all of them",
        )
    recipe = as_built(manifest.recipe, path)
    source = read_checkpoint(resolve_checkpoint(checkpoint or recipe.model.path, recipe.model.revision))
    require_checkpoint(source, manifest, path)
    source.require_folder("--layers")
    with tempfile.TemporaryDirectory(prefix="kvexport-layers-") as folder:
        small = Path(folder) / "checkpoint"
        _shorten_checkpoint(source, small, total, count)
        model = recipe.model.model_copy(update={"path": str(small), "revision": None})
        export = recipe.export.model_copy(
            update={"weights": "copy"}
        )  # of whole files, links would be whole copies on another file system
        # The plan says the budgets; shares and whole layers are those of a model of all layers.
        cache = recipe.cache.model_copy(update={"allocation": AllocationSection(kind="uniform")})
        caches = len(manifest.cache.caches) // total  # of a layer: one, or one for each KV head
        plan = CachePlan(manifest.cache.caches[: count * caches])
        yield build(
            recipe.model_copy(update={"model": model, "export": export, "cache": cache}),
            Path(folder) / "artifact",
            name=manifest.name,
            graphs_only=True,
            plan=plan,
            progress=progress,
        )


def require_checkpoint(checkpoint: Any, manifest: Manifest, path: Path) -> None:
    """Raises UsageError where `checkpoint` is not the one that the artifact at `path` was built from."""
    if checkpoint.fingerprint != manifest.model.fingerprint:
        raise UsageError(
            f"{checkpoint.path} is not the checkpoint of {path}", "--checkpoint DIR with the one it was built from"
        )


def _shorten_checkpoint(source: Any, folder: Path, total: int, count: int) -> None:
    """A checkpoint whose config says `count` layers; its weights are links, and who reads them takes what the config
    asks for."""
    from transformers import AutoConfig

    from kvexport.export.model.checkpoint import TOKENIZER_FILES

    folder.mkdir()
    for file in source.path.iterdir():
        if ".safetensors" in file.suffixes:
            (folder / file.name).symlink_to(file.resolve())
        elif file.name in TOKENIZER_FILES:
            shutil.copyfile(file, folder / file.name)
    text = AutoConfig.from_pretrained(str(source.path)).get_text_config()
    key = type(text).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(shorten_config(source.config, key, total, count)))


def shorten_config(config: dict[str, Any], key: str, total: int, count: int) -> dict[str, Any]:
    """A config.json of `total` layers for the first `count` of them. key: its name for their number. Lists with an
    entry for each layer are cut too, in `text_config` where the model has one."""
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": shorten_config(config["text_config"], key, total, count)}
    cut = {
        name: value[:count]
        if isinstance(value, list) and len(value) == total and not name.endswith(NOT_PER_LAYER)
        else value
        for name, value in config.items()
    }
    return {**cut, key: count}
