"""What `kvexport generate` reads and prints: the prompt, the stream of tokens, the figures of the call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvexport.errors import UsageError

if TYPE_CHECKING:
    from kvexport.runtime.engine import Completion, Engine
    from kvexport.runtime.sampling import GenerationSettings


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


def print_stream(engine: Engine, prompt: str | list[int], settings: GenerationSettings, *, quiet: bool) -> Completion:
    """Generate, printing every piece as soon as it is final unless `quiet`."""
    from kvexport.runtime.engine import Completion
    from kvexport.terminal import show

    ids = engine.encode(prompt)
    completion = Completion(len(ids))
    with show("reading the prompt", len(ids)) as bar:
        done = 0

        def advance(tokens: int, _: int) -> None:
            nonlocal done
            bar.advance(tokens - done)
            done = tokens

        stream = engine.stream(ids.tolist(), settings, on_prefill=advance)
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
    """Of the last call. The first generated token comes out of prefill, so the decode rate counts steps."""
    t = engine.timing
    return {
        "prompt_tokens": t.prompt_tokens,
        "generated_tokens": t.generated_tokens,
        "prefill_seconds": t.prefill_seconds,
        "prefill_tokens_per_second": t.prompt_tokens / t.prefill_seconds if t.prefill_seconds else None,
        "decode_seconds": t.decode_seconds,
        "decode_tokens_per_second": t.steps / t.decode_seconds if t.decode_seconds else None,
        "cache_bytes": engine.plan.bytes(1),
        **({} if t.whole_rows is None else {"whole_rows_of_logits": t.whole_rows}),
    }
