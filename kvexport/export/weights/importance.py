"""The importance of each input of a projection: its mean square over a text that the float model reads.

The error of a product is `sum_j e_j x_j`, where e are the errors of a weight's row. If the inputs x are uncorrelated,
its mean square is `sum_j e_j^2 E[x_j^2]`. A group's scale therefore minimizes squared errors that are multiplied with
`E[x_j^2]` (llama.cpp's importance matrix), relative to the mean over the projection's inputs. The artifact stores these
numbers in a file, so that the same weights can be rounded in the same way again, without the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvexport.errors import UsageError
from kvexport.export.model.checkpoint import Checkpoint
from kvexport.export.weights.awq import SUFFIX, ScaledNorm, Search
from kvexport.export.weights.computed import ComputedSpec
from kvexport.export.weights.quantize import Rounded
from kvexport.export.weights.write import Spec, TensorSpec
from kvexport.language.tokenizer import FILE_NAME, Tokenizer
from kvexport.paths import TEXT
from kvexport.recipe.fields import Recipe
from kvexport.terminal import Progress, silent

Importance: TypeAlias = "dict[str, NDArray[np.float32]]"
FILE = "importance.safetensors"
OWN_TEXT = (TEXT, Path(__file__).parent / "code_sample.txt")  # prose and Python, about as much of each
PIECES, LENGTH = 8, 256  # the most pieces of a text, and the tokens of each
LEAST = np.float32(0.01)  # of the mean: an input that this text left alone may matter in another


def weigh(
    specs: Sequence[Spec],
    checkpoint: Checkpoint,
    recipe: Recipe,
    progress: Callable[[str, int | None], Progress] = silent,
) -> list[Spec]:
    """Return the specs of an artifact's weights, with the importance of their inputs if the recipe uses it.

    Importance is read from the recipe's file, or measured on a text.

    Raises:
        UsageError: There is no tokenizer, the text is missing or too short, the file belongs to another checkpoint, or
            the model cannot be run layer by layer.
    """
    rounded, method = _rounded(specs), recipe.weights.method
    if method == "rtn" or not rounded:
        return list(specs)
    calibration = recipe.weights.calibration
    if calibration is not None and calibration.endswith(Path(FILE).suffix):
        importance = _read(Path(calibration), method)
    else:
        importance = _measure(rounded, checkpoint, recipe, progress)

    def weighed(spec: Spec) -> Spec:
        if isinstance(spec, TensorSpec):
            factors = _channels(importance, spec.entry.name, (2, *spec.shape), calibration)
            norm = ScaledNorm(spec.entry, factors)
            return ComputedSpec(spec.name, norm, spec.dtype, spec.shape) if factors else spec
        if spec.source.name not in rounded or not isinstance(spec.source, Rounded):
            return spec
        counted = _checked(importance, spec.source, calibration).tobytes()
        channels = _channels(importance, spec.source.name, spec.source.shape[1:], calibration)
        return replace(spec, source=replace(spec.source, importance=counted, channels=channels))

    return [weighed(spec) for spec in specs]


def save(specs: Sequence[Spec], folder: Path) -> None:
    """Write the measured importance of weights, and AWQ's factors, to a file in `folder`, if any weight has them.

    `specs` are the weights that `weigh` returned.
    """
    from safetensors.numpy import save_file

    rounded = _rounded(specs)
    tensors_to_save = {name: np.frombuffer(of.importance, np.float32) for name, of in rounded.items() if of.importance}
    for name, of in rounded.items():
        if of.channels:
            tensors_to_save[f"{name}{SUFFIX}"] = np.frombuffer(of.channels, np.float32)
    for spec in specs:
        if isinstance(spec, ComputedSpec) and isinstance(spec.source, ScaledNorm):
            tensors_to_save[f"{spec.source.name}{SUFFIX}"] = np.frombuffer(spec.source.factors, np.float32).reshape(
                2, -1
            )
    if tensors_to_save:
        save_file(tensors_to_save, folder / FILE)


def as_built(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe that takes the importance of weights from the file in an artifact's `folder`.

    The recipe is returned unchanged if its rounding uses no importance (`weights.method: rtn`).
    """
    if recipe.weights.method == "rtn":
        return recipe
    weights = recipe.weights.model_copy(update={"calibration": str(folder / FILE)})
    return recipe.model_copy(update={"weights": weights})


def _rounded(specs: Sequence[Spec]) -> dict[str, Rounded]:
    """Return the projection weights that the build rounds, by the names of their checkpoint tensors.

    Experts are left out: a short text sends too few tokens to each of them to measure their inputs.
    """
    sources = [spec.source for spec in specs if isinstance(spec, ComputedSpec) and len(spec.shape) == 2]
    return {source.name: source for source in sources if isinstance(source, Rounded)}


def _measure(
    rounded: Mapping[str, Rounded],
    checkpoint: Checkpoint,
    recipe: Recipe,
    progress: Callable[[str, int | None], Progress],
) -> Importance:
    """Run the float model on a text, and return the importance [inputs] of every rounded weight, and AWQ's scales.

    The importance of an embedding, which is not multiplied, is 1 for all inputs.
    """
    import torch

    from kvexport.export.model.streamed import run_streamed

    ids = torch.tensor(_pieces(checkpoint, recipe))
    importance = {name: np.ones(weight.shape[1], np.float32) for name, weight in rounded.items()}
    search = Search(rounded) if recipe.weights.method == "awq" else None
    with progress(f"reading {ids.numel()} tokens with the float model", len(rounded)) as bar:

        def note(tensor: str, x: torch.Tensor) -> None:
            if tensor not in importance:
                return
            squares = x.reshape(-1, x.shape[-1]).square().mean(0).numpy()
            mean = squares.mean()
            if not np.isfinite(mean):
                raise UsageError(
                    f"the inputs of {tensor} are infinite or NaN where the model reads the calibration's text",
                    "--set weights.method=rtn, which does not run the model",
                )
            if mean > 0:
                importance[tensor] = np.maximum(squares / mean, LEAST)
            bar.advance(1)

        def of_norm(norm: str, tensor: str, x: torch.Tensor, weight: torch.Tensor | None) -> None:
            assert search is not None
            rows = x.reshape(-1, x.shape[-1]).numpy()
            search.note(norm, tensor, rows, None if weight is None else weight.numpy(), importance.get(tensor))

        outputs = run_streamed(checkpoint, recipe, ids, note, of_norm if search else None)
    if search:
        scales = search.scales(outputs.offsets, outputs.others)
        if not scales:
            raise UsageError(
                f"weights.method is awq, and no norm of {checkpoint.path} is read by rounded projections alone: its "
                "scales have no place",
                "--set weights.method=importance",
            )
        for name in importance:
            importance[name] = importance[name] / scales.get(f"{name}{SUFFIX}", np.float32(1)) ** 2
        importance |= scales
    return importance


def _pieces(checkpoint: Checkpoint, recipe: Recipe) -> list[list[int]]:
    """Return token ids of pieces of the calibration text, all of one length, each with the tokenizer's start tokens."""
    if not (checkpoint.path / FILE_NAME).is_file():
        raise UsageError(
            f"weights.method is {recipe.weights.method}, which reads a text, and {checkpoint.path} has no {FILE_NAME}",
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


def _read(file: Path, method: str) -> Importance:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        importance = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"weights.calibration {str(file)!r} cannot be read: {error}",
            f"--set weights.calibration=ARTIFACT/{FILE}, or a text",
        ) from error
    file_method = "awq" if any(name.endswith(SUFFIX) for name in importance) else "importance"
    if file_method != method:
        raise UsageError(
            f"{file} is of weights.method {file_method}, not {method}", f"--set weights.method={file_method}"
        )
    return importance


def _channels(importance: Importance, tensor: str, shape: tuple[int, ...], file: str | None) -> bytes:
    """Return AWQ's scales of a weight, or the factors and addends of a norm's weight, as bytes; empty if none."""
    values = importance.get(f"{tensor}{SUFFIX}")
    if values is None:
        return b""
    fits = values.dtype == np.float32 and values.shape == shape
    if not fits or not np.isfinite(values).all() or not (np.atleast_2d(values)[0] > 0).all():
        raise UsageError(
            f"{file} has {values.dtype} {list(values.shape)} for AWQ's scales of tensor {tensor!r}, expected float32 "
            f"{list(shape)}, finite and above 0",
            f"--set weights.calibration=ARTIFACT/{FILE} of an artifact of this checkpoint, or a text",
        )
    return values.tobytes()


def _checked(importance: Importance, weight: Rounded, file: str | None) -> NDArray[np.float32]:
    values = importance.get(weight.name)
    inputs = weight.shape[1]
    if values is None or values.dtype != np.float32 or values.shape != (inputs,):
        description = "nothing" if values is None else f"{values.dtype} {list(values.shape)}"
        problem = f"{file} has {description} for tensor {weight.name!r}, expected float32 [{inputs}]"
    elif not (np.isfinite(values) & (values >= 0)).all() or not values.any():
        problem = f"{file} has values for tensor {weight.name!r} that are infinite, NaN or negative, or all 0"
    else:
        return values
    raise UsageError(problem, f"--set weights.calibration=ARTIFACT/{FILE} of an artifact of this checkpoint, or a text")
