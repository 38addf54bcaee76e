"""The command `kvexport bench`: latency and throughput of an artifact."""

from __future__ import annotations

from typing import Annotated

import typer

from kvexport.commands.options import ArtifactArgument, BackendOption, HtmlOption, JsonOption
from kvexport.commands.output import print_result, require_folder, write_page
from kvexport.errors import UsageError


def bench(
    artifact: ArtifactArgument,
    batch: Annotated[str, typer.Option(metavar="1,8", help="The numbers of sequences that decode together.")] = "1",
    context: Annotated[str, typer.Option(metavar="512,4096", help="The numbers of prompt tokens.")] = "512",
    chunk: Annotated[
        str, typer.Option(metavar="0,64", help="The prompt tokens per call; 0 is the artifact's chunk.")
    ] = "0",
    steps: Annotated[int, typer.Option(min=1, help="The number of decode steps.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="The number of times that each prompt is read.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=0, help="The threads of the model. [default: the recipe's]")
    ] = None,
    backend: BackendOption = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the prompts.")] = 0,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Measure the latency and throughput of an artifact by batch, context and chunk.

    `kvexport docs tasks/measure-speed` explains each figure, and how to load-test a server.
    """
    from kvexport.bench.offline import Plan, measure, sections
    from kvexport.engine.load import load
    from kvexport.terminal import show

    require_folder(html)
    batches, contexts, chunks = (
        _numbers(name, text, least)
        for name, text, least in (("--batch", batch, 1), ("--context", context, 1), ("--chunk", chunk, 0))
    )
    with show(f"loading {artifact}"):
        engine = load(artifact, backend=backend, threads=threads)
    result = measure(engine, artifact.resolve().name, Plan(batches, contexts, chunks, steps, rounds, seed), show)
    if html is not None:
        write_page(html, f"Speed of {result.artifact}", result.method, sections(result))
    print_result(as_json, result.to_json, lambda: sections(result))


def _numbers(name: str, text: str, least: int) -> tuple[int, ...]:
    """Return the distinct integers of a comma-separated list in ascending order."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and least <= int(word) < 2**31 for word in words):
        raise UsageError(f"{name} is {text!r}", f"{name} with integers of at least {least}, separated by commas")
    return tuple(sorted({int(word) for word in words}))
