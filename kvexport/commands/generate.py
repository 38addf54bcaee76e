"""`kvexport generate`: continue a prompt, printing every token as soon as it is final."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvexport.commands.options import ArtifactArgument, BackendOption, JsonOption
from kvexport.commands.output import print_json
from kvexport.errors import UsageError

if TYPE_CHECKING:
    from kvexport.engine.completion import Completion
    from kvexport.engine.engine import Engine
    from kvexport.language.settings import GenerationSettings


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
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Put the prompt as a user's message; default where PROMPT is the text."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system's message; implies --chat.")] = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens per second and cache bytes on stderr.")] = False,
) -> None:
    """Continue a prompt, or answer it where the checkpoint has a chat template.

    The text is streamed to stdout (token ids, where the artifact has no tokenizer). Settings that are not given come
    from the checkpoint's generation_config.json.
    """
    text = read_prompt(prompt, prompt_file, token_ids)
    if system is not None and (chat is False or isinstance(text, list)):
        other = "--no-chat" if chat is False else "--token-ids"
        raise UsageError(f"--system is part of a chat, which {other} is none", f"leave out --system or {other}")
    if chat and isinstance(text, list):
        raise UsageError("--chat takes text, which --token-ids is none", "leave out --chat or --token-ids")
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    if temperature == 0 and sample is not False:
        raise UsageError("a temperature of 0 would divide by it", "--greedy in its place takes the likeliest token")
    if sample is None and any(value is not None for value in drawing.values()):
        sample = True
    others = {"max_new_tokens": max_new_tokens, "repetition_penalty": repetition_penalty, "stop_strings": stop or None}
    from kvexport.engine.load import load
    from kvexport.terminal import show

    with show(f"loading {artifact}"):
        engine = load(artifact, backend=backend)
    settings = engine.settings(do_sample=sample, **drawing, **others)
    wanted = chat if chat is not None else True if system is not None else None
    ids = _encode(engine, text, system, wanted, plain=prompt not in (None, "-"))
    completion = print_stream(engine, ids, settings, quiet=as_json)
    figures = statistics(engine)
    if as_json:
        print_json({"artifact": str(artifact), **vars(completion), "settings": vars(settings), "stats": figures})
    if stats:
        rates = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in figures.items()}
        typer.echo("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in rates.items()), err=True)


def read_prompt(prompt: str | None, file: Path | None, token_ids: str | None) -> str | list[int]:
    """The one prompt that was given, text or token ids. Raises UsageError where there is none or several, or one cannot
    be read."""
    given = [x for x in (prompt, file, token_ids) if x is not None]
    if len(given) != 1:
        found = "there is no prompt" if not given else f"there are {len(given)} prompts"
        raise UsageError(found, "one of: PROMPT, - (stdin), --prompt-file FILE, --token-ids 1,2,3")
    if token_ids is not None:
        parts = token_ids.replace(",", " ").split()
        if wrong := [
            part for part in parts if not (part.isascii() and part.removeprefix("-").isdigit() and len(part) < 19)
        ]:
            raise UsageError(f"--token-ids holds {wrong[0]!r}, which is no token id", "--token-ids 1,2,3")
        return [int(part) for part in parts]
    where = "stdin" if file is None else str(file)
    if prompt == "-" and sys.stdin is None:
        raise UsageError("the prompt is to be read from stdin, which is closed", "generate ARTIFACT - < FILE")
    try:
        if file is not None:
            return file.read_bytes().decode()
        return typer.get_binary_stream("stdin").read().decode() if prompt == "-" else str(prompt)
    except UnicodeDecodeError as error:
        problem = f"the prompt in {where} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        raise UsageError(problem, "convert it, for example with iconv -t UTF-8") from error
    except OSError as error:
        raise UsageError(
            f"the prompt cannot be read from {where}: {error.strerror}", "--prompt-file FILE with a file you may read"
        ) from error


def _encode(
    engine: Engine, prompt: str | list[int], system: str | None, chat: bool | None, *, plain: bool
) -> list[int]:
    """Token ids of the prompt: as a user's message where a chat is wanted (True), or where nothing was said (None), the
    prompt stands on the command line (`plain`) and the checkpoint has a template, which is then said on stderr."""
    if chat is None and plain and isinstance(prompt, str) and engine.chat_template and engine.tokenizer:
        typer.echo(
            "The prompt is put as a user's message by the checkpoint's chat template (--no-chat: as it is).", err=True
        )
        chat = True
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids = engine.encode_chat([*messages, {"role": "user", "content": prompt}])
    else:
        ids = engine.encode(prompt)
    return [int(i) for i in ids]


def print_stream(engine: Engine, ids: Sequence[int], settings: GenerationSettings, *, quiet: bool) -> Completion:
    """Generate, printing every piece as soon as it is final unless `quiet`."""
    from kvexport.engine.completion import Completion
    from kvexport.terminal import show

    completion = Completion(len(ids))
    with show("reading the prompt", len(ids)) as bar:
        done = 0

        def advance(tokens: int, _: int) -> None:
            nonlocal done
            bar.advance(tokens - done)
            done = tokens

        stream = engine.stream(ids, settings, on_prefill=advance)
        token = next(stream)
    while True:
        completion.token_ids.append(token.id)
        completion.text += token.text
        completion.finish_reason = token.finish_reason
        if not quiet:
            print(
                token.text if engine.tokenizer else f"{token.id} ", end="\n" if token.finish_reason else "", flush=True
            )
        if token.finish_reason:
            return completion
        token = next(stream)


def statistics(engine: Engine) -> dict[str, int | float | None]:
    """Of the last call. The first generated token comes out of prefill, so the decode rate counts those of steps."""
    t = engine.timing
    return {
        "prompt_tokens": t.prompt_tokens,
        "generated_tokens": t.generated_tokens,
        "prefill_seconds": t.prefill_seconds,
        "prefill_tokens_per_second": t.prompt_tokens / t.prefill_seconds if t.prefill_seconds else None,
        "decode_seconds": t.decode_seconds,
        "decode_tokens_per_second": t.decoded_tokens / t.decode_seconds if t.decode_seconds else None,
        "cache_bytes": engine.plan.bytes(1),
        **({"drafted_tokens": t.drafted_tokens, "accepted_tokens": t.accepted_tokens} if t.drafted_tokens else {}),
        **({} if t.whole_rows is None else {"whole_rows_of_logits": t.whole_rows}),
    }
