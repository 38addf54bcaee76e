"""The copy of a checkpoint's small files (tokenizer, chat template, JSON) into an artifact.

The copied files are loaded from the staging folder as an engine would load them, before the new artifact replaces an
earlier one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexport.errors import EnvironmentProblem, KvexportError, UsageError
from kvexport.export.added_tokens import OLDER, complete_tokenizer
from kvexport.language.chat import read_chat_template, read_json

if TYPE_CHECKING:
    from kvexport.export.model.tensors import Checkpoint

GENERATION = "generation_config.json"
_MOST_STOPS = 64  # stop strings, each compared with the text after every token; kvexport serve has the same bound


def copy_texts(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy tokenizer files, chat template and JSON files of a checkpoint into the staging folder."""
    for source in checkpoint.texts:
        shutil.copyfile(source, folder / source.name)
    (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=2))
    if generation := _generation(checkpoint)[1]:
        (folder / GENERATION).write_text(json.dumps(generation, indent=2))
    _check_tokenizer(checkpoint.path, folder, read_json(checkpoint.path / OLDER))


def _generation(checkpoint: Checkpoint) -> tuple[Path, dict[str, Any]]:
    if (checkpoint.path / GENERATION).is_file():
        return checkpoint.path / GENERATION, checkpoint.generation_config
    return checkpoint.path / "config.json", _in_config(checkpoint.config)


def _in_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation settings in config.json, which transformers reads if there is no generation_config.json."""
    from kvexport.language.settings import GENERATION_KEYS

    inner = next((text for name in ("decoder", "generator", "text_config") if (text := config.get(name))), None)
    sections = (inner if isinstance(inner, Mapping) else {}, config)
    return {key: x[key] for x in sections for key in GENERATION_KEYS if x.get(key) is not None}


def check_generation(checkpoint: Checkpoint, vocabulary: int) -> None:
    from kvexport.language.settings import GenerationSettings

    file, config = _generation(checkpoint)
    if not config:
        return
    rest = ", or remove it: without it the settings are those of kvexport generate --help"
    mend = f"correct {file}{rest if file.name == GENERATION else ''}"
    try:
        settings = GenerationSettings.from_generation_config(config)
    except UsageError as error:
        raise UsageError(f"{file} cannot be used: {error.problem}", mend) from error
    if len(settings.stop_strings) > _MOST_STOPS:
        count = len(settings.stop_strings)
        raise UsageError(f"{file} cannot be used: it has {count} stop_strings, at most {_MOST_STOPS} are read", mend)
    ends = settings.eos_token_ids
    if ends and min(ends) >= vocabulary:
        shown = ", ".join(map(str, ends))
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        raise UsageError(
            f"{file} cannot be used: eos_token_id is {shown}, and the vocabulary has {vocabulary} "
            "tokens, so that no sequence would ever end",
            mend,
        )


def _check_tokenizer(checkpoint: Path, folder: Path, older: Mapping[str, Any]) -> None:
    from kvexport.language.text_trial import try_texts
    from kvexport.language.tokenizer import FILE_NAME, Tokenizer

    try:
        if (folder / FILE_NAME).exists():
            Tokenizer.from_folder(folder)
            complete_tokenizer(folder, older)
        read_chat_template(folder)
        if (folder / FILE_NAME).exists():
            try_texts(folder)
    except EnvironmentProblem:
        raise
    except KvexportError as error:
        problem = error.problem.replace(str(folder), str(checkpoint))
        raise UsageError(problem, f"download the .json files of {checkpoint} again") from error
