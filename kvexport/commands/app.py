"""The command line: one verb, one call. stdout is data, stderr is progress.

Nothing heavy is imported before the verb that needs it, so that `kvexport --help` answers at once.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvexport import __version__
from kvexport.commands.build import Stage, build_artifact
from kvexport.commands.errors import Verbs
from kvexport.commands.generate import print_stream, read_prompt, statistics
from kvexport.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from kvexport.recipe.files import LoadedRecipe
    from kvexport.report.page import Section

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "context_settings": {"help_option_names": ["-h", "--help"]}}
app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False, **PLAIN)
recipes_app = typer.Typer(help="List the recipes; show one; list the methods.", **PLAIN)
app.add_typer(recipes_app, name="recipes")


def main() -> None:
    """The program `kvexport`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character is no reason to stop.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="kvexport")
    finally:
        # To look through what torch and a build leave for garbage takes longer than to let it go with the process
        gc.freeze()


def _complete_recipe(incomplete: str) -> list[str]:
    from kvexport.recipe.files import recipe_folder

    return sorted(path.stem for path in recipe_folder().glob("*.yaml") if path.stem.startswith(incomplete))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


_RECIPE = typer.Option(
    "--recipe", metavar="NAME_OR_FILE", help="A recipe's name or file.", autocompletion=_complete_recipe
)
RecipeOption = Annotated[str, _RECIPE]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value; repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page too.")]
TelemetryOption = Annotated[
    bool, typer.Option("--telemetry", help="Show what every merge does to the attention output.")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help="onnxruntime or tensorrt, in place of its own.")
]
ArtifactArgument = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The directory of an artifact.")]


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="KVEXPORT_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn a Hugging Face checkpoint into an engine whose KV cache has a fixed budget.

    Exit codes: 0 ok, 1 internal error, 2 usage or recipe, 3 environment, 4 validation mismatch, 5 artifact damaged.
    """


@app.command()
def build(
    recipe: Annotated[str | None, _RECIPE] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; default artifacts/RECIPE.")
    ] = None,
    backend: BackendOption = None,
    stage: Annotated[
        Stage, typer.Option(help="Only the graphs; engines are then built with --from where they will run.")
    ] = Stage.all,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Add engines for this machine to that artifact.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build an artifact from a recipe and print its path."""
    if recipe is None and source is None:
        raise typer.BadParameter("one of --recipe NAME and --from DIR is needed")
    start = time.monotonic()
    built = build_artifact(recipe, overrides or (), out, backend, stage, source)
    if not as_json:
        print(built)
        return
    from kvexport.artifact.publish import load_manifest

    manifest = load_manifest(built, verify=False)
    sizes = [entry["bytes"] for entry in manifest["files"].values()]
    name, seconds = manifest["recipe"]["name"], time.monotonic() - start
    _print_json({"artifact": str(built), "recipe": name, "files": len(sizes), "bytes": sum(sizes), "seconds": seconds})


@app.command()
def generate(
    artifact: ArtifactArgument,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from a file, UTF-8.")
    ] = None,
    token_ids: Annotated[str | None, typer.Option(metavar='"1,2,3"', help="The prompt as token ids.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits; implies --sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens, 0 = all; implies --sample.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the most likely tokens of this mass; implies --sample.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Only tokens this likely against the likeliest; implies --sample.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: seen tokens become less likely.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; implies --sample.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="STR", help="End before this text; repeatable.")] = None,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Draw tokens, or take the likeliest.")
    ] = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens per second and cache bytes on stderr.")] = False,
) -> None:
    """Continue a prompt.

    The text is streamed to stdout (token ids, where the artifact has no tokenizer). Settings that are not given come
    from the checkpoint's generation_config.json.
    """
    text = read_prompt(prompt, prompt_file, token_ids)
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    if temperature == 0 and sample is not False:
        raise UsageError("a temperature of 0 would divide by it", "--greedy in its place takes the likeliest token")
    if sample is None and any(value is not None for value in drawing.values()):
        sample = True
    others = {"max_new_tokens": max_new_tokens, "repetition_penalty": repetition_penalty, "stop_strings": stop or None}
    from kvexport.runtime.engine import load
    from kvexport.terminal import show

    with show(f"loading {artifact}"):
        engine = load(artifact, backend=backend)
    settings = engine.settings(do_sample=sample, **drawing, **others)
    completion = print_stream(engine, text, settings, quiet=as_json)
    figures = statistics(engine)
    if as_json:
        _print_json({"artifact": str(artifact), **vars(completion), "settings": vars(settings), "stats": figures})
    if stats:
        rates = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in figures.items()}
        typer.echo("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in rates.items()), err=True)


@app.command()
def plan(
    recipe: RecipeOption,
    overrides: SetOption = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="How much of it fits, such as 24GB or 24GiB.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute what a recipe takes of memory, before anything is built."""
    from kvexport.commands.plan import make_plan
    from kvexport.terminal import show
    from kvexport.units import parse_bytes

    amount = None if memory is None else parse_bytes(memory)
    loaded = _load_recipe(recipe, overrides)
    with show("reading the checkpoint"):
        made = make_plan(loaded.recipe, loaded.name)
    fit = None if amount is None else made.fit(amount)
    _print(as_json, lambda: {**made.to_json(), "fit": vars(fit) if fit else None}, lambda: made.sections(fit))


@app.command()
def inspect(
    artifact: ArtifactArgument,
    as_json: JsonOption = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compute the SHA-256 of every file.")] = True,
) -> None:
    """Show what is in an artifact and whether it is whole."""
    from kvexport.commands.inspect import inspect_artifact

    inspection = inspect_artifact(artifact, verify=verify)
    _print(as_json, inspection.to_json, inspection.sections)


@app.command()
def validate(
    artifact: ArtifactArgument,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the longest sequence; default 4 times the capacity.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences, each shorter than the one before.")] = 3,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the weights are now; default the recipe's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random tokens.")] = 0,
    telemetry: TelemetryOption = False,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Hold the first N alone, built for this.")] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="onnxruntime, tensorrt, or all that this machine has.")
    ] = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Compare an artifact with PyTorch, step by step."""
    from kvexport.commands.validate import validate_backends
    from kvexport.terminal import show

    _require_folder(html)
    asked: dict[str, Any] = {"length": length, "batch": batch, "seed": seed, "telemetry": telemetry}
    results, missing = validate_backends(artifact, backend, layers, checkpoint, show, **asked)
    for name, why in missing.items():
        typer.echo(f"not compared with {name}: {why}", err=True)
    problem = next((result.problem for result in results if not result.passed), "")
    sections = [section for result in results for section in result.sections()]
    if html is not None:
        from kvexport.report.page import render_html

        _write(html, render_html(f"Validation of {artifact}", problem or "passed", sections))
    _print(
        as_json, lambda: [r.to_json() for r in results] if backend == "all" else results[0].to_json(), lambda: sections
    )
    if problem:
        raise MismatchError(
            problem, "build the artifact again; if it stays, report it with the output of validate --json"
        )


@app.command("eval")
def evaluate(
    recipe: RecipeOption,
    overrides: SetOption = None,
    methods: Annotated[
        str, typer.Option(metavar="A,B:KEY=VALUE", help="What to compare; default streaming, h2o, the recipe's.")
    ] = "",
    budgets: Annotated[str, typer.Option(metavar="1/8,64", help="Shares of the length, or slots.")] = "1/8,1/4,1/2",
    tasks: Annotated[str | None, typer.Option(metavar="A,B", help="Default all: needle, ..., text, stability.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Per task and length.")] = 40,
    length: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a prompt; default half of limits.max_length.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the tasks.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    training_length: Annotated[
        int | None, typer.Option(min=1, help="Of stability; default the model's positions.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure on this text, not on Python's library.")
    ] = None,
    longbench: Annotated[
        Path | None, typer.Option(metavar="DIR", help="LongBench's data and config, from there.")
    ] = None,
    ruler: Annotated[Path | None, typer.Option(metavar="DIR", help="RULER's prepared tasks, from there.")] = None,
    work: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the artifacts there.")] = None,
    telemetry: TelemetryOption = False,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Measure what methods keep of a model at equal bytes: recall, perplexity, distance to the full cache,
    stability."""
    _require_folder(html)
    from kvexport.commands.doctor import require

    require("eval")
    from kvexport.commands.eval import make_options
    from kvexport.evaluate.runner import evaluate
    from kvexport.evaluate.sections import sections
    from kvexport.terminal import show

    shared = {"samples": samples, "length": length, "seed": seed, "batch": batch, "training_length": training_length}
    options = make_options(methods, budgets, tasks, text, longbench, ruler, **shared, telemetry=telemetry)
    result = evaluate(recipe, overrides or (), options, work, show)
    if html is not None:
        from kvexport.report.page import render_html

        _write(html, render_html(f"Evaluation of {result.recipe}", "Methods at equal bytes", sections(result)))
    _print(as_json, result.to_json, lambda: sections(result))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine has and what it lacks.

    Exit code 3 where an artifact cannot be run.
    """
    from kvexport.commands.doctor import diagnose

    found = diagnose()
    _print(as_json, found.to_json, found.sections)
    if not found.runs:
        raise typer.Exit(3)


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the recipes; show one; list the methods."""
    if context.invoked_subcommand is not None:
        return
    from kvexport.recipe.files import list_recipes
    from kvexport.report.page import Table

    listed = list_recipes()
    header = ("recipe", "model", "dtype", "method", "budget", "max length", "description")
    rows = [
        (r.name, r.model or "(a base: extend it)", r.dtype, r.method, r.slots, r.max_length, r.description)
        if not r.problem
        else (r.name, None, None, None, None, None, f"CANNOT BE LOADED: {'; '.join(r.problem.splitlines())}")
        for r in listed
    ]
    _print(
        as_json, lambda: [{**vars(r), "path": str(r.path)} for r in listed], lambda: [Table("Recipes", header, rows)]
    )


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", autocompletion=_complete_recipe)],
    overrides: SetOption = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="With everything it extends and every default.")] = False,
    origin: Annotated[bool, typer.Option("--origin", help="Where every value comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a recipe: its own file, or what it comes to."""
    import yaml

    from kvexport.recipe.files import list_recipes, load_recipe
    from kvexport.report.page import Table

    path = {info.name: info.path for info in list_recipes()}.get(name, Path(name))
    if not (resolved or origin or as_json or overrides) and path.is_file():
        print(path.read_text(encoding="utf-8"), end="")
        return
    loaded = load_recipe(name, overrides or ())
    if origin and not as_json:
        rows = [(key, json.dumps(_value_at(loaded.resolved, key)), place) for key, place in loaded.origin.items()]
        _print(False, dict, lambda: [Table(f"Recipe {loaded.name}", ("key", "value", "from"), rows)])
    elif as_json:
        _print_json({"name": loaded.name, "resolved": loaded.resolved, "origin": loaded.origin})
    else:
        print(yaml.safe_dump(loaded.resolved, sort_keys=False, allow_unicode=True), end="")


@recipes_app.command("methods")
def recipes_methods(as_json: JsonOption = False) -> None:
    """List the methods and their parameters."""
    from dataclasses import asdict

    from kvexport.recipe.files import describe_method_parameters
    from kvexport.report.page import Paragraph, Table

    methods = describe_method_parameters()

    def sections() -> list[Section]:
        listed: list[Section] = [
            Table("Methods", ("method", "what it does", "source"), [(m.name, m.summary, m.source) for m in methods])
        ]
        for m in (m for m in methods if m.parameters):
            rows = [(p.name, p.type, "required" if p.required else str(p.default), p.constraint) for p in m.parameters]
            listed += [
                Table(f"Parameters of {m.name}", ("parameter", "type", "default", "allowed"), rows),
                Paragraph(m.details),
            ]
        return listed

    _print(as_json, lambda: [asdict(method) for method in methods], sections)


def _load_recipe(name: str, overrides: Sequence[str] | None) -> LoadedRecipe:
    from kvexport.recipe.files import load_recipe

    return load_recipe(name, overrides or ())


def _value_at(data: dict[str, Any], dotted: str) -> Any:
    value: Any = data
    for part in dotted.split("."):
        value = value[part]
    return value


def _print(as_json: bool, data: Callable[[], Any], sections: Callable[[], Sequence[Section]]) -> None:
    if as_json:
        _print_json(data())
        return
    from kvexport.report.page import render_text

    print(render_text(sections()).rstrip("\n"))


def _print_json(data: Any) -> None:
    print(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """null in place of the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _require_folder(page: Path | None) -> None:
    """Said before the work, not after it."""
    if page is not None and not page.absolute().parent.is_dir():
        raise UsageError(
            f"{page.parent}, where {page.name} is to be written, does not exist", f"mkdir -p {page.parent}"
        )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}",
            "name a file in a directory that exists and that you may write",
        ) from error
