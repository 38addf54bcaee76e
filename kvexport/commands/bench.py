"""`kvexport bench`: how fast an artifact is, and any server that speaks OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvexport.commands.options import BackendOption, HtmlOption, JsonOption
from kvexport.commands.output import print_result, require_folder, write_page
from kvexport.errors import UsageError


def bench(
    artifact: Annotated[Path | None, typer.Argument(metavar="[ARTIFACT]", help="Measured in this process.")] = None,
    url: Annotated[str | None, typer.Option(help="Measure a server in its place: http://127.0.0.1:8000")] = None,
    batch: Annotated[str, typer.Option(metavar="1,8", help="Sequences at once.")] = "1",
    context: Annotated[str, typer.Option(metavar="512,4096", help="Tokens of a prompt.")] = "512",
    chunk: Annotated[str, typer.Option(metavar="0,64", help="Tokens of a call of prefill; 0 = the artifact's.")] = "0",
    steps: Annotated[int, typer.Option(min=1, help="Of decoding.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each prompt is read.")] = 3,
    threads: Annotated[int | None, typer.Option(min=0, help="Of the model, in place of the recipe's.")] = None,
    backend: BackendOption = None,
    model: Annotated[str | None, typer.Option(help="Of the server; the first that it lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KVEXPORT_API_KEY", help="Of the server.")] = None,
    conversations: Annotated[int, typer.Option(min=1, help="That begin.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Of each conversation.")] = 1,
    rate: Annotated[float, typer.Option(min=0, help="Conversations that begin in a second; 0 = all at once.")] = 1.0,
    words: Annotated[int, typer.Option(min=1, help="Of a message.")] = 100,
    first_words: Annotated[int, typer.Option(min=0, help="Of a conversation's first message; 0 = as others.")] = 0,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    think: Annotated[float, typer.Option(min=0, help="Seconds between an answer and the next message.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of exactly that length.")] = False,
    slo_ttft: Annotated[float, typer.Option(min=0, help="Goodput: seconds to the first token, at most.")] = 1.0,
    slo_token: Annotated[float, typer.Option(min=0, help="Goodput: seconds of a further token, at most.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Measure latency and throughput: of an artifact by batch, context and chunk, or of a server under load.

    Under load, conversations arrive at random at a fixed rate, however long answers take; their turns follow one
    another. docs/bench.md says what each figure is.
    """
    require_folder(html)
    if (artifact is None) == (url is None):
        raise UsageError(
            "bench measures an artifact or a server", "kvexport bench ARTIFACT, or kvexport bench --url URL"
        )
    if url is not None:
        from kvexport.bench.load import Server, drive
        from kvexport.bench.online import Objective
        from kvexport.bench.online import Result as Online
        from kvexport.bench.online import sections as online_sections
        from kvexport.bench.workload import Workload

        workload = Workload(conversations, turns, rate, words, first_words, answer, think, ignore_eos, seed)
        found, answers, seconds = drive(Server(url, model, api_key or os.environ.get("OPENAI_API_KEY")), workload)
        online = Online(url, found, workload, Objective(slo_ttft, slo_token), seconds, answers)
        if html is not None:
            write_page(html, f"Load on {url}", found, online_sections(online))
        print_result(as_json, online.to_json, lambda: online_sections(online))
        if not online.whole:
            raise UsageError(f"no request was answered: {answers[0].error}", "see the errors above")
        return
    from kvexport.bench.offline import Plan, measure, sections
    from kvexport.engine.engine import load
    from kvexport.terminal import show

    assert artifact is not None
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
    """Of a list with commas, each once, ascending."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and least <= int(word) < 2**31 for word in words):
        raise UsageError(f"{name} is {text!r}", f"{name} with integers of at least {least}, parted by commas")
    return tuple(sorted({int(word) for word in words}))
