"""The command `kvexport chat`: a conversation in the terminal that keeps its KV cache from turn to turn."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvexport.commands.options import (
    AdapterOption,
    BackendOption,
    BudgetOption,
    CalibrateOption,
    DeviceOption,
    MaxLengthOption,
    SetOption,
    SourceArgument,
    adapters_of,
)
from kvexport.errors import KvexportError, UsageError
from kvexport.files import new_file
from kvexport.units import format_bytes

if TYPE_CHECKING:
    from kvexport.engine.engine import Engine
    from kvexport.engine.request import Request
    from kvexport.language.settings import GenerationSettings
    from kvexport.state.snapshot import Snapshot

HELP = """/image FILE  put an image before the next message
/save FILE   keep the conversation in a file
/load FILE   go on with one
/stats       tokens, slots and speed
/reset       begin anew
/exit        end (so does the end of the input)"""


@dataclass
class Chat:
    """A conversation with the model in the terminal.

    Attributes:
        messages: The messages so far.
        snapshot: The model's state (KV cache) after these messages; None if they have to be read again.
        last: The request of the previous answer.
        adapter: The LoRA adapter that answers; None for the model without an adapter.
        images: The bytes of image files that the next message will have before its text.
    """

    engine: Engine
    settings: GenerationSettings
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    snapshot: Snapshot | None = None
    last: Request | None = None
    adapter: str | None = None
    images: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.snapshot = self.last = None
        self.images = []

    def answer(self, text: str) -> None:
        """Answer a user's message, and print the text as soon as it is final. An interrupt ends only the answer."""
        images, self.images = self.images, []
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if images else text})
        try:
            request = self._request()
            self.engine.add(request)
        except KvexportError:
            self.messages.pop()
            self.images = images
            raise
        shown, interrupted = 0, False
        try:
            while self.engine.busy:
                self.engine.step()
                for token in request.tokens[shown:]:
                    print(token.text, end="", flush=True)
                shown = len(request.tokens)
        except KeyboardInterrupt:
            interrupted = True
            self.engine.cancel(request.id)
        print(flush=True)
        if request.error is not None and not interrupted:
            self.messages.pop()
            self.images = images
            raise request.error
        self.messages.append({"role": "assistant", "content": "".join(token.text for token in request.tokens)})
        # An interrupted step leaves no snapshot; the next turn then reads the whole conversation again.
        self.snapshot, self.last = request.snapshot, request

    def _request(self) -> Request:
        from kvexport.engine.request import Request
        from kvexport.state.sessions import next_turn

        start = self.snapshot
        added = None if start is None else next_turn(self.engine, start, self.messages)
        if added is not None:
            ids, images, _ = added
        else:
            start = None
            ids, images = self.engine.encode_chat_with_images(self.messages)
        return Request(ids, self.settings, start=start, keep=True, adapter=self.adapter, images=images)

    def command(self, line: str) -> bool:
        """Run a slash command of the user, such as /save; return False if the command ends the conversation."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word == "/exit":
            return False
        if word in ("/save", "/load", "/image") and not rest:
            raise UsageError(f"{word} needs a file", f"{word} FILE")
        if word == "/image":
            self._image(Path(rest))
        elif word == "/save":
            self._save(Path(rest))
        elif word == "/load":
            self._load(Path(rest))
        elif word == "/reset":
            self.reset()
        elif word == "/stats":
            print(self.statistics())
        elif word == "/help":
            print(HELP)
        else:
            raise UsageError(f"there is no command {word}", "/help shows those that there are")
        return True

    def _image(self, path: Path) -> None:
        from kvexport.images.decode import bytes_of, read_image

        self.engine.require_images()
        image = read_image(path)
        self.images.append(bytes_of(path)[1])
        print(f"{image.width} x {image.height} pixels, before the next message")

    def _save(self, path: Path) -> None:
        if self.snapshot is None:
            raise UsageError("there is no conversation to save", "say something first")
        with new_file(path, 0o600) as file:
            messages = json.dumps(self.messages, default=lambda data: base64.b64encode(data).decode())
            file.write(messages.encode() + b"\n" + self.snapshot.to_bytes())
        print(f"{format_bytes(path.stat().st_size)} in {path}")

    def _load(self, path: Path) -> None:
        from kvexport.state.snapshot import Snapshot

        messages_json, _, state = path.read_bytes().partition(b"\n")
        try:
            messages = json.loads(messages_json, object_hook=_with_bytes)
            whole = isinstance(messages, list) and all(set(m) == {"role", "content"} for m in messages)
        except (ValueError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise UsageError(f"{path} is no conversation", "a file that /save wrote")
        self.snapshot = Snapshot.from_bytes(state, self.engine.manifest)
        self.messages, self.last = messages, None
        print(f"{len(self.messages)} messages, {self.snapshot.length} tokens")

    def statistics(self) -> str:
        """Return figures of the conversation in a few lines: messages, tokens, cache size and the last turn's speed."""
        plan, tokens = self.engine.plan, 0 if self.snapshot is None else self.snapshot.length
        lines = [f"messages: {len(self.messages)}", f"tokens seen: {tokens}", f"cache: {format_bytes(plan.bytes(1))}"]
        if self.last is not None:
            timing = self.last.timing
            lines[-1] += f", {timing.compression}"
            rate = timing.decoded_tokens / timing.decode_seconds if timing.decode_seconds else 0.0
            read = len(self.last.ids) - self.last.cached_tokens
            lines.append(
                f"last turn: {read} tokens read in {timing.prefill_seconds:.2f} s, {rate:.3g} tokens per second"
            )
        return "\n".join(lines)


def chat(
    source: SourceArgument,
    budget: BudgetOption = None,
    max_length: MaxLengthOption = None,
    calibrate: CalibrateOption = None,
    overrides: SetOption = None,
    adapter: AdapterOption = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Begin the conversation with this system message.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="End an answer after this many tokens.")
    ] = 1024,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Divide the logits by this; 0 takes the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens whose probabilities add up to this.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Draw tokens with this seed.")] = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
) -> None:
    """Talk to a model that has a chat template.

    The KV cache is kept between turns, so a turn reads only its new tokens. If the input is a pipe, each line is a
    message. /help shows the commands.

    Example: kvexport chat Qwen/Qwen3-0.6B --budget 1024
    """
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
        lanes=1,
        adapters=adapters,
        progress=show,
    )
    if engine.chat_template is None:
        raise UsageError("the artifact has no chat template", "kvexport generate, or build an instruct model")
    sample = None if temperature is None else temperature > 0
    if sample is None and (top_p is not None or seed is not None):
        sample = True
    settings = engine.settings(
        max_new_tokens=max_new_tokens, do_sample=sample, temperature=temperature or None, top_p=top_p, seed=seed
    )
    talk = Chat(engine, settings, system, adapter=next(iter(adapters), None))
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive:
        typer.echo("/help shows the commands, /exit ends.", err=True)
    while (line := _line(interactive)) is not None:
        try:
            if line.startswith("/"):
                if not talk.command(line):
                    break
            elif line:
                talk.answer(line)
        except (KvexportError, OSError) as error:
            if not interactive:
                raise
            problem = error.problem if isinstance(error, KvexportError) else str(error)
            typer.echo(f"error: {problem}", err=True)


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "image": base64.b64decode(entry.get("image", ""))} if entry.get("type") == "image" else entry


def _line(interactive: bool) -> str | None:
    """Return the next line of the user's input; None at the end of the input."""
    if interactive:
        try:
            return input("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            return ""
    line = sys.stdin.readline() if sys.stdin is not None else ""
    return line.strip() if line else None
