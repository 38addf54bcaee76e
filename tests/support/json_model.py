"""The tiny model over other characters, those of JSON among them, with a chat template that knows tools."""

from __future__ import annotations

import string
from pathlib import Path

import tokenizers

from kvexport.engine.engine import Engine
from kvexport.language.chat import ChatTemplate
from kvexport.language.grammar import Grammars
from kvexport.language.tokenizer import Tokenizer
from tests.support.http_server import engine_of

ALPHABET = string.ascii_lowercase + string.digits + ' .,:;{}[]"<>/_-\\\n()=' + "AUSTN"
# Calls as Hermes and Qwen write them.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} "
    "| tojson }}\n</tool_call>{% endfor %}. {% endfor %}say "
)


def json_engine(artifact: Path) -> Engine:
    """An engine of its own."""
    engine = engine_of(artifact)
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({character: i for i, character in enumerate(ALPHABET)}, unk_token=".")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    engine.tokenizer = Tokenizer(inner)
    engine.grammars = Grammars(engine.tokenizer, engine.vocabulary)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, "the test")
    return engine
