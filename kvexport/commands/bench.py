"""The command `kvexport bench`: latency and throughput of an artifact."""

from __future__ import annotations

from typing import Annotated

import typer

from kvexport.commands.options import ArtifactArgument, BackendOption, JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import UsageError


def bench(
    artifact: ArtifactArgument,
    batch: Annotated[str, typer.Option(metavar="1,8", help="The numbers of sequences that decode together.")] = "1",
    context: Annotated[str, typer.Option(metavar="512,4096", help="The numbers of prompt tokens.")] = "512",
    steps: Annotated[int, typer.Option(min=1, help="The number of decode steps.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="The number of times that each prompt is read.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=0, help="The threads of the model. [default: the recipe's]")
    ] = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the latency and throughput of an artifact by batch and context.

    `kvexport docs tasks/measure-speed` explains each figure, and how to load-test a server.
    """
    from kvexport.bench import measure, sections
    from kvexport.engine.load import load
    from kvexport.terminal import show

    batches, contexts = _numbers("--batch", batch), _numbers("--context", context)
    with show(f"loading {artifact}", None):
        engine = load(artifact, backend=backend, threads=threads)
    result = measure(engine, artifact.resolve().name, batches, contexts, steps, rounds, show)
    print_result(as_json, lambda: result, lambda: sections(result))


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the distinct integers, at least 1, of a comma-separated list in ascending order."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) < 2**31 for word in words):
        raise UsageError(f"{name} is {text!r}", f"{name} with integers of at least 1, separated by commas")
    return tuple(sorted({int(word) for word in words}))
