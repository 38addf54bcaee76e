"""The command `kvexport build`, which builds an artifact from a model or a recipe."""

from __future__ import annotations

import json
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

from kvexport.backends.sections import device_settings
from kvexport.commands.options import (
    RECIPE,
    BackendOption,
    BudgetOption,
    CalibrateOption,
    JsonOption,
    MaxLengthOption,
    ModelArgument,
    SetOption,
    backend_option,
    model_option,
    output_option,
)
from kvexport.commands.output import print_json
from kvexport.errors import UsageError


class Device(str, Enum):
    """A device for which to build; auto means the device of this machine."""

    cpu = "cpu"
    cuda = "cuda"
    auto = "auto"


class Stage(str, Enum):
    """How far a build goes: only the ONNX graphs, or all stages."""

    onnx = "onnx"
    all = "all"


def build(
    model: ModelArgument = None,
    recipe: Annotated[str | None, RECIPE] = None,
    budget: BudgetOption = None,
    max_length: MaxLengthOption = None,
    calibrate: CalibrateOption = None,
    overrides: SetOption = None,
    mmproj: Annotated[
        Path | None,
        model_option(metavar="FILE", help="The image encoder of a model in a GGUF file (mmproj-....gguf)."),
    ] = None,
    out: Annotated[
        Path | None,
        output_option("--out", metavar="DIR", help="The folder of the artifact. [default: artifacts/NAME]"),
    ] = None,
    backend: BackendOption = None,
    device: Annotated[
        Device | None,
        backend_option(help="Build for this device; auto: cuda if this machine can run it, otherwise cpu."),
    ] = None,
    stage: Annotated[
        Stage,
        backend_option(help="Stop after the ONNX graphs. `--from` then adds engines on the machine that runs them."),
    ] = Stage.all,
    source: Annotated[
        Path | None,
        backend_option("--from", metavar="DIR", help="Add engines for this machine to an artifact."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build an artifact from a model or a recipe, and print its path.

    Example: kvexport build Qwen/Qwen3-0.6B --budget 1024 --out qwen3
    """
    from kvexport.models import recipe_of_command, settings_of
    from kvexport.packages import require
    from kvexport.terminal import show

    start = time.monotonic()
    of_device = device_settings(backend, device.value) if device else []
    own = [f"model.mmproj={json.dumps(str(mmproj))}"] if mmproj else []
    changes = [*(overrides or ()), *own, *([f"backend.name={backend}"] if backend else []), *of_device]
    if source is not None:
        if recipe is not None or model is not None or stage is Stage.onnx:
            raise UsageError(
                "--from takes an artifact's own recipe and graphs",
                "leave out --from, or name no model or recipe",
            )
        from kvexport.export.rebuild import rebuild

        built = rebuild(source, out, changes, progress=show)
    else:
        changes = settings_of(budget, max_length, changes)
        loaded = recipe_of_command("build", model, recipe, changes, calibrate=calibrate, progress=show)
        require("build")
        from kvexport.export.build import build as build_recipe

        if out is None:
            out = Path("artifacts") / loaded.name
            out.parent.mkdir(exist_ok=True)
        built = build_recipe(
            loaded.recipe,
            out,
            name=loaded.name,
            graphs_only=stage is Stage.onnx,
            divergence=loaded.divergence,
            progress=show,
        )
    if not as_json:
        print(built)
        return
    from kvexport.artifact.reading import load_manifest

    manifest = load_manifest(built, verify=False)
    figures = {"files": len(manifest.files), "bytes": manifest.bytes, "seconds": time.monotonic() - start}
    print_json({"artifact": str(built), "recipe": manifest.name, **figures})
