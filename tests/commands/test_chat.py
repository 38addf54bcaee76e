"""Tests of `kvexport chat`: a turn reads only new tokens, conversations are saved and loaded."""

from pathlib import Path
from typing import Any

import pytest

from kvexport.commands import chat as command
from kvexport.engine.calls import ModelCalls
from kvexport.engine.engine import Engine
from kvexport.errors import KvexportError, SnapshotError, UsageError
from tests.support.command_line import failure, ok
from tests.support.http_server import engine_of, prompt


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Engine:
    return engine_of(tiny_artifact)


@pytest.fixture
def talk(engine: Engine) -> command.Chat:
    return command.Chat(engine, engine.settings(max_new_tokens=12), "be")


def test_a_turn_reads_only_the_new_tokens(
    engine: Engine, talk: command.Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.answer("anna lamp")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    assert capsys.readouterr().out == talk.messages[-1]["content"] + "\n"
    first = talk.snapshot
    assert first is not None and first.length == len(prompt(talk.messages[:2])) + 11
    talk.answer("who")
    assert talk.last is not None and talk.last.cached_tokens == first.length
    assert len(talk.last.ids) == len(prompt(talk.messages[:4]))
    assert talk.command("/stats")
    shown = capsys.readouterr().out
    assert f"tokens seen: {len(talk.last.ids) + 11}" in shown
    assert f"slots stand for {len(talk.last.ids) + 11} tokens" in shown


def test_a_saved_and_loaded_conversation_continues_equally(talk: command.Chat, tmp_path: Path) -> None:
    talk.answer("anna lamp")
    path = tmp_path / "kept"
    assert talk.command(f"/save {path}")
    assert path.stat().st_mode & 0o777 == 0o600 and [p.name for p in tmp_path.iterdir()] == ["kept"]
    talk.answer("who")
    expected = talk.messages[-1]
    assert talk.command("/reset") and talk.messages == [{"role": "system", "content": "be"}]
    assert talk.command(f"/load {path}") and len(talk.messages) == 3
    talk.answer("who")
    assert talk.messages[-1] == expected
    assert talk.last is not None and talk.last.cached_tokens > 0
    data = path.read_bytes()
    for wrong, error in ((b"", UsageError), (b"{}\n", UsageError), (data[:-1], SnapshotError), (b"[[]]\n", UsageError)):
        path.write_bytes(wrong)
        before = list(talk.messages)
        with pytest.raises(error):
            talk.command(f"/load {path}")
        assert talk.messages == before


@pytest.mark.parametrize(("of", "where"), [(Engine, "step"), (ModelCalls, "decode")])
def test_an_interrupted_answer_is_part_of_the_conversation(
    engine: Engine, talk: command.Chat, monkeypatch: pytest.MonkeyPatch, of: type, where: str
) -> None:
    """An interrupt between two steps leaves the state as it is."""
    real, count = getattr(of, where), [0]

    def interrupted(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(of, where, interrupted)
    talk.answer("anna lamp")
    assert 0 < len(talk.messages[-1]["content"]) < 12 and not engine.busy
    assert (talk.snapshot is None) == (where == "decode")
    talk.answer("who")
    assert talk.last is not None and len(talk.last.tokens) == 12 and len(talk.messages) == 5
    assert len(talk.last.ids) == len(prompt(talk.messages[:4]))


@pytest.mark.parametrize("line", ["/save", "/save x", "/load", "/nothing"])
def test_commands_that_cannot_be_are_errors(talk: command.Chat, line: str) -> None:
    with pytest.raises(KvexportError):
        talk.command(line)
    assert talk.command("/help") and not talk.command("/exit")


def test_a_message_that_does_not_fit_leaves_the_conversation_as_it_was(talk: command.Chat) -> None:
    talk.answer("anna")
    before = list(talk.messages)
    with pytest.raises(UsageError):
        talk.answer("a" * 600)
    assert talk.messages == before


def test_chat_works_without_a_terminal(tiny_artifact: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvexport.engine.load.load", lambda *_, **__: engine)
    output = ok(
        "chat", tiny_artifact, "--max-new-tokens", 5, "--temperature", 0, input="anna\n\n/stats\nbob\n/exit\nno\n"
    )
    lines = output.splitlines()
    assert len(lines[0]) == 5 and lines[1] == "messages: 2" and len(lines[-1]) == 5
    assert "there is no command /x" in failure(2, "chat", tiny_artifact, input="/x\n")


def test_a_model_without_a_template_cannot_chat(tiny_artifact: Path) -> None:
    assert "no chat template" in failure(2, "chat", tiny_artifact, input="hi\n")
