"""The tiny model with an alphabet that includes JSON's characters, and a chat template for tools."""

import string
from pathlib import Path

import tokenizers

from kvexport.engine.engine import Engine
from kvexport.language.chat import ChatTemplate
from kvexport.language.grammar import Grammars
from kvexport.language.tokenizer import Tokenizer
from tests.support.http_server import engine_of

ALPHABET = string.ascii_lowercase + string.digits + ' .,:;{}[]"<>/_-\\\n()=' + "AUSTN"
# Tool calls have the format of Hermes and Qwen.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} "
    "| tojson }}\n</tool_call>{% endfor %}. {% endfor %}say "
)


def json_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with one token for each character of ALPHABET."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({character: i for i, character in enumerate(ALPHABET)}, unk_token=".")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return inner


def json_engine(artifact: Path) -> Engine:
    """Load a new engine with the tokenizer and the chat template of this module."""
    engine = engine_of(artifact)
    engine.tokenizer = Tokenizer(json_tokenizer())
    engine.grammars = Grammars(engine.tokenizer, engine.vocabulary)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, "the test")
    return engine
