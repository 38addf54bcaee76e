"""Tests of incremental text against whole decodes, for the kinds of tokenizers in checkpoints."""

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvexport.errors import ArtifactError, EnvironmentProblem, KvexportError, UsageError
from kvexport.language.text_stream import TextStream
from kvexport.language.tokenizer import Tokenizer

LINES = [
    "the quick brown fox jumps over the lazy dog and the dog barks back",
    "  def f(x):\n    return x + 1  # two  spaces",
    "日本語の文章と漢字、汉字和文字",
    "emoji 😀 and 👩‍👩‍👧 and 🏳️‍🌈 again 😀😀",
    "naïve café, Привет мир",
]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def spelled(data: bytes) -> str:
    """Return the characters by which GPT-2's byte-level vocabularies represent the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return "".join(chr(value) if value in printable else chr(256 + others.index(value)) for value in data)


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    tokens = [(tokenizer.token_id(BYTES[value]), tokenizer.token_id(spelled(bytes([value])))) for value in data]
    return [byte_level if fallback is None else fallback for fallback, byte_level in tokens]  # type: ignore[misc]


def odd_bytes() -> Tokenizer:
    """Return a tokenizer whose byte-level tokens begin and end inside characters, as merges across them give."""
    pieces = [
        b"\xff", b"a\xff", b"a", b"\xe5", b"\xad", b"\x97", b"\xad\x97\xe5", b"b\xe5\xad", b"\xf0\x9f",
        b"\x98\x80\xf0\x9f", b"\x98\x80 ",
    ]  # fmt: skip
    inner = tokenizers.Tokenizer(
        models.WordLevel({spelled(piece): i for i, piece in enumerate(pieces)}, unk_token=spelled(b"a"))
    )
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner)


def byte_level(merges: bool) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = 420 if merges else 257
    inner.train_from_iterator(
        LINES * 3,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return Tokenizer(inner)


def llama_like() -> Tokenizer:
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        LINES[:2] * 3, trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"] | {token: len(model["vocab"]) + value for value, token in enumerate(BYTES)}
    bpe = models.BPE(
        vocab, [tuple(pair) for pair in model["merges"]], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    inner = tokenizers.Tokenizer(bpe)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return Tokenizer(inner)


def unigram() -> Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁the", -2.5),
        ("▁▁", -3.0),
        ("the", -3.5),
        *((c, -4.0) for c in "abcdefghijklmnopqrstuvwxyz漢😀"),
    ]
    inner = tokenizers.Tokenizer(
        models.Unigram(pieces + [(token, -9.0) for token in BYTES], unk_id=0, byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return Tokenizer(inner)


def word_level() -> Tokenizer:
    words = sorted({word for line in LINES for word in line.split()} | {"a", "b", "\ufffd"})
    inner = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["</s>"])
    return Tokenizer(inner)


def suffixed_bpe() -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    inner.train_from_iterator(LINES * 3, trainer)
    return Tokenizer(inner)


KINDS = {
    "byte-level": byte_level(merges=True),
    "single-bytes": byte_level(merges=False),
    "llama": llama_like(),
    "unigram": unigram(),
    "word-level": word_level(),
    "suffixed": suffixed_bpe(),
}
ODD_BYTES = odd_bytes()
kinds = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS.keys())
texts = st.one_of(
    st.lists(
        st.sampled_from(
            [*" \n\tabeto.", "the", "  ", "quick", "漢", "字", "é", "ж", "😀", "👩‍👩‍👧", "\ufffd", "\u0301"]
        ),
        max_size=30,
    ).map("".join),
    st.text(max_size=20),
    st.sampled_from(LINES),
)


def stream(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str] = ()) -> tuple[str, TextStream]:
    text = TextStream(tokenizer, stops)
    return "".join([text.push(i) for i in ids] + [text.flush()]), text


@kinds
@settings(max_examples=60, deadline=None)
@given(text=texts)
@example(text="")
@example(text="   ")
@example(text="x😀\ufffd\ufffdx")
def test_the_pieces_joined_are_the_whole_decode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids)[0] == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "single-bytes", "word-level", "suffixed", "odd-bytes"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_whole_decode(name: str, data: st.DataObject) -> None:
    tokenizer = ODD_BYTES if name == "odd-bytes" else KINDS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    assert stream(tokenizer, ids)[0] == tokenizer.decode(ids)


@kinds
@settings(max_examples=40, deadline=None)
@given(text=texts, cut=st.integers(0, 40))
def test_a_continuation_follows_its_prompt(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode("the " + text)
    prompt, rest = ids[: cut + 1], ids[cut + 1 :]
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    if before.endswith("\ufffd") or not before:
        return
    continuation = TextStream(tokenizer, context_ids=prompt)
    assert "".join([continuation.push(i) for i in rest] + [continuation.flush()]) == whole[len(before) :]


@kinds
def test_text_is_shown_as_soon_as_it_is_final(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the dog and the fox")
    text, out = TextStream(tokenizer), ""
    for count, token in enumerate(ids, 1):
        out += text.push(token)
        assert out == tokenizer.decode(ids[:count])
    assert text.flush() == ""


@pytest.mark.parametrize("name", ["single-bytes", "llama", "unigram"])
def test_a_character_waits_for_its_last_byte(name: str) -> None:
    tokenizer = KINDS[name]
    text = TextStream(tokenizer)
    pieces = [text.push(i) for i in ids_of_bytes(tokenizer, "é字🤖".encode())]
    assert pieces == ["", "é", "", "", "字", "", "", "", "🤖"]


@pytest.mark.parametrize("name", ["single-bytes", "llama", "unigram"])
def test_an_incomplete_emoji_at_the_end_is_replaced(name: str) -> None:
    tokenizer = KINDS[name]
    ids = [*tokenizer.encode("the"), *ids_of_bytes(tokenizer, "🤖".encode()[:3])]
    text = TextStream(tokenizer)
    assert "".join(text.push(i) for i in ids) == "the"
    assert "the" + text.flush() == tokenizer.decode(ids)
    assert tokenizer.decode(ids).endswith("\ufffd")


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_bytes_that_are_no_text_leave_their_neighbours_alone(name: str) -> None:
    tokenizer = KINDS[name]
    letter = tokenizer.token_id("o")
    assert letter is not None
    assert stream(tokenizer, [letter, *ids_of_bytes(tokenizer, b"\xff"), letter])[0] == "o\ufffdo"
    assert (
        stream(tokenizer, [letter, *ids_of_bytes(tokenizer, "字".encode() + b"\xe5\xad"), letter])[0]
        == "o字\ufffd\ufffdo"
    )


def test_a_prompt_may_end_inside_a_character() -> None:
    tokenizer = KINDS["single-bytes"]
    ids = tokenizer.encode("the 字 dog")
    text = TextStream(tokenizer, context_ids=ids[:5])
    assert "".join(text.push(i) for i in ids[5:]) == "字 dog"


class _Counting(Tokenizer):
    longest = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return super().decode(ids, skip_special_tokens)


def longest_decode(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    counting = _Counting(tokenizer._inner)
    stream(counting, ids)
    return counting.longest


@kinds
def test_the_work_per_token_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    assert 0 < longest_decode(tokenizer, tokenizer.encode(" ".join(LINES * 3))) <= 16


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"suffixed"}))
@pytest.mark.parametrize("text", LINES)
def test_the_bytes_of_tokens_joined_are_the_text(name: str, text: str) -> None:
    tokenizer = KINDS[name]
    ids = tokenizer.encode(text)
    whole = b"".join(tokenizer.token_bytes[i] for i in ids).decode()
    assert whole.lstrip(" ") == tokenizer.decode(ids, skip_special_tokens=False).lstrip(" ")
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size


@pytest.mark.parametrize("name", ["byte-level", "single-bytes", "llama", "unigram"])
@pytest.mark.parametrize("broken", [b"\xff", b"\xf0\x9f\x98", b"\xc3\xfe", b"\xe5\xad\xff"])
def test_many_broken_bytes_take_bounded_work(name: str, broken: bytes) -> None:
    tokenizer = KINDS[name]
    ids = [*tokenizer.encode("the"), *ids_of_bytes(tokenizer, broken * 100)]
    assert longest_decode(tokenizer, ids) <= 24
    assert stream(tokenizer, ids)[0] == tokenizer.decode(ids)


@pytest.mark.parametrize("count", range(14))
def test_text_after_broken_bytes_is_whole_again(count: int) -> None:
    tokenizer = KINDS["single-bytes"]
    ids = ids_of_bytes(tokenizer, b"a" + b"\xff" * count + "字🤖".encode())
    assert stream(tokenizer, ids)[0] == tokenizer.decode(ids) == "a" + "\ufffd" * count + "字🤖"


def test_a_token_that_ends_one_character_and_begins_another_shows_the_first() -> None:
    ends_and_begins = ODD_BYTES.token_id(spelled(b"\xad\x97\xe5"))
    assert ends_and_begins is not None
    text = TextStream(ODD_BYTES)
    assert text.push(ODD_BYTES.token_id(spelled(b"\xe5")) or 0) == ""
    assert [text.push(ends_and_begins) for _ in range(30)] == ["字"] * 30
    assert text.flush() == "\ufffd"


def test_a_flood_of_skipped_tokens_is_no_work() -> None:
    tokenizer = KINDS["llama"]
    ids = [*tokenizer.encode("the"), *[tokenizer.token_id("</s>") or 0] * 500, *tokenizer.encode("dog")]
    assert longest_decode(tokenizer, ids) <= 16
    assert stream(tokenizer, ids)[0] == tokenizer.decode(ids)


def test_special_tokens_are_no_text() -> None:
    tokenizer = KINDS["byte-level"]
    ids = [*tokenizer.encode("dog"), tokenizer.token_id("<|end|>") or 0]
    assert stream(tokenizer, ids, ["<|end|>"])[0] == "dog"


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Apply the rule letter by letter: the stop string that ends first, and the longest of those that end together."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("name", ["byte-level", "single-bytes"])
@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="the do", max_size=30),
    stops=st.lists(st.text(alphabet="the do", min_size=1, max_size=5), max_size=3),
)
@example(text="aaab", stops=["aab"])
@example(text="abcd", stops=["abcd", "bc"])
@example(text="abc", stops=["c", "bc"])
@example(text="the dog an", stops=["and"])
@example(text="字😀字", stops=["😀字"])
def test_the_text_ends_before_the_stop_string(name: str, text: str, stops: list[str]) -> None:
    tokenizer = KINDS[name]
    out, ended = stream(tokenizer, tokenizer.encode(text), stops)
    assert (out, ended.stop_string) == cut_at_stop(text, stops)
    assert ended.stopped == (ended.stop_string is not None)


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    tokenizer = KINDS["single-bytes"]
    text = TextStream(tokenizer, ["\n\nUser:", "</a>"])
    pieces = [text.push(i) for i in tokenizer.encode("a\n\nUse it\n\nUser: b")]
    assert pieces[:8] == ["a", "", "", "", "", "", "\n\nUse ", "i"]
    assert "".join(pieces) == "a\n\nUse it"
    assert text.stopped
    assert text.stop_string == "\n\nUser:"
    assert text.flush() == ""
    assert text.push(tokenizer.encode("c")[0]) == ""


def test_the_beginning_of_a_stop_string_is_shown_when_the_text_ends() -> None:
    tokenizer = KINDS["single-bytes"]
    text = TextStream(tokenizer, ["aab"])
    assert [text.push(i) for i in tokenizer.encode("xaaa")] == ["x", "", "", "a"]
    assert text.flush() == "aa"
    assert not text.stopped
    assert text.flush() == ""
    with pytest.raises(KvexportError, match="after the end"):
        text.push(0)


@pytest.mark.parametrize("stops", [["a", ""], "ab"])
def test_an_unusable_stop_string_is_refused(stops: Sequence[str]) -> None:
    with pytest.raises(UsageError, match="stop strings"):
        TextStream(KINDS["unigram"], stops)


def save(inner: tokenizers.Tokenizer, folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    return folder


@kinds
def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = Tokenizer.from_folder(save(tokenizer._inner, tmp_path))
    assert loaded.vocab_size == tokenizer.vocab_size > 0
    for text in LINES:
        assert loaded.encode(text) == tokenizer.encode(text)
    ids = loaded.encode(LINES[0])
    assert loaded.decode(ids) == tokenizer.decode(ids)


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(KINDS["word-level"]._inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=12)
    loaded = Tokenizer.from_folder(save(inner, tmp_path))
    assert len(loaded.encode("a b a b a b a")) == 7


def test_special_tokens_come_from_the_post_processor() -> None:
    tokenizer = KINDS["llama"]
    begin = tokenizer.token_id("<s>")
    assert tokenizer.encode("the")[0] == begin
    assert begin not in tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=False).startswith("<s>")
    assert tokenizer.token_id("no such token") is None


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    for content in (b"{}", b"\xff\xfe", b"[1, 2"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ArtifactError, match=r"tokenizer\.json is not a tokenizer"):
            Tokenizer.from_folder(tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentProblem, match="'tokenizers'"):
        Tokenizer.from_folder(tmp_path)


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(UsageError, match="surrogate at character 2"):
        KINDS["unigram"].encode("ab\ud800")


def test_a_panic_of_the_library_is_an_error_of_one_text() -> None:
    """A panic of the tokenizers library arrives as a BaseException, which would end the thread of a server."""
    panic = type("PanicException", (BaseException,), {})

    class Inner:
        def __getattr__(self, name: str) -> Any:
            if name in ("encode", "encode_batch_fast", "decode"):
                return self.fail
            return lambda *_, **__: {}

        decoder = None

        def fail(self, *_: Any, **__: Any) -> None:
            raise panic("called Option::unwrap() on None")

    tokenizer = Tokenizer(Inner())  # type: ignore[arg-type]
    for work in (lambda: tokenizer.encode("a"), lambda: tokenizer.encode("a" * 9999), lambda: tokenizer.decode([1])):
        with pytest.raises(UsageError, match=r"the tokenizer failed to .*unwrap"):
            work()


def test_a_long_text_is_encoded_while_other_threads_run(tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    text, gaps, ended = "ab cd." * 200_000, [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    seconds = time.perf_counter() - start
    ended.set()
    thread.join()
    assert len(ids) == len(text) == tokenizer.least_tokens(text)
    assert max(gaps) < max(0.25, seconds / 2), "encode held the interpreter's lock"
    assert tokenizer.encode(text[:60_000]) == [
        i for j in range(0, 60_000, 3_000) for i in tokenizer.encode(text[j : j + 3_000])
    ]
