"""The command `kvexport generate`: continue a prompt, and print every token as soon as it is final."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvexport.commands.options import (
    AdapterOption,
    BackendOption,
    BudgetOption,
    CalibrateOption,
    DeviceOption,
    JsonOption,
    MaxLengthOption,
    SetOption,
    SourceArgument,
    adapters_of,
    in_panel,
    output_option,
)
from kvexport.commands.output import print_json
from kvexport.errors import UsageError

if TYPE_CHECKING:
    from kvexport.engine.completion import Completion
    from kvexport.engine.engine import Engine
    from kvexport.images.rows import PromptImages
    from kvexport.language.settings import GenerationSettings


prompt_option, sampling_option = in_panel("Prompt"), in_panel("Sampling")


def generate(
    source: SourceArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads the prompt from stdin.")
    ] = None,
    budget: BudgetOption = None,
    max_length: MaxLengthOption = None,
    calibrate: CalibrateOption = None,
    overrides: SetOption = None,
    adapter: AdapterOption = None,
    prompt_file: Annotated[
        Path | None,
        prompt_option(metavar="FILE", help="Read the prompt from a file in UTF-8."),
    ] = None,
    token_ids: Annotated[
        str | None, prompt_option(metavar='"1,2,3"', help="Take these token ids as the prompt.")
    ] = None,
    chat: Annotated[
        bool | None,
        prompt_option(
            "--chat/--no-chat",
            help="Send the prompt as a user's message. [default: --chat for a PROMPT argument and a model that has a "
            "chat template]",
        ),
    ] = None,
    system: Annotated[
        str | None,
        prompt_option(metavar="TEXT", help="Send this system message first. Implies --chat."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        prompt_option(
            metavar="FILE",
            help="Put this image before the prompt, or in place of the model's marker in it; repeatable.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        sampling_option("--max-new-tokens", "--max-tokens", help="Stop after this many tokens."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        sampling_option(metavar="STR", help="Stop before this text. This option is repeatable."),
    ] = None,
    sample: Annotated[
        bool | None,
        sampling_option("--sample/--greedy", help="Draw tokens, or take the likeliest."),
    ] = None,
    temperature: Annotated[
        float | None,
        sampling_option(help="Divide the logits by this. Implies --sample."),
    ] = None,
    top_k: Annotated[
        int | None,
        sampling_option(help="Draw from the k likeliest tokens; 0 draws from all. Implies --sample."),
    ] = None,
    top_p: Annotated[
        float | None,
        sampling_option(help="Draw from the likeliest tokens whose probabilities add up to this. Implies --sample."),
    ] = None,
    min_p: Annotated[
        float | None,
        sampling_option(
            help="Draw from tokens with at least this share of the likeliest token's probability. Implies --sample."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        sampling_option(help="Make tokens that were seen less likely, above 1."),
    ] = None,
    seed: Annotated[int | None, sampling_option(help="Draw tokens with this seed. Implies --sample.")] = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    stats: Annotated[
        bool,
        output_option("--stats", help="Print tokens per second and cache bytes on stderr."),
    ] = False,
) -> None:
    """Continue a prompt, or answer it if the checkpoint has a chat template.

    The text is streamed to stdout; without a tokenizer in the artifact, token ids are. Settings that are not on the
    command line come from the checkpoint's generation_config.json.
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
    from kvexport.models import load
    from kvexport.terminal import show

    adapters = adapters_of([adapter] if adapter is not None else ())
    engine = load(
        source,
        budget=budget,
        max_length=max_length,
        overrides=overrides or (),
        calibrate=calibrate,
        backend=backend,
        device=device,
        adapters=adapters,
        progress=show,
    )
    settings = engine.settings(do_sample=sample, **drawing, **others)
    use_chat = chat if chat is not None else True if system is not None else None
    ids, images = _encode(engine, text, system, use_chat, image or [], plain=prompt not in (None, "-"))
    completion = print_stream(engine, ids, settings, next(iter(adapters), None), images=images, quiet=as_json)
    figures = statistics(engine)
    if as_json:
        print_json({"artifact": str(engine.path), **vars(completion), "settings": vars(settings), "stats": figures})
    if stats:
        rates = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in figures.items()}
        lines = [f"{name.replace('_', ' ')}: {value}" for name, value in rates.items()]
        typer.echo("\n".join([*lines, f"cache: {engine.timing.compression}"]), err=True)


def read_prompt(prompt: str | None, file: Path | None, token_ids: str | None) -> str | list[int]:
    """Return the prompt as text or token ids: from the command line, a file, or a list of ids."""
    prompts = [x for x in (prompt, file, token_ids) if x is not None]
    if len(prompts) != 1:
        problem = "there is no prompt" if not prompts else f"there are {len(prompts)} prompts"
        raise UsageError(problem, "one of: PROMPT, - (stdin), --prompt-file FILE, --token-ids 1,2,3")
    if token_ids is not None:
        words = token_ids.replace(",", " ").split()
        if wrong := [
            word for word in words if not (word.isascii() and word.removeprefix("-").isdigit() and len(word) < 19)
        ]:
            raise UsageError(f"--token-ids holds {wrong[0]!r}, which is no token id", "--token-ids 1,2,3")
        return [int(word) for word in words]
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
    engine: Engine,
    prompt: str | list[int],
    system: str | None,
    chat: bool | None,
    images: Sequence[Path],
    *,
    plain: bool,
) -> tuple[list[int], PromptImages | None]:
    """Return the token ids of the prompt; if `chat` is true, the prompt is a message in the chat template.

    If `chat` is None, the chat template is used if the checkpoint has one and the prompt is on the command line
    (`plain`). A line on stderr then says so.
    """
    if chat is None and plain and isinstance(prompt, str) and engine.chat_template and engine.tokenizer:
        typer.echo(
            "The prompt is put as a user's message by the checkpoint's chat template (--no-chat: as it is).", err=True
        )
        chat = True
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        parts = [*({"type": "image", "image": file} for file in images), {"type": "text", "text": prompt}]
        message = {"role": "user", "content": parts if images else prompt}
        ids, encoded = engine.encode_chat_with_images([*messages, message])
    else:
        ids, encoded = engine.encode_with_images(prompt, images)
    return [int(i) for i in ids], encoded


def print_stream(
    engine: Engine,
    ids: Sequence[int],
    settings: GenerationSettings,
    adapter: str | None = None,
    *,
    images: PromptImages | None = None,
    quiet: bool,
) -> Completion:
    """Generate an answer, print its text as soon as it is final unless `quiet`, and return the completion."""
    from kvexport.engine.completion import Completion
    from kvexport.terminal import show

    completion = Completion(len(ids))
    with show("reading the prompt", len(ids)) as bar:
        done = 0

        def advance(tokens: int, _: int) -> None:
            nonlocal done
            bar.advance(tokens - done)
            done = tokens

        stream = engine.stream_encoded([(ids, images)], settings, adapter, on_prefill=advance)
        token = next(stream)
    while True:
        completion.append(token)
        if not quiet:
            print(
                token.text if engine.tokenizer else f"{token.id} ", end="\n" if token.finish_reason else "", flush=True
            )
        if token.finish_reason:
            return completion
        token = next(stream)


def statistics(engine: Engine) -> dict[str, int | float | None]:
    """Return the token counts, seconds and rates of the engine's last call.

    Prefill gives the first generated token, so the decode rate counts only the tokens of decode steps.
    """
    t = engine.timing
    return {
        "prompt_tokens": t.prompt_tokens,
        "generated_tokens": t.generated_tokens,
        "prefill_seconds": t.prefill_seconds,
        "prefill_tokens_per_second": t.prompt_tokens / t.prefill_seconds if t.prefill_seconds else None,
        "decode_seconds": t.decode_seconds,
        "decode_tokens_per_second": t.decoded_tokens / t.decode_seconds if t.decode_seconds else None,
        "cache_bytes": engine.plan.bytes(1),
        "cache_tokens": t.cache_tokens,
        "cache_slots": t.cache_slots,
        "prompt_tokens_over_budget": t.over_budget,
        **({"drafted_tokens": t.drafted_tokens, "accepted_tokens": t.accepted_tokens} if t.drafted_tokens else {}),
        **({} if t.whole_rows is None else {"whole_rows_of_logits": t.whole_rows}),
    }
