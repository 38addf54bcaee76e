"""How much each input of a projection matters: its mean square over a text that the float model reads.

The error of a product is `sum_j e_j x_j`, e the errors of a weight's row; where inputs x are uncorrelated its mean
square is `sum_j e_j^2 E[x_j^2]`. So a group's scale is chosen by squared errors that count by `E[x_j^2]` (llama.cpp's
importance matrix), relative to the mean over the projection's inputs. The artifact keeps these numbers in a file: with
them the same weights are rounded in the same way again, without the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.computed import ComputedSpec
from kvexport.export.model.checkpoint import Checkpoint
from kvexport.export.quantize import Rounded
from kvexport.export.weights import Spec
from kvexport.paths import PACKAGE, TEXT
from kvexport.recipe.fields import Recipe
from kvexport.runtime.text import FILE_NAME, Tokenizer
from kvexport.terminal import Progress, silent

Importance: TypeAlias = "dict[str, NDArray[np.float32]]"
FILE = "importance.safetensors"
OWN_TEXT = (TEXT, PACKAGE / "runtime" / "top_logits.py")  # prose and code, about as much of each
PIECES, LENGTH = 8, 256  # at most so many pieces of a text, of so many tokens each
LEAST = np.float32(0.01)  # of the mean: an input that this text left alone may matter in another


def weigh(
    specs: Sequence[Spec],
    checkpoint: Checkpoint,
    recipe: Recipe,
    progress: Callable[[str, int | None], Progress] = silent,
) -> list[Spec]:
    """`specs` whose rounded weights have the importance of their inputs where the recipe asks for it: read from the
    file that it names, or of what the model reads. Raises UsageError where there is no tokenizer, the text is too short
    or none, the file is not of this checkpoint, or the model cannot be run a layer at a time."""
    rounded = _rounded(specs)
    if recipe.weights.method == "rtn" or not rounded:
        return list(specs)
    given = recipe.weights.calibration
    if given is not None and given.endswith(Path(FILE).suffix):
        found = _read(Path(given))
    else:
        found = _measure(rounded, checkpoint, recipe, progress)
    counted = {name: _checked(found, weight, given).tobytes() for name, weight in rounded.items()}
    return [
        replace(spec, source=replace(spec.source, importance=counted[spec.source.name]))
        if isinstance(spec, ComputedSpec) and isinstance(spec.source, Rounded)
        else spec
        for spec in specs
    ]


def save(specs: Sequence[Spec], folder: Path) -> None:
    """Into `folder`, of the specs that `weigh` returned; no file where no weight has any."""
    from safetensors.numpy import save_file

    weighed = {name: weight.importance for name, weight in _rounded(specs).items() if weight.importance}
    if weighed:
        save_file({name: np.frombuffer(x, np.float32) for name, x in weighed.items()}, folder / FILE)


def as_built(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe, its weights rounded by the importance that lies in `folder`, an artifact's, if by any."""
    if recipe.weights.method == "rtn":
        return recipe
    weights = recipe.weights.model_copy(update={"calibration": str(folder / FILE)})
    return recipe.model_copy(update={"weights": weights})


def _rounded(specs: Sequence[Spec]) -> dict[str, Rounded]:
    """By the names of their tensors."""
    sources = [spec.source for spec in specs if isinstance(spec, ComputedSpec)]
    return {source.name: source for source in sources if isinstance(source, Rounded)}


def _measure(
    rounded: Mapping[str, Rounded],
    checkpoint: Checkpoint,
    recipe: Recipe,
    progress: Callable[[str, int | None], Progress],
) -> Importance:
    """Of every weight; of an embedding, of which rows are picked, all inputs are alike."""
    import torch

    from kvexport.export.model.streamed import run_streamed

    ids = torch.tensor(_pieces(checkpoint, recipe))
    found = {name: np.ones(weight.shape[1], np.float32) for name, weight in rounded.items()}
    with progress(f"reading {ids.numel()} tokens with the float model", len(rounded)) as bar:

        def note(tensor: str, x: torch.Tensor) -> None:
            if tensor not in found:
                return
            squares = x.reshape(-1, x.shape[-1]).square().mean(0).numpy()
            mean = squares.mean()
            if not np.isfinite(mean):
                raise UsageError(
                    f"the inputs of {tensor} are infinite or NaN where the model reads the calibration's text",
                    "--set weights.method=rtn, which does not run the model",
                )
            if mean > 0:
                found[tensor] = np.maximum(squares / mean, LEAST)
            bar.advance(1)

        run_streamed(checkpoint, recipe, ids, note)
    return found


def _pieces(checkpoint: Checkpoint, recipe: Recipe) -> list[list[int]]:
    """Token ids of pieces of the text, all of one length, each with what the tokenizer puts before a text."""
    if not (checkpoint.path / FILE_NAME).is_file():
        raise UsageError(
            f"weights.method is importance, which reads a text, and {checkpoint.path} has no {FILE_NAME}",
            f"put its {FILE_NAME} there, or --set weights.method=rtn",
        )
    tokenizer = Tokenizer.from_folder(checkpoint.path)
    own = recipe.weights.calibration
    text = "\n".join(_read_text(file) for file in ((Path(own),) if own is not None else OWN_TEXT))
    ids = tokenizer.encode(text, add_special_tokens=False)
    if own is None and tokenizer.decode(ids).split() != text.split():
        raise UsageError(
            f"the tokenizer of {checkpoint.path} does not know the words of the package's text",
            "--set weights.calibration=FILE, a text of the kind that the model was trained on",
        )
    start = tokenizer.encode("")
    length = min(LENGTH, recipe.limits.max_length) - len(start)
    if len(ids) < length:
        raise UsageError(
            f"{own or 'the text'} has {len(ids)} tokens, expected at least {length} to calibrate by",
            "--set weights.calibration=FILE with some pages of text",
        )
    places = np.linspace(0, len(ids) - length, min(PIECES, len(ids) // length)).astype(int)
    return [[*start, *ids[place : place + length]] for place in places]


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UsageError(
            f"weights.calibration {str(file)!r} cannot be read: {reason}", "--set weights.calibration=FILE, a text"
        ) from error


def _read(file: Path) -> Importance:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"weights.calibration {str(file)!r} cannot be read: {error}",
            f"--set weights.calibration=ARTIFACT/{FILE}, or a text",
        ) from error


def _checked(found: Importance, weight: Rounded, file: str | None) -> NDArray[np.float32]:
    values = found.get(weight.name)
    inputs = weight.shape[1]
    if values is None or values.dtype != np.float32 or values.shape != (inputs,):
        said = "nothing" if values is None else f"{values.dtype} {list(values.shape)}"
        problem = f"{file} has {said} for tensor {weight.name!r}, expected float32 [{inputs}]"
    elif not (np.isfinite(values) & (values >= 0)).all() or not values.any():
        problem = f"{file} has values for tensor {weight.name!r} that are infinite, NaN or negative, or all 0"
    else:
        return values
    raise UsageError(problem, f"--set weights.calibration=ARTIFACT/{FILE} of an artifact of this checkpoint, or a text")
